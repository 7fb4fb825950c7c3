"""Chooses how recurrences and convolutions run: by kernels of installed packages (flash-linear-attention, mamba-ssm,
causal-conv1d) where these equal transformers' own torch code on packed documents, else by that torch code, with what it
costs. Both run on small packed cases with the widths of a model's layers."""

from __future__ import annotations

import importlib
import inspect
import traceback
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ulysses_cli.plan.models.layers import ConvolutionMixer, DeltaNetMixer, KimiDeltaMixer, Mamba2Mixer
from ulysses_cli.train.attention.documents import make_documents, walk_bounds
from ulysses_cli.train.choosing import (
    Candidate,
    Choice,
    Outcome,
    describe_error,
    measure_error,
    measure_seconds,
    try_candidates,
    try_in_child,
)
from ulysses_cli.train.processes.groups import SequenceAxis
from ulysses_cli.train.recurrence.convolution import convolve
from ulysses_cli.train.recurrence.interface import CONVOLUTION
from ulysses_cli.train.recurrence.rules import Kernel, apply_delta_rule, apply_scan, pick_function

# Largest relative error of any token's vector against float32, as for attention: bfloat16 keeps 8 bits. torch's own
# code in bfloat16 reaches 0.03; a lost token or a bound that is one token off has 1 and more. A state that is carried
# into the next document may have decayed: see PackedProbe.find_leak.
PROBE_TOLERANCE = {torch.bfloat16: 0.1, torch.float32: 1e-3}
PROBE_LENGTHS = (300, 1, 64, 33)  # longer than a chunk of any kernel, one token, no multiple of a chunk
TIMED_TOKENS = 2048
MILLION = 1e6
POSITIONAL = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
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


class Sizes(NamedTuple):
    heads: int = 4
    groups: int = 2
    channels: int = 64


ANY_SIZES = Sizes()


