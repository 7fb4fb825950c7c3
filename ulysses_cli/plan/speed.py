"""Computes the seconds of a training step by part, each as work over a rate, and those that a processor launches it.
Rates are a GPU's datasheet numbers times shares that are the same for every model and row length; see hardware.yaml.
The list of parts serves what is predicted, what is measured and what is shown. Measures nothing itself."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Literal

from ulysses_cli.plan.attention import BACK_ENDS, list_needs
from ulysses_cli.plan.flops import count_pair_flops
from ulysses_cli.plan.hardware import Gpu, HostCosts
from ulysses_cli.plan.layout import count_near_ranks
from ulysses_cli.plan.ledger.job import Job
from ulysses_cli.plan.ledger.parts import count_offloaded
from ulysses_cli.plan.ledger.products import count_products
from ulysses_cli.plan.ledger.states import (
    FLOAT_BYTES,
    compute_state_file_bytes,
    list_layer_weights,
    list_overlapped_groups,
)
from ulysses_cli.plan.ledger.weights import count_shard, get_weights
from ulysses_cli.plan.levers import compute_loss_tile_tokens, compute_num_mlp_tiles, swaps_activations
from ulysses_cli.plan.models.layers import Layer
from ulysses_cli.plan.rows.ring import count_pairs, measure_ring
from ulysses_cli.plan.work import (
    compute_recurrence_flops,
    compute_recurrence_seconds,
    count_halos,
    count_latent_exchanged,
    count_norm_passes,
    count_recurrence_exchanged,
    count_spared,
    saves_slices,
)

PARTS = (
    "projections",
    "attention",
    "recurrence",
    "mlp",
    "head_loss",
    "exchange",
    "gather_reduce",
    "offload",
    "optimizer",
    "data",
    "other",
)
HOST = "host"  # what the GPU waits for: predicted alone, since a clock finds it inside the other parts
COMMUNICATION = ("exchange", "gather_reduce")
COMPUTATION = ("projections", "attention", "recurrence", "mlp", "head_loss", "other")


MILLI = 1e-3


def compute_host_seconds(job: Job, costs: HostCosts) -> float:
    """Of a micro-step: forward, recomputation, backward, and what brings gradients together."""
    levers, tokens, size = job.levers, job.local_tokens, job.shape.hidden_size
    layer = costs.get_layer(job.zero_stage, job.world_size)
    if count_products(job.shape).norms_heads:
        layer += costs.head_norms
    if job.lora is not None:
        layer *= 1 + costs.adapters
    if levers.gradient_checkpointing:
        is_full = levers.gradient_checkpointing == "full"
        layer += costs.recomputation if is_full else costs.part_recomputation
    if levers.leaf_layers:
        layer *= 1 - costs.leaf_layers
    if job.layout.sp_size > 1:
        layer += costs.exchange
    layer += costs.head_chunk * (levers.head_chunks - 1)
    if levers.offload_optimizer != "none":
        layer += costs.offload_optimizer
    if levers.tiled_mlp:
        layer += costs.tile * compute_num_mlp_tiles(tokens, size, is_large=levers.large_tiles)
    total = job.shape.num_layers * layer + costs.offloaded_layer * levers.offloaded_layers
    if levers.tiled_loss:
        tile = compute_loss_tile_tokens(tokens, job.shape.vocab_size, size, is_large=levers.large_tiles)
        total += costs.loss_tile * math.ceil(tokens / tile)
    return MILLI * costs.on_gpu * total / costs.core_speed


def compute_optimizer_host_seconds(job: Job, costs: HostCosts) -> float:
    """Of an optimizer step on the GPU. DeepSpeed waits for the gradients' norm and goes through parameters one by one,
    so that the GPU has no other work."""
    return MILLI * (costs.optimizer + costs.optimizer_layer * job.shape.num_layers) / costs.core_speed


GIGA, TERA = 1e9, 1e12
PACKED_KERNELS, FAST_PACKAGE = ("torch_varlen", "sdpa", "flash_attention_2"), "flash_attention_4"
LEAST_WORTH = 1.02  # times a step: what is worth a line
BACKWARD_ATTENTION = 2.5  # five matrix products instead of two (FlashAttention-2, arXiv 2307.08691)
# Per element of the shard, in DeepSpeed's step: the gradient's norm in float64 18, gradients joined and made float32
# 10, scaled 8, Adam 28, weights rounded and put back 10.
STEP_TRAFFIC_BYTES = 74
# Per logit: a float32 copy, log_softmax and its backward, each a pass of its own. One compiled function for a tile
# (train/elementwise/operators.py) would make 4 passes over the logits alone: no GPU has confirmed it.
LOSS_TRAFFIC_BYTES = 42
NARROW_HEAD = 64
CPU_ADAM_TRAFFIC_BYTES = 34
OVERLAP_COPY_BYTES = (
    24  # per element that is stepped early: weight and moments read and written (overlapped_optimizer.py)
)
# The first gathers of a pass and its last reductions overlap with no computation. Of heads that can travel while others
# attend, CPU ranks hid 0.78 and 0.92 (docs/benchmarks.md: 0.58 and 0.69 of all, with four chunks).
MOST_HIDDEN = 0.8


@dataclass(frozen=True)
class Speed:
    """One optimizer step. Parts add up to the step; seconds `hidden` by overlapping computation are not in them. Of a
    micro-step, the GPU computes for `device_seconds` and the processor launches for `host_seconds`; the part `host` is
    what the GPU waits for."""

    parts: dict[str, float]
    hidden: dict[str, float]
    step_seconds: float
    tokens_per_step: int
    model_flops: float  # of all ranks: forward and twice as much backward, no recomputation
    peak_flops: float
    num_gpus: int
    device_seconds: float
    host_seconds: float
    optimizer_host_seconds: float  # of the step, in the part `optimizer`

    @property
    def is_host_bound(self) -> bool:
        return self.host_seconds > self.device_seconds

    @property
    def tokens_per_second(self) -> float:
        return self.tokens_per_step / self.step_seconds

    @property
    def mfu(self) -> float:
        return self.model_flops / self.step_seconds / self.peak_flops

    @property
    def gather_over_compute(self) -> float:
        """Seconds of gathering weights and summing gradients over those of computing, hidden or not. Below 1 they can
        be hidden."""
        gathered = self.parts["gather_reduce"] + self.hidden["gather_reduce"]
        return gathered / sum(self.parts[name] for name in COMPUTATION)

    @property
    def limit(self) -> str:
        """The part that takes longest, or the host where the GPU waits for it: fewer seconds of any other part would
        help little."""
        return HOST if self.is_host_bound else max(self.parts, key=lambda part: self.parts[part])


def count_row_pairs(max_length: int, document_tokens: int | None, window_tokens: int | None) -> float:
    """(query, key) pairs of a row: half of n squared for each document, not for the row; fewer with windows."""
    length = min(document_tokens or max_length, max_length)
    return (max_length / length) * count_pairs(length, window_tokens)


def compute_attention_flops(job: Job) -> float:
    """Forward, of one rank in a micro-step: 4 q for each pair and layer, shared by the ranks of the row."""
    total = 0.0
    for kind, window_tokens, num_layers in job.shape.attention_counts:
        pairs = count_row_pairs(job.max_length, job.document_tokens, window_tokens)
        total += num_layers * count_pair_flops(kind) * pairs
    return total * job.batch / job.layout.sp_size


def compute_projection_flops(job: Job) -> float:
    """Forward."""
    return 2.0 * count_products(job.shape).others * job.local_tokens


def compute_mlp_flops(job: Job) -> float:
    """Forward."""
    return 2.0 * count_products(job.shape).mlp * job.local_tokens


def compute_head_flops(job: Job) -> float:
    """Forward: 2 h V for each token."""
    return 2 * job.shape.hidden_size * job.shape.vocab_size * job.local_tokens


def compute_product_flops(job: Job) -> dict[str, float]:
    """Of one rank's matrix products in a micro-step, by part: forward, backward, and what is computed again."""
    recomputes = job.levers.gradient_checkpointing is not False
    # A frozen weight needs no gradient, which saves half of the backward.
    passes = 1 + int(recomputes) + (2 if job.lora is None else 1)
    of_mlp = (passes + int(job.levers.tiled_mlp and not recomputes)) * compute_mlp_flops(job)
    return {
        "projections": passes * compute_projection_flops(job),
        "mlp": of_mlp - 2 * count_spared(job) * job.local_tokens,
        "head_loss": (2 + int(job.trains("lm_head"))) * compute_head_flops(job),
    }


