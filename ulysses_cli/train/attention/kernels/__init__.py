"""Attention kernels, one file each: a forward that also returns the log-sum-exp, and a backward from it."""
