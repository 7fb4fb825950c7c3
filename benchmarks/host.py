"""Measures what a processor takes to launch the work of a layer: by ZeRO stage, by lever and by number of ranks.

    python benchmarks/host.py [--repeats 10] [--json benchmarks/results/host-cpu.json]

A rank of the real engine trains on one core. Its rows are so short and its weights so small that kernels compute next
to nothing; collectives are torch's fake ones, which move nothing, and streams are only numbers. What is left is Python,
DeepSpeed's hooks, autograd and torch's dispatch. A layer is the difference of two depths. DeepSpeed's bounds, which are
numbers of weights, shrink with them, to those of a layer of an 8B model. Where a GPU has a launch, a figure holds a CPU
kernel of a few numbers: `operator_ms` says what one costs, `operators_a_layer` how many there are.

Each place (a world size and a ZeRO stage) is a process of its own. CPU time is measured, not the clock. A yardstick, a
fixed piece of such work, is taken between the steps: where other work on the machine slows it, the times of the steps
shrink by as much. Combinations that no cost was derived from show how far costs add up.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import itertools
import json
import os
import platform
import statistics
import subprocess
import sys
import time
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import timedelta
from pathlib import Path
from typing import Any

from paths import RESULTS

DEPTHS = (4, 12)
TOKENS = 8  # of a rank
NUM_WARMUP, NUM_PIECES = 3, 10
HIDDEN, INNER, HEADS = 16, 32, 8
LLAMA = {
    "model_type": "llama", "hidden_size": HIDDEN, "intermediate_size": INNER, "num_attention_heads": HEADS,
    "num_key_value_heads": HEADS, "vocab_size": 64, "max_position_embeddings": 4096, "tie_word_embeddings": False,
}  # fmt: skip
QWEN = {**LLAMA, "model_type": "qwen3", "head_dim": HIDDEN // HEADS}
EXPERTS = {
    **QWEN, "model_type": "qwen3_moe", "num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": INNER,
    "decoder_sparse_step": 1, "mlp_only_layers": [],
}  # fmt: skip
CONFIGS: dict[str, dict[str, Any]] = {"llama": LLAMA, "qwen3": QWEN, "experts": EXPERTS}
LAYER_ELEMENTS, LARGE_LAYER_ELEMENTS = 4 * HIDDEN**2 + 3 * HIDDEN * INNER, 218_112_000  # here, and of Llama 3.1 8B
BOUNDS = {
    "prefetch_bucket_size": 50_000_000, "max_live_parameters": 1_000_000_000, "max_reuse_distance": 1_000_000_000,
    "reduce_bucket_size": 100_000_000, "sub_group_size": 125_000_000,
}  # fmt: skip
WAY: Any = "compiled"  # of norms, rotations and gates: as on a GPU
PERSISTENT = 100  # more than a norm has here, less than a matrix


@dataclass(frozen=True)
class Case:
    """Words of a recipe, and numbers that replace what follows from a row's length."""

    words: tuple[str, ...] = ()
    sp_size: int = 1
    mlp_tiles: int = 2
    loss_tiles: int = 2
    config: str = "llama"


