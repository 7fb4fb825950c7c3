"""What each attention back end supports: one table, read before launch by the rules and on the rank by the kernels.

A back end that does not support a model is refused, with the names of those that do; none may be only approximate.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

from ulysses_cli.plan.models.layers import AttentionMixer
from ulysses_cli.plan.models.shape import ModelShape
from ulysses_cli.plan.recipe.recipe import AttentionName
from ulysses_cli.plan.rows.indexing import CallSize, RowSizes, find_overrun, size_call

Device = Literal["cuda", "cpu"]
Capability = tuple[int, int]  # a GPU's compute capability, such as (9, 0) of an H100


@dataclass(frozen=True)
class Need:
    """What a model needs of attention. `call`: the largest call of a rank, where it is known."""

    head_dim: int
    has_window: bool = False
    has_softcap: bool = False
    has_sinks: bool = False
    dtype: Literal["bfloat16", "float32"] = "bfloat16"
    has_more_keys: bool = False  # queries are the last of more keys, as on a ring
    call: CallSize | None = None


def list_needs(
    shape: ModelShape,
    dtype: Literal["bfloat16", "float32"],
    *,
    has_more_keys: bool = False,
    sizes: RowSizes | None = None,
) -> dict[Need, tuple[AttentionMixer, ...]]:
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
            has_more_keys=has_more_keys,
            call=size_call(mixers[0], shape, sizes) if mixers and sizes is not None else None,
        ): tuple(mixers)
        for width, mixers in (by_width or {shape.head_dim: []}).items()
    }


@dataclass(frozen=True)
class BackEnd:
    """What one back end supports. `head_dim_multiple` and `max_head_dim` bound its head sizes, `lowest` and `highest`
    the compute capability of NVIDIA's GPUs. `speed_class`: auto tries a class only where none of a lower number is
    exact, and times those of one class. It is 0 on the generations of GPUs for which a kernel was `made_for`."""

    name: str
    doc: str
    devices: tuple[Device, ...] = ("cuda",)
    lowest: Capability | None = (8, 0)
    highest: Capability | None = None
    made_for: tuple[int, ...] = ()
    speed_class: int = 1
    max_head_dim: int = 256
    head_dim_multiple: int = 8
    has_window: bool = True
    has_softcap: bool = True
    has_sinks: bool = True
    takes_float32: bool = False
    takes_more_keys: bool = True

    def find_obstacle(self, need: Need, device: Device, capability: Capability | None = None) -> str:
        """Why this back end cannot compute it, or ''. `capability`: None where it is not known, and for AMD's GPUs."""
        if device not in self.devices:
            return f"runs on {' and '.join(self.devices)} only"
        if device == "cuda" and capability is not None and not self.serves(capability):
            return f"needs {self.describe_capabilities()}, this GPU has {format_capability(capability)}"
        if need.call is not None and (overrun := find_overrun(self.name, need.call)):
            return overrun
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
        if need.has_more_keys and not self.takes_more_keys:
            return "takes as many keys as queries, and the ranks of a ring (parallel.ring_size) have more keys"
        return ""

    def serves(self, capability: Capability) -> bool:
        is_too_old = self.lowest is not None and capability < self.lowest
        is_too_new = self.highest is not None and capability > self.highest
        return not (is_too_old or is_too_new)

    def describe_capabilities(self) -> str:
        """The compute capabilities that it serves, in words."""
        if self.lowest is None:
            return "any compute capability"
        if self.highest is None:
            return f"compute capability {format_capability(self.lowest)} or higher"
        if self.highest == self.lowest:
            return f"compute capability {format_capability(self.lowest)}"
        return f"compute capability {format_capability(self.lowest)} to {format_capability(self.highest)}"

    def find_speed_class(self, capability: Capability | None) -> int:
        return 0 if capability is not None and capability[0] in self.made_for else self.speed_class


def format_capability(capability: Capability) -> str:
    return f"{capability[0]}.{capability[1]}"


FLASH_CAPABILITY: Capability = (8, 0)  # below it no flash kernel computes in bfloat16
# cuDNN builds a plan for each length of a document, 55 to 400 ms each, and keeps it until the process ends
# (https://github.com/pytorch/pytorch/issues/190388).
MAX_CUDNN_LENGTHS = 8

# Sinks need no kernel of their own: they only change the log-sum-exp. Every back end that returns it supports them
# exactly, forward and backward (train/attention/kernels/operators.py). FlashAttention 3 itself checks only that the
# capability is 8 or more, and ends the process where a kernel is missing; its backward exists for Hopper alone.
_BACK_ENDS = (
    BackEnd(
        "flash_attention_4",
        "FlashAttention-4, Hopper and Blackwell",
        lowest=(9, 0),
        highest=(11, 9),
        made_for=(10, 11),
        has_softcap=False,
    ),
    BackEnd("flash_attention_3", "FlashAttention-3, Hopper", lowest=(9, 0), highest=(9, 0), made_for=(9,)),
    BackEnd("flash_attention_2", "FlashAttention-2, Ampere and newer", made_for=(8,)),
    BackEnd("torch_varlen", "torch's own variable-length flash attention", has_softcap=False),
    BackEnd(
        "cudnn",
        "cuDNN through torch, one document at a time",
        max_head_dim=128,
        has_window=False,
        has_softcap=False,
        takes_more_keys=False,  # torch passes a causal mask from the top left: pytorch#193630
    ),
    BackEnd("flex_attention", "torch's compiled flex attention", speed_class=2, max_head_dim=512, head_dim_multiple=16),
    BackEnd(
        "sdpa",
        "torch's own flash attention where it serves, otherwise plain torch in blocks; serves everything",
        devices=("cuda", "cpu"),
        lowest=None,
        speed_class=3,
        max_head_dim=4096,
        head_dim_multiple=1,
        takes_float32=True,
    ),
)
BACK_ENDS: dict[str, BackEnd] = {back_end.name: back_end for back_end in _BACK_ENDS}
assert set(BACK_ENDS) == set(get_args(AttentionName)) - {"auto"}


def list_able(need: Need, device: Device, capability: Capability | None = None) -> list[str]:
    """The back ends that support it, in the order of the table."""
    return [name for name, back_end in BACK_ENDS.items() if not back_end.find_obstacle(need, device, capability)]
