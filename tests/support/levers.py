"""Runs a tiny model with memory levers on or off, in one process or under DeepSpeed ZeRO-3; returns losses, gradients,
weights."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from deepspeed.runtime.zero import linear
from torch import Tensor, nn
from transformers import AutoModelForCausalLM

from support.families import make_config
from ulysses_cli.plan.rows.packing import IGNORE_INDEX
from ulysses_cli.train.attention import ring
from ulysses_cli.train.attention.documents import Documents, make_documents
from ulysses_cli.train.attention.interface import register_attention
from ulysses_cli.train.loss import HeadRule, Places, PlainLoss
from ulysses_cli.train.memory.checkpointing import checkpoint_layers
from ulysses_cli.train.memory.offload import Offloader
from ulysses_cli.train.memory.tiled_loss import make_tiled_loss
from ulysses_cli.train.memory.tiled_mlp import ShardedLinear, save_before_last_products, tile_mlps
from ulysses_cli.train.memory.tiling import tile_norms
from ulysses_cli.train.model.build import close_wrapped, take_over_groups
from ulysses_cli.train.model.loss_model import LossModel
from ulysses_cli.train.processes.groups import make_sequence_axis

LENGTHS = (21, 1, 30, 12)
SHARDED = ShardedLinear(linear.zero3_linear_wrap, linear.LinearFunctionForZeroStage3)
VOCABULARY = 64
SHAPES: dict[str, dict[str, Any]] = {
    "llama": {},
    "qwen3": {"tie_word_embeddings": True},
    "gemma2": {"query_pre_attn_scalar": 16, "attn_logit_softcapping": 2.0, "final_logit_softcapping": 3.0},
    "gemma3_text": {"query_pre_attn_scalar": 16, "tie_word_embeddings": True},
    "qwen3_moe": {},
    "gpt_oss": {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4}},
    "granite": {"residual_multiplier": 0.5, "logits_scaling": 4.0},
    "phi3": {},
    "olmo2": {},
    "mixtral": {},
    "gemma4_text": {"enable_moe_block": True, "top_k_experts": 2, "hidden_size_per_layer_input": 0},
}
BESIDE = {"gemma4_text"}  # layers with experts beside their MLP


@dataclass(frozen=True)
class Levers:
    """The levers of a case. None means off; `offloaded` and `saved` count layers, from the first and the last."""

    loss_tile: int | None = None
    mlp_tiles: int | None = None
    checkpointing: str | None = None
    offloaded: int | None = None
    chunks: int = 1
    saved: int = 0


@dataclass(frozen=True)
class Case:
    kind: str = "llama"
    levers: Levers = Levers()
    lengths: tuple[int, ...] = LENGTHS
    dtype: torch.dtype = torch.float64
    lora: tuple[str, ...] = ()
    z_loss_weight: float = 0.0
    changes: dict[str, Any] = field(default_factory=dict, hash=False)
    first_target: int = 0
    is_preference: bool = False  # what a target's loss counts for follows from the losses of all ranks


def make_model(case: Case, attention: str) -> Any:
    values = {"attn_implementation": attention, "experts_implementation": "eager", **SHAPES[case.kind]}
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(make_config(case.kind, **{**values, **case.changes})).to(case.dtype)
    if case.lora:
        from peft import LoraConfig, get_peft_model

        settings = LoraConfig(r=3, target_modules=list(case.lora), init_lora_weights=False, lora_dropout=0.0)
        model.enable_input_require_grads()
        get_peft_model(model, settings, autocast_adapter_dtype=False)
    return model.train()


def make_loss_model(case: Case, axis: Any, gather_whole: Any = None, *, saves_products: bool = True) -> LossModel:
    levers = case.levers
    model = make_model(case, register_attention(axis, "sdpa", levers.chunks))
    head, config = model.get_output_embeddings(), model.config
    rule = HeadRule(
        getattr(config, "final_logit_softcapping", None), getattr(config, "logits_scaling", 1.0), case.z_loss_weight
    )

    def compute_plain_loss(hidden: Tensor, labels: Tensor, places: Any = None) -> Tensor:
        logits = head(hidden).to(torch.promote_types(hidden.dtype, torch.float32)).flatten(0, 1) / rule.divisor
        if rule.softcap is not None:
            logits = rule.softcap * torch.tanh(logits / rule.softcap)
        total = nn.functional.cross_entropy(logits, labels.flatten(), ignore_index=IGNORE_INDEX, reduction="sum")
        squares = torch.logsumexp(logits, -1).square()[labels.flatten() != IGNORE_INDEX]
        return total + rule.z_loss_weight * squares.sum()

    loss: Any = PlainLoss(head, rule) if case.is_preference and axis.size > 1 else compute_plain_loss
    if levers.loss_tile is not None:
        loss = make_tiled_loss(head, rule, levers.loss_tile, gather_whole)
    if levers.mlp_tiles is not None:
        num_tiles = levers.mlp_tiles
        num_blocks = config.num_hidden_layers * (1 + (case.kind in BESIDE))
        assert tile_mlps(model, lambda _: num_tiles, gather_whole) == num_blocks
        assert tile_norms(model, lambda _: num_tiles) >= 2 * config.num_hidden_layers + 1
    if levers.checkpointing is not None:
        offloader = None
        if levers.offloaded is not None:
            offloader = Offloader(torch.device("cpu"), levers.offloaded)
        make_storage: Any = offloader and offloader.make_storage
        checkpoint_layers(model, levers.checkpointing, make_storage, levers.saved)  # type: ignore[arg-type]
        if levers.mlp_tiles is None and saves_products:
            save_before_last_products(model, SHARDED)
    return LossModel(model, loss)


def make_row(lengths: tuple[int, ...], first_target: int = 0) -> dict[str, Tensor]:
    """Returns token ids, positions and labels of a whole row; a stretch in its middle has no targets."""
    tokens = sum(lengths)
    ids = torch.randint(3, VOCABULARY, (1, tokens), generator=torch.Generator().manual_seed(1))
    labels = ids * 7 % VOCABULARY
    labels[:, tokens // 4 : tokens // 2 + 1] = IGNORE_INDEX
    labels[:, :first_target] = IGNORE_INDEX
    positions = torch.cat([torch.arange(length) for length in lengths])[None]
    return {"input_ids": ids, "positions": positions, "labels": labels}


def run_alone(case: Case) -> dict[str, Tensor]:
    """Runs in one process without an engine; returns loss and gradients."""
    model = make_loss_model(case, make_sequence_axis(None))
    loss = model(**make_row(case.lengths, case.first_target), documents=make_documents(case.lengths))
    loss = compute_preference(loss) if case.is_preference else loss
    loss.backward()
    values = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    return {"loss": loss.detach(), **values}


def compute_preference(total: Tensor) -> Tensor:
    return 200 * torch.tanh(total / 200)


def find_places(labels: Tensor) -> Places:
    places = (labels.flatten() != IGNORE_INDEX).nonzero()[:, 0]
    return Places(places.tolist(), places)


def compute_shared_preference(engine: Any, batch: dict[str, Tensor], documents: Documents) -> Tensor:
    """The same loss on all ranks, with the gradients of the rank's own targets."""
    losses = engine(**batch, documents=documents, places=find_places(batch["labels"]), per_token=True)
    own = losses.sum()
    total = own.detach().clone()
    dist.all_reduce(total)
    return compute_preference(total + own - own.detach())