KEEPS = "memory.gradient_checkpointing=false"
LEAF = "memory.leaf_layers=true"
LORA = ("lora.r=4", "lora.target_modules=all-linear")
CASES = {
    "plain": Case((KEEPS,)),
    "full": Case(("memory.gradient_checkpointing=full",)),
    "save_attention": Case(("memory.gradient_checkpointing=true",)),
    "exchange": Case((KEEPS,), sp_size=8),
    "2 chunks": Case((KEEPS, "memory.attention_head_chunks=2"), sp_size=2),
    "4 chunks": Case((KEEPS, "memory.attention_head_chunks=4"), sp_size=2),
    "2 tiles": Case((KEEPS, "memory.tiled_mlp=true")),
    "8 tiles": Case((KEEPS, "memory.tiled_mlp=true"), mlp_tiles=8),
    "2 loss tiles": Case((KEEPS, "memory.tiled_loss=true")),
    "8 loss tiles": Case((KEEPS, "memory.tiled_loss=true"), loss_tiles=8),
    "offloaded": Case(("memory.gradient_checkpointing=true", "memory.activation_offloading=true")),
    "lora": Case((KEEPS, *LORA)),
    "offload_optimizer": Case((KEEPS, "memory.offload_optimizer=cpu")),
    "offload_param": Case((KEEPS, "memory.offload_optimizer=cpu", "memory.offload_param=cpu")),
    "qwen3": Case((KEEPS,), config="qwen3"),
    "experts": Case((KEEPS,), config="experts"),
}
FULL, PART = "memory.gradient_checkpointing=full", "memory.gradient_checkpointing=true"
# Combinations that no cost was derived from.
OFFLOADED = ("memory.activation_offloading=true",)
HELD_OUT = {
    "full, 4 tiles, exchange": Case((FULL, "memory.tiled_mlp=true"), sp_size=8, mlp_tiles=4),
    "part, 2 tiles, 4 loss tiles, offloaded, 2 chunks": Case(
        (PART, "memory.tiled_mlp=true", "memory.tiled_loss=true", *OFFLOADED, "memory.attention_head_chunks=2"),
        sp_size=2, loss_tiles=4,
    ),
    "full, lora, exchange": Case((FULL, *LORA), sp_size=2),
    "full, qwen3, exchange": Case((FULL,), sp_size=4, config="qwen3"),
}  # fmt: skip
# Beside the same cases without leaf modules, in a process of their own.
LEAVES = {
    f"{name}, leaf": replace(CASES[name], words=(*CASES[name].words, LEAF))
    for name in ("plain", "full", "save_attention")
}
ALL = CASES | HELD_OUT
PLACES: dict[tuple[int, int], list[str]] = {
    (8, 3): list(ALL),
    (64, 3): ["plain", "full"],
    (8, 2): ["plain", "full"],
    (8, 1): ["plain", "full", "full, 4 tiles, exchange", "full, lora, exchange"],
    (32, 3): ["full, 4 tiles, exchange", "full, qwen3, exchange"],
}


def prepare(world_size: int) -> None:
    """Makes this process the first of a world of fake ranks, on a device that counts as asynchronous."""
    os.environ |= {"DS_ACCELERATOR": "cpu", "RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": str(world_size)}
    os.environ["OMP_NUM_THREADS"] = "1"
    os.sched_setaffinity(0, {max(os.sched_getaffinity(0))})
    import torch
    import torch.distributed as dist
    from deepspeed.accelerator import set_accelerator
    from torch.testing._internal.distributed.fake_pg import FakeStore

    from ulysses_cli.prove.trace.fake_device import FakeAccelerator

    class HostDevice(FakeAccelerator):
        """Real tensors of the CPU behind streams that are numbers."""

        def __init__(self) -> None:
            super().__init__()
            self._name = "cpu"

        def device_name(self, device_index: Any = None) -> str:
            return "cpu"

        def current_device_name(self) -> str:
            return "cpu"

        def current_device(self) -> Any:
            return torch.device("cpu")

        def on_accelerator(self, tensor: Any) -> bool:
            return True

    torch.set_num_threads(1)
    torch.set_flush_denormal(True)
    set_accelerator(HostDevice())
    torch.Tensor.record_stream = lambda self, stream: None
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=world_size)


def make_recipe(case: Case, stage: int, world_size: int, num_layers: int) -> Any:
    import yaml
    from support.small_run import make_settings

    from ulysses_cli.plan.recipe.loader import parse_recipe

    share = LAYER_ELEMENTS / LARGE_LAYER_ELEMENTS
    bounds = {name: max(1, round(bound * share)) for name, bound in BOUNDS.items()}
    bounds |= {"param_persistence_threshold": PERSISTENT}
    if stage < 3:
        bounds = {"reduce_bucket_size": bounds["reduce_bucket_size"]}
    words = [f"deepspeed.zero_optimization.{name}={bound}" for name, bound in bounds.items()]
    words += [f"data.max_length={TOKENS * case.sp_size}", f"parallel.zero_stage={stage}", "model.dtype=bfloat16"]
    words += [f"parallel.sp_size={case.sp_size}", f"parallel.dp_shard_size={world_size // case.sp_size}"]
    settings = make_settings({**CONFIGS[case.config], "num_hidden_layers": num_layers})
    return parse_recipe(yaml.safe_dump(settings), "measured", [*words, *case.words]).recipe


