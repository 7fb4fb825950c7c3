"""What generation takes, per rank: bytes of caches and activations, operations of a prefill, seconds of a prefill and
of a later token."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from ulysses_cli.plan.flops import compute_layers_flops
from ulysses_cli.plan.hardware import Gpu
from ulysses_cli.plan.layout import Layout, compute_kv_heads
from ulysses_cli.plan.ledger.job import Job, is_indexable, is_known
from ulysses_cli.plan.ledger.parts import measure_prefill
from ulysses_cli.plan.ledger.products import count_products
from ulysses_cli.plan.ledger.weights import count_quantized_bytes, find_num_parameters, read_weights
from ulysses_cli.plan.levers import Levers
from ulysses_cli.plan.models.layers import AttentionMixer, ConvolutionMixer, DeltaNetMixer, Mamba2Mixer, Mixer
from ulysses_cli.plan.models.shape import ModelShape
from ulysses_cli.plan.resolved import find_ring_size
from ulysses_cli.plan.rows.ring import count_shared_out

STATE_BYTES = 4  # recurrent states are float32
# Of a row's queries on a rank, by which a prefill has chunks of heads: one number for all GPUs, so that machines choose
# alike and a dry run needs none.
CHUNK_BYTES = 1 << 29
NEW_TOKENS = 128  # of the longest answers of tasks that are made


def predict(
    shape: ModelShape,
    length: int,
    sp_size: int,
    num_ranks: int,
    bytes_per_number: int,
    new_tokens: int = NEW_TOKENS,
    quantized: str | None = None,
) -> dict[str, Any]:
    """The prediction for a prompt of `length` tokens, for the fullest rank. Weights are those that are sharded; where
    they fit, each rank gathers all of them once. `quantized`: the format of a base under adapters, which each rank
    holds whole; its adapters are left out."""
    whole = (find_num_parameters(shape) or 0) * bytes_per_number
    if quantized is not None and is_known(shape):
        whole = count_quantized_bytes(shape, bytes_per_number, quantized)
    return {
        "length": length,
        "sp_size": sp_size,
        "num_ranks": num_ranks,
        "cache_bytes": count_cache_bytes(shape, length, sp_size, bytes_per_number, new_tokens),
        "prefill_bytes": count_prefill_bytes(shape, length, sp_size, num_ranks, bytes_per_number),
        "weight_bytes": whole if quantized is not None else whole // num_ranks,
        "gathered_weight_bytes": whole,
        "prefill_flops": compute_layers_flops(shape, [length]) / sp_size,
    }


def choose_head_chunks(shape: ModelShape, length: int, sp_size: int, bytes_per_number: int) -> int:
    """The fewest chunks of heads with which a chunk's queries of the whole row take at most CHUNK_BYTES on a rank, else
    as many as its heads allow. A chunk has its own exchange, whose fixed cost long rows do not notice."""
    ring_size = find_ring_size(shape, sp_size)
    num_ranks = sp_size // ring_size
    heads = max(1, shape.common_heads // num_ranks)
    mixers = [mixer for layer in shape.layers for mixer in layer.mixers if isinstance(mixer, AttentionMixer)]
    width = max((mixer.num_heads * mixer.head_dim for mixer in mixers), default=0)
    num_bytes = bytes_per_number * length // ring_size * width // num_ranks
    legal = [number for number in range(1, heads + 1) if heads % number == 0]
    return next((number for number in legal if num_bytes <= number * CHUNK_BYTES), legal[-1])


def count_prefill_bytes(
    shape: ModelShape, length: int, sp_size: int, num_ranks: int, bytes_per_number: int
) -> int | None:
    """The most bytes of the fullest rank while it reads a prompt: the prefix's keys and values, and activations. None
    for a model whose layers the ledger does not know."""
    if not is_known(shape):
        return None
    ring_size = find_ring_size(shape, sp_size)
    layout = Layout(dp_shard_size=num_ranks // sp_size, sp_size=sp_size, ring_size=ring_size)
    prefix = count_shared_out(length - 1, sp_size, ring_size)
    chunks = choose_head_chunks(shape, length, sp_size, bytes_per_number)
    levers = Levers(tiled_mlp=True, tiled_loss=True, head_chunks=chunks)
    job, times = Job(shape, layout, prefix, levers, dtype_bytes=bytes_per_number), 1
    while not is_indexable(job):  # no kernel would read it
        job, times = replace(job, max_length=job.max_length // 2), 2 * times
    return times * measure_prefill(job) + count_cache_bytes(shape, prefix, sp_size, bytes_per_number, 0)


def predict_seconds(
    shape: ModelShape, length: int, sp_size: int, bytes_per_number: int, gpu: Gpu
) -> tuple[float, float] | None:
    """Seconds of a prefill, and of each later token where weights are gathered once. A prefill is bound by products, a
    token by memory: every rank reads its cache and the weights that the token needs. Exchanges are not in them. None
    where the model's weights are not known."""
    if not is_known(shape):
        return None
    peak, share = gpu.tflops * 1e12, gpu.efficiency
    products = length * compute_layers_flops(shape, [1])
    attention = max(0.0, compute_layers_flops(shape, [length]) - products)
    prefill = (products / share.matmul + attention / gpu.attention_forward) / peak / sp_size
    read = bytes_per_number * count_read_weights(shape)
    read += count_cache_bytes(shape, length, sp_size, bytes_per_number, 0)
    return prefill, read / (gpu.memory_gb_s * 1e9 * share.memory)


