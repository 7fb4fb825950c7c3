"""One rank of a training run. Modules here may import torch; only the worker's stages and assembly/ see a Recipe."""

import logging

# peft imports bitsandbytes, which on some CPUs warns that it lacks a kernel for 4-bit weights. There are none here.
logging.getLogger("bitsandbytes.backends.cpu.ops").setLevel(logging.ERROR)
