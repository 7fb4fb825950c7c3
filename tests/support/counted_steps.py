"""Counts every byte in steps of transformers' models with our attention, levers and loss, on tensors without data.

Also predicts the same step with the ledger. DeepSpeed takes no part: real_steps.py has it.
"""

import functools
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils.checkpoint import checkpoint
from transformers import AutoConfig, AutoModelForCausalLM

from support.byte_counter import ByteCounter
from ulysses_cli.plan import levers as tiles
from ulysses_cli.plan.layout import Layout
from ulysses_cli.plan.ledger.job import Job
from ulysses_cli.plan.ledger.ledger import walk_snapshots
from ulysses_cli.plan.levers import Levers
from ulysses_cli.plan.models.shape import read_model_shape
from ulysses_cli.train.attention.documents import Documents, make_documents
from ulysses_cli.train.attention.interface import register_attention
from ulysses_cli.train.loss import HeadRule
from ulysses_cli.train.memory.checkpointing import checkpoint_layers
from ulysses_cli.train.memory.tiled_loss import make_tiled_loss
from ulysses_cli.train.memory.tiled_mlp import tile_mlps
from ulysses_cli.train.memory.tiling import tile_norms
from ulysses_cli.train.processes.groups import make_sequence_axis

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
    "large tiles": Levers(tiled_loss=True, tiled_mlp=True, large_tiles=True),
}
# With few tokens the tile of the loss is the peak; in a long row it is a layer.
LEVERS |= {f"long row, {name}": LEVERS[name] for name in ("tiles", "tiles, full", "tiles, chunks", "large tiles")}
TOKENS, LONG_TOKENS, NUM_LAYERS = 8192, 65_536, 3
SP_SIZES = (1, 2, 4)


def compare_step(model: str, levers: str, sp_size: int, num_branches: int = 0) -> tuple[int, int]:
    """Returns the most bytes alive besides the weights, counted and predicted. `num_branches`: so many other answers at
    the row's end share a prompt that is nearly as long as the row."""
    config, num_tokens = MODELS[model], LONG_TOKENS if levers.startswith("long row") else TOKENS
    lengths = (num_tokens * sp_size - 16 * num_branches, *[16] * num_branches)
    shared = (0, *[lengths[0] - 16] * num_branches)
    with _fake_ranks(sp_size):
        counted = _count(config, LEVERS[levers], sp_size, num_tokens, make_documents(lengths, shared=shared))
    return counted, _predict(config, LEVERS[levers], sp_size, num_tokens, num_branches)


def count_activations(config: dict[str, Any], levers: Levers, documents: Documents) -> int:
    """The most bytes alive in a step on one rank whose weights are frozen: none of them is a gradient of a weight."""
    with _fake_ranks(1):
        return _count(config, levers, 1, documents.num_tokens, documents, is_frozen=True)


def list_cases() -> list[tuple[str, str, int]]:
    """Yields every model, levers and sp_size for which a rank's heads can be cut in as many chunks."""
    return [
        (model, name, sp_size)
        for model, config in MODELS.items()
        for name, levers in LEVERS.items()
        for sp_size in SP_SIZES
        if config["num_attention_heads"] // sp_size % levers.head_chunks == 0
    ]


@contextmanager
def _fake_ranks(sp_size: int) -> Iterator[None]:
    dist.init_process_group("fake", rank=0, world_size=sp_size, store=FakeStore())
    try:
        yield
    finally:
        dist.destroy_process_group()


def _apply_levers(model: Any, levers: Levers, num_tokens: int) -> Any:
    """Returns the tiled loss of hidden states and labels, or None."""
    if levers.gradient_checkpointing == "full" and not levers.tiled_mlp:
        model._set_gradient_checkpointing(True, functools.partial(checkpoint, use_reentrant=False))
    elif levers.gradient_checkpointing is not False:
        checkpoint_layers(model, "save_attention" if levers.gradient_checkpointing is True else "full")
    hidden, is_large = model.config.hidden_size, levers.large_tiles
    if levers.tiled_mlp:
        count_tiles = functools.partial(tiles.compute_num_mlp_tiles, hidden_size=hidden, is_large=is_large)
        tile_mlps(model, count_tiles)
        tile_norms(model, count_tiles)
    if not levers.tiled_loss:
        return None
    tile = tiles.compute_loss_tile_tokens(num_tokens, model.config.vocab_size, hidden, is_large=is_large)
    # A GPU's, where nothing is compiled.
    return make_tiled_loss(model.lm_head, HeadRule(), tile, implementation="torch")


def _count(
    config: dict[str, Any],
    levers: Levers,
    sp_size: int,
    num_tokens: int,
    documents: Documents,
    *,
    is_frozen: bool = False,
) -> int:
    """Counts a step whose gradients are freed as soon as they are made."""
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
        tiled_loss = _apply_levers(model, levers, num_tokens)
        if is_frozen:
            model.requires_grad_(False)
            model.enable_input_require_grads()
        for parameter in () if is_frozen else model.parameters():
            parameter.register_post_accumulate_grad_hook(lambda parameter: setattr(parameter, "grad", None))
        ids = torch.empty((1, num_tokens), dtype=torch.long)
        counter = ByteCounter()
        for parameter in model.parameters():
            counter.track(parameter)
        weights_bytes = counter.now
        with counter:
            positions = torch.arange(num_tokens)[None]
            inputs = {"position_ids": positions, "use_cache": False, "documents": documents}
            hidden = model.model(ids, **inputs).last_hidden_state
            if tiled_loss is None:
                logits = model.lm_head(hidden).float()
                loss = torch.nn.functional.cross_entropy(logits[0], ids[0], reduction="sum")
                del logits
            else:
                loss = tiled_loss(hidden, ids)
            del hidden
            loss.backward()
    return counter.peak - weights_bytes


def _predict(config: dict[str, Any], levers: Levers, sp_size: int, num_tokens: int, num_branches: int) -> int:
    """Returns the ledger's peak of the step, without what the engine and the kernel hold."""
    shape = read_model_shape({"max_position_embeddings": 4096, **config, "num_hidden_layers": NUM_LAYERS}, "model")
    job = Job(shape, Layout(1, 1, sp_size), num_tokens * sp_size, levers, num_branches=num_branches)
    return max(
        sum(size for name, size in snapshot.lines.items() if name not in ENGINE_LINES)
        for snapshot in walk_snapshots(job)
        if snapshot.phase in ("forward", "backward")
    )
