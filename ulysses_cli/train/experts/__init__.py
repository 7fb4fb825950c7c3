"""Experts that are stacked in one tensor: their adapters."""
