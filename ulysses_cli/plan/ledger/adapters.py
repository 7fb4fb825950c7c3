"""Bytes of adapters that also train the length of each row of their weight (DoRA; peft's tuners/lora/dora.py), and of
a frozen base in 4 or 8 bits with its products (bitsandbytes' functional.py and autograd/). An adapted layer has i
inputs and o outputs: n elements of a weight, b bytes of the dtype, S local tokens or those of a tile, r the rank.
modules.py has the sizes of the adapters' own weights."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache

from ulysses_cli.plan.ledger.job import Job, Lines, name_linear
from ulysses_cli.plan.ledger.layer import count_mlp_tile_tokens, is_tiled, list_adapter_saved, saves_input
from ulysses_cli.plan.ledger.weights import Weights, is_fused_mlp
from ulysses_cli.plan.models.layers import Layer

DORA_SAVED = 2  # of the output's size: the frozen layer's result and the adapter's, each of which a length scales
DORA_AT_ONCE = 5  # of the output's size: both, each of them scaled, and the adapter's before it was
DORA_GRADIENTS = 3  # beside the output's: that of the scaled adapter, and two before they are summed to one of lengths


@dataclass(frozen=True)
class AdaptedLinear:
    """One linear layer with an adapter."""

    name: str
    num_in: int
    num_out: int
    in_mlp: bool


@lru_cache(maxsize=256)
def _list_of_layer(weights: Weights, number: int, rank: int) -> tuple[AdaptedLinear, ...]:
    modules = [module for module in weights.modules if module.layer == number]
    sizes = {key: size for module in modules for key, size in module.weights}
    found = []
    for module in modules:
        name, _, end = module.name.rpartition(".")
        if end == "a":
            first, second = (sizes[f"{number}.{name}.{each}"] // rank for each in "ab")
            found.append(AdaptedLinear(name, first, second, module.in_mlp))
    return tuple(found)


def list_adapted(job: Job, kind: Layer) -> tuple[AdaptedLinear, ...]:
    """In the order of a forward; () where no lengths are trained."""
    if job.adapters is None or not job.adapters.has_magnitudes:
        return ()
    return _list_of_layer(job.weights, job.shape.kinds_before[kind].index(1) - 1, job.adapters.rank)


def compute_dora_saved(job: Job, kind: Layer, tokens: int, *, in_mlp: bool) -> int:
    """2 b o S of each adapted layer."""
    return sum(
        _compute_own_dora_saved(job, linear, tokens) for linear in list_adapted(job, kind) if linear.in_mlp is in_mlp
    )


def compute_last_dora_saved(job: Job, kind: Layer, *, in_mlp: bool) -> int:
    """Of the last adapted layer before the residual: its backward is over first."""
    last = [linear for linear in list_adapted(job, kind) if linear.in_mlp is in_mlp][-1:]
    tokens = count_mlp_tile_tokens(job) if in_mlp else job.local_tokens
    return sum(
        _compute_own_dora_saved(job, linear, tokens) for linear in last if linear.name in ("o_proj", "down_proj")
    )


def _compute_own_dora_saved(job: Job, linear: AdaptedLinear, tokens: int) -> int:
    return DORA_SAVED * job.dtype_bytes * linear.num_out * tokens


def compute_dora_work(job: Job, linear: AdaptedLinear, tokens: int, *, keeps: bool) -> int:
    """The larger of two times: the base's result, while the adapters' product, its scaled copy and the weight with it
    are measured, b (o S + 3 i o); and then, with that product, 5 b o S. `keeps`: the identity that the product was made
    of is saved for a backward, and lives as long as the product."""
    i, o, product = linear.num_in, linear.num_out, linear.num_in * linear.num_out
    identity = i * i
    making = o * tokens + identity + product
    measuring = o * tokens + identity * keeps + 3 * product
    drops = job.adapters is not None and job.adapters.drops  # the frozen layer runs again on what is left
    scaling = identity * keeps + product + (DORA_AT_ONCE + int(drops)) * o * tokens
    return job.dtype_bytes * max(making, measuring, scaling)


def compute_dora_gradients(job: Job, linear: AdaptedLinear, tokens: int) -> int:
    return DORA_GRADIENTS * job.dtype_bytes * linear.num_out * tokens


def list_dora_forward(job: Job, kind: Layer) -> Iterator[tuple[str, int, int]]:
    """(Place in a layer, bytes around an adapted layer, bytes of its work) of a forward: what was projected before, and
    what the block holds. An evaluation drops nothing."""
    keeps = job.levers.gradient_checkpointing is False
    b, h, done = job.dtype_bytes, job.shape.hidden_size, 0
    drops = job.adapters is not None and job.adapters.drops  # and its copy of the input is there
    for linear in list_adapted(job, kind):
        if linear.in_mlp:
            tokens = count_mlp_tile_tokens(job)
            held = (3 if is_tiled(job) else 2) * h * job.local_tokens
            wide = 0 if linear.name in ("gate_proj", "gate_up_proj") else job.shape.intermediate_size
            around = b * (held + wide * tokens)
        else:
            tokens, is_last = job.local_tokens, linear.name == "o_proj"
            around = b * (job.query_width if is_last else h + max(done, _count_queries(job, kind, linear))) * tokens
            done += linear.num_out
        work = compute_dora_work(job, linear, tokens, keeps=keeps) + (b * linear.num_in * tokens if drops else 0)
        yield "mlp" if linear.in_mlp else "attention", around, work


def _count_queries(job: Job, kind: Layer, linear: AdaptedLinear) -> int:
    """Elements per token of queries, adapted or not, while keys are projected to latents and back: as projected, and
    then joined anew (modeling_deepseek_v3.py: DeepseekV3Attention.forward)."""
    is_latent = kind.attention is not None and kind.attention.latent is not None
    return {"kv_a_proj_with_mqa": 1, "kv_b_proj": 2}.get(linear.name, 0) * job.query_width if is_latent else 0


def list_dora_recomputed(
    job: Job, kind: Layer, attention_saved: int, mlp_saved: int
) -> Iterator[tuple[str, int, int, int]]:
    """(Place in a layer, what attention has saved, what the MLP has, bytes of the work) at each adapted layer while a
    layer is computed again. `attention_saved` and `mlp_saved` are those of the whole layer. In tiles the MLP's part is
    over before its first adapted layer. The work is done beside what this layer's adapter and those before it have
    saved, and what the last matrix reads is there even if only its copy under dropout is saved."""
    b = job.dtype_bytes
    h = job.shape.hidden_size
    done = 0
    tokens = job.local_tokens
    own, of_adapters = {name: size for name, size, _ in list_adapter_saved(job, kind)}, 0
    for linear in list_adapted(job, kind):
        of_adapters += own.get(linear.name, 0)
        work = compute_dora_work(job, linear, tokens, keeps=True) + of_adapters
        if linear.name == "down_proj" and not saves_input(job, linear.name):
            work += b * linear.num_in * tokens
        if linear.in_mlp and not is_tiled(job):
            yield "mlp", attention_saved, mlp_saved - _count_later(job, kind, linear, tokens), work
        elif linear.name == "o_proj":
            yield "attention", attention_saved - _compute_own_dora_saved(job, linear, tokens), 0, work
        elif not linear.in_mlp:
            projected = max((1 + DORA_SAVED) * done, _count_queries(job, kind, linear))
            yield "attention", b * (2 * h + projected) * tokens, 0, work
            done += linear.num_out


def compute_dora_tile_again(job: Job, kind: Layer, inside_saved: int) -> int:
    """The most of a tile's inside and of the work at one of its adapted layers. `inside_saved` is that of the tile."""
    tokens = count_mlp_tile_tokens(job)
    return max(
        (
            inside_saved - _count_later(job, kind, linear, tokens) + compute_dora_work(job, linear, tokens, keeps=True)
            for linear in list_adapted(job, kind)
            if linear.in_mlp
        ),
        default=0,
    )


