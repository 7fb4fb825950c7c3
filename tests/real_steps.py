"""Real training steps on CPU ranks with every byte counted, and the wish for a trace of the same."""

from __future__ import annotations

import gc
import json
import subprocess
import sys
from typing import Any

from courses import Trip
from live_bytes import LiveBytes
from small_run import CONFIG
from training import MemoryRows, make_recipe

from ulysses_cli.plan.ledger.device import DEVICE_LINES
from ulysses_cli.plan.ledger.job import make_job
from ulysses_cli.plan.lever_choice import choose_levers
from ulysses_cli.plan.memory import compute_ledger
from ulysses_cli.plan.model_shape import read_model_shape
from ulysses_cli.plan.resolved import make_layout
from ulysses_cli.train.loop import train

TOKENS = 2048
SIZES = {
    "hidden_size": 256, "intermediate_size": 768, "num_hidden_layers": 4, "num_attention_heads": 8,
    "num_key_value_heads": 4, "head_dim": 32, "vocab_size": 4096, "max_position_embeddings": 4096,
}  # fmt: skip
PHASES = ("forward", "backward", "optimizer_step")
UNSEEN = {*DEVICE_LINES, "cublas_workspace", "attention_kernel"}


def make_case(config: dict[str, Any], *overrides: str) -> Any:
    """Small buckets, so that a small model fills them as a large one does."""
    zero = "deepspeed.zero_optimization"
    small = (
        f"{zero}.reduce_bucket_size=1000000",
        f"{zero}.prefetch_bucket_size=200000",
        f"{zero}.sub_group_size=2000000",
    )
    small += (f"{zero}.max_live_parameters=2000000", f"{zero}.param_persistence_threshold=1000")
    return make_recipe(f"data.max_length={TOKENS}", *small, *overrides, config={**CONFIG, **SIZES, **config})


def measure_step(recipe: Any) -> int:
    """On a rank: most bytes alive in the second step."""
    meter = LiveBytes()
    with meter:
        rows = MemoryRows([[(TOKENS, 1)]] * 4, recipe.model.config["vocab_size"])
        trip = Trip(recipe, rows, 3)
        trip.course.num_steps = 1
        train(trip.course)
        gc.collect()
        meter.peak = meter.now
        trip.course.num_steps = 2
        train(trip.course)
    peak = meter.peak
    trip.built.engine.wrapped.destroy()
    del trip
    gc.collect()
    return peak


def make_wish(recipe: Any) -> dict[str, Any]:
    shape = read_model_shape(recipe.model.config, "test")
    levers = choose_levers(recipe, shape, None).levers
    return {
        "recipe": recipe.model_dump(mode="json"),
        "config": recipe.model.config,
        "levers": vars(levers),
        "world_size": make_layout(recipe).world_size,
    }


def trace_step(recipe: Any) -> int:
    """The same step without data, in a process of its own."""
    command = [sys.executable, "-m", "ulysses_cli.prove.trace"]
    done = subprocess.run(command, input=json.dumps(make_wish(recipe)), capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads(done.stdout)
    return max(found["device"][phase] + found["host"][phase] for phase in PHASES)  # a CPU rank has one memory


def predict_step(recipe: Any) -> int:
    """The formula's bytes of what a counter of tensors sees."""
    shape = read_model_shape(recipe.model.config, "test")
    ledger = compute_ledger(make_job(recipe, shape, choose_levers(recipe, shape, None).levers))
    return max(sum(size for name, size in ledger.phases[phase].lines.items() if name not in UNSEEN) for phase in PHASES)
