"""Lines that depend on when a snapshot is: the second shards of replicas; below ZeRO-3 gradients and buckets, which are
allocated and freed during a step."""

from __future__ import annotations

from ulysses_cli.plan.ledger.job import Job
from ulysses_cli.plan.ledger.memory_snapshot import (
    AGAIN,
    BEFORE_ATTENTION,
    BEFORE_GRADIENTS,
    BETWEEN,
    EMBEDDED,
    FIRST,
    HEAD_SENT,
    HEAD_SNAPSHOTS,
    LAST_SENT,
    LEAVES,
    MAKING,
    PASSES,
    MemorySnapshot,
)
from ulysses_cli.plan.ledger.token_vectors.modules import VECTOR_GATE, VECTOR_OUTPUT
from ulysses_cli.plan.ledger.zero import lower_stages, states, swapping
from ulysses_cli.plan.ledger.zero.gathering import compute_gathered
from ulysses_cli.plan.ledger.zero.reductions import SENT


def settle(job: Job, snapshot: MemorySnapshot) -> MemorySnapshot:
    if job.zero_stage < 3:
        return _settle_gradients(job, snapshot)
    return swapping.settle_gradients(job, _settle_shards(job, snapshot))


def _settle_shards(job: Job, snapshot: MemorySnapshot) -> MemorySnapshot:
    """With replicas, weights that were released since the last step have a second shard; frozen ones keep it. The check
    of the head goes through the model twice; so do accumulated micro-steps, and an evaluation and the step after it."""
    if job.layout.dp_replicate_size == 1 or snapshot.name == MAKING:
        return snapshot
    repeats = lower_stages.accumulates(job) or job.evaluates
    goes_again = snapshot.phase == "load" or (snapshot.phase in PASSES and repeats) or job.adapters is not None
    gathered_bytes = 0 if goes_again else snapshot.lines.get("parameters_gathered", 0)
    if snapshot.phase == "backward":  # fetched again, a weight has a second shard from its release in the forward
        gathered_bytes = min(gathered_bytes, job.dtype_bytes * compute_gathered(job).never_released)
    second = states.compute_second_shard(job, gathered_bytes)
    return snapshot._replace(lines={**snapshot.lines, "parameters_second_shard": second})


def _settle_gradients(job: Job, snapshot: MemorySnapshot) -> MemorySnapshot:
    phase = snapshot.phase if snapshot.name != BETWEEN else "forward"
    is_reducing = phase == "backward" and _has_gradient(job, snapshot)
    sent = lower_stages.find_first_sent(job.weights, job.engine.reduce_bucket)
    is_sending = snapshot.name.endswith((SENT, EMBEDDED, LAST_SENT, HEAD_SENT))
    is_first = snapshot.name.startswith((FIRST, HEAD_SENT))
    has_sent = (is_sending and not is_first) or (
        sent.layer == lower_stages.ABOVE_LAYERS and snapshot.name not in HEAD_SNAPSHOTS
    )
    gradients = lower_stages.compute_gradients(
        job, phase, is_reducing=is_reducing, has_sent=has_sent, is_sending=is_sending
    )
    lines = {
        "gradients": gradients - snapshot.lines.get(lower_stages.FREED_GRADIENTS, 0),
        "reduce_bucket": lower_stages.compute_buckets(job, is_reducing=is_reducing) if phase in PASSES else 0,
    }
    return snapshot._replace(lines={**snapshot.lines, **lines, lower_stages.FREED_GRADIENTS: 0})


def _has_gradient(job: Job, snapshot: MemorySnapshot) -> bool:
    """Whether a backward has made its first gradient. With adapters alone, the last layer that has one makes it."""
    if job.adapters is None or job.trains("lm_head"):
        return snapshot.name not in BEFORE_GRADIENTS
    if job.trains("norm"):
        return snapshot.name not in (*BEFORE_GRADIENTS, LEAVES)
    if snapshot.layer is not None and snapshot.layer != job.weights.last_trained:
        return snapshot.layer < job.weights.last_trained
    before = (*BEFORE_GRADIENTS, LEAVES, "final norm", AGAIN, "norm of token vectors")
    if job.shape.token_vectors and job.adapters.adapts(VECTOR_OUTPUT, VECTOR_GATE):
        return snapshot.name not in before
    in_mlp: tuple[str, ...] = BEFORE_ATTENTION
    if job.adapters.adapts(*job.family.mlp_modules):  # in tiles all gradients leave the MLP at once
        in_mlp = ("mlp",) if job.levers.tiled_mlp else ()
    return snapshot.name not in (*before, "norm behind the MLP", *in_mlp)
