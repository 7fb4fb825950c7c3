"""A run on sizes alone: the model's and this package's own code under DeepSpeed's engine, every byte counted."""
