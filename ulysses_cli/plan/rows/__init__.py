"""Rows of tokens: which documents each holds, and which of its tokens each rank of a ring holds."""
