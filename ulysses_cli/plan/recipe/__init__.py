"""A recipe's settings, how a file and overrides become a Recipe, and what may change when a run is resumed."""
