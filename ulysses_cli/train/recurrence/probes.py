"""Small packed cases of convolutions and recurrences, with the widths of a model's layers: for choosing kernels, and
for timing torch's code where there is none.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from ulysses_cli.plan.models.layers import ConvolutionMixer, DeltaNetMixer, KimiDeltaMixer, Mamba2Mixer
from ulysses_cli.train.attention.documents import make_documents, walk_bounds
from ulysses_cli.train.processes.groups import SequenceAxis
from ulysses_cli.train.recurrence.convolution import convolve
from ulysses_cli.train.recurrence.interface import CONVOLUTION
from ulysses_cli.train.recurrence.kernels import MILLION, PROBE_LENGTHS, Kernel, pick_function
from ulysses_cli.train.recurrence.rules import apply_delta_rule, apply_scan

HEADS, GROUPS, CHANNELS = 4, 2, 64
TIMED_TOKENS = 2048
RecurrentMixer = DeltaNetMixer | KimiDeltaMixer | Mamba2Mixer


class DrawnInputs:
    """Draws the same tensors in any dtype. `disturbed`: tokens at which those of a row, and the factors of the result's
    gradient, have other values."""

    def __init__(self, device: torch.device, dtype: torch.dtype, disturbed: slice = slice(0)) -> None:
        self.generator, self.device, self.dtype = torch.Generator().manual_seed(0), device, dtype
        self.disturbed, self.leaves = disturbed, list[Tensor]()

    def draw(self, *shape: int, dtype: torch.dtype | None = None) -> Tensor:
        leaf = self._draw(shape).to(self.device, dtype or self.dtype).requires_grad_()
        self.leaves.append(leaf)
        return leaf

    def _draw(self, shape: Sequence[int]) -> Tensor:
        drawn = torch.randn(*shape, generator=self.generator)
        if len(shape) > 2:  # [1, tokens, ...]
            drawn[:, self.disturbed] += 1
        return drawn.to(self.dtype)  # values that `dtype` can hold

    def finish(self, out: Tensor) -> list[Tensor]:
        """The result, then all gradients."""
        factors = self._draw(out.shape).to(out.device, out.dtype)
        return [out.detach(), *torch.autograd.grad(out, self.leaves, factors, retain_graph=True)]


class PackedProbe(ABC):
    """Runs one function of a layer, forward and backward, on documents in one row. Tensors of tokens are
    [1, tokens, ...]."""

    def __init__(self, device: torch.device, lengths: Sequence[int] = PROBE_LENGTHS) -> None:
        self.device, self.documents = device, make_documents(lengths, device)
        self.alone, self.num_tokens = SequenceAxis(None, 1, 0), sum(lengths)

    def run(self, kernel: Kernel, dtype: torch.dtype, disturbed: slice = slice(0)) -> list[Tensor]:
        """Returns the result and all gradients."""
        inputs = DrawnInputs(self.device, dtype, disturbed)
        return inputs.finish(self.start(kernel, inputs)())

    @abstractmethod
    def start(self, kernel: Kernel, inputs: DrawnInputs) -> Callable[[], Tensor]:
        """Draws the inputs and returns what computes the result."""

    def find_leak(self, kernel: Kernel, dtype: torch.dtype) -> str:
        """Disturbs one document after the other. Says which result or gradient of another one changes in any bit, or
        ''. A kernel whose sums differ from run to run cannot be told from one that leaks."""
        before = self.run(kernel, dtype)
        for number, (begin, end) in enumerate(walk_bounds(self.documents.lengths)):
            for index, (own, other) in enumerate(zip(before, self.run(kernel, dtype, slice(begin, end)), strict=True)):
                if own.dim() < 3 or own.size(1) != self.num_tokens:
                    continue  # of a parameter, to which all documents add
                same = [torch.equal(own[:, part], other[:, part]) for part in (slice(begin), slice(end, None))]
                if not all(same):
                    what = "result" if index == 0 else "gradient"
                    return f"the {what} of one document changes with document {number}"
        return ""

    def time(self, dtype: torch.dtype, num_forwards: int) -> float:
        """Seconds per token of torch's code with as many forwards and one backward: the second of two runs."""
        inputs = DrawnInputs(self.device, dtype)
        compute = self.start("torch", inputs)
        for _ in range(2):
            self._wait()
            started = time.perf_counter()
            for _ in range(num_forwards):
                out = compute()
            torch.autograd.grad(out, inputs.leaves, torch.ones_like(out))
            self._wait()
            seconds = time.perf_counter() - started
        return seconds / self.num_tokens

    def _wait(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)


class ConvolutionProbe(PackedProbe):
    def __init__(
        self,
        original: Callable[..., Tensor],
        taps: int,
        activation: str | None,
        device: torch.device,
        lengths: Sequence[int] = PROBE_LENGTHS,
        channels: int = CHANNELS,
    ) -> None:
        super().__init__(device, lengths)
        self.original = original
        self.taps = taps
        self.activation = activation
        self.channels = channels

    def start(self, kernel: Kernel, inputs: DrawnInputs) -> Callable[[], Tensor]:
        hidden = inputs.draw(1, self.num_tokens, self.channels)
        weight, bias = inputs.draw(self.channels, self.taps), inputs.draw(self.channels)
        function = pick_function(self.original, kernel)
        place = (self.documents, self.alone)
        return lambda: convolve(function, hidden.mT, weight, bias, *place, activation=self.activation).mT


