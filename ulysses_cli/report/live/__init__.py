"""Shows progress while a command runs: live on a terminal, as plain lines elsewhere."""
