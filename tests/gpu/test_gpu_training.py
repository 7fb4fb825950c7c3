"""Tests training steps over NCCL: ranks that share a GPU, with sequence parallelism and ZeRO, give the losses and
weights of one rank. They say nothing about speed."""

import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from support.shared_gpu import run_sharing_ranks

SCRIPT = Path(__file__).with_name("nccl_training.py")
PRECISE = ("model.attn_implementation=sdpa",)  # float32, which no flash kernel has
HALF = ("model.dtype=bfloat16",)
LEVERS = ("memory.tiled_mlp=true", "memory.tiled_loss=true", "memory.activation_offloading=true")
CASES: dict[str, tuple[int, tuple[str, ...]]] = {
    "sp 2": (2, (*PRECISE, "parallel.sp_size=2")),
    "sp 2, levers": (2, (*PRECISE, "parallel.sp_size=2", *LEVERS)),
    "sp 2, bfloat16": (2, (*HALF, "parallel.sp_size=2")),
    "a ring of 2": (2, (*PRECISE, "parallel.sp_size=2", "parallel.ring_size=2")),
    "ZeRO-2": (2, (*PRECISE, "parallel.sp_size=2", "parallel.zero_stage=2")),
    "sp 2 x 2, a rank with replicas": (4, (*PRECISE, "parallel.sp_size=2", "parallel.dp_replicate_size=2")),
}


def compare_with_one_rank(folder: Path, device: str, case: str, python: str = sys.executable) -> None:
    num_ranks, words = CASES[case]
    one = [word for word in words if not word.startswith("parallel.")]
    rows = num_ranks // 2  # of a step, on one rank as on all
    found: list[dict[str, Any]] = []
    for ranks, settings in ((1, [*one, f"train.gradient_accumulation_steps={rows}"]), (num_ranks, [*words])):
        file = folder / f"{ranks}.pt"
        run_sharing_ranks(SCRIPT, ranks, [device, str(file), *settings], python)
        found.append(torch.load(file))
    expected, shared = found
    loss_bar, weight_bar = (0.02, 0.02) if "bfloat16" in case else (1e-4, 1e-3)
    for loss, right in zip(shared["losses"], expected["losses"], strict=True):
        assert loss == pytest.approx(right, rel=loss_bar)
    for name, right in expected["weights"].items():
        assert (shared["weights"][name] - right).norm() <= weight_bar * right.norm(), name


@pytest.mark.gpu
@pytest.mark.parametrize("case", CASES)
def test_ranks_that_share_a_gpu_train_as_one(case: str, tmp_path: Path) -> None:
    compare_with_one_rank(tmp_path, "cuda", case)
