"""The ledger: bytes per rank on the GPU and per node on the host, by phase and by line. For a search, formulas walk
every time of a step at which a rank's memory may be fullest; a run on sizes (sized/) knows load, evaluation and save
too. A phase is as large as its fullest snapshot, and the lines of a snapshot add up to it. Takes a Job."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property

from ulysses_cli.plan.ledger import layer, machine, mixers, mlp
from ulysses_cli.plan.ledger.adapters import (
    compute_quantized_work,
    list_dora_forward,
)
from ulysses_cli.plan.ledger.job import (
    BETWEEN,
    EMBEDDED,
    FIRST,
    HEAD_SENT,
    LAST_SENT,
    LEAVES,
    RECOMPUTATION,
    Job,
    Lines,
    MemorySnapshot,
)
from ulysses_cli.plan.ledger.layer import (
    compute_norm_backward,
    compute_norm_forward,
    compute_norm_saved,
    saves_norm_input,
)
from ulysses_cli.plan.ledger.layer_backward import (
    SENT,
    get_snapshot_place,
    make_inside,
    settle,
    walk_flushes,
    walk_layer_backward,
    walk_sent,
)
from ulysses_cli.plan.ledger.machine import compute_host_uncertainty, list_host_phases
from ulysses_cli.plan.ledger.modules import VECTOR_EMBEDDING
from ulysses_cli.plan.ledger.saved_results import count_embedded, drop_layers, list_saved
from ulysses_cli.plan.ledger.weights import INPUT_NORM
from ulysses_cli.plan.ledger.zero import gradients, states
from ulysses_cli.plan.ledger.zero.gathering import Gathered, compute_gathered, find_leaves
from ulysses_cli.plan.ledger.zero.gradients import find_filled, list_last_filled
from ulysses_cli.plan.levers import compute_loss_tile_tokens
from ulysses_cli.plan.models.family import Trait
from ulysses_cli.plan.models.layers import Layer
from ulysses_cli.plan.rows.indexing import EMBEDDING, LINEAR, runs_in_pieces

INPUT_BYTES = 24  # of a token: its number, label and position


# --- head and loss


def count_head_elements(job: Job) -> int:
    return job.shape.vocab_size * job.shape.hidden_size


def compute_final_norm(job: Job) -> int:
    """The last norm saves its float32 input and scaled result, and its output is the head's input: (4 + 2 b) h S."""
    return compute_norm_saved(job, job.shape.hidden_size) + job.dtype_bytes * job.shape.hidden_size * job.local_tokens


def compute_final_norm_saved(job: Job) -> int:
    """What is left of that in the backward: a frozen head saves no input, but for its adapter and under ZeRO-3."""
    weight = "embed_tokens" if job.shape.tie_word_embeddings else "lm_head"
    is_adapted = job.adapters is not None and "lm_head" in job.adapters.targets
    if job.trains(weight) or is_adapted or job.zero_stage == 3:
        return compute_final_norm(job)
    return compute_norm_saved(job, job.shape.hidden_size)


def compute_final_norm_forward(job: Job) -> int:
    return compute_norm_forward(job, job.shape.hidden_size)


def compute_final_norm_backward(job: Job) -> int:
    """As in a layer, and the gradient of what was scaled, b h S, until it is cast to float32. In tiles or fused: the
    gradients of input and output."""
    hidden, tokens, b = job.shape.hidden_size, job.local_tokens, job.dtype_bytes
    is_precise = job.shape.centers_norms or Trait.PRECISE_NORMS in job.shape.traits
    is_cast = b < 4 and job.family.norm_parts > 0 and not is_precise
    return compute_norm_backward(job, hidden) + (2 if saves_norm_input(job) else is_cast) * b * hidden * tokens


def compute_loss_forward(job: Job) -> int:
    """Logits in float32 and log-softmax: 8 V S (train/loss.py). A divisor or a softcap works while the logits in the
    model's dtype, b V S, exist: a divisor makes another 4 V S; a softcap divides, takes the tanh and scales, and saves
    the tanh, 4 V S. A z-loss sums exponentials, of which torch makes 4 V S (ReduceOps.cpp: logsumexp_out_impl). In
    tiles (train/memory/tiled_loss.py) the same for one tile, without gradients: logits, two float32 copies, the
    tanh."""
    vocab, tokens, b = job.shape.vocab_size, count_loss_tokens(job), job.dtype_bytes
    original, capped = b if b < 4 else 0, 4 if job.shape.final_softcap else 0
    if job.levers.tiled_loss:
        return (b + _count_copies(job) + capped) * vocab * tokens
    in_transform = original + (4 + capped + 4 * _transforms_logits(job)) * _transforms_logits(job)
    return max(in_transform, 8 + capped + (4 if job.has_z_loss else 0)) * vocab * tokens


