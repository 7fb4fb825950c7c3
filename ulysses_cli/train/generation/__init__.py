"""Greedy generation on split rows: prefill by Ulysses, then a cache on each rank of its own heads."""
