"""What each command does: parse, call, hand to report, exit code. Heavy ones start child processes."""
