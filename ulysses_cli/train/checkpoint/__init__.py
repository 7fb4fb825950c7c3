"""Checkpoints: their format, when they are written, saves in the background, how a run resumes."""
