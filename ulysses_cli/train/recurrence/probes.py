"""Small packed cases of convolutions and recurrences, with the widths of a model's layers, for choosing kernels."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from ulysses_cli.plan.models.layers import DeltaNetMixer, KimiDeltaMixer, Mamba2Mixer
from ulysses_cli.train.attention.documents import make_documents
from ulysses_cli.train.processes.sequence_axis import SequenceAxis
from ulysses_cli.train.recurrence.convolution import convolve
from ulysses_cli.train.recurrence.kernels import PROBE_LENGTHS, Kernel, pick_function
from ulysses_cli.train.recurrence.rules import apply_delta_rule, apply_scan

HEADS, GROUPS, CHANNELS = 4, 2, 64
Probe = Callable[[Kernel, torch.dtype], Sequence[Tensor]]
RecurrentMixer = DeltaNetMixer | KimiDeltaMixer | Mamba2Mixer


class _Inputs:
    """Draws the same tensors in any dtype."""

    def __init__(self, device: torch.device, dtype: torch.dtype) -> None:
        self.generator, self.device, self.dtype = torch.Generator().manual_seed(0), device, dtype
        self.leaves: list[Tensor] = []

    def draw(self, *shape: int, dtype: torch.dtype | None = None) -> Tensor:
        drawn = torch.randn(*shape, generator=self.generator).to(self.dtype)  # values that `dtype` can hold
        leaf = drawn.to(self.device, dtype or self.dtype).requires_grad_()
        self.leaves.append(leaf)
        return leaf

    def finish(self, out: Tensor) -> list[Tensor]:
        """The result, then all gradients."""
        factors = torch.randn(out.shape, generator=self.generator).to(out.device, out.dtype)
        return [out.detach(), *torch.autograd.grad(out, self.leaves, factors)]


def make_convolution_probe(
    original: Callable[..., Tensor], taps: int, activation: str | None, device: torch.device
) -> Probe:
    documents, alone = make_documents(PROBE_LENGTHS, device), SequenceAxis(None, 1, 0)

    def run(kernel: Kernel, dtype: torch.dtype) -> list[Tensor]:
        inputs = _Inputs(device, dtype)
        hidden = inputs.draw(1, documents.num_tokens, CHANNELS)
        weight, bias = inputs.draw(CHANNELS, taps), inputs.draw(CHANNELS)
        function = pick_function(original, kernel)
        out = convolve(function, hidden.mT, weight, bias, documents, alone, activation=activation)
        return inputs.finish(out.mT)

    return run


def make_rule_probe(original: Callable[..., Any], mixer: RecurrentMixer, device: torch.device) -> Probe:
    documents, alone = make_documents(PROBE_LENGTHS, device), SequenceAxis(None, 1, 0)
    tokens = documents.num_tokens

    def run_scan(mixer: Mamba2Mixer, kernel: Kernel, inputs: _Inputs) -> Tensor:
        of_heads = {
            "A": -inputs.draw(HEADS, dtype=torch.float32).exp(), "D": inputs.draw(HEADS), "dt_bias": inputs.draw(HEADS),
        }  # fmt: skip
        x, dt = inputs.draw(1, tokens, HEADS, mixer.head_dim), inputs.draw(1, tokens, HEADS)
        b, c = (inputs.draw(1, tokens, GROUPS, mixer.state_dim) for _ in range(2))
        options = {"chunk_size": mixer.chunk_tokens, "dt_softplus": True}
        return apply_scan(original, x, dt, b, c, of_heads, documents, alone, options, kernel)

    def run_delta(mixer: DeltaNetMixer | KimiDeltaMixer, kernel: Kernel, inputs: _Inputs) -> Tensor:
        has_channels = isinstance(mixer, KimiDeltaMixer)
        key_dim, value_dim = (
            (mixer.head_dim, mixer.head_dim)
            if isinstance(mixer, KimiDeltaMixer)
            else (mixer.key_head_dim, mixer.value_head_dim)
        )
        groups = HEADS if has_channels else GROUPS
        q, k = (inputs.draw(1, tokens, groups, key_dim) for _ in range(2))
        v, beta = inputs.draw(1, tokens, HEADS, value_dim), inputs.draw(1, tokens, HEADS).sigmoid()
        decay = inputs.draw(1, tokens, HEADS, *([key_dim] if has_channels else []), dtype=torch.float32)
        g = -torch.nn.functional.softplus(decay - 2)  # slow enough that a state outlives a document
        options = {"use_qk_l2norm_in_kernel": True}
        return apply_delta_rule(original, q, k, v, g, beta, documents, alone, options, kernel)

    def run(kernel: Kernel, dtype: torch.dtype) -> list[Tensor]:
        inputs = _Inputs(device, dtype)
        out = run_scan(mixer, kernel, inputs) if isinstance(mixer, Mamba2Mixer) else run_delta(mixer, kernel, inputs)
        return inputs.finish(out)

    return run
