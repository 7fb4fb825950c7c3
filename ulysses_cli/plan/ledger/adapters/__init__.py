"""Adapters: modules with them, and what they bring along beside their weights: lengths of rows, a base in few bits."""
