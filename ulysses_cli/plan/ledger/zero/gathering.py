"""How many elements of weights ZeRO-3 has gathered at each point of a step. Runs `coordinator.py` over a step's
modules.

Its rules, from runtime/zero/partitioned_param_coordinator.py: fetch what a module needs; then prefetch up to
prefetch_bucket more at every module, until max_live are gathered; keep what is used again within max_reuse_distance. A
gather of several weights holds its flat buffer, in addition to the copies out of it, until the last weight is needed.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property, lru_cache
from itertools import groupby, pairwise

from ulysses_cli.plan.ledger.job import EngineSettings, Job
from ulysses_cli.plan.ledger.layer import is_tiled
from ulysses_cli.plan.ledger.modules import (
    EMBEDDING,
    GATE_ADAPTER,
    HEAD,
    LAYERS,
    Adapters,
    Module,
    list_copied_adapters,
)
from ulysses_cli.plan.ledger.weights import CHILD_DEPTH, LAST_PROJECTIONS, is_adapter, list_weights
from ulysses_cli.plan.ledger.zero.coordinator import NOTHING_ON_DISK, Coordinator, HookEvent, ModuleOrder, WeightsOnDisk
from ulysses_cli.plan.ledger.zero.states import find_on_disk
from ulysses_cli.plan.models.family import Trait
from ulysses_cli.plan.models.shape import ModelShape

FETCH_BACK = "fetch back"  # the place where the first of an MLP's weights are fetched for their gradients
REFETCH = "fetch again"  # the place in a layer where its MLP is fetched for its recomputation or backward
ByLayer = tuple[tuple[int, int], ...]


@dataclass(frozen=True, eq=False)
class Gathered:
    """Gathered elements, without the persistent ones, which are always there.

    `forward`, `backward`: by place in a layer, (layer, elements), from the last layer down. `final`: in the final
    norm's forward; `head`: while the head is fetched; `logits`: when it has been left; `loss`: in its backward; `norm`:
    in the final norm's backward; `embedding`: at the end of the step. `start`: while embeddings are fetched; `vectors`:
    while layers' own vectors are normed.
    `never_released`: of weights that the forward has kept from their first gather on. `left`: when the backward is
    over, until the optimizer's step releases all.
    `at_gradients`: by weight, when its gradient is made, just before its module is left.
    """

    forward: dict[str, ByLayer]
    backward: dict[str, ByLayer]
    final: int = 0
    head: int = 0
    logits: int = 0
    loss: int = 0
    norm: int = 0
    embedding: int = 0
    start: int = 0
    vectors: int = 0
    persistent: int = 0
    never_released: int = 0
    left: int = 0
    at_gradients: Mapping[str, int] = field(default_factory=dict)

    @cached_property
    def _maxima(self) -> dict[tuple[str, str, frozenset[int]], ByLayer]:
        """What was listed: a search asks the same again and again."""
        return {}

    def list_maxima(self, phase: str, place: str, layers: frozenset[int]) -> ByLayer:
        """(Layer, elements) of these layers, from the last one down, only where more is gathered than in any of them
        above."""
        key = phase, place, layers
        if key not in self._maxima:
            by_layer = (self.forward if phase == "forward" else self.backward).get(place, ())
            self._maxima[key] = tuple(_list_maxima(each for each in by_layer if each[0] in layers))
        return self._maxima[key]

    def list_backward(self, place: str, layers: Collection[int]) -> ByLayer:
        """(Layer, elements) of all of these layers in a backward, from the last one down."""
        found = dict(self.backward.get(place, ()))
        return tuple((number, found.get(number, 0)) for number in sorted(layers, reverse=True))


NONE = Gathered({}, {})


def compute_gathered(job: Job) -> Gathered:
    """Steps on one rank gather nothing, unless the weights are on the host; below stage 3 nothing is gathered at all. A
    product with a transposed weight saves a view of it for the backward, which keeps it in memory even if DeepSpeed
    releases it (transformers: integrations/moe.py, _grouped_linear)."""
    if job.zero_stage < 3 or (job.world_size == 1 and job.levers.offload_param == "none"):
        return NONE
    recomputes = job.levers.gradient_checkpointing is not False
    saves_experts = not (recomputes or is_tiled(job)) and Trait.TRANSPOSED_EXPERTS not in job.shape.traits
    options = {"splits": job.world_size > 1, "saves_experts": saves_experts}
    disk = find_on_disk(job)
    return _replay(job.shape, job.adapters, job.engine, recomputes, job.levers.tiled_mlp, disk, **options)


@lru_cache(maxsize=64)
def _replay(
    shape: ModelShape,
    adapters: Adapters | None,
    engine: EngineSettings,
    recomputes: bool,
    tiles_mlp: bool = False,
    disk: WeightsOnDisk = NOTHING_ON_DISK,
    *,
    splits: bool = True,
    saves_experts: bool = False,
) -> Gathered:
    weights = list_weights(shape, adapters)
    leaves = find_leaves(shape, tiles_mlp=tiles_mlp)
    modules = tuple(join_mlps(weights.modules, leaves, shape))
    events = list(ModuleOrder(modules).walk_step(recomputes=recomputes))
    saved = find_experts(modules, weights.first_trained) if saves_experts else frozenset()
    is_joined = bool(leaves)
    with_experts = {module.layer for module in modules if module.name == "experts"}
    coordinator = Coordinator(modules, events, engine, joins_mlps=is_joined, splits=splits, saved=saved, disk=disk)
    in_layers: dict[tuple[str, str], dict[int, int]] = {}  # (phase, place) -> layer -> elements
    at_gradients: dict[str, int] = {}
    most = {
        "final": 0,
        "head": 0,
        "logits": 0,
        "loss": 0,
        "norm": 0,
        "embedding": 0,
        "start": 0,
        "vectors": 0,
    }
    never_released: int | None = None
    for event in events:
        module, before = modules[event.module], coordinator.held
        if event.is_backward and never_released is None:
            never_released = coordinator.count_never_released()
        peak = coordinator.follow(event)
        if module.part == LAYERS:
            leaves_backward = event.is_backward and not event.enters
            if leaves_backward:
                made = (name for name, _ in module.weights if weights.first_layers.get(name) == module.layer)
                at_gradients |= {name: at_gradients.get(name, before) for name in made}
            place, num_elements = name_place(module, event, in_experts=module.layer in with_experts), coordinator.held
            if (place == "attention" and not event.is_backward) or (leaves_backward and module.name == "mlp"):
                num_elements = before  # a recomputation inside a whole MLP's backward has gathered attention's weights
            if place and not event.is_recomputing:
                key = "backward" if event.is_backward else "forward", place
                layers = in_layers.setdefault(key, {})
                layers[module.layer] = max(layers.get(module.layer, 0), num_elements)
            if event.enters and module.in_mlp:
                is_recomputing = event.is_recomputing or event.is_backward
                key = ("backward", REFETCH) if is_recomputing else ("forward", "fetch")
                layers = in_layers.setdefault(key, {})
                layers[module.layer] = max(layers.get(module.layer, 0), peak)
            if event.enters and event.is_backward and begins_backward(module):
                layers = in_layers.setdefault(("backward", FETCH_BACK), {})
                layers[module.layer] = max(layers.get(module.layer, 0), peak)
        elif module.part == HEAD and event.enters:
            most["head"] = max(most["head"], peak)
            if event.is_backward:
                name = "norm" if module.name == "norm" else "loss"
                most[name] = max(most[name], coordinator.held)
            elif module.name == "norm":
                most["final"] = coordinator.held
        elif module.part == HEAD and not event.is_backward:
            most["logits"] = coordinator.held
        elif module.part == EMBEDDING and event.enters and not event.is_backward:
            most["start"] = max(most["start"], peak)
            most["vectors"] = coordinator.held
        elif event.is_backward and (module.part == EMBEDDING or not (event.enters or module.part == HEAD)):
            most["embedding"] = max(most["embedding"], coordinator.held)
    persistent = sum(n for n in weights.persistent_sizes if n <= engine.persistence_threshold)
    by_place = {key: tuple(sorted(layers.items(), reverse=True)) for key, layers in in_layers.items()}
    return Gathered(
        forward={place: by_layer for (phase, place), by_layer in by_place.items() if phase == "forward"},
        backward={place: by_layer for (phase, place), by_layer in by_place.items() if phase == "backward"},
        persistent=persistent,
        never_released=never_released or 0,
        left=coordinator.count_left(),
        at_gradients=at_gradients,
        **most,
    )


def name_place(module: Module, event: HookEvent, *, in_experts: bool) -> str:
    """The place in a layer whose gathered elements this event decides, or ''. Attention itself runs before the output
    projection in the forward, and after it in the backward. `in_experts`: the layer has experts."""
    if module.in_mlp and not event.is_backward:
        return _name_mlp_place(module, event, in_experts=in_experts)
    if module.in_mlp:
        return _name_mlp_backward(module, event)
    if module.name in LAST_PROJECTIONS:
        return "attention" if event.enters != event.is_backward else ""
    if not event.enters or "norm" not in module.name:
        return ""
    return "norm" if module.name.startswith("norm") else module.name


def _name_mlp_place(module: Module, event: HookEvent, *, in_experts: bool) -> str:
    """The first matrix makes one tensor of the inner width, or two at once; the second tensor exists from the
    activation on. At the widest, when gate and up are multiplied, the first matrices are released. At the last matrix
    more weights are in flight, the output head among them. Experts and tiles are gathered as a whole."""
    if module.name in ("up_proj", "gate_up_proj") and not event.enters:
        return "shared" if in_experts else "mlp"
    if not event.enters:
        return ""
    if module.name == "experts" or (module.name == "mlp" and module.weights):
        return "mlp"  # at the router, which is before them, the buffer of their gather may still be there
    if module.name.startswith("down_proj"):
        return "down"
    return "gate" if module.name.startswith(("act_fn", "up_proj", "gate_up_proj")) else "first"


def _name_mlp_backward(module: Module, event: HookEvent) -> str:
    """Frozen matrices that a recomputation used are released after the last one, before the inside is widest."""
    if not event.enters:
        is_whole = module.name == "mlp" and bool(module.weights)
        return "mlp" if module.name == "down_proj" or is_whole else ""
    if module.weights and module.name in ("mlp", "router", "experts"):
        return "mlp"
    return "down" if module.name.startswith("down_proj") else "gate" if module.name != "mlp" else ""


def begins_backward(module: Module) -> bool:
    return module.in_mlp and (module.name == "experts" or module.name.startswith("down_proj"))


def _list_maxima(layers: Iterable[tuple[int, int]]) -> Iterator[tuple[int, int]]:
    most = -1
    for layer, num_elements in layers:
        if num_elements > most:
            most = num_elements
            yield layer, num_elements


def find_leaves(shape: ModelShape, *, tiles_mlp: bool) -> frozenset[int]:
    """Layers whose MLP is a leaf module: its weights are gathered together, and its gradients are reduced together."""
    are_leaves = (tiles_mlp or (kind.num_experts > 0 and Trait.WHOLE_MLPS in shape.traits) for kind in shape.layers)
    return frozenset(index for index, is_leaf in enumerate(are_leaves) if is_leaf)


def _split_mlp(modules: list[Module], traits: tuple[Trait, ...]) -> list[list[Module]]:
    """The expert that every token goes to may be a module beside the block, and then it is gathered by itself; and so
    are experts beside an MLP, their norms and their router."""
    names = [module.name for module in modules]
    if Trait.SHARED_APART in traits and "shared" in names:
        bounds = [0, names.index("shared"), len(names)]
    else:
        bounds = [at for at, module in enumerate(modules) if at == 0 or module.depth == CHILD_DEPTH] + [len(names)]
    return [modules[start:stop] for start, stop in pairwise(bounds)]


def _rank_as_made(weight: str, traits: tuple[Trait, ...]) -> int:
    if is_adapter(weight):
        return 4
    if f".{GATE_ADAPTER}." in weight:
        return 3
    is_router, are_experts = ".router" in weight, ".experts." in weight
    if Trait.EXPERTS_LAST in traits:
        return int(are_experts)
    if is_router:
        return 0 if Trait.ROUTER_FIRST in traits else 1
    return 0 if are_experts else 2


def find_experts(modules: tuple[Module, ...], first: int) -> frozenset[str]:
    """Of the layers from `first` on: no gradient goes to those before it, which save nothing."""
    names = (name for module in modules if module.layer >= first for name, _ in module.weights)
    return frozenset(name for name in names if name.endswith((".experts.gate_up", ".experts.down")))


def join_mlps(modules: tuple[Module, ...], leaves: frozenset[int], shape: ModelShape) -> Iterator[Module]:
    """Joins the modules of each MLP that is a ZeRO-3 leaf module, as tiled ones are, because it is gathered as a whole:
    weights in the order in which they were made (record_parameters), adapters last. Most blocks make their experts
    before the router and the expert that every token goes to, whichever runs first. A shared block's MLP has adapters
    of other layers in it."""
    copied: dict[int, list[tuple[str, int]]] = {}
    for number, name, size in list_copied_adapters(shape, modules):
        copied.setdefault(number, []).extend([(name, size)] if GATE_ADAPTER in name else [])
    for (in_mlp, number), group in groupby(modules, key=lambda module: (module.in_mlp, module.layer)):
        if in_mlp and number in leaves:
            for inside in _split_mlp(list(group), shape.traits):
                weights = dict.fromkeys(weight for module in inside for weight in module.weights)
                weights |= dict.fromkeys(copied.get(number, ()))
                order = sorted(weights, key=lambda each: _rank_as_made(each[0], shape.traits))
                yield replace(inside[0], weights=tuple(order))
        else:
            yield from group
