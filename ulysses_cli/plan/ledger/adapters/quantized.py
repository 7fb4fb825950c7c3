"""Bytes of a frozen base in 4 or 8 bits, and of its products. From bitsandbytes' functional.py and autograd/.

n elements of a weight, b bytes of the model's dtype, S local tokens or those of a tile, i inner.
"""

from __future__ import annotations

from functools import lru_cache

from ulysses_cli.plan.ledger.job import Job, name_linear
from ulysses_cli.plan.ledger.layer import count_mlp_tile_tokens, is_tiled
from ulysses_cli.plan.ledger.memory_snapshot import Lines
from ulysses_cli.plan.ledger.weights import Weights, is_fused_mlp
from ulysses_cli.plan.models.layers import Layer

NF4_BLOCK, SCALE_BLOCK = 64, 256  # weights that share a scale; scales that share a scale of their own
CODE_BYTES = 2048  # tables of a weight, each rounded up to 512 bytes
SCALE_BYTES = 4  # float32


def compute_spared(job: Job) -> int:
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


def compute_restored(job: Job, kind: Layer) -> int:
    """The MLP's largest weight in the model's dtype while it is multiplied, b n, and in 4 bits its scales, 4 n / 64."""
    return compute_last_restored(job, kind) * (1 + is_fused_mlp(job.family))


def compute_last_restored(job: Job, kind: Layer) -> int:
    """The same of its last weight."""
    if job.quantized is None or kind.num_experts:
        return 0
    num_elements = job.shape.hidden_size * job.shape.intermediate_size
    scales = SCALE_BYTES * num_elements // NF4_BLOCK if job.quantized == "nf4" else 0
    return job.dtype_bytes * num_elements + scales


def list_tile_backward(job: Job, kind: Layer) -> Lines:
    """In a tile's backward, beside the gradients of the activation's product: the last weight is restored before, when
    one tensor of the inner width is not made yet."""
    if not is_tiled(job):
        return {}
    inner = job.dtype_bytes * job.shape.intermediate_size * count_mlp_tile_tokens(job)
    return {"restored_weights": max(0, compute_last_restored(job, kind) - inner)}


def compute_product(job: Job, kind: Layer) -> int:
    """In 8 bits, beyond a product's result: 32-bit sums and their float16 copy, 6 i S, and the input's codes. In 4 bits
    nothing but the restored weight."""
    if job.quantized != "int8" or kind.num_experts:
        return 0
    width = 6 * job.shape.intermediate_size + job.shape.hidden_size
    return width * count_mlp_tile_tokens(job)


def compute_work(job: Job, kind: Layer, adapters: int = 0) -> Lines:
    """Beside an MLP's product in a forward, where the adapters' work, `adapters` bytes, is counted too. In 8 bits no
    weight is restored in a forward, and the product is over before its adapter begins: the larger one counts."""
    if job.quantized == "int8":
        return {"restored_weights": max(0, compute_product(job, kind) - adapters)}
    return {"restored_weights": compute_restored(job, kind)}
