"""Bytes of vectors that each layer has for each token beside the hidden states, and of keys that layers borrow
(transformers: modeling_gemma4.py), per rank and micro-step.

Letters as in layer.py; p numbers of one layer's vector, w those of all layers together.
"""

from __future__ import annotations

from ulysses_cli.plan.ledger.job import Job
from ulysses_cli.plan.ledger.layer import (
    compute_layer_input,
    compute_norm_backward,
    compute_norm_forward,
    compute_norm_saved,
    saves_input,
)
from ulysses_cli.plan.ledger.memory_snapshot import Lines
from ulysses_cli.plan.ledger.token_vectors import lent_keys
from ulysses_cli.plan.ledger.token_vectors.modules import VECTOR_GATE, VECTOR_OUTPUT, VECTOR_PROJECTION


def count_width(job: Job) -> int:
    return job.shape.token_vectors.width if job.shape.token_vectors else 0


def have_gradient(job: Job) -> bool:
    """Whether what makes the vectors is trained, or their projection's input."""
    is_adapted = job.adapters is None or job.adapters.adapts(VECTOR_PROJECTION)
    return is_adapted or job.trains("embed_tokens") or job.trains("norm")


def compute_vectors(job: Job) -> int:
    """b w S: one tensor, of which each layer's vector is a view."""
    return job.dtype_bytes * count_width(job) * job.local_tokens


def list_saved(job: Job) -> Lines:
    """From the forward on: the vectors, which a layer that leaves for the host takes with it, what their norm saved,
    and with recomputation the keys and values that layers lend."""
    if job.shape.token_vectors is None:
        return {"lent_keys": lent_keys.compute_lent(job)} if lent_keys.is_lending(job) else {}
    leaves = job.levers.offloaded_layers >= job.shape.num_layers
    norm = compute_norm_saved(job, count_width(job)) * have_gradient(job)
    saved = {"token_vectors": compute_vectors(job) * (not leaves), "token_vectors_norm": norm}
    return saved | ({"lent_keys": lent_keys.compute_lent(job)} if lent_keys.is_lending(job) else {})


def list_used(job: Job) -> Lines:
    """The same in a forward without a backward."""
    return {"token_vectors": compute_vectors(job), "lent_keys": lent_keys.compute_lent(job)}


def list_gradients(job: Job, num_left: int) -> Lines:
    """In the backward when the first `num_left` layers are left: the vectors' gradient, to which each layer that is
    done has added its own, and the gradients of borrowed keys, which wait for the layer that made them."""
    lines = {}
    if job.shape.token_vectors and have_gradient(job) and num_left < job.shape.num_layers:
        lines["token_vectors_gradient"] = compute_vectors(job)
    if lent_keys.is_lending(job):
        lines["borrowed_gradients"] = lent_keys.compute_waiting(job, num_left)
    return lines


def compute_own(job: Job) -> int:
    """b p S: one layer's vector."""
    size = job.shape.token_vectors.size if job.shape.token_vectors else 0
    return job.dtype_bytes * size * job.local_tokens


def compute_layer_saved(job: Job) -> int:
    """At the end of a layer: the gate's input, the gate, the activated gate where the vector has a gradient, the
    product and what the norm saves."""
    if job.shape.token_vectors is None:
        return 0
    num = 1 + have_gradient(job) + saves_input(job, VECTOR_OUTPUT)
    gate_input = compute_layer_input(job) * saves_input(job, VECTOR_GATE)
    return gate_input + num * compute_own(job) + compute_norm_saved(job, job.shape.hidden_size)


def compute_waiting(job: Job) -> int:
    """Until the end of a layer's backward its vector's gradient waits."""
    return compute_own(job) * have_gradient(job) if job.shape.token_vectors else 0


def compute_embedding_forward(job: Job) -> int:
    """What was looked up, and the same scaled: 2 b w S."""
    return 2 * compute_vectors(job)


def compute_forward(job: Job) -> int:
    """What was looked up, and the norm of what was projected."""
    return compute_vectors(job) + compute_norm_forward(job, count_width(job))


def compute_backward(job: Job) -> int:
    """The vectors' gradient, which waits for the embedding, and the norm's backward with what it saved."""
    width = count_width(job)
    return compute_vectors(job) + compute_norm_saved(job, width) + compute_norm_backward(job, width)


def compute_embedding_gradient(job: Job) -> int:
    """b V w: whole on every rank until it is reduced; not of a frozen one."""
    vectors = job.shape.token_vectors
    return job.dtype_bytes * vectors.vocab_size * vectors.width if vectors and job.adapters is None else 0