def compute_loss_backward(job: Job) -> int:
    """Log-softmax, the gradient of its output and that of its input, all float32: 12 V S. A softcap's tanh is saved
    too, 4 V S; for a z-loss also the logits, of which its backward makes three copies in one expression, 8 V S more
    (torch: FunctionsManual.cpp, logsumexp_backward). In tiles: logits and two float32 copies (with a softcap: three),
    or their gradient and the one of the head's weight that the tile makes (train/memory/tiled_loss.py)."""
    vocab, capped = job.shape.vocab_size, 4 if job.shape.final_softcap else 0
    if job.levers.tiled_loss:
        return compute_loss_tile(job, count_loss_tokens(job))
    return (12 + capped + (8 if job.has_z_loss else 0)) * vocab * job.local_tokens


def compute_loss_tile(job: Job, tokens: int) -> int:
    """Of one tile of that many tokens, forward and backward in one."""
    vocab, b = job.shape.vocab_size, job.dtype_bytes
    copies = (_count_copies(job) + (4 if job.shape.final_softcap else 0)) * vocab * tokens
    return b * vocab * tokens + max(copies, compute_tile_gradient(job))


def compute_tile_gradient(job: Job) -> int:
    """b V h: one tile's gradient of the head's weight. In float32 it is the sum itself, or is added as it is made."""
    return compute_head_gradient(job) if job.dtype_bytes < 4 else 0


def _transforms_logits(job: Job) -> bool:
    return bool(job.shape.final_softcap) or job.shape.logits_divisor != 1


def _count_copies(job: Job) -> int:
    """Bytes of a tile's float32 logits and their log-softmax. Float32 logits are copied only if they are
    transformed."""
    return 8 if job.dtype_bytes < 4 or _transforms_logits(job) else 4


def count_loss_tokens(job: Job) -> int:
    if not job.levers.tiled_loss:
        return job.local_tokens
    return compute_loss_tile_tokens(
        job.local_tokens, job.shape.vocab_size, job.shape.hidden_size, is_large=job.levers.large_tiles
    )


def compute_head_accumulator(job: Job) -> int:
    """In tiles, the head's gradient is summed in float32: 4 V h. A frozen head has none."""
    return 4 * count_head_elements(job) if job.levers.tiled_loss and job.trains("lm_head") else 0


def compute_hidden_gradient(job: Job) -> int:
    """In tiles, the hidden states' gradient is made with the loss and held until the backward: b h S."""
    return job.dtype_bytes * job.shape.hidden_size * job.local_tokens if job.levers.tiled_loss else 0


def compute_head_gradient(job: Job) -> int:
    """b V h, whole on every rank until it is reduced."""
    return job.dtype_bytes * count_head_elements(job) if job.trains("lm_head") else 0


def compute_embedding_gradient(job: Job) -> int:
    """The same, of the embedding."""
    return job.dtype_bytes * count_head_elements(job) if job.trains("embed_tokens") else 0


def compute_added_gradient(job: Job) -> int:
    """While a tile's gradient of the head is added to the sum: b V for each token of a tile, and b V h."""
    return job.dtype_bytes * job.shape.vocab_size * count_loss_tokens(job) + compute_tile_gradient(job)


def compute_logits_gradient(job: Job) -> int:
    """While the head's own gradient is made from them: b V S, and in pieces its float32 sum; in tiles they are freed by
    then."""
    num_bytes = job.dtype_bytes * job.shape.vocab_size * job.local_tokens
    return 0 if job.levers.tiled_loss else num_bytes + compute_pieces_sum(job, "lm_head", num_bytes)


def compute_pieces_sum(job: Job, name: str, row_bytes: int) -> int:
    """A row of so many bytes passes embedding or head in pieces, whose gradients are summed in float32: 4 V h
    (train/memory/tiled_mlp.py)."""
    operators = LINEAR if name == "lm_head" else EMBEDDING
    return 4 * count_head_elements(job) if job.trains(name) and runs_in_pieces(row_bytes, *operators) else 0


