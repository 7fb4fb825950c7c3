"""The model's weights, as its own file makes them on sizes. Holds no tensors."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import NamedTuple

from ulysses_cli.plan.ledger.adapted_layers import QuantizedLinear, quantize_layers
from ulysses_cli.plan.ledger.depth import find_layers, find_number
from ulysses_cli.plan.ledger.job import Job
from ulysses_cli.plan.ledger.kept import KeptOnDisk
from ulysses_cli.plan.ledger.step import DTYPES, alone, load_own, make_bare
from ulysses_cli.plan.models.shape import ModelShape
from ulysses_cli.plan.recipe.sections import Lora
from ulysses_cli.plan.sizes.nn import Linear
from ulysses_cli.plan.sizes.tensor import Running


class Weight(NamedTuple):
    name: str
    num_elements: int
    is_trained: bool


@dataclass(frozen=True)
class Weights:
    """Every weight once, in the model's order; and the sizes of those that are in use together: before the layers, in
    each of them, behind them."""

    every: tuple[Weight, ...]
    blocks: tuple[tuple[int, ...], ...]

    def __hash__(self) -> int:
        """Cheap, because every ledger looks up caches by weights."""
        return hash((len(self.every), self.num_elements, self.num_trained))

    @cached_property
    def trained(self) -> tuple[int, ...]:
        return tuple(weight.num_elements for weight in self.every if weight.is_trained)

    @cached_property
    def num_trained(self) -> int:
        return sum(self.trained)

    @cached_property
    def num_elements(self) -> int:
        return sum(weight.num_elements for weight in self.every)

    @cached_property
    def largest(self) -> int:
        return max(weight.num_elements for weight in self.every)

    @cached_property
    def first_trained(self) -> int:
        """The number of the first layer with a trained weight, 0 where one before all layers is trained: no gradient
        goes to the layers before it, and they save nothing."""
        if any(weight.is_trained for weight in self.every[: len(self.blocks[0])]):
            return 0
        trained = (find_number(weight.name) for weight in self.every if weight.is_trained)
        return min((number for number in trained if number is not None), default=len(self.blocks) - 2)


PREFETCH, MAX_LIVE = 50_000_000, 1_000_000_000  # DeepSpeed's defaults (runtime/zero/config.py)


def size_prefetch(weights: Weights, *, leaf_layers: bool) -> tuple[int, int]:
    """Elements that DeepSpeed gathers ahead of each module that has hooks, and that it lets exist meanwhile. Modules of
    a layer are many, and its defaults start every gather at least one module early. A leaf layer is one module: the
    next layer starts early as a whole or waits for its last weights (benchmarks/prefetch.py). So there is room for two
    layers and the embedding."""
    if not leaf_layers:
        return PREFETCH, MAX_LIVE
    layer = max((sum(block) for block in weights.blocks[1:-1]), default=0)
    return max(PREFETCH, layer), max(MAX_LIVE, 2 * layer + weights.largest)


def get_weights(job: Job) -> Weights:
    return read_weights(job.model or job.shape, job.lora)


def read_weights(shape: ModelShape, lora: Lora | None) -> Weights:
    return WEIGHTS.get(shape, lora, lambda: _read_weights(shape, lora))


WEIGHTS = KeptOnDisk(
    "weights",
    64,
    lambda weights: [weights.every, weights.blocks],
    lambda packed: Weights(tuple(Weight(*each) for each in packed[0]), tuple(map(tuple, packed[1]))),
)


def _read_weights(shape: ModelShape, lora: Lora | None) -> Weights:
    with alone():
        model = make_bare(shape, lora)
        weights = model.named_parameters()
        every = tuple(Weight(name, weight.numel(), weight.requires_grad) for name, weight in weights)
        layers = [tuple(weight.numel() for weight in layer.parameters()) for layer in find_layers(model) or ()]
    inside = [at for at, weight in enumerate(every) if find_number(weight.name) is not None] or [len(every)]
    before, behind = (
        tuple(each.num_elements for each in part) for part in (every[: inside[0]], every[inside[-1] + 1 :])
    )
    return Weights(every, (before, *layers, behind))


def list_linear_modules(shape: ModelShape) -> tuple[str, ...]:
    """Names of the linear layers that take an adapter, in the model's order. Experts are parts of one tensor and not
    layers; where peft adapts them by the names of an MLP, no layer of such a name takes one. () of a model whose file
    does not run on sizes."""
    return LINEAR_MODULES.get(shape, None, lambda: _list_linear_modules(shape))


LINEAR_MODULES = KeptOnDisk[tuple[str, ...]]("linear modules", 64, list, tuple)


def _list_linear_modules(shape: ModelShape) -> tuple[str, ...]:
    try:
        with alone():
            model = make_bare(shape)
            routers = tuple(f".{end}" for end in load_own("model.routers").list_router_layers(model))
            list_blocks = load_own("memory.tiled_mlp").list_blocks
    except Exception:  # noqa: BLE001 - its code may ask for what nobody has foreseen
        return ()
    head, refused = model.get_output_embeddings(), {shape.refused_by_peft}
    if shape.adapts_experts:
        blocks = [block for layer in find_layers(model) or () for _, block in list_blocks(layer)]
        refused |= {path.rpartition(".")[2] for block in blocks for path, _ in block.named_modules()}
    layers = [path for path, layer in model.named_modules() if isinstance(layer, Linear) and layer is not head]
    names = dict.fromkeys(path.rpartition(".")[2] for path in layers if not path.endswith(routers))
    return tuple(name for name in names if name not in refused)


def find_num_parameters(shape: ModelShape) -> int | None:
    """None for a model whose file does not run on sizes."""
    try:
        return read_weights(shape, None).num_elements
    except Exception:  # noqa: BLE001 - its code may ask for what nobody has foreseen
        return None


@lru_cache(maxsize=64)
def count_quantized_bytes(shape: ModelShape, dtype_bytes: int, kind: str) -> int:
    """Of a whole model whose linear layers are held in 4 or 8 bits."""
    with alone():
        Running.dtype = DTYPES[dtype_bytes]
        model = make_bare(shape)
        quantize_layers(model, kind)
        quantized = [module for module in model.modules() if isinstance(module, QuantizedLinear)]
        tensors = [*model.parameters(), *(buffer for layer in quantized for buffer in layer.buffers())]
        return sum(tensor.numel() * tensor.dtype.itemsize for tensor in tensors)


def count_shard(num_elements: int, num_ranks: int) -> int:
    """Elements of a shard, rounded up as each weight is."""
    return -(-num_elements // num_ranks)
