"""Tests what optimizer states on a disk take: disk space, locked memory, GPU memory, and a step's time."""

from dataclasses import replace
from pathlib import Path

import pytest
from support.recipes import load

from ulysses_cli.hardware_table import load_hardware
from ulysses_cli.plan.ledger.job import make_job
from ulysses_cli.plan.ledger.machine import (
    compute_disk_bytes,
    compute_node_disk_bytes,
    compute_pinned_rounding,
    compute_save_copy,
    compute_swap_need,
    round_up,
)
from ulysses_cli.plan.ledger.states import (
    compute_locked_state_bytes,
    compute_locked_weight_bytes,
    count_largest_group,
    size_weight_buffers,
)
from ulysses_cli.plan.ledger.weights import count_shard, get_weights
from ulysses_cli.plan.levers import Levers
from ulysses_cli.plan.models.shape import read_model_shape
from ulysses_cli.plan.planner.estimate import compute_estimate
from ulysses_cli.plan.recipe.recipe import Recipe
from ulysses_cli.report.ledger import describe_estimate, format_estimate

LLAMA = {
    "model_type": "llama", "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32,
    "num_attention_heads": 32, "num_key_value_heads": 8, "vocab_size": 128_256, "max_position_embeddings": 131_072,
    "tie_word_embeddings": False,
}  # fmt: skip
SHAPE = read_model_shape(LLAMA, "the 8B")
GIB = 1 << 30


def make(*overrides: str) -> Recipe:
    return load("parallel.sp_size=8", *overrides).recipe


@pytest.mark.check
def test_a_disk_frees_host_memory_and_costs_time(tmp_path: Path) -> None:
    gpu = load_hardware().get_gpu("h100-80gb")
    swap = ("memory.offload_optimizer=nvme", f"memory.nvme_path={tmp_path}")
    on_host = compute_estimate(make("memory.offload_optimizer=cpu"), SHAPE, gpu)
    on_disk = compute_estimate(make(*swap), SHAPE, gpu)
    job = on_disk.job
    trained = get_weights(job).num_trained
    assert trained == pytest.approx(8.03e9, rel=0.001)
    assert compute_node_disk_bytes(on_host.job) == 0
    assert compute_node_disk_bytes(job) == pytest.approx(16 * trained, rel=0.02)
    assert on_disk.ledger.host_peak_bytes < on_host.ledger.host_peak_bytes - 10 * trained
    assert job.engine.sub_group == 125_000_000
    locked = on_disk.ledger.host_phases["optimizer_step"]["optimizer_pinned"]
    largest = count_largest_group(job)
    assert 125_000_000 < largest < 125_000_000 + 128_256 * 4096 // 8
    assert compute_locked_state_bytes(job) == 16 * largest
    assert locked == 8 * (16 * largest + job.engine.gradient_bytes * count_shard(trained, 8))
    assert on_disk.speed.step_seconds > on_host.speed.step_seconds + 0.99 * 2 * 16 * trained / 5e9
    need = describe_estimate(on_disk)["disk_bytes_per_node"]
    assert need == compute_node_disk_bytes(job)
    assert describe_estimate(on_host)["disk_bytes_per_node"] == 0
    assert f"{need / GIB:,.1f} GiB" in format_estimate(on_disk, "r.yaml")
    assert "nvme_path" not in format_estimate(on_host, "r.yaml")


def test_need_of_a_recipe_and_of_a_model_without_formulas(tmp_path: Path) -> None:
    recipe = make("memory.offload_optimizer=nvme", f"memory.nvme_path={tmp_path}")
    on_disk, locked = compute_swap_need(recipe, SHAPE, Levers(offload_optimizer="nvme"))
    assert on_disk == pytest.approx(16 * 8.03e9 / 8, rel=0.02)
    assert locked == 16 * count_largest_group(make_job(recipe, SHAPE, Levers(offload_optimizer="nvme")))
    alone = make("parallel.sp_size=1", "memory.offload_optimizer=nvme", f"memory.nvme_path={tmp_path}")
    _, locked = compute_swap_need(alone, SHAPE, Levers(offload_optimizer="nvme", offload_param="nvme"))
    embedding = 128_256 * 4096
    assert locked > 16 * embedding + 2 * (8 * embedding + embedding), "no group is smaller than a weight in it"
    assert compute_swap_need(recipe, replace(SHAPE, model_type="other"), Levers(offload_optimizer="nvme")) == (0, 0)


@pytest.mark.check
def test_weights_on_a_disk(tmp_path: Path) -> None:
    """On 8 ranks, seven weights of a layer have files of 1 MiB or more; two norms do not. The embedding's is the
    largest."""
    gpu = load_hardware().get_gpu("h100-80gb")
    cpu, disk = "memory.offload_param=cpu", ("memory.offload_param=nvme", f"memory.nvme_path={tmp_path}")
    words = ("memory.offload_optimizer=cpu", "memory.gradient_checkpointing=true")
    host = compute_estimate(make(*words, cpu), SHAPE, gpu)
    there = compute_estimate(make(*words, *disk), SHAPE, gpu)
    job, largest = there.job, 128_256 * 4096 // 8
    assert size_weight_buffers(get_weights(job), 8, 2) == {"buffer_count": 8, "buffer_size": largest}
    assert compute_locked_weight_bytes(job) == 2 * (8 * largest + count_largest_group(job))
    size = 2 * 8_030_261_248 // 8
    assert compute_pinned_rounding(host.job) - compute_pinned_rounding(job) == round_up(size) - size
    assert compute_disk_bytes(job) == pytest.approx(2 * 8.03e9 / 8, rel=0.02)
    assert compute_disk_bytes(host.job) == compute_locked_weight_bytes(host.job) == 0
    assert there.ledger.gpu_allocated_bytes <= host.ledger.gpu_allocated_bytes, "nothing is gathered ahead"
    assert there.speed.step_seconds > host.speed.step_seconds + (3 * 2 * 8.03e9 / 5e9)


def test_a_save_copies_what_is_not_in_host_memory(tmp_path: Path) -> None:
    """The embedding's weight and both moments are copied to the file one after the other."""
    swap = (f"memory.nvme_path={tmp_path}",)
    for where, more in (("none", ()), ("cpu", ()), ("nvme", swap)):
        recipe = make(f"memory.offload_optimizer={where}", *more)
        job = make_job(recipe, SHAPE, Levers(offload_optimizer=where))
        assert compute_save_copy(job) == (0 if where == "cpu" else 12 * 128_256 * 4096 // 8)
        assert compute_save_copy(replace(job, async_save=True)) == 12 * count_shard(get_weights(job).num_trained, 8)
