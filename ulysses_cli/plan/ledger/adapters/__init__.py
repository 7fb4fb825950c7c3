"""Bytes of what adapters bring along beside their own weights: lengths of rows, and a base in few bits."""
