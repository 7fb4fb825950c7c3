"""`python -m ulysses_cli.prove.trace`: reads what to trace as JSON from stdin, writes the result as JSON to stdout and
progress to stderr. Patches this whole process.
"""

from __future__ import annotations

import json
import os
import sys
import warnings
from contextlib import ExitStack

from ulysses_cli.prove.trace.trace import prepare_process, trace


def main() -> int:
    request = json.load(sys.stdin)
    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what libraries print must not mix with the result
    warnings.simplefilter("ignore", FutureWarning)  # of DeepSpeed's use of torch
    warnings.filterwarnings("ignore", "Accessing the data pointer")  # ZeRO-2 checks the alignment of data pointers
    with ExitStack() as stack:
        stack.callback(out.close)
        prepare_process(request)
        progress = sys.stderr
        out.write(json.dumps(trace(request, lambda line: progress.write(f"{line}\n"))) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