def build_engine(case: Case, stage: int, world_size: int, num_layers: int) -> tuple[Any, Any]:
    """Returns the engine and rows of one micro-step."""
    import numpy as np
    import torch

    from ulysses_cli.data.steps import MicroBatch
    from ulysses_cli.plan.models.shape import read_model_shape
    from ulysses_cli.plan.planner.lever_choice import choose_levers
    from ulysses_cli.plan.resolved import choose_layout, settle
    from ulysses_cli.plan.rows.ring import Ring, deal_rows
    from ulysses_cli.train.model.build import build
    from ulysses_cli.train.model.loading import load_model_config
    from ulysses_cli.train.processes.groups import make_groups

    recipe, row = make_recipe(case, stage, world_size, num_layers), TOKENS * case.sp_size
    shape = read_model_shape(load_model_config(recipe).to_dict(), "measured")
    groups = make_groups(choose_layout(recipe, shape), timedelta(minutes=1))
    plan = settle(recipe, shape, choose_levers(recipe, shape, None).levers)
    built = build(plan, groups, torch.device("cpu"), 10**6, parts=make_parts())
    numbers = np.zeros((1, TOKENS), np.int64)
    positions = np.arange(TOKENS)[None].copy()
    order = deal_rows((row,), 1, Ring(groups.layout.ring_size, shape.window_counts))
    return built.engine, MicroBatch(numbers, numbers, positions, (row,), (0,), order)


def make_parts() -> Any:
    """Kernels are named instead of timed; norms, rotations and gates run as on a GPU."""
    from ulysses_cli.train.attention.kernels.choice import KernelChoice
    from ulysses_cli.train.elementwise.choice import CANDIDATES, ElementwiseChoice
    from ulysses_cli.train.model.parts import Parts

    def choose_kernel(*_: Any) -> Any:
        return KernelChoice("sdpa", "measured")

    def choose_implementations(*_: Any) -> Any:
        return ElementwiseChoice(dict.fromkeys(CANDIDATES, WAY), "measured")

    return Parts(choose_kernel=choose_kernel, choose_implementations=choose_implementations)


class Side:
    """An engine of one depth, and the CPU time of its steps. A step is cut where a module starts and where a gradient
    is ready, into pieces of less than a millisecond. Other work on the machine slows some pieces of every step, so the
    least of each piece is taken."""

    def __init__(self, engine: Any, rows: Any) -> None:
        from ulysses_cli.train.inputs import Yardstick

        self.engine, self.rows = engine, rows
        self.steps: list[list[float]] = []
        self.yardsticks: list[list[float]] = []
        self._yardstick = Yardstick()
        self._marks: list[float] = []
        self._num_micro = 0
        for parameter in filter(lambda each: each.requires_grad, engine.wrapped.module.parameters()):
            parameter.register_post_accumulate_grad_hook(self.mark)
        for module in engine.wrapped.module.modules():
            module.register_forward_pre_hook(self.mark)
        self._update = engine.wrapped.step
        engine.wrapped.step = self._step

    def mark(self, *_: Any) -> None:
        self._marks.append(time.process_time())

    def _step(self, *args: Any) -> None:
        self.mark()
        self._num_micro = len(self._marks) - 1
        self._update(*args)
        self.mark()

    def take_step(self) -> None:
        self._marks = [time.process_time()]
        self.engine.train_micro_step(self.rows, TOKENS)
        self.steps.append([after - before for before, after in itertools.pairwise(self._marks)])
        self.engine.read_update(0.0)
        self.yardsticks.append([self._yardstick.measure() for _ in range(NUM_PIECES)])

    def get_yardstick(self) -> float:
        """By the same statistic as the steps."""
        return float(statistics.mean(min(times) for times in zip(*self.yardsticks, strict=True)))

    def sum_least(self, which: slice = slice(None)) -> tuple[float, float]:
        """Seconds of a micro-step and of the optimizer's step, by some of the repetitions."""
        least = [min(times) for times in zip(*self.steps[which], strict=True)]
        return sum(least[: self._num_micro]), sum(least[self._num_micro :])


