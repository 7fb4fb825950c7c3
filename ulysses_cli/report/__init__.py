"""Turns values into the text, JSON and pages that people and programs read.

Decides nothing: commands choose exit codes, plan/ finds problems.
"""
