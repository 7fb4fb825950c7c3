"""Fine-tune language models on very long sequences: the command is cli.py, what a Python program calls is api.py."""

__version__ = "0.1.0"
