"""Moments of a layer's backward, from the end of the layer to its beginning."""

from __future__ import annotations

from collections.abc import Iterator

from ulysses_cli.plan.ledger import layer
from ulysses_cli.plan.ledger.job import Job
from ulysses_cli.plan.ledger.memory_snapshot import Lines, MemorySnapshot
from ulysses_cli.plan.ledger.weights import INPUT_NORM, NORM_BEHIND, has_norm_before, has_norm_behind
from ulysses_cli.plan.models.shape import Layer


def walk_layer_backward(job: Job, kind: Layer, base: Lines) -> Iterator[tuple[str, MemorySnapshot]]:
    """The last layer's backward, when everything below is still kept, and the place of each moment in the layer."""
    mlp, norm_saved = layer.compute_mlp_saved(job, kind), layer.compute_norm_saved(job, job.shape.hidden_size)
    attention, own_input = layer.compute_attention_saved(job), layer.compute_layer_input(job)
    result = 0 if layer.keeps_result(job) else layer.compute_attention_result(job)
    norm_work = layer.compute_norm_backward(job, job.shape.hidden_size)

    def at(name: str, attention_left: int, mlp_left: int, **work: int) -> MemorySnapshot:
        return make_inside(job, kind, base, name, attention_left, mlp_left, work)

    whole = attention + result
    if job.levers.gradient_checkpointing is not False:
        again = {"recomputed_attention": layer.compute_attention_again(job), "recomputed_mlp": 0}
        yield "attention", MemorySnapshot("backward", "recomputation", {**base, **again})
    if has_norm_behind(job.shape):
        yield NORM_BEHIND, at("norm behind the MLP", whole, mlp, norm_backward=norm_work)
        if kept := layer.compute_kept_output(job):
            base = {**base, "kept_mlp_outputs": base["kept_mlp_outputs"] - kept}
    left = count_mlp_left(job, kind)
    if not kind.num_experts and not layer.is_tiled(job):
        yield "down", at("the MLP's last matrix", whole, left, mlp=layer.compute_down_backward(job))
        yield "gate", at("gate and up", whole, left, mlp=layer.compute_gate_backward(job))
    yield "mlp", at("mlp", whole, left, mlp=layer.compute_mlp_backward(job, kind))
    yield "norm", at("norm", whole, norm_saved, norm_backward=norm_work + own_input)
    rest = attention - layer.compute_output_input(job) + result
    yield "attention", at("exchange", rest, 0, attention_exchange=layer.compute_attention_exchange(job))
    kernel = {"attention": layer.compute_attention_kernel(job), "attention_kernel": layer.compute_kernel_workspace(job)}
    yield "attention", at("attention", rest, 0, **kernel)
    if job.family.query_key_norm:
        rows = layer.compute_attention_rows(job)
        norm = layer.compute_norm_backward(job, job.query_width) + rows
        yield "q_norm", at("query norm", rest - rows - result, 0, norm_backward=norm)
    if has_norm_before(job.shape):
        saved = norm_saved * (not layer.is_input_kept(job))
        yield INPUT_NORM, at("input norm", saved, 0, norm_backward=norm_work + own_input)


def count_mlp_left(job: Job, kind: Layer) -> int:
    """What the MLP's backward finds: a norm behind it has let its own go."""
    mlp = layer.compute_mlp_saved(job, kind)
    if not has_norm_behind(job.shape):
        return mlp
    return mlp - layer.compute_norm_behind_saved(job) + layer.compute_layer_input(job)


def make_inside(
    job: Job, kind: Layer, base: Lines, name: str, attention_left: int, mlp_left: int, work: Lines
) -> MemorySnapshot:
    """What is left of a layer at some time of its backward, and what is worked with. With recomputation its inside is
    made anew; without, it is part of what is kept, and goes piece by piece."""
    if job.levers.gradient_checkpointing is not False:
        adapters = layer.compute_adapter_saved(job)
        left = {"recomputed_attention": attention_left, "recomputed_mlp": mlp_left, "lora": adapters}
        return MemorySnapshot("backward", name, {**base, **left, **work})
    whole = layer.compute_attention_saved(job) + layer.compute_attention_result(job)
    gone = whole - attention_left + layer.compute_mlp_saved(job, kind) - mlp_left
    return MemorySnapshot("backward", name, {**base, "kept_layers": base["kept_layers"] - gone, **work})
