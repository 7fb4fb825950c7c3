"""Functions that the loop calls before and after each step."""