class PackedProbe:
    """Runs transformers' function `name`, forward and backward, on documents in one row, with the widths of the layers
    that call it. Tensors of tokens are [1, tokens, ...]."""

    def __init__(
        self,
        name: str,
        function: Callable[..., Any],
        mixer: RecurrentMixer | ConvolutionMixer,
        device: torch.device,
        lengths: Sequence[int] = PROBE_LENGTHS,
        sizes: Sizes = ANY_SIZES,
    ) -> None:
        self.name, self.function = name, function
        self.mixer, self.sizes = mixer, sizes
        self.device, self.lengths, self.num_tokens = device, lengths, sum(lengths)
        self.place = make_documents(lengths, device), SequenceAxis(None, 1, 0)

    def __reduce__(self) -> Any:
        """A child process finds the function by its name."""
        rest = (self.mixer, self.device, self.lengths, self.sizes)
        return _import_probe, (self.function.__module__, self.name, *rest)

    def run(self, kernel: Kernel, dtype: torch.dtype, disturbed: slice = slice(0)) -> list[Tensor]:
        """Returns the result and all gradients."""
        inputs = DrawnInputs(self.device, dtype, disturbed)
        return inputs.finish(self.start(kernel, inputs)())

    def start(self, kernel: Kernel, inputs: DrawnInputs) -> Callable[[], Tensor]:
        """Draws the inputs and returns what computes the result."""
        if self.name == CONVOLUTION or isinstance(self.mixer, ConvolutionMixer):
            return self._start_convolution(kernel, inputs)
        if isinstance(self.mixer, Mamba2Mixer):
            return self._start_scan(self.mixer, kernel, inputs)
        return self._start_delta(self.mixer, kernel, inputs)

    def find_leak(self, kernel: Kernel, dtype: torch.dtype) -> str:
        """Disturbs one document after the other. Says which result or gradient of another one changes in any bit, or
        ''. A kernel whose sums differ from run to run cannot be told from one that leaks."""
        before = self.run(kernel, dtype)
        for number, (begin, end) in enumerate(walk_bounds(self.lengths)):
            for index, (own, other) in enumerate(zip(before, self.run(kernel, dtype, slice(begin, end)), strict=True)):
                if own.dim() < 3 or own.size(1) != self.num_tokens:
                    continue  # of a parameter, to which all documents add
                same = [torch.equal(own[:, part], other[:, part]) for part in (slice(begin), slice(end, None))]
                if not all(same):
                    what = "result" if index == 0 else "gradient"
                    return f"the {what} of one document changes with document {number}"
        return ""

    def time(self, dtype: torch.dtype, num_forwards: int) -> float:
        """Seconds of torch's code per million tokens, with as many forwards and one backward."""
        inputs = DrawnInputs(self.device, dtype)
        compute = self.start("torch", inputs)

        def run() -> None:
            for _ in range(num_forwards):
                out = compute()
            torch.autograd.grad(out, inputs.leaves, torch.ones_like(out))

        return measure_seconds(run, self.device, 1) * MILLION / self.num_tokens

    def _start_convolution(self, kernel: Kernel, inputs: DrawnInputs) -> Callable[[], Tensor]:
        num_channels = self.sizes.channels
        hidden = inputs.draw(1, self.num_tokens, num_channels)
        weight, bias = inputs.draw(num_channels, self.mixer.conv_tokens), inputs.draw(num_channels)
        function = pick_function(self.function, kernel)
        activation = None if isinstance(self.mixer, ConvolutionMixer) else "silu"
        return lambda: convolve(function, hidden.mT, weight, bias, *self.place, activation=activation).mT

    def _start_scan(self, mixer: Mamba2Mixer, kernel: Kernel, inputs: DrawnInputs) -> Callable[[], Tensor]:
        tokens, heads = self.num_tokens, self.sizes.heads
        logs, skip, bias = inputs.draw(heads, dtype=torch.float32), inputs.draw(heads), inputs.draw(heads)
        x, dt = inputs.draw(1, tokens, heads, mixer.head_dim), inputs.draw(1, tokens, heads)
        b, c = (inputs.draw(1, tokens, self.sizes.groups, mixer.state_dim) for _ in range(2))
        options = {"chunk_size": mixer.chunk_tokens, "dt_softplus": True}

        def compute() -> Tensor:
            of_heads = {"A": -logs.exp(), "D": skip, "dt_bias": bias}
            return apply_scan(self.function, x, dt, b, c, of_heads, *self.place, options, kernel)

        return compute

    def _start_delta(
        self, mixer: DeltaNetMixer | KimiDeltaMixer, kernel: Kernel, inputs: DrawnInputs
    ) -> Callable[[], Tensor]:
        tokens, key_heads, (heads, groups, _) = self.num_tokens, self.sizes.heads, self.sizes
        decay_shape: tuple[int, ...] = (1, tokens, heads)
        if isinstance(mixer, KimiDeltaMixer):
            key_dim = value_dim = mixer.head_dim
            decay_shape = (*decay_shape, key_dim)
        else:
            key_dim, value_dim = mixer.key_head_dim, mixer.value_head_dim
            key_heads = groups if takes_key_groups(pick_function(self.function, "torch")) else heads
        q, k = (inputs.draw(1, tokens, key_heads, key_dim) for _ in range(2))
        v, strength = inputs.draw(1, tokens, heads, value_dim), inputs.draw(1, tokens, heads)
        decay = inputs.draw(*decay_shape, dtype=torch.float32)

        def compute() -> Tensor:
            g = -torch.nn.functional.softplus(decay - 2)  # slow enough that a state outlives a document
            options = {"use_qk_l2norm_in_kernel": True}
            return apply_delta_rule(self.function, q, k, v, g, strength.sigmoid(), *self.place, options, kernel)

        return compute


def _import_probe(module: str, name: str, *rest: Any) -> PackedProbe:
    return PackedProbe(name, getattr(importlib.import_module(module), name), *rest)


def takes_key_groups(delta_rule: Callable[..., Any]) -> bool:
    """Whether transformers' torch code takes fewer heads of keys than of values. Releases in which it refuses them have
    layers that repeat keys before they call it."""
    keys, values, of_heads = torch.ones(1, 1, 2, 8), torch.ones(1, 1, 4, 8), torch.zeros(1, 1, 4)
    try:
        delta_rule(keys, keys, values, g=of_heads, beta=of_heads)
    except Exception:  # noqa: BLE001 - torch code says so in its own way
        return False
    return True


