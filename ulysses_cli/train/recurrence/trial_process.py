"""Tries a package's kernel of a recurrence or convolution in a process of its own: an illegal access there would leave
an error in the context of the GPU that every later call of this process would meet. Imports nothing heavy itself.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from ulysses_cli.plan.models.layers import ConvolutionMixer, DeltaNetMixer, KimiDeltaMixer, Mamba2Mixer
from ulysses_cli.train.attention.kernels.trial_process import LIMIT_SECONDS, answer_parent, ask_child

if TYPE_CHECKING:
    import torch

    from ulysses_cli.train.recurrence.kernels import Kernel
    from ulysses_cli.train.recurrence.probes import PackedProbe

MIXERS = {kind.__name__: kind for kind in (ConvolutionMixer, DeltaNetMixer, KimiDeltaMixer, Mamba2Mixer)}
COMMAND = (sys.executable, "-m", "ulysses_cli.train.recurrence.trial_process")


def find_obstacle_in_process(
    name: str,
    function: Callable[..., Any],
    mixer: ConvolutionMixer | DeltaNetMixer | KimiDeltaMixer | Mamba2Mixer,
    kernel: Kernel,
    device: torch.device,
    dtype: torch.dtype,
    command: Sequence[str] = COMMAND,
) -> str:
    """Why a kernel of transformers' `function` cannot be used, or ''. However the child ends, this process goes on."""
    request = {
        "module": function.__module__, "name": name, "kernel": kernel, "device": str(device),
        "dtype": str(dtype).removeprefix("torch."), "mixer": [type(mixer).__name__, asdict(mixer)],
    }  # fmt: skip
    answer = ask_child(request, {"obstacle"}, LIMIT_SECONDS, command)
    return answer if isinstance(answer, str) else str(answer["obstacle"])


def _try(request: dict[str, Any]) -> Mapping[str, Any]:
    import torch

    from ulysses_cli.train.recurrence.kernels import find_obstacle
    from ulysses_cli.train.recurrence.probes import make_probe

    kind, sizes = request["mixer"]
    function = getattr(importlib.import_module(request["module"]), request["name"])
    probe: PackedProbe = make_probe(request["name"], function, MIXERS[kind](**sizes), torch.device(request["device"]))
    return {"obstacle": find_obstacle(probe, request["kernel"], getattr(torch, request["dtype"]))}


if __name__ == "__main__":
    answer_parent(int(sys.argv[1]), _try)
