"""Layout -> the launcher's command line and environment, its run folder, and what became of the run."""
