"""`ulysses evaluate`: what a model answers at given lengths."""
