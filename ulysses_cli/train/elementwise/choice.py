"""Chooses how norms, rotary embedding and gated activations run: on a GPU by measurement against transformers' own
code, elsewhere by what is known of the device. A way that fails or differs is passed over.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, get_args

import torch
from torch import Tensor, nn
from torch.nn import functional

from ulysses_cli.plan.nouns import format_count
from ulysses_cli.train.elementwise import formulas
from ulysses_cli.train.elementwise.formulas import NormKind
from ulysses_cli.train.elementwise.functions import Gate, Normalize, Rotate
from ulysses_cli.train.elementwise.interface import Part, Ways
from ulysses_cli.train.elementwise.operators import Way

NORM_KINDS: tuple[NormKind, ...] = get_args(NormKind)
# torch's RMSNorm scales by the weight alone and knows no offset.
CANDIDATES: dict[Part, tuple[Way, ...]] = {
    "rounded": ("torch", "compiled"), "precise": ("torch", "compiled"), "offset": ("compiled",),
    "rotary": ("compiled",), "gate": ("compiled",),
}  # fmt: skip
# By torch's sources: its RMSNorm has a kernel each way on a GPU; a compiled elementwise formula is one kernel.
GPU_WAYS: Ways = {part: candidates[0] for part, candidates in CANDIDATES.items()}
# Measured on a CPU: a norm's backward in blocks takes 0.6 of autograd's time. A rotation in blocks saves 2 % of a step
# in float32 and nothing in bfloat16, a gate nothing.
CPU_WAYS: Ways = {part: "transformers" if part == "gate" else "blocks" for part in CANDIDATES}
NO_WAYS: Ways = dict.fromkeys(CANDIDATES, "transformers")
TRIAL_TOKENS, NUM_TIMED = 4096, 10
TOLERANCE = {torch.bfloat16: 0.02, torch.float32: 1e-4}  # of the largest value; bfloat16 keeps 8 bits
EPS, HEADS = 1e-5, 8

Inputs = Sequence[Tensor]
Run = Callable[..., Tensor]


@dataclass(frozen=True)
class ElementwiseChoice:
    ways: Ways
    reason: str


@dataclass(frozen=True)
class Widths:
    """Of the model's rows, heads and gated MLPs."""

    hidden: int
    head_dim: int
    inner: int


def choose_ways(
    device: torch.device, dtype: torch.dtype, widths: Widths, norms: Collection[NormKind]
) -> ElementwiseChoice:
    """Tries all candidates where there is a GPU. `norms`: the formulas of the model's norms."""
    if device.type == "cpu":
        rotary: Way = CPU_WAYS["rotary"] if dtype == torch.float32 else "transformers"
        return ElementwiseChoice({**CPU_WAYS, "rotary": rotary}, "in blocks that fit a processor's cache")
    if device.type != "cuda":
        return ElementwiseChoice(GPU_WAYS, "as on a GPU")
    ways: dict[Part, Way] = dict(NO_WAYS)
    reasons = []
    for part, candidates in CANDIDATES.items():
        if part not in NORM_KINDS or part in norms:
            ways[part], reason = _choose_part(candidates, _Trial(part, device, dtype, widths))
            reasons.append(f"{f'{part} norm' if part in NORM_KINDS else part} by {ways[part]} ({reason})")
    return ElementwiseChoice(ways, ", ".join(reasons))


def _choose_part(candidates: Sequence[Way], trial: _Trial) -> tuple[Way, str]:
    seconds: dict[Way, float] = {"transformers": trial.measure("transformers")}
    notes = []
    for way in candidates:
        try:
            error = trial.compare(way)
            if math.isnan(error) or error > TOLERANCE[trial.dtype]:
                notes.append(f"{way} differs by {error:.2g}")
                continue
            seconds[way] = trial.measure(way)
        except Exception as error:  # noqa: BLE001 - a compiler may be missing, or may raise anything
            lines = str(error).strip().splitlines() or [type(error).__name__]
            notes.append(f"{way} failed: {lines[0][:120]}")
    times = [f"{way} {1e3 * value:.2f} ms" for way, value in sorted(seconds.items(), key=lambda each: each[1])]
    return min(seconds, key=lambda way: seconds[way]), "; ".join([", ".join(times), *notes])


