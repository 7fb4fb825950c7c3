"""Files that submit a recipe to a cluster: SLURM, Kubernetes, SkyPilot."""
