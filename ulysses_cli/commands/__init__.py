"""One file per command: parse, call, print with report/, exit code. Commands that need torch start child processes."""
