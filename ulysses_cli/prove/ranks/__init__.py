"""Rank processes on this machine, started for a proof."""