# --- a step


def walk_snapshots(job: Job) -> Iterator[MemorySnapshot]:
    """Every time at which a rank's memory may be fullest, in order."""
    return (settle(job, snapshot) for snapshot in _walk_all(job))


def _walk_all(job: Job) -> Iterator[MemorySnapshot]:
    gathered = compute_gathered(job)
    held, saved_results = _list_held(job, gathered), list_saved(job)
    yield from _walk_start(job, held, gathered, "forward")
    inside = {**saved_results, "embedded": count_embedded(job)}
    recomputes = job.levers.gradient_checkpointing is not False
    for kind in job.shape.layer_kinds:
        is_saved = job.shape.last_of_kind[kind] >= job.weights.first_trained
        for place, work in _list_forward_work(job, kind):
            view = job.view(kind)
            if is_saved and not recomputes:  # most of it is part of what is saved
                saved = {"attention": mixers.compute_saved(view, kind), "mlp": mlp.compute_mlp_saved(view, kind)}
                work = {name: max(0, size - saved.get(name, 0)) for name, size in work.items()}
            snapshot = MemorySnapshot("forward", place, {**held, **inside, **work})
            if place == "attention" and is_saved and layer.saves_result(job):  # which is still being made
                snapshot.lines["saved_attention_results"] -= mixers.compute_result(view, kind)
            yield from _gather(job, kind, snapshot, gathered, place)
    norm = {"parameters_gathered": job.dtype_bytes * gathered.final, "final_norm": compute_final_norm_forward(job)}
    yield MemorySnapshot("forward", "final norm", {**held, **inside, **norm})
    fetched = _list_fetched(job, gathered.head, min(gathered.head, count_head_elements(job)))
    yield MemorySnapshot(
        "forward",
        "the head is gathered",
        {**held, **saved_results, **fetched, "final_norm": compute_final_norm(job)},
    )
    at_loss = {**held, **saved_results, "parameters_gathered": job.dtype_bytes * gathered.loss}
    yield from _walk_loss(job, at_loss, _list_logits(job, gathered))
    tied = {"tied_gradient": compute_head_gradient(job) if job.shape.tie_word_embeddings else 0}
    saved = {"final_norm": layer.compute_norm_saved(job, job.shape.hidden_size)}
    norm = {"norm_backward": compute_final_norm_backward(job)}
    at_norm = {**at_loss, "parameters_gathered": job.dtype_bytes * gathered.norm}
    yield MemorySnapshot("backward", "final norm", {**at_norm, **saved, **tied, **norm})
    if leaves := states.compute_head_flush(job):  # when the final norm's gradient comes
        residual = {"residual_gradient": layer.compute_layer_input(job)}
        yield MemorySnapshot("backward", HEAD_SENT, {**at_norm, **residual, "reduce_flush": leaves})
    base = {**held, **saved_results, **tied, "residual_gradient": layer.compute_layer_input(job)}
    base["retained_gradients"] = gradients.compute_retained_gradients(job, 1)
    for kind in job.shape.layer_kinds:
        if job.shape.last_of_kind[kind] < job.weights.first_trained:
            continue
        for place, snapshot in _walk_layer(job, kind, base):
            yield from _gather(job, kind, snapshot, gathered, place)
            if job.zero_stage < 3:
                yield from walk_sent(job, kind, snapshot)
            for lower in _list_lower(job, kind):
                lines = drop_layers(job, snapshot.lines, lower + 1, is_recomputing=snapshot.name == RECOMPUTATION)
                yield MemorySnapshot(snapshot.phase, snapshot.name, lines, lower)
            for below, num_sent in gradients.list_layers_below(job).items():
                number = job.shape.find_last_of_kind(kind, below)
                if number is None or number < job.weights.first_trained:
                    continue
                lines = drop_layers(job, snapshot.lines, number + 1)
                large = {"retained_gradients": gradients.compute_retained_gradients(job, num_sent)}
                large[gradients.FREED_GRADIENTS] = gradients.compute_freed_gradients(job, num_sent)
                yield MemorySnapshot(snapshot.phase, f"{snapshot.name}, {SENT}", {**lines, **large})
        yield from walk_flushes(job, kind, base, gathered)
    yield from _walk_ends(job, held, gathered)


