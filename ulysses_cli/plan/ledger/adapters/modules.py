"""Module: one module of the model with the sizes of its weights; and what makes modules, with LoRA's adapters."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

EMBEDDING, LAYERS, HEAD = "embedding", "layers", "head"
# DeepSpeed's hook does not see the end of their backward (runtime/zero/parameter_offload.py): the input of the first is
# a keyword argument, and the second gets the trained embedding beside its own input and does not read it.
ATTENTION, UNREAD_EMBEDDING = "attention", "layer beside the embedding"

BIAS = ".bias"  # stands behind the name of the weight that it belongs to


@dataclass(frozen=True)
class Adapters:
    """LoRA: its rank; the last parts of the names of the layers that get an adapter, () for every linear layer; whether
    there is dropout before the adapters; which parts are trained whole: embed_tokens, lm_head, norm; and whether the
    lengths of their weights' rows are trained too."""

    rank: int
    targets: tuple[str, ...] = ()
    drops: bool = False
    saved: tuple[str, ...] = ()
    has_lengths: bool = False  # DoRA

    def adapts(self, *names: str) -> bool:
        """Whether any of these layers has an adapter."""
        return not self.targets or any(name in self.targets for name in names)


def trains(adapters: Adapters | None, part: str) -> bool:
    """Whether a part is trained whole: embed_tokens, lm_head or norm (all norms)."""
    return adapters is None or part in adapters.saved


@dataclass(frozen=True)
class Module:
    """One module: its place, its own weights as (name, elements), and whether they are trained. The modules that follow
    it with a greater depth are inside it. An MLP in tiles is gathered as a whole: its modules are `in_mlp`.
    `is_beside`: it is of an MLP that does not read attention's result. `reads`: weights of modules inside it that it
    reads itself, so that DeepSpeed gathers them with its own (parameter_offload.py: ZeROOrderedDict)."""

    part: str
    layer: int
    depth: int
    name: str = ""
    weights: tuple[tuple[str, int], ...] = ()
    is_trained: bool = True
    in_mlp: bool = False
    is_beside: bool = False
    reads: tuple[tuple[str, int], ...] = ()

    @property
    def gathered(self) -> tuple[tuple[str, int], ...]:
        return self.weights + self.reads

    @property
    def is_left(self) -> bool:
        """Whether a hook runs at the end of its backward."""
        return self.name not in (ATTENTION, UNREAD_EMBEDDING)


def make_beside(
    adapters: Adapters | None,
    depth: int,
    name: str,
    *weights: tuple[str, int],
    is_trained: bool | None = None,
    in_mlp: bool = False,
) -> Module:
    """A module beside the embedding, before all layers."""
    whole = adapters is None or ("norm" in name and trains(adapters, "norm"))
    return Module(EMBEDDING, -1, depth, name, weights, whole if is_trained is None else is_trained, in_mlp)


def make_linear(
    make: Callable[..., Module], adapters: Adapters | None, make_base: Callable[..., Module] | None = None
) -> Callable[..., Iterator[Module]]:
    """Returns what makes a linear layer with its adapter. `make_base` makes the matrix and its bias, if not `make`;
    `target` is the layer's name in the model, if not `name`."""
    make_base = make_base or make

    def linear(
        name: str,
        num_in: int,
        num_out: int,
        in_mlp: bool = False,
        depth: int = 4,
        num_biases: int = 0,
        target: str = "",
    ) -> Iterator[Module]:
        weights = [(name, num_in * num_out)] + [(f"{name}{BIAS}", num_biases)] * (num_biases > 0)
        if adapters is None or (adapters.targets and (target or name) not in adapters.targets):
            yield make_base(depth, name, *weights, in_mlp=in_mlp)
            return
        # peft reads the first adapter's dtype in the outer module, for which DeepSpeed then fetches that adapter
        yield make(depth, name, (f"{name}.a", num_in * adapters.rank), in_mlp=in_mlp, is_trained=True)
        depth += 1
        yield make_base(depth, f"{name}.base", *weights, in_mlp=in_mlp)
        yield make(depth, f"{name}.dropout", in_mlp=in_mlp)
        yield make(depth, f"{name}.a", (f"{name}.a", num_in * adapters.rank), in_mlp=in_mlp, is_trained=True)
        yield make(depth, f"{name}.b", (f"{name}.b", num_out * adapters.rank), in_mlp=in_mlp, is_trained=True)
        if adapters.has_lengths:
            yield make(depth, f"{name}.lengths", (f"{name}.lengths", num_out), in_mlp=in_mlp, is_trained=True)

    return linear
