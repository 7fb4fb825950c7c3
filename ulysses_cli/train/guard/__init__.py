"""Ends runs that must stop: signals, stop conditions, hangs. Masks secrets in logs."""
