"""Claims proven: the same numbers as one process, what a step takes, how fast it is, a machine that is fit."""
