"""One rank's life. What stands here may import torch; only __main__.py and build.py see a Recipe."""
