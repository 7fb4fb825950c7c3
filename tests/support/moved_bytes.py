"""Counts the bytes of numbers that pass between the fake GPU and the host in forwards and backwards of a traced step.
The fake device stands in for the real one in a whole process: `python -m support.moved_bytes` is one."""

import json
import os
import subprocess
import sys
from collections import Counter
from typing import Any
from unittest import mock

from torch.utils._pytree import tree_leaves

from support.real_steps import make_request

DEEPSPEEDS = "deepspeed"  # gradients come as DeepSpeed brings them


def count_moved(recipe: Any, *, is_deepspeeds: bool = False) -> dict[str, int]:
    """Returns bytes to the host (`down`) and to the GPU (`up`)."""
    request = {**make_request(recipe), "rank": 0, DEEPSPEEDS: is_deepspeeds}
    command = [sys.executable, "-m", "support.moved_bytes"]
    environ = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    done = subprocess.run(command, input=json.dumps(request), capture_output=True, text=True, env=environ)
    assert done.returncode == 0, done.stderr[-3000:]
    moved: dict[str, int] = json.loads(done.stdout.splitlines()[-1])
    return moved


def main() -> None:
    from ulysses_cli.prove.trace.trace import prepare_process, trace

    request = json.load(sys.stdin)
    prepare_process(request)
    import torch

    from ulysses_cli.prove.trace import storages
    from ulysses_cli.train.model import build

    moved: Counter[str] = Counter()

    class MovedBytes(storages.Storages):
        def forget_peaks(self, *kept: str) -> None:
            """After the first step."""
            moved.clear()
            super().forget_peaks(*kept)

        def __torch_dispatch__(self, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            result = super().__torch_dispatch__(op, types, args, kwargs)
            is_copy = op in (torch.ops.aten.copy_.default, torch.ops.aten._to_copy.default)
            if is_copy and self.phase in ("forward", "backward") and result.is_floating_point():
                sources = [leaf for leaf in tree_leaves(args) if isinstance(leaf, torch.Tensor)]
                if sources[-1].device != result.device:
                    moved["down" if result.device.type == "cpu" else "up"] += result.nbytes
            return result

    with mock.patch.object(storages, "Storages", MovedBytes):
        if request[DEEPSPEEDS]:
            with mock.patch.object(build, "HostGradients"):
                trace(request)
        else:
            trace(request)
    print(json.dumps({"down": moved["down"], "up": moved["up"]}))


if __name__ == "__main__":
    main()
