"""Exports a checkpoint as a Hugging Face model folder."""
