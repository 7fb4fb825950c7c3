"""`python -m ulysses_cli.prove.trace`: what is to be traced comes as JSON on stdin, findings leave as JSON on stdout,
progress goes to stderr. Patches this whole process.
"""

from __future__ import annotations

import json
import os
import sys
import warnings
from contextlib import ExitStack

from ulysses_cli.prove.trace.trace import prepare_process, trace


def main() -> int:
    wish = json.load(sys.stdin)
    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what libraries say is talk
    warnings.simplefilter("ignore", FutureWarning)  # of DeepSpeed's use of torch
    warnings.filterwarnings("ignore", "Accessing the data pointer")  # ZeRO-2 asks whether it is even
    with ExitStack() as stack:
        stack.callback(out.close)
        prepare_process(wish)
        talk = sys.stderr
        out.write(json.dumps(trace(wish, lambda words: talk.write(f"{words}\n"))) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
