"""Experts that are stacked in one tensor: their adapters, and how they run. Takes no recipe and no group."""
