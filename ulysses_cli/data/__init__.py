"""Turns documents into rows of tokens. Needs no GPU, no process group and no torch."""
