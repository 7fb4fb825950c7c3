"""`verify`: the same numbers as one process with plain torch."""
