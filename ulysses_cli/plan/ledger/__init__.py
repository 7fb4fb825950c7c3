"""Bytes per rank, term by term: one named function each, with its formula and where the formula comes from."""
