"""Levers that trade time or host memory for GPU memory. Take modules and tensors."""
