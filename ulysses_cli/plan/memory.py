"""The ledger: bytes per rank on the GPU and per node on the host, by phase and by line.

A phase is as large as its fullest moment; the lines of a moment add up to it. Each line is a function in plan/ledger/.
Arguments in, values out.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

from ulysses_cli.plan.ledger import device, head, layer, states, swapping
from ulysses_cli.plan.ledger.gathering import Gathered, Highs, compute_gathered
from ulysses_cli.plan.ledger.host import compute_host_uncertainty, keeps_result, list_host_lines
from ulysses_cli.plan.ledger.job import Job
from ulysses_cli.plan.ledger.weights import has_norm_behind
from ulysses_cli.plan.model_shape import Layer

PHASES = ("load", "forward", "backward", "optimizer_step", "evaluation", "save")
Lines = dict[str, int]


@dataclass(frozen=True)
class Moment:
    """A time at which memory may be fullest: what happens then, and every line alive."""

    phase: str
    name: str
    lines: Lines

    @cached_property
    def num_bytes(self) -> int:
        return sum(self.lines.values())


@dataclass(frozen=True)
class Ledger:
    """Every phase at its fullest. Bytes are a rank's on the GPU and a node's on the host."""

    phases: dict[str, Moment]
    host_phases: dict[str, Lines]
    fragmentation: dict[str, int]

    @cached_property
    def peak(self) -> Moment:
        return max(self.phases.values(), key=lambda moment: moment.num_bytes)

    @property
    def gpu_peak_bytes(self) -> int:
        return self.peak.num_bytes

    @property
    def gpu_allocated_bytes(self) -> int:
        """What torch.cuda.max_memory_allocated would say."""
        beside = device.DEVICE_LINES
        return max(sum(n for name, n in moment.lines.items() if name not in beside) for moment in self.phases.values())

    @cached_property
    def host_peak_bytes(self) -> int:
        return max(sum(lines.values()) for lines in self.host_phases.values())

    @cached_property
    def host_uncertainty_bytes(self) -> int:
        return compute_host_uncertainty(max(self.host_phases.values(), key=lambda lines: sum(lines.values())))

    @cached_property
    def uncertainty_bytes(self) -> int:
        return device.compute_uncertainty(self.peak.lines)


def compute_ledger(job: Job, *, expandable_segments: bool = True) -> Ledger:
    fullest: dict[str, Moment] = {}  # what stands beside torch's tensors grows with them: it is added at the end
    for moment in walk_moments(job):
        if moment.phase not in fullest or moment.num_bytes > fullest[moment.phase].num_bytes:
            fullest[moment.phase] = moment
    phases = {
        phase: _complete(job, fullest[phase], expandable=expandable_segments) for phase in PHASES if phase in fullest
    }
    allocated = max(moment.num_bytes for moment in fullest.values())
    fragmentation = {
        "expandable_segments": device.compute_allocator(job, allocated, expandable=True),
        "fixed_segments": device.compute_allocator(job, allocated, expandable=False),
    }
    return Ledger(phases, {phase: list_host_lines(job, phase) for phase in phases}, fragmentation)


def _complete(job: Job, moment: Moment, *, expandable: bool) -> Moment:
    """With what stands beside torch's tensors; lines that are zero are left out."""
    lines = {name: size for name, size in moment.lines.items() if size}
    lines["allocator"] = device.compute_allocator(job, sum(lines.values()), expandable=expandable)
    lines["cuda_context"] = device.compute_context(job)
    if job.world_size > 1:
        lines["nccl"] = device.compute_nccl(job)
    return Moment(moment.phase, moment.name, lines)


