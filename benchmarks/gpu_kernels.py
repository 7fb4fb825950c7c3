"""Times each attention kernel that this machine has, with the heads of an 8B model, forward and backward of one
document, and compares it with the share of the GPU's peak that plan/hardware.yaml predicts. Each kernel runs in a
process of its own. Each row is printed as a line of JSON when it is measured. One that is far behind at a length is not
tried at the next.

    python benchmarks/gpu_kernels.py [--lengths 32768,131072] [--device cuda]
"""

from __future__ import annotations

import argparse
import json
from functools import partial
from typing import Any

import paths  # noqa: F401 - finds this checkout
import torch

from ulysses_cli.hardware_table import load_hardware
from ulysses_cli.plan.attention import BACK_ENDS, Device, Need
from ulysses_cli.plan.rows.ring import count_pairs
from ulysses_cli.train.attention.kernels.operators import KERNELS
from ulysses_cli.train.attention.kernels.trial import KernelSearch, KernelWorkload, try_kernel
from ulysses_cli.train.choosing import try_in_child
from ulysses_cli.train.processes.host import count_host_bytes

HEADS, KV_HEADS, HEAD_DIM = 32, 8, 128
LIMIT_SECONDS = 120.0
FAR = 3.0  # times the fastest


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--lengths", default="32768,131072")
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    options = parser.parse_args()
    kind: Device = options.device
    capability, gpu = None, None
    if kind == "cuda":
        facts = torch.cuda.get_device_properties(0)
        capability = torch.cuda.get_device_capability(0) if torch.version.hip is None else None
        gpu = load_hardware().recognise(facts.name, facts.total_memory, count_host_bytes())[0]
    need = Need(HEAD_DIM, dtype="bfloat16")
    work = KernelWorkload(num_heads=HEADS, num_kv_heads=KV_HEADS)
    search = KernelSearch(need, torch.device(kind), work=work)
    slow: dict[str, str] = {}
    for length in map(int, options.lengths.split(",")):
        seconds: dict[str, float] = {}
        flops = 2 * 7 * HEADS * HEAD_DIM * count_pairs(length, None)  # seven products, forward and backward
        for name, back_end in BACK_ENDS.items():
            obstacle = back_end.find_obstacle(need, kind, capability) or KERNELS[name].find_missing()
            if (
                name == "sdpa"
                and kind == "cuda"
                and not BACK_ENDS["torch_varlen"].find_obstacle(need, kind, capability)
            ):
                obstacle = "makes the same calls as torch_varlen"
            obstacle = obstacle or slow.get(name, "")
            row: dict[str, Any] = {"name": f"{name}, {length:,} tokens", "obstacle": obstacle}
            if not obstacle:
                result = try_in_child(partial(try_kernel, name, search, (length,)), LIMIT_SECONDS)
                row |= {"obstacle": result.obstacle, "seconds": result.seconds or None}
                seconds |= {name: result.seconds} if result.seconds else {}
                if gpu is not None and result.seconds:
                    forward, backward = flops * 2 / 7, flops * 5 / 7
                    peak = gpu.tflops * 1e12
                    predicted = forward / (peak * gpu.attention_forward) + backward / (peak * gpu.attention_backward)
                    row |= {"tflops": flops / result.seconds / 1e12, "predicted_seconds": predicted}
            print(json.dumps(row), flush=True)
        for name, value in seconds.items():
            if value > FAR * min(seconds.values()):
                slow[name] = f"took {value / min(seconds.values()):.1f} times the fastest at {length:,} tokens"


if __name__ == "__main__":
    main()
