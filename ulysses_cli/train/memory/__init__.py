"""Levers that trade time or host memory for GPU memory. They take modules and tensors."""
