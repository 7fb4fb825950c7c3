"""A training step on tensors without data: every allocation is counted."""