def _compute_loss_bytes(job: Job) -> float:
    """Memory traffic of the loss in a micro-step, beside the head's products."""
    return LOSS_TRAFFIC_BYTES * job.shape.vocab_size * job.local_tokens


def _get_attention(job: Job, gpu: Gpu) -> tuple[float, float]:
    """Shares of the peak, forward and backward, by the model's widest heads."""
    is_narrow = max((mixer.head_dim for mixer in job.shape.attentions), default=0) <= NARROW_HEAD
    return gpu.get_attention(is_packed=job.kernel in PACKED_KERNELS, is_narrow=is_narrow)


def compute_exchange_bytes(job: Job, *, of_attention: bool = False) -> float:
    """Bytes that one rank sends to others of its row in a micro-step, but for a ring's: halos of convolutions, what
    recurrences exchange, and attention's heads. These are b S (u - 1) / u for a layer and u ranks that exchange heads,
    times: in the forward q + 2 r before the kernel and q after it; the same again where layers are recomputed in full;
    in the backward q before the kernel (3 q + 2 r where only slices were saved) and q + 2 r after it.
    `of_attention`: its heads alone."""
    num_ranks = job.layout.ulysses_size
    if num_ranks == 1:
        return 0.0
    total = 0.0
    for kind, before in job.shape.kinds_before.items():
        view = job.view(kind)
        beside = 0.0 if of_attention else count_halos(view, kind) + count_recurrence_exchanged(view, kind)
        total += before[-1] * (beside + _count_heads_exchanged(view, kind))
    return total


