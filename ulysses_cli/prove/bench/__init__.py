"""`bench`: speed and memory of a recipe on this machine, beside prediction and peer."""