def walk_moments(job: Job) -> Iterator[Moment]:
    """Every time at which a rank may be at its fullest, in order."""
    gathered = compute_gathered(job)
    yield from _walk_load(job, gathered)
    held, kept = _list_held(job, gathered), _list_kept(job)
    recomputes = job.levers.gradient_checkpointing is not False
    for kind in job.shape.layer_kinds:
        attention, mlp = layer.compute_attention_forward(job), layer.compute_mlp_forward(job, kind)
        if not recomputes:  # most of it is part of what is kept
            attention = max(0, attention - layer.compute_attention_saved(job))
            mlp = max(0, mlp - layer.compute_mlp_saved(job, kind))
        for place, work in (
            ("attention", {"attention": attention}),
            ("mlp", {"mlp": mlp, "lora": layer.compute_adapter_work(job, kind)}),
        ):
            moment = Moment("forward", place, {**held, **kept, **work})
            yield from _gather(job, moment, gathered.get_highs("forward", place))
    fetched = {"parameters_gathered": job.dtype_bytes * gathered.head}
    yield Moment(
        "forward", "the head is gathered", {**held, **kept, **fetched, "final_norm": head.compute_final_norm(job)}
    )
    at_loss = {**held, **kept, "parameters_gathered": job.dtype_bytes * gathered.loss}
    yield from _walk_loss(job, at_loss)
    tied = {"tied_gradient": head.compute_head_gradient(job) if job.shape.tie_word_embeddings else 0}
    saved = {"final_norm": layer.compute_norm_saved(job, job.shape.hidden_size)}
    norm = {"norm_backward": head.compute_final_norm_backward(job)}
    at_norm = {**at_loss, "parameters_gathered": job.dtype_bytes * gathered.norm}
    yield Moment("backward", "final norm", {**at_norm, **saved, **tied, **norm})
    base = {**held, **kept, **tied, "residual_gradient": layer.compute_layer_input(job)}
    for kind in job.shape.layer_kinds:
        for place, moment in _walk_layer_backward(job, kind, base):
            yield from _gather(job, moment, gathered.get_highs("backward", place))
        yield from _walk_flushes(job, kind, base, gathered)
    yield from _walk_ends(job, held, gathered)


def _gather(job: Job, moment: Moment, highs: Highs) -> Iterator[Moment]:
    """The same moment in each layer in which more is gathered than in all above it."""
    for num_gone, num_elements in highs:
        lines = _drop_layers(job, moment.lines, job.shape.num_layers - num_gone)
        yield Moment(moment.phase, moment.name, {**lines, "parameters_gathered": job.dtype_bytes * num_elements})


def _walk_loss(job: Job, at_loss: Lines) -> Iterator[Moment]:
    """Head and loss. In tiles the forward makes the gradients, and the backward only hands them on."""
    tiled, final = job.levers.tiled_loss, {"final_norm": head.compute_final_norm(job)}
    tiles = {
        "head_accumulator": head.compute_head_accumulator(job),
        "hidden_gradient": head.compute_hidden_gradient(job),
    }
    line = "loss_tile" if tiled else "logits"
    yield Moment("forward", "loss", {**at_loss, **final, **tiles, line: head.compute_loss_forward(job)})
    phase = "forward" if tiled else "backward"
    yield Moment(phase, "loss", {**at_loss, **final, **tiles, line: head.compute_loss_backward(job)})
    if tiled:
        final = {"final_norm": layer.compute_norm_saved(job, job.shape.hidden_size)}
    oversize = states.compute_oversize_gradient(job, head.count_head_elements(job)) * head.trains_head(job)
    gradient, logits = {"head_gradient": head.compute_head_gradient(job)}, {line: head.compute_logits_gradient(job)}
    yield Moment("backward", "head's gradient", {**at_loss, **final, **tiles, **gradient, **logits})
    tiles["head_accumulator"], gradient["oversize_gradient"] = 0, oversize  # the sum has gone when its cast leaves
    yield Moment("backward", "head's gradient leaves", {**at_loss, **final, **tiles, **gradient, **logits})


def _walk_layer_backward(job: Job, kind: Layer, base: Lines) -> Iterator[tuple[str, Moment]]:
    """The last layer's backward, when everything below is still kept, and the place of each moment in the layer."""
    mlp, norm_saved = layer.compute_mlp_saved(job, kind), layer.compute_norm_saved(job, job.shape.hidden_size)
    attention, own_input = layer.compute_attention_saved(job), layer.compute_layer_input(job)
    result = 0 if keeps_result(job) else layer.compute_attention_result(job)
    norm_work = layer.compute_norm_backward(job, job.shape.hidden_size)

    def at(name: str, attention_left: int, mlp_left: int, **work: int) -> Moment:
        return _make_inside(job, kind, base, name, attention_left, mlp_left, work)

    whole = attention + result
    if has_norm_behind(job.shape):
        yield "norm", at("norm behind the MLP", whole, mlp, norm_backward=norm_work)
    yield "mlp", at("mlp", whole, _count_mlp_left(job, kind), mlp=layer.compute_mlp_backward(job, kind))
    yield "norm", at("norm", whole, norm_saved, norm_backward=norm_work + own_input)
    rest = attention - layer.compute_output_input(job) + result
    yield "attention", at("exchange", rest, 0, attention_exchange=layer.compute_attention_exchange(job))
    kernel = {"attention": layer.compute_attention_kernel(job), "attention_kernel": layer.compute_kernel_workspace(job)}
    yield "attention", at("attention", rest, 0, **kernel)
    if job.family.query_key_norm:
        rows = layer.compute_attention_rows(job)
        norm = layer.compute_norm_backward(job, job.query_width) + rows
        yield "q_norm", at("query norm", rest - rows - result, 0, norm_backward=norm)


