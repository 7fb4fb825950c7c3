"""A recipe's keys, how a file and overrides become a Recipe, and what may change when a run is resumed."""