def find_missing(original: Callable[..., Any]) -> str:
    """Why `original` is transformers' torch code, or ''. Its wrapper is called without tensors, to see what fails:
    releases that refuse documents' bounds without a package do so first; others reach their torch code."""
    torch_code = getattr(original, "__wrapped__", None)
    if torch_code is None:
        return "transformers has no kernel for it"
    parameters = inspect.signature(torch_code).parameters.values()
    count = sum(parameter.default is parameter.empty and parameter.kind in POSITIONAL for parameter in parameters)
    try:
        original(*[None] * count, cu_seqlens=torch.zeros(2))
    except ValueError as error:
        return str(error)
    except Exception as error:  # noqa: BLE001 - torch code or a package's function, called without tensors
        codes = [frame.f_code for frame, _ in traceback.walk_tb(error.__traceback__)]
        return "transformers found no package for it" if torch_code.__code__ in codes else ""
    return ""


def choose_recurrence_kernel(
    probe: PackedProbe,
    dtype: torch.dtype,
    explain_cost: Callable[[], str] = str,
    run_trial: Callable[[Callable[[], Outcome]], Outcome] = try_in_child,
) -> Choice[Kernel]:
    """Returns the first kernel of a package that has no obstacle, else torch. `explain_cost` says what torch's code
    costs. `run_trial`: an illegal access would leave an error in the GPU's context that every later call of this
    process would meet."""
    kernels: tuple[Kernel, ...] = ("by document",) if probe.name == CONVOLUTION else ("packed", "by document")
    trials = {kernel: partial(run_trial, partial(try_kernel, probe, kernel, dtype)) for kernel in kernels}
    tally = try_candidates(Candidate(kernel, trials[kernel], speed_class=at) for at, kernel in enumerate(kernels))
    if best := tally.find_best():
        return Choice(best, "; ".join(["equals torch's code on packed documents", *tally.notes]))
    return Choice("torch", "; ".join(filter(None, [explain_cost(), *tally.notes])))


def try_kernel(probe: PackedProbe, kernel: Kernel, dtype: torch.dtype) -> Outcome:
    """The results of a package's kernel must equal those of torch's code in float32. One that takes packed documents
    must also keep each document's bits whatever the others hold."""
    expected = probe.run("torch", torch.float32)
    try:
        results = probe.run(kernel, dtype)
        leak = probe.find_leak(kernel, dtype) if kernel == "packed" else ""
    except Exception as error:  # noqa: BLE001 - a foreign package may raise anything
        return Outcome(f"failed its probe: {describe_error(error)}")
    for result, right in zip(results, expected, strict=True):
        error_share = measure_error(result, right)
        if not error_share <= PROBE_TOLERANCE[dtype]:  # or not a number
            return Outcome(f"differs from torch's code by {error_share:.2g} on packed documents")
    return Outcome(f"leaks: {leak}" if leak else "")


def time_torch(probe: PackedProbe, num_ranks: int, dtype: torch.dtype, num_forwards: int) -> float:
    """Seconds of torch's code per million tokens: of a rank for a convolution; for a rule those of a row, of which a
    rank has some of the heads."""
    mixer = probe.mixer
    if isinstance(mixer, ConvolutionMixer):
        sizes = Sizes(channels=mixer.conv_channels)
    else:
        groups = {DeltaNetMixer: "num_key_heads", Mamba2Mixer: "num_groups", KimiDeltaMixer: "num_heads"}[type(mixer)]
        num_groups = max(1, getattr(mixer, groups) // num_ranks)
        sizes = Sizes(-(-mixer.num_heads // num_ranks), num_groups, mixer.conv_channels)
    timed = PackedProbe(probe.name, probe.function, mixer, probe.device, [TIMED_TOKENS], sizes)
    return timed.time(dtype, num_forwards)


def describe_cost(seconds: float, max_length: int) -> str:
    """`seconds`: of one rank, per million tokens of a row. `max_length`: of a row of this run."""
    return (
        f"at least {seconds:,.1f} s in a step for each million tokens of a row, {seconds * max_length / MILLION:,.2f} "
        f"s for each row of {max_length:,} tokens of this run, and float32 copies of whole rows; "
        "pip install 'ulysses-cli[recurrent]'"
    )