def _count_mlp_left(job: Job, kind: Layer) -> int:
    """What the MLP's backward finds: a norm behind it has let its own go."""
    mlp = layer.compute_mlp_saved(job, kind)
    if not has_norm_behind(job.shape):
        return mlp
    return mlp - layer.compute_norm_saved(job, job.shape.hidden_size) + layer.compute_layer_input(job)


def _make_inside(
    job: Job, kind: Layer, base: Lines, name: str, attention_left: int, mlp_left: int, work: Lines
) -> Moment:
    """What is left of a layer at some time of its backward, and what is worked with. With recomputation its inside is
    made anew; without, it is part of what is kept, and goes piece by piece."""
    if job.levers.gradient_checkpointing is not False:
        adapters = layer.compute_adapter_saved(job)
        left = {"recomputed_attention": attention_left, "recomputed_mlp": mlp_left, "lora": adapters}
        return Moment("backward", name, {**base, **left, **work})
    whole = layer.compute_attention_saved(job) + layer.compute_attention_result(job)
    gone = whole - attention_left + layer.compute_mlp_saved(job, kind) - mlp_left
    return Moment("backward", name, {**base, "kept_layers": base["kept_layers"] - gone, **work})


def _walk_flushes(job: Job, kind: Layer, base: Lines, gathered: Gathered) -> Iterator[Moment]:
    """Where the bucket is full for the first time in an MLP and in an attention, when layers above have gone; and again
    where more is gathered by then."""
    result = 0 if keeps_result(job) else layer.compute_attention_result(job)
    most, whole = {True: -1, False: -1}, layer.compute_attention_saved(job) + result
    for flush in states.list_flushes(job.weights, job.engine.reduce_bucket):
        highs = gathered.get_highs("backward", "mlp" if flush.in_mlp else "attention")
        num_gone = job.shape.num_layers - 1 - flush.layer
        num_gathered = max(elements for above, elements in highs if above <= num_gone)
        if num_gathered > most[flush.in_mlp]:
            most[flush.in_mlp] = num_gathered
            left = _count_mlp_left(job, kind) - layer.compute_inside_gone(job, flush.weight) if flush.in_mlp else 0
            work = {
                "reduce_flush": min(
                    states.compute_reduce_flush(job), flush.num_elements * job.engine.communication_bytes
                ),
                "parameters_gathered": job.dtype_bytes * num_gathered,
            }
            moment = _make_inside(job, kind, base, "gradients are reduced", whole, left, work)
            yield Moment(moment.phase, moment.name, _drop_layers(job, moment.lines, flush.layer + 1))


