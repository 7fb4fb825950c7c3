"""Files on disk, as far as they can be checked without torch: patterns, kinds of files, weight headers."""
