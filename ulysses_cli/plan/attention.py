"""What each attention back end supports: one table, read before launch by the rules and on the rank by the kernels.

A back end that does not support a model is refused, with the names of those that do; none may be only approximate.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

from ulysses_cli.plan.models.layers import AttentionMixer
from ulysses_cli.plan.models.shape import ModelShape
from ulysses_cli.plan.recipe.recipe import AttentionName

Device = Literal["cuda", "cpu"]


@dataclass(frozen=True)
class Need:
    """What a model needs of attention."""

    head_dim: int
    has_window: bool = False
    has_softcap: bool = False
    has_sinks: bool = False
    dtype: Literal["bfloat16", "float32"] = "bfloat16"


def list_needs(shape: ModelShape, dtype: Literal["bfloat16", "float32"]) -> dict[Need, tuple[AttentionMixer, ...]]:
    """What each kind of attention in a model needs, with its layers. Kinds differ in the width of their heads, where
    values that are narrower than keys count as wide as keys."""
    by_width: dict[int, list[AttentionMixer]] = {}
    for mixer in shape.attentions:
        by_width.setdefault(max(mixer.head_dim, mixer.value_head_dim), []).append(mixer)
    return {
        Need(
            head_dim=width,
            has_window=any(mixer.window_tokens is not None for mixer in mixers),
            has_softcap=shape.attention_softcap is not None,
            has_sinks=any(mixer.has_sinks for mixer in mixers),
            dtype=dtype,
        ): tuple(mixers)
        for width, mixers in (by_width or {shape.head_dim: []}).items()
    }


@dataclass(frozen=True)
class BackEnd:
    """What one back end supports. `head_dim_multiple` and `max_head_dim` bound its head sizes."""

    doc: str
    devices: tuple[Device, ...] = ("cuda",)
    max_head_dim: int = 256
    head_dim_multiple: int = 8
    has_window: bool = True
    has_softcap: bool = True
    has_sinks: bool = True
    takes_float32: bool = False

    def find_obstacle(self, need: Need, device: Device) -> str:
        """Why this back end cannot compute it, or ''."""
        if device not in self.devices:
            return f"runs on {' and '.join(self.devices)} only"
        if need.head_dim > self.max_head_dim:
            return f"takes head_dim up to {self.max_head_dim}, this model has {need.head_dim}"
        if need.head_dim % self.head_dim_multiple:
            return f"takes head_dim in multiples of {self.head_dim_multiple}, this model has {need.head_dim}"
        if need.has_window and not self.has_window:
            return "has no sliding window, which this model uses"
        if need.has_softcap and not self.has_softcap:
            return "has no softcap on attention's logits, which this model uses"
        if need.has_sinks and not self.has_sinks:
            return "has no attention sinks, which this model uses"
        if need.dtype == "float32" and not self.takes_float32:
            return "computes in bfloat16 only, the recipe asks for float32"
        return ""


# Sinks need no kernel of their own: they only change the log-sum-exp. Every back end that returns it supports them
# exactly, forward and backward (train/attention/kernels/operators.py).
BACK_ENDS: dict[str, BackEnd] = {
    "flash_attention_4": BackEnd("FlashAttention-4, Hopper and Blackwell", has_softcap=False),
    "flash_attention_3": BackEnd("FlashAttention-3, Hopper"),
    "flash_attention_2": BackEnd("FlashAttention-2, Ampere and newer"),
    "torch_varlen": BackEnd("torch's own variable-length flash attention", has_softcap=False),
    "cudnn": BackEnd(
        "cuDNN through torch, one document at a time", max_head_dim=128, has_window=False, has_softcap=False
    ),
    "flex_attention": BackEnd("torch's compiled flex attention", max_head_dim=512, head_dim_multiple=16),
    "sdpa": BackEnd(
        "torch's own flash attention where it serves, otherwise plain torch in blocks; serves everything",
        devices=("cuda", "cpu"),
        max_head_dim=4096,
        head_dim_multiple=1,
        takes_float32=True,
    ),
}
assert set(BACK_ENDS) == set(get_args(AttentionName)) - {"auto"}


def list_able(need: Need, device: Device) -> list[str]:
    """The back ends that support it, in the order of the table."""
    return [name for name, back_end in BACK_ENDS.items() if not back_end.find_obstacle(need, device)]