def predict_questions(
    seconds: tuple[float, float] | None, num_questions: int, num_groups: int, new_tokens: int = NEW_TOKENS
) -> float | None:
    """Seconds of all questions of a length at most: each group answers questions of its own, one after the other; each
    question has a prefill and an answer of full length. Weights are gathered once."""
    if seconds is None:
        return None
    prefill, later = seconds
    return -(-num_questions // num_groups) * (prefill + (new_tokens - 1) * later)


def judge_room(prediction: Mapping[str, Any], gpu: Gpu) -> str:
    """How a prompt finds room on this GPU: with all weights gathered once, which is fast, with a share of them, or not.
    While weights are sharded, or on the host, a layer's are gathered at a time, which is not counted."""
    if prediction["prefill_bytes"] is None:
        return "unknown"
    room = gpu.memory_bytes - prediction["prefill_bytes"]
    share = 0 if prediction["weights_are_on"] == "host" else prediction["weight_bytes"]
    if prediction["gathered_weight_bytes"] <= room and share:
        return "with all weights"
    return "with a share of the weights" if share <= room else "no"


def count_read_weights(shape: ModelShape, num_sequences: int = 1) -> int:
    """Weights that a step of generation reads: of an embedding that is not the head, a few rows; of a layer's experts,
    those of each sequence's token. It is assumed that no two sequences share an expert until all are read."""
    embedding = 0 if shape.tie_word_embeddings else shape.vocab_size * shape.hidden_size
    num_idle = max(0, shape.num_experts - num_sequences * shape.num_experts_per_token)
    idle = count_products(shape).expert_weights * num_idle // max(1, shape.num_experts)
    return read_weights(shape, None).num_elements - embedding - idle


def count_cache_bytes(
    shape: ModelShape, length: int, sp_size: int, bytes_per_number: int, new_tokens: int, num_sequences: int = 1
) -> int:
    """Bytes that the fullest rank keeps of a prompt of `length` tokens and of what is generated after it. On a ring a
    rank keeps its share of the prompt, and what is generated."""
    ring_size = find_ring_size(shape, sp_size)
    prefix = count_shared_out(length - 1, sp_size, ring_size)
    own = num_sequences * (length - prefix + new_tokens)
    mixers = (mixer for layer in shape.layers for mixer in layer.mixers)
    sizes = sp_size // ring_size, ring_size
    return sum(_count_mixer(mixer, prefix, own, sizes, bytes_per_number, num_sequences) for mixer in mixers)


def _count_mixer(
    mixer: Mixer, prefix: int, own: int, sizes: tuple[int, int], bytes_per_number: int, num_sequences: int
) -> int:
    """`sizes`: ranks that have heads of their own, and of a ring."""
    num_ranks, ring_size = sizes
    if isinstance(mixer, AttentionMixer):
        kept = min(prefix // ring_size, (mixer.window_tokens or prefix + 1) - 1)
        heads = compute_kv_heads(mixer.num_heads, mixer.num_kv_heads, num_ranks).num_local
        return (kept + own) * heads * (mixer.head_dim + mixer.value_head_dim) * bytes_per_number
    copies = 1 + num_sequences  # after the prefix, and after each sequence's tokens
    inputs = mixer.conv_channels * (mixer.conv_tokens - 1) * bytes_per_number * copies
    if isinstance(mixer, ConvolutionMixer):
        return inputs
    if isinstance(mixer, Mamba2Mixer):
        numbers = mixer.head_dim * mixer.state_dim
    elif isinstance(mixer, DeltaNetMixer):
        numbers = mixer.key_head_dim * mixer.value_head_dim
    else:
        numbers = mixer.head_dim * mixer.head_dim
    return inputs + mixer.num_heads // num_ranks * numbers * STATE_BYTES * copies
