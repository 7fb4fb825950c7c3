"""What all layers save for the backward, and what is left of it once the backward has passed some layers."""

from __future__ import annotations

from functools import lru_cache

from ulysses_cli.plan.ledger import layer, mixers, mlp
from ulysses_cli.plan.ledger.job import Job, Lines
from ulysses_cli.plan.ledger.modules import Module
from ulysses_cli.plan.ledger.weights import FIRST_PROJECTIONS, LAST_PROJECTIONS, has_norm_before
from ulysses_cli.plan.models.family import Trait
from ulysses_cli.plan.models.layers import Layer

# train/memory/offload.py (MAX_LEAVING): what the last two layers to run have saved is on the device, whether it stays
# or leaves. In the backward one layer's tensors arrive while another's are used.
MIN_ON_DEVICE = 2


def list_saved(job: Job) -> Lines:
    """What all layers have saved for the backward, as far as it is on the GPU when the last layer has run."""
    num_layers = job.shape.num_layers
    before = {
        "saved_embedding_norm": _compute_embedding_norm(job),
        **layer.list_vectors_saved(job),
        **mixers.list_kept_embedding(job),
    }
    if job.levers.gradient_checkpointing is False:
        return {"saved_layers": _sum_saved_inside(job, num_layers), **before}
    return before | _sum_saved(job, num_layers - count_on_device(job, num_layers), num_layers)


def _compute_embedding_norm(job: Job) -> int:
    """What a norm between the embedding and the first layer saves."""
    has_norm = Trait.NORMED_EMBEDDINGS in job.shape.traits and job.trains("embed_tokens")
    return layer.compute_norm_saved(job, job.shape.hidden_size) if has_norm else 0


def _sum_saved_inside(job: Job, num_layers: int) -> int:
    """Of the first layers."""
    kinds_before = job.shape.kinds_before
    first = min(num_layers, job.weights.first_trained)
    inside = sum(
        (kinds_before[kind][num_layers] - kinds_before[kind][first]) * size
        for kind, size in _list_saved_inside(job).items()
    )
    return inside - (compute_first_unsaved(job) if num_layers > first else 0)


@lru_cache(maxsize=16)
def _list_saved_inside(job: Job) -> dict[Layer, int]:
    saved = {}
    for kind in job.shape.layer_kinds:
        view = job.view(kind)
        of_mixer = mixers.compute_saved(view, kind) + mixers.compute_result(view, kind)
        saved[kind] = of_mixer + mlp.compute_mlp_saved(view, kind) + layer.compute_adapter_saved(job, kind)
    return saved


def _sum_saved(job: Job, start: int, stop: int) -> Lines:
    """What layers from `start` to before `stop` keep for their recomputation."""
    kinds_before, first = job.shape.kinds_before, job.weights.first_trained
    start, stop = max(start, first), max(stop, first)
    results = outputs = 0
    own = layer.compute_own_vector(job) if job.levers.offloaded_layers > 0 else 0  # else it is a view
    for kind, (result, output) in _list_kept(job).items():
        num = kinds_before[kind][stop] - kinds_before[kind][start]
        results += num * result
        outputs += num * output
    return {
        "saved_layer_inputs": (stop - start) * (layer.compute_layer_input(job) + own),
        "saved_attention_results": results,
        "saved_mlp_outputs": outputs,
    }


@lru_cache(maxsize=16)
def _list_kept(job: Job) -> dict[Layer, tuple[int, int]]:
    """Of each kind of layer, the results of its mixers and of its MLPs that are kept for the recomputation."""
    saves = layer.saves_result(job)
    kept = {}
    for kind in job.shape.layer_kinds:
        view = job.view(kind)
        output = mixers.compute_block_saved_output(view) if kind.shared else mlp.compute_saved_outputs(view, kind)
        kept[kind] = mixers.compute_result(view, kind) * saves, output
    return kept


def compute_first_unsaved(job: Job) -> int:
    """What the first layer that saves anything does not save although others do. A frozen embedding's output needs no
    gradient, so the first norm, which reads it, saves nothing, or if it is trained what its weight's gradient needs.
    Where adapters have a dropout, whose copy they save, the first projections save no input, and that dropout no mask.
    A mixer in which nothing needs a gradient before its last projection saves that projection's input alone. A frozen
    MLP beside attention saves nothing."""
    if job.adapters is None or job.trains("embed_tokens"):
        return 0
    if not _skips_first_norm(job):
        return layer.compute_norm_input_saved(job, job.shape.hidden_size)
    trained = [module for module in job.weights.modules if _is_trained_in_first_mixer(job, module)]
    if all(module.name.startswith(LAST_PROJECTIONS) for module in trained):
        return _compute_whole_mixer(job) - sum(_compute_input(job, module) for module in trained)
    has_norm = has_norm_before(job.shape)
    unsaved = layer.compute_norm_saved(job, job.shape.hidden_size) if has_norm else 0
    if job.adapters.drops:
        num_adapted = sum(
            module.layer == job.weights.first_trained
            and module.name.endswith(".a")
            and module.name[:-2] in FIRST_PROJECTIONS
            for module in job.weights.modules
        )
        unsaved += layer.DROPOUT_MASK_BYTES * num_adapted * job.shape.hidden_size * job.local_tokens
        unsaved += layer.compute_layer_input(job) if has_norm and layer.saves_input(job, *FIRST_PROJECTIONS) else 0
    first = job.shape.layers[job.weights.first_trained]
    if mlp.is_parallel(job) and not job.adapters.adapts(*job.family.mlp_modules):
        unsaved += mlp.compute_mlp_saved(job.view(first.without_window()), first)
    return unsaved + (mixers.compute_convolution_first_unsaved(job.view(first)) if mixers.is_convolution(first) else 0)


