"""Ranks as processes: groups, devices, the store they meet in, values they compare."""
