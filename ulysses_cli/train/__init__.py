"""One rank's life. What stands here may import torch; only __main__.py and build.py see a Recipe."""

import logging

# peft imports bitsandbytes, which on some CPUs misses a kernel for weights of 4 bits and says so. There are none here.
logging.getLogger("bitsandbytes.backends.cpu.ops").setLevel(logging.ERROR)
