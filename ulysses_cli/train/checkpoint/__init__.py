"""Checkpoints: their format, the folders of a run, when they are written, how a run resumes."""