def _walk_layer(job: Job, kind: Layer, base: Lines) -> Iterator[tuple[str, MemorySnapshot]]:
    """A layer's backward, and its end, where its vectors' gradient is filled up with zeros to that of all layers."""
    yield from walk_layer_backward(job, kind, base)
    if job.shape.per_layer_embeddings and layer.have_vectors_gradient(job):
        name, filled = "gradient of token vectors", {"token_vectors_filled": layer.compute_vectors(job)}
        place = get_snapshot_place(job, kind, name)
        yield INPUT_NORM, make_inside(job.view(kind), kind, base, name, place, 0, 0, filled)


def _walk_start(job: Job, held: Lines, gathered: Gathered, phase: str) -> Iterator[MemorySnapshot]:
    """Before the first layer."""
    if not job.shape.per_layer_embeddings:
        start = {"parameters_gathered": job.dtype_bytes * gathered.start}
        yield MemorySnapshot(phase, "the embedding is gathered", {**held, **start})
        return
    embedded, b = {"embedded": layer.compute_layer_input(job)}, job.dtype_bytes
    for name, num_gathered, work in (
        ("vectors are looked up", gathered.start, layer.compute_vectors_embedding_forward(job)),
        ("vectors are normed", gathered.vectors, layer.compute_vector_forward(job)),
    ):
        lines = {"parameters_gathered": b * num_gathered, "token_vectors": work}
        yield MemorySnapshot(phase, name, {**held, **embedded, **lines})


def _list_forward_work(job: Job, kind: Layer) -> Iterator[tuple[str, Lines]]:
    """(Place in a layer, tensors in use there) of a forward."""
    job = job.view(kind)
    yield "attention", {"attention": mixers.compute_forward(job, kind)}
    for place, around, work in list_dora_forward(job, kind):
        yield place, {place: around, "lora": work}
    if kind.shared:
        yield "mlp", {"mlp": mixers.compute_block_mlp_forward(job, kind)}
        return
    if kind.mlp is None:
        return
    # before any of the MLP is computed
    yield "fetch", {"mlp": mlp.count_around(job) * layer.compute_layer_input(job)}
    adapters = {"lora": mlp.compute_adapter_work(job, kind)}
    restored, beside = (
        compute_quantized_work(job, kind),
        compute_quantized_work(job, kind, adapters["lora"]),
    )
    in_tile = beside if layer.is_tiled(job) else {}
    if kind.num_experts and not layer.is_tiled(job):
        yield from ((place, {"mlp": size, **adapters}) for place, size in mlp.list_experts_forward(job, kind))
        return
    yield "mlp", {"mlp": mlp.compute_mlp_forward(job, kind), **adapters, **in_tile}
    if not job.levers.tiled_mlp:
        yield "first", {"mlp": mlp.compute_first_forward(job), **adapters, **beside}
        if job.family.is_mlp_gated:
            yield "gate", {"mlp": mlp.compute_gate_forward(job), **adapters, **beside}
        yield "down", {"mlp": mlp.compute_down_forward(job), **restored}


def _gather(
    job: Job, kind: Layer, snapshot: MemorySnapshot, gathered: Gathered, place: str
) -> Iterator[MemorySnapshot]:
    """The same snapshot in each layer of that kind in which more is gathered than in any of them above it."""
    numbers, first = job.shape.numbers_of_kind[kind], job.weights.first_trained
    if snapshot.phase == "backward" and first:
        numbers = frozenset(number for number in numbers if number >= first)
    grows = job.shape.per_layer_embeddings or layer.is_kv_source(job) or mixers.has_blocks(job)
    if snapshot.phase == "backward" and grows:
        maxima = gathered.list_backward(place, numbers)  # what waits for lower layers grows
    else:
        maxima = gathered.list_maxima(snapshot.phase, place, numbers)
    for number, num_elements in maxima or ((job.shape.last_of_kind[kind], 0),):
        lines = drop_layers(job, snapshot.lines, number + 1, is_recomputing=snapshot.name == RECOMPUTATION)
        if snapshot.phase == "backward":
            lines = {**lines, **states.list_unswapped(job, number)}
        lines = {**lines, "parameters_gathered": job.dtype_bytes * num_elements}
        yield MemorySnapshot(snapshot.phase, snapshot.name, lines, number)


