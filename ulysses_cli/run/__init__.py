"""A run outside its ranks: its folder, locks and checkpoints, also in buckets; launching ranks and machines; this
host."""
