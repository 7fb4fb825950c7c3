"""What all layers keep for the backward, and what is left of it further down."""

from __future__ import annotations

from ulysses_cli.plan.ledger import layer
from ulysses_cli.plan.ledger.job import Job
from ulysses_cli.plan.ledger.moment import Lines

# train/offload.py: the newest two runs of layers (MAX_LEAVING) wait on the device for their copies, beside the last
# layer, which stays, until the backward begins; there one arrives while another is used.
MAX_ON_DEVICE, BACK_ON_DEVICE = 3, 2


def list_kept(job: Job, num_on_device: int) -> Lines:
    """What the backward needs of all layers. In host memory, a few layers' worth is on the GPU."""
    levers, layers = job.levers, job.shape.layers
    # with adapters the embedding's output is made to need a gradient, and stays
    embedded = count_embedded(job) if job.adapters is not None else 0
    if levers.gradient_checkpointing is False:
        inside = layer.compute_attention_saved(job) + layer.compute_attention_result(job)
        inside += layer.compute_adapter_saved(job)
        mlps = {kind: layer.compute_mlp_saved(job, kind) for kind in set(layers)}
        return {"embedded": embedded, "kept_layers": len(layers) * inside + sum(mlps[kind] for kind in layers)}
    num = min(num_on_device, len(layers)) if levers.activation_offloading else len(layers)
    results = layer.compute_attention_result(job) if layer.keeps_result(job) else 0
    return {
        "embedded": embedded,
        "kept_layer_inputs": num * layer.compute_layer_input(job),
        "kept_attention_results": num * results,
        "kept_mlp_outputs": num * layer.compute_kept_output(job),
    }


def count_embedded(job: Job) -> int:
    """The embedding's output, which the model holds until its last norm. It is the first layer's input, and counted as
    such where that stays on the device."""
    is_apart = job.levers.activation_offloading or job.levers.gradient_checkpointing is False
    return layer.compute_layer_input(job) if is_apart and job.dtype_bytes < 4 else 0


def drop_layers(job: Job, lines: Lines, num_left: int) -> Lines:
    """Without what layers above kept. In host memory two layers' worth stays on the device: in the forward those that
    leave; in the backward those that came back, but for an input, which its layer's forward lets go unless a norm has
    saved it as it is."""
    num_layers = job.shape.num_layers
    if num_left == num_layers:
        return lines
    if job.levers.activation_offloading and job.levers.gradient_checkpointing is not False:
        if "recomputed_mlp" not in lines:
            most, back = min(MAX_ON_DEVICE, num_layers), min(BACK_ON_DEVICE, num_layers)
            return {name: size * back // most if name.startswith("kept_") else size for name, size in lines.items()}
        gone = 0 if job.fused_norms or layer.is_tiled(job) else layer.compute_layer_input(job)
        return {**lines, "kept_layer_inputs": lines["kept_layer_inputs"] - gone}
    return {name: size * num_left // num_layers if name.startswith("kept_") else size for name, size in lines.items()}