def measure_place(world_size: int, stage: int, names: list[str], num_repeats: int) -> dict[str, Any]:
    """Milliseconds by case."""
    prepare(world_size)
    return {
        "world_size": world_size,
        "zero_stage": stage,
        "cases": {name: measure_case((ALL | LEAVES)[name], stage, world_size, num_repeats) for name in names},
    }


def measure_case(case: Case, stage: int, world_size: int, num_repeats: int) -> dict[str, float]:
    """Steps of both depths take turns, so that a busy machine slows both."""
    few, many = (make_side(case, stage, world_size, depth) for depth in DEPTHS)
    calls, operators = (split(*pair) for pair in zip(count_work(few), count_work(many), strict=True))
    gc.collect()
    gc.freeze()  # a run has one engine: collections that walk through all that were here would count
    for _ in range(num_repeats):
        for side in (few, many):
            side.take_step()
    figures = split_depths(few, many)
    figures |= {"calls_a_layer": calls[0], "calls_beside": calls[1]}
    figures |= {"operators_a_layer": operators[0], "operators_beside": operators[1]}
    figures["yardstick_ms"] = statistics.mean((few.get_yardstick(), many.get_yardstick()))
    figures["least_yardstick_ms"] = min(map(min, few.yardsticks + many.yardsticks))
    few.engine.close()
    many.engine.close()
    result = {key: round(value, 4) for key, value in figures.items()}
    print(f"{world_size} ranks, stage {stage}, {case}: {result}", flush=True)
    return result


def make_side(case: Case, stage: int, world_size: int, depth: int) -> Side:
    with tiles_of(case):
        side = Side(*build_engine(case, stage, world_size, depth))
    for _ in range(NUM_WARMUP):
        side.take_step()
    side.steps, side.yardsticks = [], []
    return side


