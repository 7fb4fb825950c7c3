"""From documents to rows of tokens. No GPU, no process group, no torch."""
