"""What a terminal shows while a command runs."""