def _count_heads_exchanged(job: Job, kind: Layer) -> float:
    """Of one layer's attention."""
    num_ranks, forwards = job.layout.ulysses_size, 1 + int(job.levers.gradient_checkpointing == "full")
    if kind.attention is None:
        return 0.0
    of_widths = job.dtype_bytes * job.local_tokens * (num_ranks - 1) / num_ranks
    if kind.attention.is_latent:
        return of_widths * count_latent_exchanged(job, kind.attention)
    q, r = job.query_width, job.exchanged_kv_width
    backward = (3 * q + 2 * r if saves_slices(job) else q) + q + 2 * r
    width = (2 * q + 2 * r) * forwards + backward
    return of_widths * width


def compute_ring_bytes(job: Job, *, in_rounds: bool | None = None) -> float:
    """Bytes that the rank of a ring with most to trade gets or sends in a micro-step: 2 r for each fetched key in the
    forward, also where layers are recomputed in full, and in the backward twice that, since gradients return.
    `in_rounds`: of layers whose keys come in rounds alone, or of the others."""
    forwards = 1 + int(job.levers.gradient_checkpointing == "full")
    width = 0.0
    for kind, window_tokens, num_layers in job.shape.attention_counts:
        share = measure_ring(job.max_length, job.document_tokens, job.make_ring(), window_tokens)
        if in_rounds is None or in_rounds == bool(share.rounds):
            width += num_layers * _count_fetched(job.view(kind), kind) * max(share.fetched, share.sent)
    return job.dtype_bytes * width * job.local_tokens * (forwards + 2)


def _count_fetched(job: Job, kind: Layer) -> int:
    """Numbers of a key with its value, of all heads that chunks bring. Each head that latents are expanded to has keys
    of its own, with values of another width."""
    if kind.attention is not None and kind.attention.is_latent:
        return job.query_width + kind.attention.num_heads * kind.attention.value_head_dim
    return 2 * job.exchanged_kv_width


def compute_elementwise_bytes(job: Job) -> float:
    """Memory traffic of a forward outside matrix products, in elements read and written. transformers' norms make nine
    passes over float32 and bfloat16 copies, its rotation negates, joins, multiplies twice and adds, its activation is
    a kernel of its own; a recurrence has a gated norm. In one kernel each (train/elementwise/): input and output;
    of a gate, two inputs."""
    b, h = job.dtype_bytes, job.shape.hidden_size
    norm = 2 * b if job.fused_norms else 28 + 4 * b
    rotation, activation = (2 if job.fused_gates else 12) * b, (3 if job.fused_gates else 5) * b
    total = float(norm * count_products(job.shape).normed)
    for kind, before in job.shape.kinds_before.items():
        view = job.view(kind)
        heads = view.query_width + view.own_kv_width if kind.attention else 0
        gates = sum(map(count_norm_passes, kind.mixers))
        width = view.shape.intermediate_size if kind.mlp else 0
        if kind.num_experts:
            width = job.shape.num_experts_per_token * (job.shape.moe_intermediate_size + 2 * h)
        total += before[-1] * (rotation * heads + b * gates + 6 * b * h + activation * width)
    return total * job.local_tokens


