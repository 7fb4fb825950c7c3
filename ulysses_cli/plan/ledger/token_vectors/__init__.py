"""Vectors that each layer has for each token beside the hidden states, and keys that later layers borrow."""
