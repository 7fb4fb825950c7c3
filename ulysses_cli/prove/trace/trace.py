"""Runs a step of a recipe's model, levers and engine on tensors without data and counts every allocation.

Patches the whole process that it runs in (see __main__.py); computes no value.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, fields, replace
from datetime import timedelta
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from ulysses_cli.plan.ds_config import make_ds_config
from ulysses_cli.plan.ledger.job import make_engine, make_job
from ulysses_cli.plan.ledger.moments import find_fullest_ranks
from ulysses_cli.plan.ledger.weights import find_num_parameters
from ulysses_cli.plan.levers import Levers
from ulysses_cli.plan.models.shape import ModelShape, find_text_part, read_model_shape
from ulysses_cli.plan.recipe.recipe import Recipe
from ulysses_cli.plan.units import format_count

FEW_LAYERS, MORE_LAYERS = 8, 4
Layers = tuple[int, int]  # numbers of layers: offloaded, and those above them that are not offloaded
LIVE_ELEMENTS = 2_200_000_000  # what ZeRO-3 may gather at both ends; each layer between them adds the same
BETWEEN = "between"  # between steps: what is allocated there is allocated in every phase
HELD = "held"  # what is allocated when the optimizer's step starts
SUMS = (
    "data_types",
    "communication_data_type",
)  # DeepSpeed's settings for the sums of a run that accumulates gradients


@dataclass(frozen=True)
class TracedPeaks:
    """Peak bytes of one rank of a traced model: by phase on the device and on the host, what the allocator would
    reserve, and the file of activations on a disk."""

    device: dict[str, int]
    host: dict[str, int]
    reserved: dict[str, int]
    disk: dict[str, int] = field(default_factory=dict)


def trace(request: Mapping[str, Any], report: Any = lambda _: None) -> dict[str, Any]:
    """`request`: recipe, model config, levers and world size as plain data. Returns peaks as plain data."""
    shape = read_model_shape(request["config"], "the traced model")
    num_layers = shape.num_layers
    request = {**request, "config": {**find_text_part(request["config"]), "num_hidden_layers": num_layers}}
    layer_elements, in_groups = count_layer_elements(request["config"]), count_grouped_elements(request)
    if in_groups >= num_layers * layer_elements:  # one group holds all weights
        in_groups = 0
    few = max(FEW_LAYERS, -(-max(LIVE_ELEMENTS, in_groups) // layer_elements))
    if reaches_across(shape):
        few = num_layers
    num_first = min(num_layers, int(request["levers"]["offloaded_layers"]))
    if num_saved := int(request["levers"]["saved_layers"]):  # none is offloaded then
        num_first = num_layers - num_saved
    whole = num_first, num_layers - num_first
    peaks: dict[Layers, TracedPeaks] = {}
    for layers in list_cuts(whole, few, find_period(request["config"])):
        what = "recomputed" if num_saved else "offloaded"
        report(f"tracing {sum(layers)} of {format_count(num_layers, 'layer')}, {layers[0]} of them {what}")
        peaks[layers] = trace_layers(request, layers)
    reached = extrapolate(peaks, whole, steps_in_groups=in_groups > 0)
    for by_phase in (reached.device, reached.host):
        by_phase.pop(HELD)
    return {"num_layers": num_layers, "traced_layers": [sum(layers) for layers in peaks], **vars(reached)}


def reaches_across(shape: ModelShape) -> bool:
    """Whether layers use keys or weights of others: with fewer layers these would be others."""
    return any((layer.attention and layer.attention.shares_kv) or layer.shared_block for layer in shape.layers)


def find_period(config: Mapping[str, Any]) -> int:
    """After how many layers, behind the first few, the kinds of layers repeat, in a multiple that is worth a second
    trace. Where they do not repeat, the number of layers."""
    kinds = [layer.without_window() for layer in read_model_shape(config, "the traced model").layers][FEW_LAYERS:]
    sizes = range(1, len(kinds) // 2 + 1)  # fewer than two repetitions may be chance
    repeats = (n for n in sizes if all(a == b for a, b in zip(kinds[n:], kinds, strict=False)))
    period = next(repeats, max(1, len(kinds)))
    return period * max(1, MORE_LAYERS // period)


def list_cuts(whole: Layers, few: int, num_more: int = MORE_LAYERS) -> list[Layers]:
    """The numbers of layers to trace: a few, and then `num_more` more, offloaded and not, where the model has more."""
    if sum(whole) <= few + num_more:
        return [whole]
    above = min(whole[1], max(few // 2, few - whole[0]))
    base = few - above, above
    more = [min(num_more, most - num) for num, most in zip(base, whole, strict=True)]
    grown = [(base[0] + more[0], base[1]), (base[0], base[1] + more[1])]
    return [base, *(cut for cut in grown if cut != base)]


def count_grouped_elements(request: Mapping[str, Any]) -> int:
    """Weights in the first group that ZeRO-3 steps. A cut with as many weights has groups as large as the whole
    model's."""
    recipe, levers = Recipe.model_validate_json(json.dumps(request["recipe"])), Levers(**request["levers"])
    if recipe.zero_stage < 3 or recipe.lora is not None or levers.offload_optimizer != "none":
        return 0
    return make_engine(recipe, levers).sub_group * int(request["world_size"])


