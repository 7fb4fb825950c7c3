"""Bytes of convolutions and recurrences with their kernels, and their work in a step."""