def _list_lower(job: Job, kind: Layer) -> list[int]:
    """Below ZeRO-3 with adapters, the last layers of that kind in which the first gradient is made, and in which
    gradients have come before."""
    if job.zero_stage == 3 or job.adapters is None:
        return []
    last = min(job.weights.last_trained, job.shape.num_layers - 1)
    numbers = {job.shape.find_last_of_kind(kind, number) for number in (last, last - 1) if number >= 0}
    return sorted(number for number in numbers if number is not None and number >= job.weights.first_trained)


def _list_logits(job: Job, gathered: Gathered) -> Lines:
    """While the loss is computed of all logits, the head has been left. In tiles it is read again for each."""
    num_elements = gathered.loss if job.levers.tiled_loss else gathered.logits
    return {"parameters_gathered": job.dtype_bytes * num_elements}


def _walk_loss(job: Job, at_loss: Lines, of_logits: Lines) -> Iterator[MemorySnapshot]:
    """Head and loss. In tiles the forward computes the gradients, and the backward only passes them on. `of_logits`:
    what is gathered until the head's backward."""
    tiled, final = job.levers.tiled_loss, {"final_norm": compute_final_norm(job)}
    tiles = {
        "head_accumulator": compute_head_accumulator(job),
        "hidden_gradient": compute_hidden_gradient(job),
    }
    line = "loss_tile" if tiled else "logits"
    # the sum of the head's gradients is allocated when the first tile is done
    first, phase = {**tiles, "head_accumulator": 0}, "forward" if tiled else "backward"
    own = {**at_loss, **of_logits}
    yield MemorySnapshot("forward", "loss", {**own, **final, **first, line: compute_loss_forward(job)})
    if not tiled:
        final = {"final_norm": compute_final_norm_saved(job)}
    yield MemorySnapshot(phase, "loss", {**own, **final, **first, line: compute_loss_backward(job)})
    if tiled:
        a_tile = count_loss_tokens(job)
        if second := min(a_tile, job.local_tokens - a_tile):
            yield MemorySnapshot(phase, "loss", {**at_loss, **final, **tiles, line: compute_loss_tile(job, second)})
        added = {line: compute_added_gradient(job)}
        yield MemorySnapshot(phase, "head's gradient is added", {**at_loss, **final, **tiles, **added})
        final = {"final_norm": layer.compute_norm_saved(job, job.shape.hidden_size)}
    gradient, logits = {"head_gradient": compute_head_gradient(job)}, {line: compute_logits_gradient(job)}
    if job.dtype_bytes < 4:  # a float32 sum is the gradient itself
        yield MemorySnapshot("backward", "head's gradient", {**at_loss, **final, **tiles, **gradient, **logits})
    tiles["head_accumulator"] = 0  # the sum is freed when its cast leaves
    yield MemorySnapshot("backward", LEAVES, {**at_loss, **final, **tiles, **gradient, **logits})


