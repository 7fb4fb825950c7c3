"""Bytes that DeepSpeed's ZeRO holds: states, gathered weights, gradient buckets, files on a disk."""
