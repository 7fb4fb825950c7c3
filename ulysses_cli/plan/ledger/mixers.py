"""Bytes of the parts of a decoder layer that read other tokens: softmax attention, a convolution or a recurrence.
A layer may have none, or attention beside a recurrence, which runs first; or a shared block, which is counted whole.

Each function takes the job as its kind of layer sees it (Job.view).
"""

from __future__ import annotations

from collections.abc import Sequence

from ulysses_cli.plan.ledger import attention, latent, layer
from ulysses_cli.plan.ledger.adapters import lengths
from ulysses_cli.plan.ledger.job import Job
from ulysses_cli.plan.ledger.recurrence import convolution, kimi
from ulysses_cli.plan.ledger.recurrence import mixer as recurrence
from ulysses_cli.plan.ledger.recurrence.kernels import RecurrentMixer
from ulysses_cli.plan.ledger.shared_blocks import block
from ulysses_cli.plan.models.layers import AttentionMixer, DeltaNetMixer, KimiDeltaMixer, Layer, Mamba2Mixer


def find_recurrence(kind: Layer) -> RecurrentMixer | None:
    return next((mixer for mixer in kind.mixers if isinstance(mixer, DeltaNetMixer | Mamba2Mixer)), None)


def find_latent(kind: Layer) -> AttentionMixer | None:
    return kind.attention if kind.attention and kind.attention.latent else None


def is_convolution(kind: Layer) -> bool:
    """Whether its only mixer is a short convolution."""
    return bool(kind.mixers) and kind.attention is None and find_recurrence(kind) is None and find_kimi(kind) is None


def find_kimi(kind: Layer) -> KimiDeltaMixer | None:
    return next((mixer for mixer in kind.mixers if isinstance(mixer, KimiDeltaMixer)), None)


def compute_result(job: Job, kind: Layer) -> int:
    """Bytes of the mixers' saved results, with which recomputation does not run the mixers again."""
    if kind.shared:
        return block.compute_result(job, kind)
    if latent_mixer := find_latent(kind):
        return latent.compute_result(job, latent_mixer)
    if kimi_mixer := find_kimi(kind):
        return kimi.compute_result(job, kimi_mixer)
    of_attention = attention.compute_attention_result(job) if kind.attention else 0
    recurrent = find_recurrence(kind)
    return of_attention + (recurrence.compute_result(job, recurrent) if recurrent else 0)


def compute_saved(job: Job, kind: Layer) -> int:
    """Mixers side by side share the norm before them; each scales its output by itself (modeling_falcon_h1.py:
    FalconH1DecoderLayer.forward)."""
    if kind.shared:
        return block.compute_saved(job, kind)
    of_lengths = lengths.compute_saved(job, kind, job.local_tokens, in_mlp=False)
    if latent_mixer := find_latent(kind):
        return latent.compute_saved(job, latent_mixer) + of_lengths
    if kimi_mixer := find_kimi(kind):
        return kimi.compute_saved(job, kimi_mixer) + of_lengths
    if not kind.mixers:
        return attention.compute_input_norm_saved(job)
    recurrent = find_recurrence(kind)
    if recurrent and kind.attention is None:
        return recurrence.compute_saved(job, recurrent) + of_lengths
    saved = attention.compute_attention_saved(job) if kind.attention else convolution.compute_saved(job)
    return saved + of_lengths + compute_beside(job, kind)


def compute_beside(job: Job, kind: Layer) -> int:
    """What a recurrence saves beside attention, apart from the norm that both have."""
    recurrent = find_recurrence(kind)
    if recurrent is None or kind.attention is None:
        return 0
    return recurrence.compute_saved(job, recurrent) - attention.compute_input_norm_saved(job)


def compute_forward(job: Job, kind: Layer) -> int:
    if kind.shared:
        return block.compute_forward(job, kind)
    if latent_mixer := find_latent(kind):
        return latent.compute_forward(job, latent_mixer)
    if kimi_mixer := find_kimi(kind):
        return kimi.compute_forward(job, kimi_mixer)
    if not kind.mixers:
        return layer.compute_layer_input(job)
    works = []
    if recurrent := find_recurrence(kind):
        works.append(recurrence.compute_forward(job, recurrent))
    if kind.attention:
        works.append(attention.compute_attention_forward(job))
    return _find_most(job, kind, works or [convolution.compute_forward(job)])


def _find_most(job: Job, kind: Layer, works: Sequence[int]) -> int:
    """Of mixers side by side: the first runs beside the norm's output, of which it has a scaled copy, the second also
    beside the first one's result."""
    beside = layer.compute_layer_input(job) * (len(works) > 1)
    return max(work + (1 + number) * beside for number, work in enumerate(works))


def compute_again(job: Job, kind: Layer) -> int:
    """While they are recomputed."""
    if kind.shared:
        return block.compute_again(job, kind)
    of_lengths = lengths.compute_saved(job, kind, job.local_tokens, in_mlp=False)
    if latent_mixer := find_latent(kind):
        return latent.compute_again(job, latent_mixer) + of_lengths
    if kimi_mixer := find_kimi(kind):
        return kimi.compute_again(job, kimi_mixer)
    if not kind.mixers:
        return attention.compute_input_norm_saved(job) + layer.compute_layer_input(job)
    works = []
    if recurrent := find_recurrence(kind):
        works.append(recurrence.compute_again(job, recurrent))
    if kind.attention:
        works.append(attention.compute_attention_again(job) + compute_beside(job, kind))
    again = _find_most(job, kind, works or [convolution.compute_again(job)])
    return again + (0 if recurrent else of_lengths)


def compute_left_for_projections(job: Job, kind: Layer, weight: str) -> int:
    """What is left of them when the first projections compute their gradients from those of their results. Of two
    mixers the last runs its backward first."""
    if latent_mixer := find_latent(kind):
        return latent.compute_left_for_projections(job, latent_mixer)
    if kimi_mixer := find_kimi(kind):
        return kimi.compute_left_for_projections(job, kimi_mixer)
    recurrent = find_recurrence(kind)
    if recurrent and (kind.attention is None or weight == "in_proj"):
        return recurrence.compute_left_for_projections(job, recurrent)
    if not kind.mixers:
        return attention.compute_input_norm_saved(job)
    if kind.attention is None:
        return convolution.compute_left_for_projection(job)
    gone = attention.compute_attention_rows(job) + attention.compute_output_input(job)
    width = job.query_width + attention.count_gate(job) + 2 * job.own_kv_width
    gradients = job.dtype_bytes * width * job.local_tokens
    return attention.compute_attention_saved(job) - gone + gradients + compute_beside(job, kind)
