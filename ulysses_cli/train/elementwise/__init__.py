"""Norms, rotary embedding and gated activations in one pass each, where transformers' code makes several."""