class RuleProbe(PackedProbe):
    def __init__(
        self,
        original: Callable[..., Any],
        mixer: RecurrentMixer,
        device: torch.device,
        lengths: Sequence[int] = PROBE_LENGTHS,
        heads: tuple[int, int] = (HEADS, GROUPS),
    ) -> None:
        super().__init__(device, lengths)
        self.original, self.mixer = original, mixer
        self.num_heads, self.num_groups = heads

    def start(self, kernel: Kernel, inputs: DrawnInputs) -> Callable[[], Tensor]:
        if isinstance(self.mixer, Mamba2Mixer):
            return self._start_scan(self.mixer, kernel, inputs)
        return self._start_delta(self.mixer, kernel, inputs)

    def _start_scan(self, mixer: Mamba2Mixer, kernel: Kernel, inputs: DrawnInputs) -> Callable[[], Tensor]:
        tokens, heads = self.num_tokens, self.num_heads
        logs, skip, bias = inputs.draw(heads, dtype=torch.float32), inputs.draw(heads), inputs.draw(heads)
        x, dt = inputs.draw(1, tokens, heads, mixer.head_dim), inputs.draw(1, tokens, heads)
        b, c = (inputs.draw(1, tokens, self.num_groups, mixer.state_dim) for _ in range(2))
        options = {"chunk_size": mixer.chunk_tokens, "dt_softplus": True}
        place = (self.documents, self.alone)

        def compute() -> Tensor:
            of_heads = {"A": -logs.exp(), "D": skip, "dt_bias": bias}
            return apply_scan(self.original, x, dt, b, c, of_heads, *place, options, kernel)

        return compute

    def _start_delta(
        self, mixer: DeltaNetMixer | KimiDeltaMixer, kernel: Kernel, inputs: DrawnInputs
    ) -> Callable[[], Tensor]:
        has_channels, tokens, heads = isinstance(mixer, KimiDeltaMixer), self.num_tokens, self.num_heads
        key_dim, value_dim = (
            (mixer.head_dim, mixer.head_dim)
            if isinstance(mixer, KimiDeltaMixer)
            else (mixer.key_head_dim, mixer.value_head_dim)
        )
        takes_groups = not has_channels and takes_key_groups(pick_function(self.original, "torch"))
        key_heads = self.num_groups if takes_groups else heads
        q, k = (inputs.draw(1, tokens, key_heads, key_dim) for _ in range(2))
        v, strength = inputs.draw(1, tokens, heads, value_dim), inputs.draw(1, tokens, heads)
        decay = inputs.draw(1, tokens, heads, *([key_dim] if has_channels else []), dtype=torch.float32)
        place = (self.documents, self.alone)

        def compute() -> Tensor:
            g = -torch.nn.functional.softplus(decay - 2)  # slow enough that a state outlives a document
            options = {"use_qk_l2norm_in_kernel": True}
            return apply_delta_rule(self.original, q, k, v, g, strength.sigmoid(), *place, options, kernel)

        return compute


def make_probe(
    name: str, function: Callable[..., Any], mixer: RecurrentMixer | ConvolutionMixer, device: torch.device
) -> PackedProbe:
    """Of transformers' function `name`, with the sizes of the layers that call it."""
    if name != CONVOLUTION and not isinstance(mixer, ConvolutionMixer):
        return RuleProbe(function, mixer, device)
    activation = None if isinstance(mixer, ConvolutionMixer) else "silu"
    return ConvolutionProbe(function, mixer.conv_tokens, activation, device)


def takes_key_groups(delta_rule: Callable[..., Any]) -> bool:
    """Whether transformers' torch code takes fewer heads of keys than of values. Releases in which it refuses them have
    layers that repeat keys before they call it."""
    keys, values = torch.ones(1, 1, GROUPS, 8), torch.ones(1, 1, HEADS, 8)
    of_heads = torch.zeros(1, 1, HEADS)
    try:
        delta_rule(keys, keys, values, g=of_heads, beta=of_heads)
    except Exception:  # noqa: BLE001 - torch code says so in its own way
        return False
    return True


def time_convolution(
    original: Callable[..., Tensor],
    mixer: RecurrentMixer | ConvolutionMixer,
    device: torch.device,
    dtype: torch.dtype,
    num_forwards: int,
) -> float:
    """Seconds of torch's code per million tokens of a rank."""
    probe = ConvolutionProbe(original, mixer.conv_tokens, None, device, [TIMED_TOKENS], mixer.conv_channels)
    return MILLION * probe.time(dtype, num_forwards)


def time_rule(
    original: Callable[..., Any],
    mixer: RecurrentMixer,
    num_ranks: int,
    device: torch.device,
    dtype: torch.dtype,
    num_forwards: int,
) -> float:
    """Seconds of torch's code per million tokens of a row, of which a rank has some of the heads."""
    num_heads = -(-mixer.num_heads // num_ranks)
    wanted = {DeltaNetMixer: "num_key_heads", Mamba2Mixer: "num_groups", KimiDeltaMixer: "num_heads"}[type(mixer)]
    num_groups = max(1, getattr(mixer, wanted) // num_ranks)
    probe = RuleProbe(original, mixer, device, [TIMED_TOKENS], (num_heads, num_groups))
    return MILLION * probe.time(dtype, num_forwards)
