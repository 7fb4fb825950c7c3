"""A model's forward and backward on sizes alone, and the same on torch's tensors without data: what each allocates and
frees, in order."""

import gc
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from transformers import AttentionInterface, AutoConfig, AutoModelForCausalLM

import ulysses_cli.train.attention.kernels.operators  # noqa: F401 - the trace asks for its operators
from ulysses_cli.plan.sizes import autograd
from ulysses_cli.plan.sizes.library import Unknown, make_torch
from ulysses_cli.plan.sizes.sources import ModelSources, make_config, make_model
from ulysses_cli.plan.sizes.tensor import BY_NAME, DEVICE, FLOAT32, INT64, ByteMeter, Running, make
from ulysses_cli.prove.trace.storages import Storages

PHASES = ("forward", "backward")
# Run by both: attention that any torch has.
ATTENTION = """
def attend(module, query, key, value, attention_mask=None, **others):
    copies = query.shape[1] // key.shape[1]
    if copies > 1:
        key, value = key.repeat_interleave(copies, 1), value.repeat_interleave(copies, 1)
    weights = torch.softmax(torch.matmul(query, key.transpose(2, 3)) * 0.5, -1)
    return torch.matmul(weights, value).transpose(1, 2).contiguous(), None
"""


class Events(NamedTuple):
    """Bytes that come (above 0) and go (below 0), by phase, and the weights' names and shapes."""

    changes: dict[str, list[int]]
    peaks: dict[str, int]
    weights: list[tuple[str, tuple[int, ...]]]


def run_on_sizes(config: Mapping[str, Any], tokens: int, dtype: str) -> Events:
    gc.collect()
    gc.disable()  # only references free
    meter = start_meter()
    own: dict[str, Any] = {"torch": make_torch()["torch"]}
    exec(ATTENTION, own)
    sources = ModelSources(own["attend"])
    Running.dtype = BY_NAME[dtype]
    model = make_model(sources, make_config(sources, config))
    Running.dtype, Unknown.running = FLOAT32, True
    try:
        ids = make((1, tokens), INT64)
        with meter.during("forward"):
            logits = model(input_ids=ids, position_ids=ids, use_cache=False).logits
        with meter.during("backward"):
            autograd.backward([logits], [make(logits.shape, logits.dtype)])
    finally:
        Unknown.running = False
        gc.enable()
    changes = {phase: [change for change, own_phase, _ in meter.events or () if own_phase == phase] for phase in PHASES}
    return Events(changes, dict(meter.device.peaks), [(name, p.shape) for name, p in model.named_parameters()])


def start_meter() -> ByteMeter:
    Running.meter, Running.device, Running.dtype = ByteMeter([]), DEVICE, None
    Running.hooks, Running.grad = [], True
    return Running.meter


def run_on_torch(config: Mapping[str, Any], tokens: int, dtype: str) -> Events:
    own: dict[str, Any] = {"torch": torch}
    exec(ATTENTION, own)
    AttentionInterface.register("plain_products", own["attend"])
    made = AutoConfig.for_model(**config)
    storages = Storages(sees_kernels=False)
    before = torch.get_default_dtype()
    with FakeTensorMode(allow_non_fake_inputs=True), storages, torch.device("meta"):
        torch.set_default_dtype(getattr(torch, dtype))
        try:
            model = AutoModelForCausalLM.from_config(made, attn_implementation="plain_products")
        finally:
            torch.set_default_dtype(before)
        for module in model.modules():
            if hasattr(getattr(module, "config", None), "model_type"):
                module.config._experts_implementation = "grouped_mm"
        model.train()
        ids = torch.zeros((1, tokens), dtype=torch.int64)
        with storages.during("forward"):
            logits = model(input_ids=ids, position_ids=ids, use_cache=False).logits
        with storages.during("backward"):
            logits.backward(torch.empty_like(logits))
        weights = [(name, tuple(p.shape)) for name, p in model.named_parameters()]
    changes = {phase: [each.num_bytes for each in storages.events if each.phase == phase] for phase in PHASES}
    return Events(changes, dict(storages.device.peaks), weights)