def _count_later(job: Job, kind: Layer, linear: AdaptedLinear, tokens: int) -> int:
    """Of what an MLP saves, what this adapted layer and those after it do; that of the last one has no result."""
    inside = [each for each in list_adapted(job, kind) if each.in_mlp]
    later = inside[inside.index(linear) :]
    return sum(
        _compute_own_dora_saved(job, each, tokens)
        + (job.dtype_bytes * each.num_out * tokens if each is not inside[-1] else 0)
        for each in later
    )


def list_dora_backward(
    job: Job, kind: Layer, attention_saved: int, mlp_saved: int
) -> Iterator[tuple[str, int, int, int]]:
    """(Name of the layer, what is left of attention, of the MLP, bytes of gradients) when the gradients of lengths are
    made. Those of the MLP's first layers are made when its product and the last layer are done with."""
    for linear in reversed(list_adapted(job, kind)):
        gradients = compute_dora_gradients(job, linear, job.local_tokens)
        if linear.name == "o_proj":
            yield linear.name, attention_saved, 0, gradients
        elif linear.name == "down_proj" and not is_tiled(job):
            yield linear.name, attention_saved, mlp_saved, gradients
        elif linear.name in ("up_proj", "gate_up_proj") and not is_tiled(job):
            product = job.dtype_bytes * job.shape.intermediate_size * job.local_tokens
            gone = compute_last_dora_saved(job, kind, in_mlp=True) + product
            yield linear.name, attention_saved, mlp_saved - gone, gradients


