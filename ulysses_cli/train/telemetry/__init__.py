"""What a run reports: events, metrics files, run.json, the time of a step's parts."""
