"""This machine, without torch: its network, the builds of operators, child processes."""
