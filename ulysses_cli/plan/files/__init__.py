"""Files that others wrote, as far as they can be judged without torch: patterns, kinds, weight headers."""
