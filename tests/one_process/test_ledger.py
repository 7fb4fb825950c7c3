"""The ledger's activation terms against real code: transformers' models with our attention, levers and loss run a
step on tensors without data, every allocation counted. What DeepSpeed adds is held against a trace in test_memory.py.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support.live_bytes import LiveBytes
from support.tiers import mark_by
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils.checkpoint import checkpoint
from transformers import AutoConfig, AutoModelForCausalLM

from ulysses_cli.plan import tiles
from ulysses_cli.plan.layout import Layout
from ulysses_cli.plan.ledger import ledger as memory
from ulysses_cli.plan.ledger.job import Job
from ulysses_cli.plan.levers import Levers
from ulysses_cli.plan.models.shape import read_model_shape
from ulysses_cli.train.attention.documents import make_documents
from ulysses_cli.train.attention.interface import register_attention
from ulysses_cli.train.processes.sequence_axis import make_sequence_axis

ENGINE_LINES = {
    "parameters", "parameters_persistent", "parameters_gathered", "parameters_arriving", "gradients",
    "optimizer_master", "optimizer_adam", "reduce_bucket", "reduce_flush", "oversize_gradient",
    "cublas_workspace", "attention_kernel",
}  # fmt: skip
LLAMA: dict[str, Any] = {
    "model_type": "llama", "hidden_size": 1024, "intermediate_size": 3584, "num_attention_heads": 16,
    "num_key_value_heads": 4, "vocab_size": 16_000,
}  # fmt: skip
MODELS: dict[str, dict[str, Any]] = {
    "grouped keys": LLAMA,
    "all keys": {**LLAMA, "num_key_value_heads": 16},
    "tied, query norms": {**LLAMA, "model_type": "qwen3", "head_dim": 128, "tie_word_embeddings": True},
    "norms behind": {**LLAMA, "model_type": "olmo2", "num_key_value_heads": 16},
    "four norms": {**LLAMA, "model_type": "gemma3_text", "head_dim": 64, "intermediate_size": 4096},
    "fused projections": {**LLAMA, "model_type": "phi3", "pad_token_id": 0},
    "experts": {
        **LLAMA, "model_type": "qwen3_moe", "head_dim": 64, "num_experts": 16, "num_experts_per_tok": 4,
        "moe_intermediate_size": 512,
    },
    "experts with sinks": {
        **LLAMA, "model_type": "gpt_oss", "head_dim": 64, "intermediate_size": 1024, "num_local_experts": 8,
        "num_experts_per_tok": 2,
    },
}  # fmt: skip
FULL, NONE = Levers(gradient_checkpointing="full"), Levers(gradient_checkpointing=False)
LEVERS = {
    "none": Levers(),
    "full recompute": FULL,
    "no recompute": NONE,
    "tiled loss": Levers(tiled_loss=True),
    "tiles": Levers(tiled_loss=True, tiled_mlp=True),
    "tiles, full": replace(FULL, tiled_loss=True, tiled_mlp=True),
    "tiles, chunks": Levers(tiled_loss=True, tiled_mlp=True, head_chunks=2),
    "tiled loss, no recompute": replace(NONE, tiled_loss=True),
}
# With few tokens the tile of the loss is the peak; in a long row it is a layer.
LONG = {f"long row, {name}": LEVERS[name] for name in ("tiles", "tiles, full", "tiles, chunks")}
LEVERS |= LONG
TOKENS, LONG_TOKENS, NUM_LAYERS = 8192, 65_536, 3
SAMPLE = {
    ("grouped keys", "none", 4), ("grouped keys", "full recompute", 1), ("tied, query norms", "no recompute", 4),
    ("all keys", "tiles", 4), ("norms behind", "tiled loss", 2), ("fused projections", "tiles, chunks", 2),
    ("experts", "tiled loss", 4), ("four norms", "tiles, full", 1), ("all keys", "long row, tiles", 2),
}  # fmt: skip


@pytest.fixture(params=[1, 2, 4])
def sp_size(request: pytest.FixtureRequest) -> Iterator[int]:
    dist.init_process_group("fake", rank=0, world_size=request.param, store=FakeStore())
    yield request.param
    dist.destroy_process_group()


def apply_levers(model: Any, levers: Levers, num_tokens: int) -> Any:
    """-> what turns hidden states into the loss, in tiles, or None."""
    if levers.gradient_checkpointing == "full" and not levers.tiled_mlp:
        model._set_gradient_checkpointing(True, functools.partial(checkpoint, use_reentrant=False))
    elif levers.gradient_checkpointing is not False:
        recompute = pytest.importorskip("ulysses_cli.train.memory.checkpointing")
        recompute.checkpoint_layers(model, "keep_attention" if levers.gradient_checkpointing is True else "full")
    if levers.tiled_mlp:
        tiled_mlp = pytest.importorskip("ulysses_cli.train.memory.tiled_mlp")
        tiled_norm = pytest.importorskip("ulysses_cli.train.memory.tiled_norm")
        hidden = model.config.hidden_size
        tiled_mlp.tile_mlps(model, lambda num: tiles.compute_num_mlp_tiles(num, hidden))
        tiled_norm.tile_norms(model, lambda num: tiles.compute_num_mlp_tiles(num, hidden))
    if not levers.tiled_loss:
        return None
    tiled_loss = pytest.importorskip("ulysses_cli.train.memory.tiled_loss")
    loss = pytest.importorskip("ulysses_cli.train.loss")
    tile = tiles.compute_loss_tile_tokens(num_tokens, model.config.vocab_size)
    return tiled_loss.make_tiled_loss(model.lm_head, loss.HeadRule(), tile)


def measure(config: dict[str, Any], levers: Levers, sp_size: int, num_tokens: int = TOKENS) -> int:
    """Most bytes alive beside the weights in a step whose gradients leave as soon as they are made."""
    attention = register_attention(make_sequence_axis(dist.group.WORLD), "sdpa", levers.head_chunks)
    values = {**config, "num_hidden_layers": NUM_LAYERS, "attn_implementation": attention}
    with FakeTensorMode(allow_non_fake_inputs=True):
        usual = torch.get_default_dtype()
        torch.set_default_dtype(torch.bfloat16)
        try:
            model = AutoModelForCausalLM.from_config(AutoConfig.for_model(values.pop("model_type"), **values))
        finally:
            torch.set_default_dtype(usual)
        model.train()
        tiled = apply_levers(model, levers, num_tokens)
        for parameter in model.parameters():
            parameter.register_post_accumulate_grad_hook(lambda parameter: setattr(parameter, "grad", None))
        ids, documents = torch.empty((1, num_tokens), dtype=torch.long), make_documents((num_tokens * sp_size,))
        meter = LiveBytes()
        for parameter in model.parameters():
            meter.track(parameter)
        weights = meter.now
        with meter:
            positions = torch.arange(num_tokens)[None]
            inputs = {"position_ids": positions, "use_cache": False, "documents": documents}
            hidden = model.model(ids, **inputs).last_hidden_state
            if tiled is None:
                logits = model.lm_head(hidden).float()
                loss = torch.nn.functional.cross_entropy(logits[0], ids[0], reduction="sum")
                del logits
            else:
                loss = tiled(hidden, ids)
            del hidden
            loss.backward()
    return meter.peak - weights


def predict(config: dict[str, Any], levers: Levers, sp_size: int, num_tokens: int = TOKENS) -> int:
    """The same from the ledger: the fullest moment of the step, without what the engine and the kernel hold."""
    shape = read_model_shape({"max_position_embeddings": 4096, **config, "num_hidden_layers": NUM_LAYERS}, "model")
    job = Job(shape, Layout(1, 1, sp_size), num_tokens * sp_size, levers)
    return max(
        sum(size for name, size in moment.lines.items() if name not in ENGINE_LINES)
        for moment in memory.walk_moments(job)
        if moment.phase in ("forward", "backward")
    )


LONG = [case for case in SAMPLE if case[0] == "all keys" or "tiles, full" in case[1]]  # seconds each


def list_cases() -> list[Any]:
    cases = [(model, levers, size) for model in MODELS for levers in LEVERS for size in (1, 2, 4)]
    return [pytest.param(*case, marks=mark_by(case in SAMPLE and case not in LONG, case in SAMPLE)) for case in cases]


@pytest.mark.parametrize(("model", "levers", "sp_size"), list_cases(), indirect=["sp_size"])
def test_what_a_real_step_allocates(model: str, levers: str, sp_size: int) -> None:
    config = MODELS[model]
    if levers.endswith("chunks") and config["num_attention_heads"] // sp_size % 2:
        return
    num_tokens = LONG_TOKENS if levers in LONG else TOKENS
    real = measure(config, LEVERS[levers], sp_size, num_tokens)
    assert predict(config, LEVERS[levers], sp_size, num_tokens) == pytest.approx(real, rel=0.03)
