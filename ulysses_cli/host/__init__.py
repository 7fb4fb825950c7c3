"""This machine, looked at without torch: its network, the builds of operators, child processes."""
