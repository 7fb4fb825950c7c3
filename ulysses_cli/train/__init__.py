"""One rank's life. What stands here may import torch; only __main__.py and build.py see a Recipe."""

import logging

# peft imports bitsandbytes, which warns on some CPUs that it did not find a kernel for weights of 4 bits: nobody's here.
logging.getLogger("bitsandbytes.backends.cpu.ops").setLevel(logging.ERROR)