def _is_trained_in_first_mixer(job: Job, module: Module) -> bool:
    is_inside = module.layer == job.weights.first_trained and not module.in_mlp
    return is_inside and module.is_trained and bool(module.weights)


def _compute_whole_mixer(job: Job) -> int:
    """What the mixer of the first layer that saves anything would save, with its result and the norm before it."""
    kind = job.shape.layers[job.weights.first_trained].without_window()
    view = job.view(kind)
    return mixers.compute_saved(view, kind) + mixers.compute_result(view, kind)


def _compute_input(job: Job, module: Module) -> int:
    """Of a layer with an adapter, from the size of the adapter's first matrix; 0 of its other modules."""
    if job.adapters is None or not module.name.endswith(".a") or not layer.saves_input(job, module.name[:-2]):
        return 0
    return sum(size for _, size in module.weights) // job.adapters.rank * job.dtype_bytes * job.local_tokens


def _skips_first_norm(job: Job) -> bool:
    """Also where the first layer has no such norm."""
    if job.adapters is None or job.trains("embed_tokens"):
        return False
    return not (has_norm_before(job.shape) and job.trains("norm"))


def compute_offloaded(job: Job) -> int:
    """What the layers that keep it in host memory have there. What all of them read is there once."""
    own = sum(_sum_saved(job, 0, min(job.levers.offloaded_layers, job.shape.num_layers)).values())
    return own + (mixers.compute_kept_embedding(job) if job.levers.offloaded_layers > 0 else 0)


def count_on_device(job: Job, num_left: int) -> int:
    """Of the first `num_left` layers, how many have their saved tensors on the GPU while the last of them runs."""
    num_offloaded = job.levers.offloaded_layers
    return min(num_left, max(MIN_ON_DEVICE, num_left - num_offloaded)) if num_offloaded else num_left


def count_embedded(job: Job) -> int:
    """The embedding's output, which the model holds until its last norm. It is also the first layer's input; where that
    input is saved and stays on the device it is counted there, and not here."""
    if job.weights.first_trained:
        is_counted = False
    elif job.levers.gradient_checkpointing is not False:
        is_counted = count_on_device(job, job.shape.num_layers) == job.shape.num_layers
    elif has_norm_before(job.shape):
        is_counted = layer.saves_input_unchanged(job) and not compute_first_unsaved(job)
    else:
        is_counted = layer.saves_input(job, *FIRST_PROJECTIONS)
    return 0 if is_counted else layer.compute_layer_input(job)


def drop_layers(job: Job, lines: Lines, num_left: int, *, is_recomputing: bool = False) -> Lines:
    """`lines` when only the first `num_left` layers are left: without what the layers above had saved, and in a
    backward with the gradients that they left for others. `is_again`: the last of them is being recomputed."""
    if "residual_gradient" in lines:
        lines = {**lines, **layer.list_vectors_gradients(job, num_left), **mixers.list_block_gradients(job, num_left)}
    return _drop_saved(job, lines, num_left, is_recomputing=is_recomputing)


def _drop_saved(job: Job, lines: Lines, num_left: int, *, is_recomputing: bool) -> Lines:
    """An input that came back from the host is freed at the end of the layer's forward, unless a norm has saved it
    unchanged."""
    num_layers = job.shape.num_layers
    if job.levers.gradient_checkpointing is False:
        gone = _sum_saved_inside(job, num_layers) - _sum_saved_inside(job, num_left) if num_left < num_layers else 0
        return {**lines, "saved_layers": lines["saved_layers"] - gone} if gone else lines
    if num_left == num_layers > job.levers.offloaded_layers:
        return lines  # nothing has been freed, and the last layer's input never left the device
    whole = _sum_saved(job, num_layers - count_on_device(job, num_layers), num_layers)
    kept = _sum_saved(job, num_left - count_on_device(job, num_left), num_left)
    left = {name: lines[name] - size + kept[name] for name, size in whole.items() if name in lines}
    came_back = "recomputed_mlp" in lines and num_left <= job.levers.offloaded_layers
    is_unsaved = not layer.saves_input_unchanged(job) or (
        num_left == job.weights.first_trained + 1 and _skips_first_norm(job)
    )
    if came_back and is_unsaved and not is_recomputing:
        left["saved_layer_inputs"] -= layer.compute_layer_input(job)
    return {**lines, **left}