def _walk_ends(job: Job, held: Lines, gathered: Gathered) -> Iterator[MemorySnapshot]:
    """After the layers' backward: the embedding's gradient and the optimizer's step."""
    b, embedding = job.dtype_bytes, compute_embedding_gradient(job)
    end = {**held, "parameters_gathered": b * gathered.embedding, **states.list_unswapped(job, -1)}
    end["retained_gradients"] = gradients.compute_retained_gradients(job, job.weights.num_trained)
    if job.shape.per_layer_embeddings and layer.have_vectors_gradient(job):
        yield from _walk_vectors_backward(job, end)
    came = {"residual_gradient": layer.compute_layer_input(job), "embedding_gradient": embedding}
    came["embedding_sum"] = compute_pieces_sum(job, "embed_tokens", came["residual_gradient"])
    before, last = list_last_filled(job.weights, job.engine.reduce_bucket)
    # gradients that wait in the bucket have left their own memory
    num_moved = before.num_before + (before.num_elements or last.num_elements - embedding // b)
    came[gradients.FREED_GRADIENTS] = gradients.compute_freed_gradients(job, num_moved)
    at_embedding = EMBEDDED if before.num_before else f"{FIRST}gradients, of the {EMBEDDED}"
    added = dict(came)
    if job.shape.tie_word_embeddings:  # its two gradients are added to a third, when the embedding's backward is over
        added |= {"embedding_gradient": 3 * embedding, "residual_gradient": 0}
    yield MemorySnapshot("backward", at_embedding, {**end, **added})
    yield MemorySnapshot("backward", at_embedding, {**end, **came, "reduce_flush": states.compute_flush(job, *before)})
    flush = {"reduce_flush": states.compute_flush(job, *last)}
    flush[gradients.FREED_GRADIENTS] = gradients.compute_freed_gradients(job, last.num_before + last.num_elements)
    at_end = LAST_SENT if last.num_before else f"{FIRST}and {LAST_SENT}"
    yield MemorySnapshot("backward", at_end, {**end, **flush})
    between = {**held, "inputs": 0}  # nothing reads them any more
    if job.zero_stage == 1 and gradients.accumulates(job):
        yield MemorySnapshot("optimizer_step", BETWEEN, between)
    left = {"parameters_gathered": b * gathered.left}
    yield MemorySnapshot("optimizer_step", "before the step", {**between, **left})
    # persistent weights too are released before the step and gathered after it (stage3.py: step)
    work = {"optimizer_transients": states.compute_step_transients(job), "parameters_persistent": 0}
    yield MemorySnapshot("optimizer_step", "the step", {**between, **work})
    if job.zero_stage == 3 and job.world_size > 1:  # all in one collective (_allgather_params_coalesced)
        shares = {"parameters_arriving": states.compute_arriving(job, gathered.persistent)}
        yield MemorySnapshot("optimizer_step", "persistent weights are gathered", {**between, **shares})


def _walk_vectors_backward(job: Job, end: Lines) -> Iterator[MemorySnapshot]:
    """After all layers: the norm of all vectors, then their embedding."""
    residual = {"residual_gradient": layer.compute_layer_input(job)}
    tied = {"tied_gradient": compute_head_gradient(job) if job.shape.tie_word_embeddings else 0}
    norm = {"token_vectors": layer.compute_vector_backward(job)}
    yield MemorySnapshot("backward", "vectors are normed", {**end, **residual, **tied, **norm})
    if size := layer.compute_vectors_embedding_gradient(job):
        filled = find_filled(job.weights, job.engine.reduce_bucket, VECTOR_EMBEDDING)
        lines = {"token_vectors": 2 * layer.compute_vectors(job), "embedding_gradient": size}
        yield MemorySnapshot("backward", EMBEDDED, {**end, **residual, **tied, **lines})
        lines["token_vectors"] //= 2
        lines["reduce_flush"] = states.compute_flush(job, *filled)
        yield MemorySnapshot("backward", EMBEDDED, {**end, **residual, **tied, **lines})


def compute_prefill(job: Job) -> int:
    """What generation holds besides weights and cache while it reads a prompt: the rotation's cosines and sines,
    vectors of layers and lent keys, the residual, and the tensors in use at the fullest place of a layer. An MLP's
    count the residual. Where rows are exchanged, the result of attention has its memory before the exchange
    (train/generation/cache.py)."""
    rotation = 2 * job.dtype_bytes * job.shape.head_dim * job.local_tokens
    return (
        rotation
        + sum(layer.list_vectors_used(job).values())
        + mixers.compute_kept_embedding(job)
        + max(
            sum(work.values()) + (0 if "mlp" in work else _compute_beside_mixer(job.view(kind)))
            for kind in job.shape.layer_kinds
            for _, work in _list_forward_work(job, kind)
        )
    )


def _compute_beside_mixer(job: Job) -> int:
    result = job.dtype_bytes * job.query_width * job.local_tokens if job.layout.ulysses_size > 1 else 0
    return layer.compute_layer_input(job) + result


def _list_fetched(job: Job, num_elements: int, num_arriving: int) -> Lines:
    """What is gathered while a weight arrives of which nothing was available on the GPU."""
    arriving = states.compute_arriving(job, num_arriving) if job.world_size > 1 else 0
    return {"parameters_gathered": job.dtype_bytes * num_elements, "parameters_arriving": arriving}


def _list_loaded(job: Job, gathered: Gathered) -> Lines:
    return {
        "parameters": states.compute_parameters(job),
        "parameters_persistent": job.dtype_bytes * gathered.persistent,
        "gradients": states.compute_gradients(job),
        "optimizer_master": states.compute_master(job),
        "reduce_bucket": states.compute_reduce_bucket(job),
        "cublas_workspace": machine.compute_cublas(job),
    }


def _list_held(job: Job, gathered: Gathered) -> Lines:
    """What stays between snapshots after the first step."""
    is_precise = Trait.PRECISE_ROTARY in job.shape.traits
    widths = {mixer.head_dim for mixer in job.shape.attentions} if job.family.has_global_heads else {job.shape.head_dim}
    rotary = 2 * (4 if is_precise else job.dtype_bytes) * sum(widths)
    return {
        **_list_loaded(job, gathered),
        "optimizer_adam": states.compute_adam(job),
        "inputs": (rotary + INPUT_BYTES) * job.local_tokens,
    }


PHASES = ("load", "forward", "backward", "optimizer_step", "evaluation", "save")


@dataclass(frozen=True)
class Ledger:
    """The fullest snapshot of every phase. Bytes of a rank on the GPU, and of a node on the host."""

    phases: dict[str, MemorySnapshot]
    host_phases: dict[str, Lines]
    fragmentation: dict[str, int]
    missing: str = ""  # why no run on sizes was made, where one was asked for

    @cached_property
    def peak(self) -> MemorySnapshot:
        return max(self.phases.values(), key=lambda snapshot: snapshot.num_bytes)

    @property
    def gpu_peak_bytes(self) -> int:
        return self.peak.num_bytes

    @property
    def gpu_allocated_bytes(self) -> int:
        """What torch.cuda.max_memory_allocated would say."""
        own = machine.DEVICE_LINES
        return max(sum(n for name, n in snap.lines.items() if name not in own) for snap in self.phases.values())

    @cached_property
    def host_peak_bytes(self) -> int:
        return max(sum(lines.values()) for lines in self.host_phases.values())

    @cached_property
    def host_uncertainty_bytes(self) -> int:
        return compute_host_uncertainty(max(self.host_phases.values(), key=lambda lines: sum(lines.values())))

    @cached_property
    def uncertainty_bytes(self) -> int:
        return machine.compute_uncertainty(self.peak.lines)


def compute_ledger(job: Job) -> Ledger:
    """By formulas alone, which a search asks hundreds of times. They know a step, which takes at least what an
    evaluation takes, and nearly always more than a load or a save."""
    return complete_ledger(job, list_fullest(job))


def list_fullest(job: Job) -> dict[str, MemorySnapshot]:
    """Of each phase, by its bytes of torch's tensors: what the GPU holds besides grows with them."""
    fullest: dict[str, MemorySnapshot] = {}
    sizes = dict.fromkeys(PHASES, -1)
    for snapshot in walk_snapshots(job):
        size = snapshot.num_bytes
        if size > sizes[snapshot.phase]:
            sizes[snapshot.phase], fullest[snapshot.phase] = size, snapshot
    if job.levers.leaf_layers:  # about a layer more is gathered, and its gradients wait
        whole = find_leaves(job.shape, tiles_mlp=job.levers.tiled_mlp)
        sizes_of: Counter[int] = Counter()
        for module in job.weights.modules:
            if module.layer >= 0 and not (module.in_mlp and module.layer in whole):
                sizes_of[module.layer] += sum(numel for _, numel in module.weights)
        size = job.dtype_bytes * max(sizes_of.values())
        for phase, times in (("forward", 1), ("backward", 2)):
            lines = {**fullest[phase].lines, "leaf_layers": times * size}
            fullest[phase] = fullest[phase]._replace(lines=lines)
    return fullest


def complete_ledger(job: Job, fullest: Mapping[str, MemorySnapshot], missing: str = "") -> Ledger:
    """Adds what the GPU holds besides torch's tensors, and the host."""
    phases = {phase: _complete(job, fullest[phase]) for phase in PHASES if phase in fullest}
    allocated = max(snapshot.num_bytes for snapshot in fullest.values())
    fragmentation = {
        "expandable_segments": machine.compute_allocator(job, allocated, expandable=True),
        "fixed_segments": machine.compute_allocator(job, allocated, expandable=False),
    }
    in_host = [phase for phase in PHASES if phase != "evaluation" or job.evaluates]
    return Ledger(phases, list_host_phases(job, in_host), fragmentation, missing)


def _complete(job: Job, snapshot: MemorySnapshot) -> MemorySnapshot:
    """Leaves out lines that are zero."""
    lines = {name: size for name, size in snapshot.lines.items() if size}
    lines["allocator"] = machine.compute_allocator(job, sum(lines.values()), expandable=True)
    lines["cuda_context"] = machine.compute_context(job)
    if job.world_size > 1:
        lines["nccl"] = machine.compute_nccl(job)
    return snapshot._replace(lines=lines, layer=None)