def extrapolate(peaks: Mapping[Layers, TracedPeaks], whole: Layers, *, steps_in_groups: bool = False) -> TracedPeaks:
    """A straight line from the first cut through each of the others. The memory of an optimizer step in groups, apart
    from what is held before it, does not grow with the layers, but for one weight more or less in the largest group."""
    base, first = next(iter(peaks.items()))

    def reach(place: str) -> dict[str, int]:
        reached = dict(getattr(first, place))
        for layers, traced in peaks.items():
            for kind in (0, 1):
                if more := layers[kind] - base[kind]:
                    for name, low in getattr(first, place).items():
                        reached[name] += (getattr(traced, place)[name] - low) * (whole[kind] - base[kind]) // more
        return reached

    device = reach("device")
    if steps_in_groups:
        work = (traced.device["optimizer_step"] - traced.device[HELD] for traced in peaks.values())
        device["optimizer_step"] = device[HELD] + max(work)
    return TracedPeaks(device, reach("host"), reach("reserved"), reach("disk"))


def trace_layers(request: Mapping[str, Any], layers: Layers) -> TracedPeaks:
    from torch._subclasses.fake_tensor import FakeTensorMode

    import ulysses_cli.train.model.build  # noqa: F401 - libraries make tensors while they are imported
    from ulysses_cli.prove.trace.fake_device import count_file_bytes, forget_files, forget_groups, get_current_stream
    from ulysses_cli.prove.trace.few_tiles import CountedFile, replace_file
    from ulysses_cli.prove.trace.storages import Storages, replay

    storages = Storages(get_current_stream, sees_kernels=request["recipe"]["run"]["device"] != "cpu")
    file = CountedFile()
    replace_file(file)
    forget_files()
    with TemporaryDirectory() as folder, FakeTensorMode(allow_non_fake_inputs=True), storages:
        run_steps(request, layers, storages, Path(folder))
    forget_groups()
    events = [(event.storage, event.num_bytes, event.stream) for event in storages.events if not event.is_host]
    reserved = {
        "expandable_segments": replay(events, expandable=True),
        "fixed_segments": replay(events, expandable=False),
    }
    device, host = ({name: size for name, size in place.peaks.items() if name != BETWEEN} for place in storages.places)
    return TracedPeaks(device, host, reserved, {"activations": file.num_bytes, **count_file_bytes()})


def run_steps(request: Mapping[str, Any], layers: Layers, storages: Any, swap_folder: Path) -> None:
    """One step, an evaluation, and the step whose peaks count: all later steps are like it."""
    import numpy as np

    from ulysses_cli.data.steps import MicroBatch
    from ulysses_cli.plan.resolved import choose_layout, count_branches, settle
    from ulysses_cli.plan.rows.ring import Ring, deal_rows, list_dearest
    from ulysses_cli.prove.trace.fake_device import DEVICE, make_parts
    from ulysses_cli.train.model.build import build
    from ulysses_cli.train.processes.groups import make_groups

    config = cut_layers(request["config"], sum(layers))
    settings = {**request["recipe"], "model": {**request["recipe"]["model"], "config": config, "name_or_path": None}}
    recipe = Recipe.model_validate_json(json.dumps(settings))
    shape = read_model_shape(config, "the traced model")
    cut = {"saved_layers": layers[1]} if request["levers"]["saved_layers"] else {"offloaded_layers": layers[0]}
    layout, levers = choose_layout(recipe, shape), Levers(**{**request["levers"], **cut})
    num_steps = settings["train"]["gradient_accumulation_steps"]
    if num_steps > 1:  # under ZeRO-3 without replicas or gradients on the host all are alike; else two are enough
        are_alike = recipe.zero_stage == 3 and settings["parallel"]["dp_replicate_size"] == 1
        are_alike = are_alike and levers.offload_optimizer != "cpu"
        num_steps = 1 if are_alike else 2
        settings["train"] = {**settings["train"], "gradient_accumulation_steps": num_steps}
        if settings["model"]["dtype"] == "bfloat16" and recipe.zero_stage > 1:
            whole = make_ds_config(recipe, layout)
            settings["deepspeed"] = {**{name: whole[name] for name in SUMS}, **settings["deepspeed"]}
        recipe = Recipe.model_validate_json(json.dumps(settings))
    tokens, batch = recipe.data.max_length, recipe.train.per_device_train_batch_size
    local = tokens // layout.sp_size
    groups = make_groups(layout, timedelta(minutes=1))
    plan, parts = settle(recipe, shape, levers), make_parts()
    if recipe.zero_stage < 3:  # the model is made in host memory, then moved (train/model/loading.py)
        parts = replace(parts, load_weights=_in_phases(storages, (BETWEEN,), parts.load_weights))
    built = build(plan, groups, DEVICE, 2, parts=parts, swap_folder=swap_folder)
    engine, wrapped = built.engine, built.engine.wrapped
    numbers = np.zeros((batch, local), np.int64)
    positions = np.broadcast_to(np.arange(local), (batch, local)).copy()
    lengths, shared = list_dearest(tokens, batch, count_branches(recipe, shape))
    order = deal_rows(lengths, batch, Ring(layout.ring_size, shape.window_counts), shared)
    rows = MicroBatch(numbers, numbers, positions, lengths, tuple(range(batch)), order, shared=shared)
    for name, phases in (("backward", ("backward",)), ("step", (HELD, "optimizer_step"))):
        setattr(wrapped, name, _in_phases(storages, phases, getattr(wrapped, name), BETWEEN))
    storages.phase = BETWEEN
    micro_steps = [rows] * num_steps
    run_step(engine, micro_steps, tokens, storages)
    storages.forget_peaks("load")
    if recipe.data.eval_datasets or recipe.data.eval_split:
        with storages.during("evaluation"):
            engine.compute_token_losses(rows)
    run_step(engine, micro_steps, tokens, storages)
    engine.close()


