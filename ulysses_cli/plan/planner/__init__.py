"""Chooses layout, levers and machines: the search, what fits, and what it costs."""