def compute_sum_bytes(job: Job) -> float:
    """Memory traffic of a backward that adds each tile's gradient of a weight to a float32 sum in a pass of its own:
    the gradient is written and read, the sum read and written, 2 b + 8 for each weight and tile. Added inside the
    product, the sum travels while the product computes."""
    if job.sums_in_product or job.lora is not None:
        return 0.0
    num_bytes, levers = 0.0, job.levers
    if levers.tiled_mlp:
        num_tiles = compute_num_mlp_tiles(job.local_tokens, job.shape.hidden_size, is_large=levers.large_tiles)
        num_bytes += num_tiles * count_products(job.shape).mlp_weights
    if job.levers.tiled_loss:
        tile = compute_loss_tile_tokens(
            job.local_tokens, job.shape.vocab_size, job.shape.hidden_size, is_large=job.levers.large_tiles
        )
        num_bytes += -(-job.local_tokens // tile) * job.shape.hidden_size * job.shape.vocab_size
    return (2 * job.dtype_bytes + 8) * num_bytes


def explain_packed(job: Job, gpu: Gpu) -> str:
    """What torch's own attention kernel costs where a package has a faster one for this GPU and model, or ''. A plan
    does not know which packages are installed."""
    dtype: Literal["bfloat16", "float32"] = "bfloat16" if job.dtype_bytes == 2 else "float32"
    needs = list_needs(job.shape, dtype, has_more_keys=job.layout.ring_size > 1 or job.num_branches > 0)
    if gpu.packed_attention is None or any(BACK_ENDS[FAST_PACKAGE].find_obstacle(need, "cuda") for need in needs):
        return ""
    slow, fast = (compute_speed(replace(job, kernel=kernel), gpu) for kernel in (PACKED_KERNELS[0], FAST_PACKAGE))
    ratio = slow.step_seconds / fast.step_seconds
    if ratio < LEAST_WORTH:
        return ""
    return (
        f"with torch's own attention kernel, which packed rows get without FlashAttention 3 or 4, a step takes "
        f"{ratio:.2f} times as long as with one of these: pip install 'ulysses-cli[flash-attn-4]'"
    )


def compute_speed(job: Job, gpu: Gpu) -> Speed:
    """Where some layers save all, time lies between those of jobs in which none and all of them do."""
    levers, saved = job.levers, job.levers.saved_layers
    if not saved or not levers.gradient_checkpointing:
        return _compute_speed(job, gpu)
    none, every = replace(levers, saved_layers=0), replace(levers, saved_layers=0, gradient_checkpointing=False)
    again, once = (_compute_speed(job.with_levers(each), gpu) for each in (none, every))
    return _join_speeds(again, once, min(1.0, saved / job.shape.num_layers))


def _join_speeds(first: Speed, second: Speed, share: float) -> Speed:
    def mix(one: float, other: float) -> float:
        return one + share * (other - one)

    parts, hidden = (
        {name: mix(size, others[name]) for name, size in own.items()}
        for own, others in ((first.parts, second.parts), (first.hidden, second.hidden))
    )
    on_device, on_host = mix(first.device_seconds, second.device_seconds), mix(first.host_seconds, second.host_seconds)
    step_seconds = mix(first.step_seconds, second.step_seconds)
    return replace(
        first, parts=parts, hidden=hidden, step_seconds=step_seconds, device_seconds=on_device, host_seconds=on_host
    )


def _compute_speed(job: Job, gpu: Gpu) -> Speed:
    share = gpu.efficiency
    matmul = gpu.tflops * TERA * share.matmul
    memory = gpu.memory_gb_s * GIGA * share.memory
    levers, steps = job.levers, job.accumulation
    recomputes = levers.gradient_checkpointing is not False
    attention, recurrence = compute_attention_flops(job), compute_recurrence_flops(job)
    forwards = 1 + int(levers.gradient_checkpointing == "full")
    peak = gpu.tflops * TERA

    parts = dict.fromkeys(PARTS, 0.0)
    parts |= {part: flops / matmul for part, flops in compute_product_flops(job).items()}
    parts["head_loss"] += _compute_loss_bytes(job) / memory
    forward_share, backward_share = _get_attention(job, gpu)
    parts["attention"] = attention * forwards / (peak * forward_share)
    parts["attention"] += attention * BACKWARD_ATTENTION / (peak * backward_share)
    parts["recurrence"] = sum(compute_recurrence_seconds(job, gpu))
    parts["other"] = (3 + int(recomputes)) * compute_elementwise_bytes(job) / memory
    parts["other"] += compute_sum_bytes(job) / memory
    parts["exchange"], in_rounds, in_chunks = _compute_exchange_seconds(job, gpu, memory)
    window = _compute_backward_seconds(job, gpu, parts)
    room = sum(parts.values())  # a second of computation hides a second of transfers of any kind
    shares = job.layout.ring_size  # in rounds, keys of the next are fetched while those of one are computed
    hidden = {"exchange": min(MOST_HIDDEN * in_rounds, parts["attention"] * (shares - 1) / shares)}
    chunks = levers.head_chunks  # of n, the first to come and the last to return travel while none attends
    most = min(MOST_HIDDEN * in_chunks, parts["attention"] - hidden["exchange"])
    hidden["exchange"] += most * (chunks - 1) / chunks
    parts["exchange"] += in_rounds - hidden["exchange"]
    room -= hidden["exchange"]
    for part, seconds in (
        ("gather_reduce", _compute_gather_seconds(job, gpu)),
        ("offload", _compute_offload(job, gpu)),
    ):
        hidden[part] = min(MOST_HIDDEN * seconds, room)
        parts[part] = seconds - hidden[part]
        room -= hidden[part]
    on_device, on_host = sum(parts.values()), compute_host_seconds(job, gpu.host)
    parts[HOST] = max(0.0, on_host - on_device)
    parts = {part: steps * seconds for part, seconds in parts.items()}
    parts["optimizer"], exchanged = _compute_optimizer_seconds(job, gpu, memory)
    parts["offload"] += exchanged
    hidden = {part: steps * seconds for part, seconds in hidden.items()}
    hidden["optimizer"] = min(parts["optimizer"], _compute_early_seconds(job, gpu, window))
    parts["optimizer"] -= hidden["optimizer"]
    forward = compute_projection_flops(job) + compute_mlp_flops(job) + compute_head_flops(job) + attention + recurrence
    return Speed(
        parts=parts,
        hidden=hidden,
        step_seconds=sum(parts.values()),
        tokens_per_step=steps * job.micro_step_tokens * job.layout.dp_size,
        model_flops=3 * forward * steps * job.world_size,
        peak_flops=peak * job.world_size,
        num_gpus=job.world_size,
        device_seconds=on_device,
        host_seconds=on_host,
        optimizer_host_seconds=compute_optimizer_host_seconds(job, gpu.host),
    )


def _compute_exchange_seconds(job: Job, gpu: Gpu, memory: float) -> tuple[float, float, float]:
    """Heads, then keys of a ring, each to ranks of the same machine over NVLink or PCIe and to others over the network
    at the same time; and two copies that reorder them, each read and written. Attention waits for heads and for keys
    that are fetched at once. The second number is of keys in rounds, which attention hides; the third, a part of the
    first, is of heads whose chunks travel while others attend."""
    layout, per_node = job.layout, gpu.gpus_per_node
    heads, keys = compute_exchange_bytes(job), compute_ring_bytes(job)
    in_rounds = compute_ring_bytes(job, in_rounds=True)
    near_heads = heads * (count_near_ranks(layout.ulysses_size, per_node) - 1) / max(1, layout.ulysses_size - 1)
    near_shares = max(1, count_near_ranks(layout.sp_size, per_node) // layout.ulysses_size)  # of the ring, here
    near_keys = (near_shares - 1) / max(1, layout.ring_size - 1)  # the share of a ring's keys that stays here

    def travel(num_bytes: float, near: float) -> float:
        inside = near / (gpu.link_gb_s * GIGA * gpu.efficiency.link)
        between = (num_bytes - near) / (gpu.network_gb_s * GIGA * gpu.efficiency.network)
        return max(inside, between)

    at_once = keys - in_rounds
    seconds = (4 * (heads + keys) + _compute_merge_bytes(job)) / memory
    seconds += travel(heads, near_heads) + travel(at_once, at_once * near_keys)
    in_chunks = compute_exchange_bytes(job, of_attention=True) / heads if job.levers.overlap_exchange and heads else 0.0
    return seconds, travel(in_rounds, in_rounds * near_keys), in_chunks * travel(heads, near_heads)


def _compute_merge_bytes(job: Job) -> float:
    """Memory traffic of adding up results of rounds: for each but the first, a float32 sum is read and written and a
    part is read, 8 + b for each number of a query; of attention's result, and in the backward of queries' gradients."""
    forwards, elements = 1 + int(job.levers.gradient_checkpointing == "full"), 0.0
    for kind, window_tokens, num_layers in job.shape.attention_counts:
        share = measure_ring(job.max_length, job.document_tokens, job.make_ring(), window_tokens)
        parts = max((each.largest_part for each in share.rounds if not each.is_own), default=0.0)
        elements += num_layers * (job.layout.ring_size - 1) * parts * job.view(kind).query_width
    return (forwards + 1) * (8 + job.dtype_bytes) * elements * job.local_tokens


def _compute_gather_seconds(job: Job, gpu: Gpu) -> float:
    """Per micro-step: stage 3 gathers b (N + F) for the forward and for the backward, and reduce-scatters N gradients.
    Weights are prefetched, so the gather is hidden as far as there is computation."""
    ranks = job.world_size
    if ranks == 1:
        return 0.0
    gathered = job.dtype_bytes * get_weights(job).num_elements if job.zero_stage == 3 else 0
    reduced = job.engine.communication_bytes * get_weights(job).num_trained
    seconds = _spread(gathered, ranks, gpu) + _spread(reduced, ranks, gpu)
    return seconds + compute_second_gather_seconds(job, gpu)


def compute_second_gather_seconds(job: Job, gpu: Gpu) -> float:
    """Per micro-step, of the backward. A second shard keeps it inside a replica."""
    gathered = job.dtype_bytes * get_weights(job).num_elements if job.zero_stage == 3 else 0
    ranks = job.layout.replica_size if job.layout.dp_replicate_size > 1 else job.world_size
    return _spread(gathered, ranks, gpu)


def _spread(num_bytes: float, num_ranks: int, gpu: Gpu) -> float:
    """Across machines every byte enters a machine once, by the network of all of the group's ranks there, and is
    distributed there."""
    inside = gpu.link_gb_s * GIGA * gpu.efficiency.link
    near = count_near_ranks(num_ranks, gpu.gpus_per_node)
    if near == num_ranks:
        return num_bytes * (num_ranks - 1) / num_ranks / inside
    return max(num_bytes / inside, num_bytes / (gpu.network_gb_s * GIGA * gpu.efficiency.network * near))


def _compute_offload(job: Job, gpu: Gpu) -> float:
    """Per micro-step: offloaded activations go to the host or a disk and back; shards of offloaded weights are read
    twice. Those on a disk are read for each run of a module, because none is kept; ranks of a machine share its
    disk."""
    rate, disk = gpu.host_gb_s * GIGA * gpu.efficiency.host, gpu.efficiency.disk_gb_s * GIGA
    saved = count_offloaded(job)
    activations = 2.0 * saved / rate
    if swaps_activations(job.levers):  # copies and transfers run at the same time
        activations = max(activations, 2.0 * saved * job.ranks_per_node / disk)
    weights = job.dtype_bytes * get_weights(job).num_elements / job.world_size
    if job.levers.offload_param == "none":
        return activations
    if job.levers.offload_param == "cpu":
        return activations + 2 * weights / rate
    num_runs = 2 + int(job.levers.gradient_checkpointing is not False)
    return activations + num_runs * weights * (1 / rate + job.ranks_per_node / disk)


def _compute_optimizer_seconds(job: Job, gpu: Gpu, memory: float) -> tuple[float, float]:
    """Seconds of (Adam, its transfers to the host or a disk and back) once per step; the transfers are not hidden."""
    shard = count_shard(get_weights(job).num_trained, job.world_size)
    # Files of states are read and written once, those of trained weights written; ranks of a machine share its disk.
    written = 2 * compute_state_file_bytes(job) + (job.dtype_bytes * shard if job.levers.offload_param == "nvme" else 0)
    moved = job.ranks_per_node * written / (gpu.efficiency.disk_gb_s * GIGA)
    on_host = compute_optimizer_host_seconds(job, gpu.host)
    if job.levers.offload_optimizer == "none":
        return on_host + STEP_TRAFFIC_BYTES * shard / memory + _compute_muon_seconds(job, gpu), moved
    seconds = on_host + CPU_ADAM_TRAFFIC_BYTES * shard / (gpu.efficiency.host_memory_gb_s * GIGA)
    link = gpu.host_gb_s * GIGA * gpu.efficiency.host
    return seconds, moved + (_count_gradient_bytes(job) + job.dtype_bytes) * shard / link


def _compute_muon_seconds(job: Job, gpu: Gpu) -> float:
    """Each rank orthogonalizes its part of the matrices, which it gets whole and sends back: five times 4 n^2 m + 2 n^3
    for n rows, the shorter side, of m. One side is the hidden size (train/optimizer/muon.py)."""
    if job.optim != "muon":
        return 0.0
    hidden, flops, elements = job.shape.hidden_size, 0.0, 0
    for size in list_layer_weights(job):
        n, m = sorted((hidden, max(1, size // hidden)))
        flops += 5 * (4 * n * n * m + 2 * n**3)
        elements += size
    peak = gpu.tflops * TERA * gpu.efficiency.matmul
    return flops / job.world_size / peak + 2 * _spread(job.dtype_bytes * elements / job.world_size, job.world_size, gpu)


def _count_gradient_bytes(job: Job) -> int:
    """Of a gradient, in a step, to the host and back. At stage 3 the sum of the micro-steps before comes back for each
    other one (train/optimizer/host_gradients.py); for a disk DeepSpeed brings all back, and sends them in float32."""
    steps, size = job.accumulation, job.engine.gradient_bytes
    if job.zero_stage < 3:
        return FLOAT_BYTES
    return (2 * steps - 1) * size if job.levers.offload_optimizer == "cpu" else 2 * steps * size + FLOAT_BYTES


def _compute_backward_seconds(job: Job, gpu: Gpu, parts: dict[str, float]) -> float:
    """Of a micro-step: computation without one forward. Exchanges are left out."""
    return sum(parts[name] for name in COMPUTATION) - _compute_forward_seconds(job, gpu)


def compute_reference_seconds(job: Job, gpu: Gpu) -> float:
    """Of the forward by which the model before step 1 judges the answers of one step: it gathers weights once, and
    exchanges heads and keys as often as one of the passes of a step does."""
    recomputes = job.levers.gradient_checkpointing == "full"
    computation, launches = _compute_forward_seconds(job, gpu), compute_host_seconds(job, gpu.host)
    passes = 2 + int(job.levers.gradient_checkpointing is not False)
    exchanged, in_rounds, _ = _compute_exchange_seconds(job, gpu, gpu.memory_gb_s * GIGA * gpu.efficiency.memory)
    gathered = compute_second_gather_seconds(job, gpu)
    on_device = computation + exchanged / (2 + int(recomputes))
    on_device += max(0.0, gathered + in_rounds / (3 + int(recomputes)) - MOST_HIDDEN * computation)
    return job.accumulation * max(on_device, launches / passes)


def _compute_forward_seconds(job: Job, gpu: Gpu) -> float:
    """Of a micro-step, computation alone."""
    share, peak = gpu.efficiency, gpu.tflops * TERA
    products = compute_projection_flops(job) + compute_mlp_flops(job) + compute_head_flops(job)
    rate, _ = _get_attention(job, gpu)
    forward = products / (peak * share.matmul) + compute_attention_flops(job) / (peak * rate)
    forward += (compute_elementwise_bytes(job) + _compute_loss_bytes(job)) / (gpu.memory_gb_s * GIGA * share.memory)
    return forward + compute_recurrence_seconds(job, gpu)[0]


def _compute_early_seconds(job: Job, gpu: Gpu, window: float) -> float:
    """Seconds of Adam on the host that the backward of the last micro-step hides, in which no gradient is clipped."""
    rate = gpu.efficiency.host_memory_gb_s * GIGA
    num_overlapped = MOST_HIDDEN * window * rate / (CPU_ADAM_TRAFFIC_BYTES + OVERLAP_COPY_BYTES)
    return CPU_ADAM_TRAFFIC_BYTES * min(sum(list_overlapped_groups(job)), num_overlapped) / rate
