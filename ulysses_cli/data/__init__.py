"""Tokens are made here: sources, tokenizers, the store on disk, rows. No process group."""
