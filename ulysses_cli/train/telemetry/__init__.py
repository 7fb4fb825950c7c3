"""What a run tells: records, run.json, the time of a step's parts."""
