"""A training step on tensors without data, which counts every allocation."""
