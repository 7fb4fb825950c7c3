"""Bytes that a job needs per rank and node, line by line: of tensors by a run on sizes, of machines term by term."""