class _Trial:
    """One part on random rows of the model's widths."""

    def __init__(
        self, part: Part, device: torch.device, dtype: torch.dtype, widths: Widths, num_tokens: int = TRIAL_TOKENS
    ) -> None:
        self.part, self.device, self.dtype = part, device, dtype
        generator = torch.Generator(device).manual_seed(0)

        def draw(*shape: int) -> Tensor:
            return torch.randn(*shape, generator=generator, device=device, dtype=dtype)

        if part in NORM_KINDS:
            self.inputs = [draw(1, num_tokens, widths.hidden), 1 + 0.1 * draw(widths.hidden)]
        elif part == "rotary":
            rows = draw(1, num_tokens, HEADS, widths.head_dim).transpose(1, 2)
            angles = draw(1, 1, num_tokens, widths.head_dim // 2).repeat(1, 1, 1, 2)
            self.inputs = [rows, angles.cos(), angles.sin()]
        else:
            self.inputs = [draw(1, num_tokens, widths.inner), draw(1, num_tokens, widths.inner)]
        self.dout = draw(*self.inputs[0].shape)

    def run(self, way: str, inputs: Inputs, dout: Tensor) -> list[Tensor]:
        """Forward and backward."""
        leaves = [tensor.detach().requires_grad_() for tensor in inputs]
        out = RUNS[self.part](way, *leaves)
        wanted = leaves[:1] if self.part == "rotary" else leaves
        return [out.detach(), *torch.autograd.grad(out, wanted, dout)]

    def compare(self, way: Way) -> float:
        """The largest difference from transformers' formula in float32, as a share of the largest value."""
        expected = self.run("transformers", [tensor.float() for tensor in self.inputs], self.dout.float())
        results = self.run(way, self.inputs, self.dout)
        return max(
            ((ours.float() - right).abs().max() / right.abs().max()).item()
            for ours, right in zip(results, expected, strict=True)
        )

    def measure(self, way: Way) -> float:
        best = math.inf
        for _ in range(1 + NUM_TIMED):
            torch.cuda.synchronize(self.device)
            start = time.perf_counter()
            self.run(way, self.inputs, self.dout)
            torch.cuda.synchronize(self.device)
            best = min(best, time.perf_counter() - start)
        return best


def _run_norm(kind: NormKind, way: str, hidden: Tensor, weight: Tensor) -> Tensor:
    if way == "transformers":
        return formulas.normalize(hidden, weight, EPS, kind)[0]
    norm = nn.Module()
    norm.weight = nn.Parameter(weight.detach())
    return Normalize.apply(hidden, weight, norm, EPS, kind, way)


def _run_rotary(way: str, rows: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    if way != "transformers":
        return Rotate.apply(rows, cos.detach(), sin.detach(), way)
    first, second = rows.chunk(2, -1)
    return rows * cos.detach() + torch.cat([-second, first], -1) * sin.detach()


def _run_gate(way: str, gates: Tensor, values: Tensor) -> Tensor:
    return functional.silu(gates) * values if way == "transformers" else Gate.apply(gates, values, way)


RUNS: Mapping[Part, Run] = {
    **{kind: partial(_run_norm, kind) for kind in NORM_KINDS}, "rotary": _run_rotary, "gate": _run_gate,
}  # fmt: skip


def describe(choice: ElementwiseChoice, served: Any) -> str:
    """What runs how, for the run's log."""
    counts = {"norm": served.norms, "rotary embedding": served.rotations, "gated MLP": served.gates}
    named = ", ".join(format_count(count, noun) for noun, count in counts.items() if count)
    if not named:
        return "norms, rotary embedding and MLPs are those of transformers"
    return f"in one pass each: {named}: {choice.reason}"