def _drop_layers(job: Job, lines: Lines, num_left: int) -> Lines:
    """Without what layers above kept. In host memory two layers' worth stays on the device until the end, but for the
    input that came back: the layer's forward lets it go. The last layer's never left."""
    num_layers = job.shape.num_layers
    if num_left == num_layers:
        return lines
    if job.levers.activation_offloading and job.levers.gradient_checkpointing is not False:
        gone = layer.compute_layer_input(job) if "recomputed_mlp" in lines else 0
        return {**lines, "kept_layer_inputs": lines["kept_layer_inputs"] - gone}
    return {name: size * num_left // num_layers if name.startswith("kept_") else size for name, size in lines.items()}


def _walk_ends(job: Job, held: Lines, gathered: Gathered) -> Iterator[Moment]:
    """After the layers: the embedding's gradient, the optimizer, evaluation and saving."""
    b, embedding = job.dtype_bytes, head.compute_head_gradient(job)
    end = {**held, "parameters_gathered": b * gathered.embedding, "residual_gradient": layer.compute_layer_input(job)}
    if head.trains_head(job):
        end |= {
            "embedding_gradient": embedding * (2 if job.shape.tie_word_embeddings else 1),
            "oversize_gradient": states.compute_oversize_gradient(job, head.count_head_elements(job)),
            "reduce_flush": states.compute_reduce_flush(job),
        }
    waiting = {"gradients_unswapped": swapping.compute_unswapped_gradients(job)}
    yield Moment("backward", "embedding", {**end, **waiting})
    step = {**held, **waiting, "optimizer_transients": states.compute_step_transients(job)}
    yield Moment("optimizer_step", "the step", step)
    if job.evaluates:
        grown = {
            **held,
            "parameters_gathered": b * gathered.get_most("forward"),
            "residual": 2 * layer.compute_layer_input(job),
        }
        for kind in job.shape.layer_kinds:
            work = {"mlp": layer.compute_mlp_forward(job, kind), "lora": layer.compute_adapter_work(job, kind)}
            yield Moment("evaluation", "mlp", {**grown, **work})
        yield Moment("evaluation", "attention", {**grown, "attention": layer.compute_attention_forward(job)})
        loss = {"loss_tile" if job.levers.tiled_loss else "logits": head.compute_loss_forward(job)}
        at_loss = {"parameters_gathered": b * gathered.loss, "residual": layer.compute_layer_input(job), **loss}
        yield Moment("evaluation", "loss", {**grown, **at_loss})
    largest = 0 if job.zero_stage < 3 or job.world_size == 1 else 2 * b * job.weights.largest
    yield Moment("save", "weights are gathered one by one", {**held, "parameters_gathered": largest})


def _walk_load(job: Job, gathered: Gathered) -> Iterator[Moment]:
    loaded = _list_loaded(job, gathered)
    made = {name: size for name, size in loaded.items() if name not in ("gradients", "reduce_bucket")}
    yield Moment("load", "master weights are made", {**made, "load_transients": states.compute_load_transients(job)})
    fetched = job.dtype_bytes * gathered.proof
    yield Moment("load", "the head is proven", {**loaded, "parameters_gathered": fetched})


def _list_loaded(job: Job, gathered: Gathered) -> Lines:
    return {
        "parameters": states.compute_parameters(job),
        "parameters_persistent": job.dtype_bytes * gathered.persistent,
        "gradients": states.compute_gradients(job),
        "optimizer_master": states.compute_master(job),
        "reduce_bucket": states.compute_reduce_bucket(job),
        "cublas_workspace": device.compute_cublas(job),
    }


def _list_held(job: Job, gathered: Gathered) -> Lines:
    """What stays between moments once the first step was made."""
    inputs = (2 * job.dtype_bytes * job.shape.head_dim + 24) * job.local_tokens  # rotary tables and three numbers
    return {
        **_list_loaded(job, gathered),
        "parameters_second_shard": states.compute_second_shard(job),
        "optimizer_adam": states.compute_adam(job),
        "inputs": inputs,
    }


def _list_kept(job: Job) -> Lines:
    """What the backward needs of all layers. In host memory, two layers' worth is on the GPU: one arrives while another
    is used."""
    levers, layers = job.levers, job.shape.layers
    # with adapters the embedding's output is made to need a gradient, and stays
    embedded = layer.compute_layer_input(job) if job.adapters is not None else 0
    if levers.gradient_checkpointing is False:
        inside = layer.compute_attention_saved(job) + layer.compute_attention_result(job)
        inside += layer.compute_adapter_saved(job)
        mlps = {kind: layer.compute_mlp_saved(job, kind) for kind in set(layers)}
        return {"embedded": embedded, "kept_layers": len(layers) * inside + sum(mlps[kind] for kind in layers)}
    num = min(2, len(layers)) if levers.activation_offloading else len(layers)
    results = layer.compute_attention_result(job) if keeps_result(job) else 0
    return {
        "embedded": embedded,
        "kept_layer_inputs": num * layer.compute_layer_input(job),
        "kept_attention_results": num * results,
        "kept_mlp_outputs": num * layer.compute_kept_output(job),
    }
