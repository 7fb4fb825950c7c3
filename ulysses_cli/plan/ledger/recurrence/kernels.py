"""Bytes per local token inside the kernels of recurrences: what flash-linear-attention's gated delta rule and
mamba-ssm's scan make and save, in that order. prove/trace/recurrent_kernels.py makes the same tensors.

After the exchange a rank has all tokens of the row and its share of the heads, so that a width of all heads counts once
per local token. b bytes of the dtype.
"""

from __future__ import annotations

from ulysses_cli.plan.layout import compute_kv_heads
from ulysses_cli.plan.ledger.job import Job
from ulysses_cli.plan.models.layers import DeltaNetMixer, Mamba2Mixer

RecurrentMixer = DeltaNetMixer | Mamba2Mixer
FLOAT = 4
DELTA_CHUNK = 64  # fla/ops/gated_delta_rule/chunk.py: chunk_size


def count_values(mixer: RecurrentMixer) -> int:
    """Elements of the result."""
    return mixer.num_heads * (mixer.head_dim if isinstance(mixer, Mamba2Mixer) else mixer.value_head_dim)


def count_shared(mixer: RecurrentMixer, num_ranks: int) -> int:
    """Elements of one of the two tensors that groups of heads share: queries or keys, B or C. A group goes to every
    rank that has heads of it; all count as the rank that gets most."""
    num, width = (
        (mixer.num_groups, mixer.state_dim)
        if isinstance(mixer, Mamba2Mixer)
        else (mixer.num_key_heads, mixer.key_head_dim)
    )
    return num_ranks * compute_kv_heads(mixer.num_heads, num, num_ranks).num_local * width


def count_rows(mixer: RecurrentMixer, num_ranks: int, dtype_bytes: int) -> int:
    """What the exchange brings: shared tensors, values, and numbers of each head: steps, or decay (float32) and
    strength."""
    small = dtype_bytes if isinstance(mixer, Mamba2Mixer) else dtype_bytes + FLOAT
    return dtype_bytes * (2 * count_shared(mixer, num_ranks) + count_values(mixer)) + small * mixer.num_heads


def count_kernel_saved(mixer: RecurrentMixer, job: Job) -> int:
    """Delta rule: normalized queries and keys, values, decay and strength, and a matrix for each chunk and head
    (ChunkGatedDeltaRuleFunction). Scan: result, inputs and decay (MambaChunkScanCombinedFn)."""
    b, rows = job.dtype_bytes, count_rows(mixer, job.layout.ulysses_size, job.dtype_bytes)
    if isinstance(mixer, Mamba2Mixer):
        return rows + b * count_values(mixer) + FLOAT * mixer.num_heads
    return rows + b * DELTA_CHUNK * mixer.num_heads


def count_kernel_forward(mixer: RecurrentMixer, job: Job) -> int:
    """In addition to the rows. Delta rule: normalized queries and keys, the chunks' matrices, w, u, states, new values
    and the result. Scan: steps and decay, then states in float32 and again in the dtype, or these with products of
    chunks and the result."""
    b, v, states = job.dtype_bytes, count_values(mixer), _count_states(mixer)
    if isinstance(mixer, Mamba2Mixer):
        products = FLOAT * mixer.num_groups * mixer.chunk_tokens
        return 2 * FLOAT * mixer.num_heads + max((FLOAT + b) * states, b * states + products + b * v)
    shared, w = count_shared(mixer, job.layout.ulysses_size), mixer.num_heads * mixer.key_head_dim
    return b * (2 * shared + DELTA_CHUNK * mixer.num_heads + w + states + 3 * v) + FLOAT * mixer.num_heads


def count_kernel_backward(mixer: RecurrentMixer, job: Job) -> int:
    """With what was saved, and without the gradient of the result."""
    b, v, states = job.dtype_bytes, count_values(mixer), _count_states(mixer)
    shared, saved = count_shared(mixer, job.layout.ulysses_size), count_kernel_saved(mixer, job)
    if isinstance(mixer, Mamba2Mixer):
        products = FLOAT * mixer.num_groups * mixer.chunk_tokens
        begun = b * (2 * shared + 2 * mixer.num_heads) + 2 * FLOAT * mixer.num_heads + products
        passing = (2 * FLOAT + 2 * b) * states
        ending = 2 * b * states + b * v + 2 * FLOAT * shared + 3 * FLOAT * mixer.num_heads + 2 * products
        return saved + begun + max(passing, ending)
    w = mixer.num_heads * mixer.key_head_dim
    grouped = shared if mixer.num_heads > mixer.num_key_heads else 0
    begun = b * (w + 3 * v + 2 * states)  # w, u, states and their gradients, new values and their gradient
    keys = b * (3 * w + grouped)  # gradients of queries, keys and w; one of them summed over its heads
    values = b * (2 * w + 2 * (grouped or w) + v)  # the gradient of w, keys' once more, queries' and keys', values'
    return saved + begun + max(keys, values) + 4 * FLOAT * mixer.num_heads


def _count_states(mixer: RecurrentMixer) -> int:
    """A state for each chunk and head."""
    if isinstance(mixer, Mamba2Mixer):
        return mixer.num_heads * mixer.head_dim * mixer.state_dim // mixer.chunk_tokens
    return mixer.num_heads * mixer.key_head_dim * mixer.value_head_dim // DELTA_CHUNK
