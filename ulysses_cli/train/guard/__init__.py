"""What ends a run that should not go on, and how it ends."""
