"""Runs real training steps on CPU ranks with every byte counted, and requests a trace of the same."""

import gc
import json
import subprocess
import sys
from typing import Any

from support.byte_counter import ByteCounter
from support.run_harness import RunHarness
from support.small_run import CONFIG
from support.training import MemoryRows, make_recipe
from ulysses_cli.plan.ledger.job import make_job
from ulysses_cli.plan.ledger.ledger import measure_ledger
from ulysses_cli.plan.ledger.machine import DEVICE_LINES
from ulysses_cli.plan.models.shape import read_model_shape
from ulysses_cli.plan.planner.lever_choice import choose_levers
from ulysses_cli.plan.resolved import make_layout
from ulysses_cli.train.evaluation import evaluate
from ulysses_cli.train.loop import train

TOKENS = 2048
ZERO = "deepspeed.zero_optimization"
SIZES = {
    "hidden_size": 256, "intermediate_size": 768, "num_hidden_layers": 4, "num_attention_heads": 8,
    "num_key_value_heads": 4, "head_dim": 32, "vocab_size": 4096, "max_position_embeddings": 4096,
}  # fmt: skip
PHASES = ("forward", "backward", "optimizer_step")
UNSEEN = {*DEVICE_LINES, "cublas_workspace", "attention_kernel", "process", "weights_file", "pinned_rounding"}


def make_case(config: dict[str, Any], *overrides: str) -> Any:
    """Makes a recipe with small buckets, which a small model fills as a large model fills large ones."""
    small = (
        f"{ZERO}.reduce_bucket_size=1000000",
        f"{ZERO}.prefetch_bucket_size=200000",
        f"{ZERO}.sub_group_size=2000000",
    )
    small += (f"{ZERO}.max_live_parameters=2000000", f"{ZERO}.param_persistence_threshold=1000")
    return make_recipe(f"data.max_length={TOKENS}", *small, *overrides, config={**CONFIG, **SIZES, **config})


def measure_step(recipe: Any) -> int:
    """Returns, on a rank, the most bytes alive in the second step."""
    return measure_steps(recipe, "step")[0]


def measure_steps(recipe: Any, *order: str) -> list[int]:
    """Returns, on a rank, the most bytes alive in each step or evaluation, after a first step that is not counted."""
    from deepspeed.utils import groups as ds_groups

    peaks = []
    with ByteCounter(ignored_device="meta") as counter:
        rows = MemoryRows([[(recipe.data.max_length, 1)]] * 16, recipe.model.config["vocab_size"])
        harness = RunHarness(recipe, rows, 2 + len(order))
        harness.train_state.num_steps = 1
        train(harness.train_state)
        for what in order:
            gc.collect()
            counter.peak = counter.now
            if what == "step":
                harness.train_state.num_steps += 1
                train(harness.train_state)
            else:
                evaluate(harness.train_state.engine, harness.train_state.groups, rows, harness.train_state.batching)
            peaks.append(counter.peak)
    harness.built.engine.close()
    ds_groups._ZERO_PARAM_INTRA_PARALLEL_GROUP = None  # DeepSpeed makes replicas' groups once in a process
    del harness
    gc.collect()
    return peaks


def make_request(recipe: Any) -> dict[str, Any]:
    levers = choose_levers(recipe, read_model_shape(recipe.model.config, "test"), None).levers
    return {
        "recipe": recipe.model_dump(mode="json"),
        "config": recipe.model.config,
        "levers": vars(levers),
        "world_size": make_layout(recipe).world_size,
    }


def trace_step(recipe: Any) -> int:
    """Traces the same step without data, in a process of its own."""
    answer = trace_bytes(recipe)
    return max(answer["device"][phase] + answer["host"][phase] for phase in PHASES)  # a CPU rank has one memory


def trace_bytes(recipe: Any) -> dict[str, Any]:
    command = [sys.executable, "-m", "ulysses_cli.prove.trace"]
    done = subprocess.run(command, input=json.dumps(make_request(recipe)), capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    traced: dict[str, Any] = json.loads(done.stdout)
    return traced


def predict_step(recipe: Any) -> int:
    """Returns the ledger's bytes of what a counter of tensors sees. A CPU rank has one memory for the GPU's and its
    share of the host's."""
    shape = read_model_shape(recipe.model.config, "test")
    job = make_job(recipe, shape, choose_levers(recipe, shape, None).levers)
    ledger = measure_ledger(job)

    def add_up(lines: dict[str, int]) -> int:
        return sum(size for name, size in lines.items() if name not in UNSEEN)

    return max(
        add_up(ledger.phases[phase].lines) + add_up(ledger.host_phases[phase]) // job.ranks_per_node for phase in PHASES
    )