@contextmanager
def tiles_of(case: Case) -> Iterator[None]:
    """The numbers of tiles that the case says, for rows of a few tokens."""
    from ulysses_cli.train.model import loss_model

    rules: Any = loss_model
    before = rules.compute_num_mlp_tiles, rules.compute_loss_tile_tokens
    rules.compute_num_mlp_tiles = lambda *_, **__: case.mlp_tiles
    rules.compute_loss_tile_tokens = lambda *_, **__: -(-TOKENS // case.loss_tiles)
    try:
        yield
    finally:
        rules.compute_num_mlp_tiles, rules.compute_loss_tile_tokens = before


def count_work(side: Side) -> tuple[int, int]:
    """Of a micro-step: calls of functions from Python, and of torch's operators that are more than a view."""
    from torch.utils._python_dispatch import TorchDispatchMode

    calls = operators = 0

    class Counting(TorchDispatchMode):  # type: ignore[misc]
        def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            nonlocal operators
            shares = [each.alias_info is not None and not each.alias_info.is_write for each in function._schema.returns]
            operators += not any(shares)
            return function(*args, **(kwargs or {}))

    def count(_: Any, event: str, __: Any) -> None:
        nonlocal calls
        calls += event in ("call", "c_call")

    with Counting():
        side.engine.train_micro_step(side.rows, TOKENS)
    sys.setprofile(count)
    side.engine.train_micro_step(side.rows, TOKENS)
    sys.setprofile(None)
    return calls, operators


def split(few: float, many: float) -> tuple[float, float]:
    """What is in each layer and what is beside the layers."""
    layer = (many - few) / (DEPTHS[1] - DEPTHS[0])
    return layer, few - DEPTHS[0] * layer


def split_depths(few: Side, many: Side) -> dict[str, float]:
    """Milliseconds of a layer, of what is beside the layers, and how far the two halves of the repetitions differ."""
    (micro, update), (micro_of_few, update_of_few) = many.sum_least(), few.sum_least()
    layer, beside = split(micro_of_few, micro)
    parts = (slice(0, None, 2), slice(1, None, 2))
    halves = [split(few.sum_least(part)[0], many.sum_least(part)[0])[0] for part in parts]
    return {
        "layer_ms": 1e3 * layer,
        "beside_ms": 1e3 * beside,
        "spread": max(halves) / min(halves) - 1,
        "update_layer_ms": 1e3 * split(update_of_few, update)[0],
    }


def measure_operator() -> float:
    """Milliseconds of a torch operator on a few numbers that are there."""
    import torch

    few, result = torch.ones(TOKENS), torch.empty(TOKENS)
    seconds = []
    for _ in range(9):
        before = time.process_time()
        for _ in range(1000):
            torch.add(few, few, out=result)
        seconds.append(time.process_time() - before)
    return min(seconds)


def find_core(result: dict[str, Any]) -> float:
    """The yardstick's milliseconds when nothing disturbed it."""
    return float(min(case["least_yardstick_ms"] for place in result["places"] for case in place["cases"].values()))


def find_case(result: dict[str, Any], world_size: int, stage: int, name: str) -> dict[str, float]:
    key = (world_size, stage)
    cases = next(each["cases"] for each in result["places"] if (each["world_size"], each["zero_stage"]) == key)
    return dict(cases[name])


def layer_of(result: dict[str, Any], world_size: int, stage: int, name: str) -> float:
    """Milliseconds on a core that nothing disturbs: by how much longer the yardstick took between the steps."""
    case = find_case(result, world_size, stage, name)
    return case["layer_ms"] * find_core(result) / case["yardstick_ms"]


def derive_costs(result: dict[str, Any]) -> dict[str, float]:
    """The numbers of `host` in plan/hardware.yaml: differences between a lever's case and the one without it. A tile of
    the loss is beside the layers, less than the noise of a step: its calls are counted."""
    plain = {place: layer_of(result, *place, "plain") for place in [(8, 1), (8, 2), (8, 3), (64, 3)]}

    def differ(case: str, other: str) -> float:
        return layer_of(result, 8, 3, case) - layer_of(result, 8, 3, other)

    def count(case: str) -> float:
        return find_case(result, 8, 3, case)["calls_beside"]

    rank = (plain[64, 3] - plain[8, 3]) / (64 - 8)
    call = plain[8, 3] / find_case(result, 8, 3, "plain")["calls_a_layer"]
    costs = {
        "yardstick": find_core(result),
        "layer_zero1": plain[8, 1],
        "layer_zero2": plain[8, 2],
        "layer_zero3": plain[8, 3] - 8 * rank,
        "rank": rank,
        "recomputation": statistics.mean(layer_of(result, 8, stage, "full") - plain[8, stage] for stage in (1, 2, 3)),
        "part_recomputation": differ("save_attention", "plain"),
        "head_norms": differ("qwen3", "plain"),
        "adapters": differ("lora", "plain") / plain[8, 3],
        "exchange": differ("exchange", "plain"),
        "head_chunk": differ("4 chunks", "2 chunks") / 2,
        "leaf_layers": 1 - statistics.mean(list_leaf_shares(result["leaves"]["cases"])),
        "tile": differ("8 tiles", "2 tiles") / 6,
        "loss_tile": call * (count("8 loss tiles") - count("2 loss tiles")) / 6,
        "offloaded_layer": differ("offloaded", "save_attention"),
        "offload_optimizer": differ("offload_optimizer", "plain"),
    }
    return {name: float(f"{value:.2g}") for name, value in costs.items()}


def list_leaf_shares(cases: dict[str, dict[str, float]]) -> list[float]:
    """Of a layer's time, what is left where layers are leaf modules."""
    times = {name: case["layer_ms"] / case["yardstick_ms"] for name, case in cases.items()}
    return [times[name] / times[name.partition(",")[0]] for name in LEAVES]


def predict_layer(case: Case, stage: int, world_size: int, costs: Any) -> float:
    """Milliseconds by the formula of plans, for a row that has the case's numbers of tiles."""
    from ulysses_cli.plan.ledger.job import make_job
    from ulysses_cli.plan.models.shape import read_model_shape
    from ulysses_cli.plan.planner.lever_choice import read_levers
    from ulysses_cli.plan.speed import compute_host_seconds

    seconds = []
    for depth in DEPTHS:
        recipe = make_recipe(case, stage, world_size, depth)
        shape = read_model_shape(recipe.model.config, "measured")
        job = make_job(recipe, shape, read_levers(recipe, shape)[0])
        seconds.append(compute_host_seconds(replace(job, max_length=case.mlp_tiles * HIDDEN * case.sp_size), costs))
    return 1e3 * split(*seconds)[0]


def list_errors(result: dict[str, Any], costs: Any) -> dict[str, float]:
    """Of what is predicted for combinations, as a share of what was measured."""
    errors = {}
    for place in result["places"]:
        at = place["world_size"], place["zero_stage"]
        for name in [*filter(HELD_OUT.__contains__, place["cases"])]:
            predicted = predict_layer(HELD_OUT[name], at[1], at[0], costs)
            errors[f"{at[0]} ranks, stage {at[1]}: {name}"] = predicted / layer_of(result, *at, name) - 1
    return errors


def run_place(world_size: int, stage: int, names: list[str], num_repeats: int) -> dict[str, Any]:
    words = ["--place", f"{world_size},{stage}", "--cases", ";".join(names), "--repeats", str(num_repeats)]
    done = subprocess.run([sys.executable, __file__, *words], stdout=subprocess.PIPE, text=True, check=True)
    return dict(json.loads(done.stdout.splitlines()[-1]))


def main() -> None:
    from ulysses_cli.plan.hardware import HostCosts

    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=10)
    parser.add_argument("--json", type=Path, default=RESULTS / "host-cpu.json")
    parser.add_argument("--place", help="one world size and ZeRO stage, such as 8,3: prints JSON")
    parser.add_argument("--cases", default="", help="of that place, such as 'plain;leaf'")
    options = parser.parse_args()
    if options.place:
        world_size, stage = map(int, options.place.split(","))
        with contextlib.redirect_stdout(sys.stderr):
            place = measure_place(world_size, stage, options.cases.split(";"), options.repeats)
        print(json.dumps(place))
        return
    result: dict[str, Any] = {"machine": describe_machine(), "operator_ms": measure_operator(), "places": []}
    for (world_size, stage), names in PLACES.items():
        result["places"].append(run_place(world_size, stage, names, options.repeats))
        for name, figures in result["places"][-1]["cases"].items():
            layer, spread = figures["layer_ms"], figures["spread"]
            print(
                f"{world_size:3} ranks, stage {stage}, {name:50} {layer:7.3f} ms a layer (spread {spread:.0%})",
                flush=True,
            )
        options.json.write_text(json.dumps(result, indent=1) + "\n")
    names = [each for name in LEAVES for each in (name.partition(",")[0], name)]
    result["leaves"] = run_place(8, 3, names, options.repeats)
    result["costs"] = derive_costs(result)
    result["errors"] = list_errors(result, HostCosts(**result["costs"]))
    options.json.write_text(json.dumps(result, indent=1) + "\n")
    print(json.dumps({name: result[name] for name in ("costs", "errors")}, indent=1))


def describe_machine() -> dict[str, Any]:
    import torch

    model = next(
        (line.split(":")[1].strip() for line in Path("/proc/cpuinfo").read_text().splitlines() if "model name" in line),
        "",
    )
    return {"processor": model, "python": platform.python_version(), "torch": torch.__version__}


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    main()
