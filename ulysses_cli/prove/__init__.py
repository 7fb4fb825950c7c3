"""Proofs that a user can run: the same numbers as one process, the speed, the machine."""
