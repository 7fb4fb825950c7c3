"""Bytes of the final norm, the output head and the loss, whole or in tiles of tokens.

V vocabulary, h hidden, S local tokens, b bytes of the dtype.
"""

from __future__ import annotations

from ulysses_cli.plan.ledger.job import Job
from ulysses_cli.plan.ledger.layer import (
    compute_norm_backward,
    compute_norm_forward,
    compute_norm_saved,
    saves_norm_input,
)
from ulysses_cli.plan.levers import compute_loss_tile_tokens
from ulysses_cli.plan.models.family import Trait
from ulysses_cli.plan.rows.indexing import EMBEDDING, LINEAR, runs_in_pieces


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
