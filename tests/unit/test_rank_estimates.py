"""Tests what a rank asks of the ledger: which GPU this is, and what to change after memory ran out."""

from dataclasses import replace

import pytest
import yaml
from support.recipes import load

from ulysses_cli.hardware_table import load_hardware
from ulysses_cli.hub import find_model_shape
from ulysses_cli.plan.ledger.job import make_job
from ulysses_cli.plan.ledger.ledger import compute_ledger
from ulysses_cli.plan.levers import Levers
from ulysses_cli.plan.planner.estimate import explain_memory
from ulysses_cli.plan.planner.lever_choice import choose_levers

HOST = 200 << 30


@pytest.mark.parametrize(
    ("name", "memory", "key", "is_known"),
    [
        ("NVIDIA H100 80GB HBM3", 85e9, "h100-80gb", True),
        ("NVIDIA H100 PCIe", 85e9, "h100-pcie", True),
        ("NVIDIA A100-SXM4-40GB", 42e9, "a100-40gb", True),
        ("NVIDIA A100-SXM4-80GB", 84e9, "a100-80gb", True),
        ("NVIDIA GeForce RTX 4090", 25e9, "rtx-4090", True),
        ("NVIDIA RTX 6000 Ada Generation", 50e9, "rtx-6000-ada", True),
        ("NVIDIA H200", 150e9, "h200", True),
        ("Tesla V100-SXM2-32GB", 34e9, "rtx-5090", False),  # the nearest in size gives its rates
    ],
)
def test_a_device_is_recognised_and_keeps_its_own_memory(name: str, memory: float, key: str, is_known: bool) -> None:
    gpu, known = load_hardware().recognise(name, int(memory), HOST)
    assert (gpu.key, known) == (key, is_known)
    assert (gpu.memory_bytes, gpu.host_bytes_per_gpu) == (int(memory), HOST)


@pytest.mark.full
def test_advice_after_out_of_memory_needs_less_memory() -> None:
    recipe = load("model.name_or_path=Qwen/Qwen3-4B", "data.max_length=128Ki", "parallel.sp_size=4").recipe
    shape = find_model_shape(recipe).shape
    gpu = load_hardware().get_gpu("h100-80gb")
    tried = Levers()
    text = explain_memory(recipe, shape, tried, gpu)
    head, _, change = text.partition("; this needs less:\n")
    assert head.startswith("largest in ")
    assert head.count(" GiB") == 3
    advice = yaml.safe_load(change)
    settings = [f"{section}.{name}={value}" for section, output in advice.items() for name, value in output.items()]
    better = load(
        "model.name_or_path=Qwen/Qwen3-4B", "data.max_length=128Ki", "parallel.sp_size=4",
        *(setting.replace("True", "true") for setting in settings),
    ).recipe  # fmt: skip
    chosen = choose_levers(better, shape, gpu).levers
    before, after = (
        compute_ledger(make_job(each, shape, levers, gpus_per_node=8)).gpu_peak_bytes
        for each, levers in ((recipe, tried), (better, chosen))
    )
    assert after < 0.95 * before
    small = replace(gpu, memory_bytes=1 << 30)
    assert "no lever and no shorter row helps: use more GPUs" in explain_memory(recipe, shape, tried, small)
