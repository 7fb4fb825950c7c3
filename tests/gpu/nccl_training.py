"""Trains a small model as one of several ranks that share a GPU, or on a CPU: `nccl_training.py DEVICE FILE WORD...`.
Rank 0 writes losses and weights to the file. test_gpu_training.py starts it with RANK, WORLD_SIZE and the master's
address."""

import os
import sys
import tempfile
from pathlib import Path

import torch
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).parents[1]))
from support.run_harness import RunHarness
from support.training import MemoryRows, make_recipe

from ulysses_cli.train.loop import train

ROWS = MemoryRows([[(200, 0), (56, 0)], [(256, 0)], [(5, 0), (100, 9), (151, 15)], [(250, 40)]])
NUM_STEPS = 3


def main() -> int:
    device, file, *words = torch.device(sys.argv[1]), *sys.argv[2:]
    if device.type == "cuda":
        torch.cuda.set_device(0)
    dist.init_process_group(
        "nccl" if device.type == "cuda" else "gloo",
        rank=int(os.environ["RANK"]),
        world_size=int(os.environ["WORLD_SIZE"]),
    )
    recipe = make_recipe("data.max_length=256", f"run.device={device.type}", *words)
    with tempfile.TemporaryDirectory() as folder:
        harness = RunHarness(recipe, ROWS, NUM_STEPS, folder, device=device)
        train(harness.train_state)
        weights = {name: weight.cpu() for name, weight in harness.read_weights().items()}
    if dist.get_rank() == 0:
        torch.save({"losses": harness.losses, "weights": weights}, file)
    dist.destroy_process_group()
    return 0


if __name__ == "__main__":
    sys.exit(main())
