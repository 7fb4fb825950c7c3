"""Fine-tune language models on very long sequences. This module holds only the version."""

__version__ = "0.1.0"