def name_dora_snapshot(linear: str) -> str:
    return f"lengths of {linear}"


NF4_BLOCK, SCALE_BLOCK = 64, 256  # weights that share a scale; scales that share a scale of their own
CODE_BYTES = 2048  # tables of a weight, each rounded up to 512 bytes
SCALE_BYTES = 4  # float32


def compute_quantized_spared(job: Job) -> int:
    """How much less the base takes than in the model's dtype. In 4 bits a weight takes n / 2, a byte for each 64
    weights, and 4 bytes for 256 of those; in 8 bits n, and 4 bytes per row."""
    if job.quantized is None:
        return 0
    family = job.family
    extras = (name for name in family.linear_extras if isinstance(name, str))
    names = (*family.attention_modules, *family.mlp_modules, *extras)
    sizes = _list_quantized(job.weights, tuple(name_linear(name, family) for name in names))
    if job.quantized == "int8":
        rows = SCALE_BYTES * sum(sizes) // job.shape.hidden_size
        return (job.dtype_bytes - 1) * sum(sizes) - rows
    return job.dtype_bytes * sum(sizes) - sum(map(_count_nf4_bytes, sizes))


def _count_nf4_bytes(num_elements: int) -> int:
    blocks = -(-num_elements // NF4_BLOCK)
    return -(-num_elements // 2) + blocks + SCALE_BYTES * -(-blocks // SCALE_BLOCK) + CODE_BYTES


@lru_cache(maxsize=64)
def _list_quantized(weights: Weights, names: tuple[str, ...]) -> tuple[int, ...]:
    """Elements of each linear layer's weight; keys are `LAYER.NAME`."""
    found = (weight for module in weights.modules for weight in module.weights)
    return tuple(size for key, size in found if key.partition(".")[2] in names)


def compute_restored_weights(job: Job, kind: Layer) -> int:
    """The MLP's largest weight in the model's dtype while it is multiplied, b n, and in 4 bits its scales, 4 n / 64."""
    return compute_last_restored_weights(job, kind) * (1 + int(is_fused_mlp(job.family)))


def compute_last_restored_weights(job: Job, kind: Layer) -> int:
    """The same of its last weight."""
    if job.quantized is None or kind.num_experts:
        return 0
    num_elements = job.shape.hidden_size * job.shape.intermediate_size
    scales = SCALE_BYTES * num_elements // NF4_BLOCK if job.quantized == "nf4" else 0
    return job.dtype_bytes * num_elements + scales


def list_quantized_tile_backward(job: Job, kind: Layer) -> Lines:
    """In a tile's backward, beside the gradients of the activation's product: the last weight is restored before, when
    one tensor of the inner width is not made yet."""
    if not is_tiled(job):
        return {}
    inner = job.dtype_bytes * job.shape.intermediate_size * count_mlp_tile_tokens(job)
    return {"restored_weights": max(0, compute_last_restored_weights(job, kind) - inner)}


def compute_quantized_product(job: Job, kind: Layer) -> int:
    """In 8 bits, beyond a product's result: 32-bit sums and their float16 copy, 6 i S, and the input's codes. In 4 bits
    nothing but the restored weight."""
    if job.quantized != "int8" or kind.num_experts:
        return 0
    width = 6 * job.shape.intermediate_size + job.shape.hidden_size
    return width * count_mlp_tile_tokens(job)


def compute_quantized_work(job: Job, kind: Layer, adapters: int = 0) -> Lines:
    """Beside an MLP's product in a forward, where the adapters' work, `adapters` bytes, is counted too. In 8 bits no
    weight is restored in a forward, and the product is over before its adapter begins: the larger one counts."""
    if job.quantized == "int8":
        return {"restored_weights": max(0, compute_quantized_product(job, kind) - adapters)}
    return {"restored_weights": compute_restored_weights(job, kind)}
