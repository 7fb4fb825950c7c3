"""Bytes of blocks of attention and MLP whose weights several layers use."""
