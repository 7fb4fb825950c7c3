"""`python -m ulysses_cli.prove.trace`: reads what to trace as JSON from stdin, writes the result as JSON to stdout and
progress to stderr. Patches this whole process; of several ranks each is traced in a process of its own.
"""

from __future__ import annotations

import json
import os
import sys
import warnings
from collections.abc import Mapping
from contextlib import ExitStack
from subprocess import PIPE
from typing import Any

from ulysses_cli.prove.trace.trace import join_ranks, list_ranks, prepare_process, trace
from ulysses_cli.run import host


def main() -> int:
    request = json.load(sys.stdin)
    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what libraries print must not mix with the result
    with ExitStack() as stack:
        stack.callback(out.close)
        ranks = [request["rank"]] if "rank" in request else list_ranks(request)
        result = _trace_one({**request, "rank": ranks[0]}) if len(ranks) == 1 else _trace_each(request, ranks)
        out.write(json.dumps(result) + "\n")
    return 0


def _trace_one(request: Mapping[str, Any]) -> dict[str, Any]:
    warnings.simplefilter("ignore", FutureWarning)  # of DeepSpeed's use of torch
    warnings.filterwarnings("ignore", "Accessing the data pointer")  # ZeRO-2 checks the alignment of data pointers
    prepare_process(request)
    return trace(request, _report)


def _trace_each(request: Mapping[str, Any], ranks: list[int]) -> dict[str, Any]:
    traces = []
    for number, rank in enumerate(ranks, 1):
        _report(f"rank {rank}, {number} of {len(ranks)} ranks that may need most memory")
        with host.start_module("ulysses_cli.prove.trace", [], stdin=PIPE, stdout=PIPE) as child:
            answer, _ = child.communicate(json.dumps({**request, "rank": rank}))
        if child.returncode:
            raise SystemExit(child.returncode)
        traces.append(json.loads(answer))
    return join_ranks(traces)


def _report(line: str) -> None:
    progress = sys.stderr
    progress.write(f"{line}\n")


if __name__ == "__main__":
    sys.exit(main())