def run_split(case: Case) -> dict[str, Tensor]:
    """Shares the row among all ranks without an engine; returns loss and gradients, summed over the ranks."""
    axis = make_sequence_axis(dist.group.WORLD)
    model = make_loss_model(case, axis)
    batch = {name: whole.chunk(axis.size, 1)[axis.rank] for name, whole in make_row(case.lengths).items()}
    loss = model(**batch, documents=make_documents(case.lengths))
    loss.backward()
    results = {"loss": loss.detach()} | {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    for tensor in results.values():
        dist.all_reduce(tensor)
    return results


def run_zero3(case: Case, sp_size: int, steps: int = 2, reuse: int = 10**9) -> dict[str, Any]:
    """Runs under DeepSpeed ZeRO-3 on all ranks, with every weight sharded. Returns losses, gradients of the last step,
    weights after it, and how often each weight was gathered in it."""
    import deepspeed
    from deepspeed.utils import safe_get_full_fp32_param, safe_get_full_grad, set_z3_leaf_module

    if not deepspeed.comm.is_initialized():
        take_over_groups()
    world = dist.get_world_size()
    axis = make_sequence_axis(dist.group.WORLD if sp_size > 1 else None)
    module = make_loss_model(case, axis, lambda block: set_z3_leaf_module(block, True))
    names = {id(p): name for name, p in module.named_parameters()}
    weights = [p for p in module.parameters() if p.requires_grad]
    engine, *_ = deepspeed.initialize(
        model=module,
        optimizer=torch.optim.SGD(weights, lr=0.1),
        dist_init_required=False,
        config={
            "train_micro_batch_size_per_gpu": 1,
            "train_batch_size": world,
            "bf16": {"enabled": case.dtype == torch.bfloat16},
            "zero_optimization": {
                "stage": 3,
                "stage3_param_persistence_threshold": 0,
                "stage3_max_reuse_distance": reuse,
            },
            "zero_allow_untested_optimizer": True,
            "steps_per_print": 10**9,
        },
    )
    row = make_row(case.lengths, case.first_target)
    if sp_size > 1:
        batch = {name: whole.chunk(sp_size, 1)[axis.rank] for name, whole in row.items()}
        documents = make_documents(case.lengths)
    else:  # each rank has a row of its own, the second a much shorter one
        own = case.lengths if dist.get_rank() == 0 else (3, 2)
        batch, documents = make_row(own), make_documents(own)
    losses, grads = [], {}
    for step in range(steps):
        with count_gathers(engine, names) as gathers:
            if case.is_preference:
                loss = compute_shared_preference(engine, batch, documents)
            else:
                loss = engine(**batch, documents=documents)
            engine.backward(loss * world / 50)
        if step == steps - 1:
            grads = {name: safe_get_full_grad(p) for name, p in module.named_parameters() if p.requires_grad}
        engine.step()
        losses.append(loss.detach())
    after = {name: safe_get_full_fp32_param(p) for name, p in module.named_parameters() if p.requires_grad}
    values = {"losses": torch.stack(losses), "gathers": gathers}
    values |= {f"grad of {name}": grad for name, grad in grads.items()} | {f"new {n}": w for n, w in after.items()}
    close_wrapped(engine)
    return values


@contextmanager
def count_gathers(engine: Any, names: dict[int, str]) -> Iterator[dict[str, int]]:
    """Counts how often each weight is gathered."""
    coordinator = engine.optimizer.parameter_offload.get_param_coordinator()
    method = "_PartitionedParameterCoordinator__all_gather_params_"
    values: dict[str, int] = {}
    original = getattr(coordinator, method)

    def gather(params: Any, *args: Any, **kwargs: Any) -> None:
        for p in params:
            if p.ds_status.name == "NOT_AVAILABLE":
                values[names[id(p)]] = values.get(names[id(p)], 0) + 1
        original(params, *args, **kwargs)

    setattr(coordinator, method, gather)
    try:
        yield values
    finally:
        delattr(coordinator, method)


@contextmanager
def count_attention() -> Iterator[list[int]]:
    """Counts how often the kernel's forward runs."""
    calls, original = [0], ring.attend

    def attend(*args: Any) -> Any:
        calls[0] += 1
        return original(*args)

    with mock.patch.object(ring, "attend", attend):
        yield calls


def measure_difference(result: dict[str, Any], expected: dict[str, Any]) -> dict[str, float]:
    """Returns the largest difference of each tensor, relative to its largest value."""
    assert result.keys() == expected.keys()
    return {
        name: ((result[name] - reference).abs().max() / reference.abs().max().clamp(min=1e-30)).item()
        for name, reference in expected.items()
        if isinstance(reference, Tensor)
    }