def run_step(engine: Any, micro_steps: list[Any], num_targets: int, storages: Any) -> None:
    for rows in micro_steps:
        with storages.during("forward"):
            engine.train_micro_step(rows, num_targets)
    engine.read_update(0.0)


def count_layer_elements(config: Mapping[str, Any]) -> int:
    """Weights of one layer, from models of one and of two layers."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    sizes = []
    for num_layers in (1, 2):
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**cut_layers(config, num_layers)))
        sizes.append(sum(parameter.numel() for parameter in model.parameters()))
    return sizes[1] - sizes[0]


def cut_layers(config: Mapping[str, Any], num_layers: int) -> dict[str, Any]:
    """The config of the same model with only its first layers. Lists with one entry per layer are cut too, and
    patterns with one letter per layer."""
    whole = int(config["num_hidden_layers"])
    cut = {
        name: value[:num_layers] if _is_by_layer(name, value) and len(value) == whole else value
        for name, value in config.items()
    }
    own = cut.get("per_layer_config")  # by a layer's number
    if isinstance(own, Mapping):
        cut["per_layer_config"] = {index: values for index, values in own.items() if int(index) < num_layers}
    return {**cut, "num_hidden_layers": num_layers}


def _is_by_layer(name: str, value: Any) -> bool:
    return isinstance(value, list) or (isinstance(value, str) and name.endswith("_pattern"))


def _in_phases(storages: Any, phases: tuple[str, ...], function: Any, after: str = "") -> Any:
    """Wraps a function so that it runs in the last of `phases`. Of the others, what is allocated when they start is
    recorded. After the call the phase is `after`, so that a forward ends where its backward starts."""

    def call(*args: Any, **kwargs: Any) -> Any:
        with ExitStack() as stack:
            for phase in phases:
                stack.enter_context(storages.during(phase))
            result = function(*args, **kwargs)
        storages.phase = after or storages.phase
        return result

    return call


def list_ranks(request: Mapping[str, Any]) -> list[int]:
    """The ranks of which one needs most memory."""
    recipe = Recipe.model_validate_json(json.dumps(request["recipe"]))
    shape = read_model_shape(request["config"], "the traced model")
    job = make_job(recipe, shape, Levers(**request["levers"]), needs_weights=False)
    is_known = job.zero_stage == 3 or find_num_parameters(shape) is not None
    return find_fullest_ranks(job) if is_known else [job.world_size - 1]


def join_ranks(traces: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Of the traces of several ranks, the largest peak of each phase."""
    joined = dict(traces[0])
    for place in (each.name for each in fields(TracedPeaks)):
        joined[place] = {name: max(trace[place][name] for trace in traces) for name in joined[place]}
    return joined


def prepare_process(request: Mapping[str, Any]) -> None:
    """Installs the fake device and replaces code that cannot run on it. Call it before anything else of the project is
    imported. `request` may name one of the ranks that `list_ranks` gives."""
    world_size, recipe = int(request["world_size"]), request["recipe"]
    rank = request["rank"] if "rank" in request else list_ranks(request)[0]
    os.environ |= {"DS_ACCELERATOR": "cpu", "RANK": str(rank), "LOCAL_RANK": "0", "WORLD_SIZE": str(world_size)}
    import torch.distributed as dist
    from torch.distributed._tools import fake_collectives  # noqa: F401 - collectives of tensors without data
    from torch.testing._internal.distributed.fake_pg import FakeStore

    from ulysses_cli.prove.trace import fake_device

    fake_device.install()
    fake_device.replace_parts()
    fake_device.replace_swaps()
    if recipe["run"]["device"] != "cpu":  # as a GPU does
        fake_device.copy_on_streams()
        fake_device.drop_as_a_gpu_does()
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world_size)
