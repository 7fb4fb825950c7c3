"""Chooses how norms, rotary embedding and gated activations run: on a GPU by measurement against transformers' own
code, elsewhere by what is known of the device. One that fails or differs is passed over.
"""

from __future__ import annotations

import json
import math
import os
import shutil
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, get_args

import torch
from torch import Tensor, nn
from torch.nn import functional

from ulysses_cli.plan.units import format_count
from ulysses_cli.train.choosing import (
    Candidate,
    Choice,
    Outcome,
    choose_once,
    describe_error,
    find_version,
    measure_seconds,
    try_candidates,
)
from ulysses_cli.train.elementwise import formulas
from ulysses_cli.train.elementwise.formulas import NormKind
from ulysses_cli.train.elementwise.interface import Implementations, Part
from ulysses_cli.train.elementwise.operators import Gate, Implementation, Normalize, Rotate, compute_losses
from ulysses_cli.train.loss import HeadRule

NORM_KINDS: tuple[NormKind, ...] = get_args(NormKind)
# torch's RMSNorm scales by the weight alone and knows no offset.
CANDIDATES: dict[Part, tuple[Implementation, ...]] = {
    "rounded": ("torch", "compiled"), "precise": ("torch", "compiled"), "offset": ("compiled",),
    "rotary": ("compiled",), "gate": ("compiled",), "loss": ("compiled",),
}  # fmt: skip
# By torch's sources: its RMSNorm has a kernel each way on a GPU; a compiled elementwise formula is one kernel.
GPU_IMPLEMENTATIONS: Implementations = {part: candidates[0] for part, candidates in CANDIDATES.items()}
# Measured on a CPU: a norm's backward in blocks takes 0.6 of autograd's time. A rotation in blocks saves 2 % of a step
# in float32 and nothing in bfloat16, a gate nothing.
CPU_IMPLEMENTATIONS: Implementations = {part: "transformers" if part == "gate" else "blocks" for part in CANDIDATES}
NO_IMPLEMENTATIONS: Implementations = {part: "torch" if part == "loss" else "transformers" for part in CANDIDATES}
# What takes most memory of what a GPU may choose where norms are fused.
LARGEST_IMPLEMENTATIONS: Implementations = {
    "rounded": "torch", "precise": "torch", "offset": "compiled", "rotary": "transformers", "gate": "transformers",
    "loss": "torch",
}  # fmt: skip
NUM_COMPARED, NUM_TIMED = 4096, 10  # rows; repetitions
TIMED_BYTES = 1 << 27  # of a tensor: more than a cache holds, so that memory decides and not the starts of kernels
TOLERANCE = {torch.bfloat16: 0.02, torch.float32: 1e-4}  # of the largest value; bfloat16 keeps 8 bits
EPS = 1e-5
SOURCES = Path(__file__).parent

Inputs = Sequence[Tensor]
Run = Callable[..., Tensor]


@dataclass(frozen=True)
class ElementwiseChoice:
    implementations: Implementations
    reason: str


@dataclass(frozen=True)
class Widths:
    """Of the model's rows, heads and gated MLPs; `norms`: of each kind of norm in the model."""

    hidden: int
    num_heads: int
    head_dim: int
    inner: int
    norms: Mapping[NormKind, Collection[int]]
    vocabulary: int = 0  # 0: the loss is not of tiles

    def list_rows(self, part: Part) -> list[tuple[int, tuple[int, ...]]]:
        """How many rows a token has in the part's tensors, and their shape."""
        if part in NORM_KINDS:
            return [(max(1, self.hidden // width), (width,)) for width in sorted(self.norms.get(part, ()))]
        if part == "loss":
            return [(1, (self.vocabulary,))] if self.vocabulary else []
        return [(1, (self.num_heads, self.head_dim) if part == "rotary" else (self.inner,))]


def choose_implementations(
    device: torch.device,
    dtype: torch.dtype,
    widths: Widths,
    num_tokens: int,
    *,
    uses_cache: bool = False,
    make_trial: Callable[..., Any] | None = None,
) -> ElementwiseChoice:
    """Tries all candidates where there is a GPU. `num_tokens`: of a rank's rows. A choice in which nothing failed is
    kept for later runs, since trials compile for up to half a minute."""
    if device.type == "cpu":
        implementations = foresee_implementations(dtype, is_fused=True, is_gpu=False)
        return ElementwiseChoice(implementations, "in blocks that fit a processor's cache")
    if device.type != "cuda":
        return ElementwiseChoice(GPU_IMPLEMENTATIONS, "as on a GPU")
    rows = {
        part: [(row, count_timed(per_token * num_tokens, row, dtype)) for per_token, row in widths.list_rows(part)]
        for part in CANDIDATES
    }

    def choose() -> Choice[str]:
        make = make_trial or _Trial
        return _try_parts({part: [make(part, device, dtype, *row) for row in rows[part]] for part in CANDIDATES})

    facts = {"dtype": str(dtype), "rows": rows}  # beyond some length all rows of tokens are timed alike
    choice = choose_once(facts | _list_versions(device), SOURCES, choose, _is_choice) if uses_cache else choose()
    return ElementwiseChoice(json.loads(choice.name), choice.reason)


def foresee_implementations(dtype: torch.dtype, *, is_fused: bool, is_gpu: bool) -> Implementations:
    """What is known before a run, which memory is counted with. `is_fused`: as the recipe says. On a CPU it is what the
    run has; on a GPU, where trials decide, no choice takes more."""
    if is_gpu:
        return LARGEST_IMPLEMENTATIONS if is_fused else NO_IMPLEMENTATIONS
    if not is_fused:
        return {**NO_IMPLEMENTATIONS, "loss": CPU_IMPLEMENTATIONS["loss"]}
    return CPU_IMPLEMENTATIONS if dtype == torch.float32 else {**CPU_IMPLEMENTATIONS, "rotary": "transformers"}


def _list_versions(device: torch.device) -> dict[str, str]:
    """Machines that share a home may differ, also in whether they can compile."""
    versions = {name: find_version([name]) for name in ("torch", "transformers", "triton")}
    compiler = shutil.which(os.environ.get("CC") or "gcc") or shutil.which("clang") or ""
    cuda = str(torch.version.cuda or torch.version.hip)
    return versions | {"cuda": cuda, "gpu": torch.cuda.get_device_name(device), "compiler": compiler}


def _is_choice(text: str) -> bool:
    implementations, known = dict(json.loads(text)), set(get_args(Implementation))
    return implementations.keys() == CANDIDATES.keys() and known.issuperset(implementations.values())


def _try_parts(trials: Mapping[Part, Sequence[_Trial]]) -> Choice[str]:
    """Names the implementation of each part, in JSON."""
    implementations, reasons, is_lasting = dict(NO_IMPLEMENTATIONS), list[str](), True
    for part, of_part in trials.items():
        if of_part:
            choice = _choose_part((NO_IMPLEMENTATIONS[part], *CANDIDATES[part]), of_part)
            implementations[part] = choice.name
            is_lasting &= choice.is_lasting
            reasons.append(f"{f'{part} norm' if part in NORM_KINDS else part} by {choice.name} ({choice.reason})")
    torch.cuda.empty_cache()
    return Choice(json.dumps(implementations, sort_keys=True), ", ".join(reasons), is_lasting)


def _choose_part(candidates: Sequence[Implementation], trials: Sequence[_Trial]) -> Choice[Implementation]:
    """The first of the candidates is transformers' own code, which is taken where none is exact."""
    tally = try_candidates(Candidate(name, partial(_try_all, name, trials)) for name in candidates)
    reason = "; ".join([tally.format_times(), *tally.notes])
    return Choice(tally.find_best() or candidates[0], reason, tally.is_lasting)


def _try_all(implementation: Implementation, trials: Sequence[_Trial]) -> Outcome:
    try:
        errors = [trial.compare(implementation) for trial in trials]
        if not all(error <= TOLERANCE[trials[0].dtype] for error in errors):  # or not a number
            return Outcome(f"differs by {max(errors):.2g}", is_lasting=True)
        return Outcome(seconds=sum(trial.measure(implementation) for trial in trials))
    except Exception as error:  # noqa: BLE001 - a compiler may be missing, or may raise anything
        return Outcome(f"failed: {describe_error(error)}")


@dataclass(frozen=True)
class _Trial:
    """One part on random rows of a shape: few to compare values, and as many as a rank has to measure time."""

    part: Part
    device: torch.device
    dtype: torch.dtype
    row: tuple[int, ...]
    num_timed: int = NUM_COMPARED

    def draw(self, num_rows: int) -> tuple[Inputs, Tensor]:
        """The part's inputs, and a gradient of its output."""
        generator = torch.Generator(self.device).manual_seed(0)

        def draw(*shape: int) -> Tensor:
            return torch.randn(*shape, generator=generator, device=self.device, dtype=self.dtype)

        rows = draw(1, num_rows, *self.row)
        if self.part in NORM_KINDS:
            inputs = [rows, 1 + 0.1 * draw(*self.row)]
        elif self.part == "rotary":
            angles = draw(1, 1, num_rows, self.row[-1] // 2).repeat(1, 1, 1, 2)
            inputs = [rows.transpose(1, 2), angles.cos(), angles.sin()]
        else:
            inputs = [rows, draw(1, num_rows, *self.row)]
        return inputs, draw(*inputs[0].shape)

    def run(self, implementation: Implementation, inputs: Inputs, dout: Tensor) -> list[Tensor]:
        """Forward and backward."""
        if self.part == "loss":
            return _run_loss(implementation, *inputs)
        leaves = [tensor.detach().requires_grad_() for tensor in inputs]
        out = RUNS[self.part](implementation, *leaves)
        wanted = leaves[:1] if self.part == "rotary" else leaves
        return [out.detach(), *torch.autograd.grad(out, wanted, dout)]

    def compare(self, implementation: Implementation) -> float:
        """The largest difference from transformers' formula in float32, as a share of the largest value."""
        inputs, dout = self.draw(min(NUM_COMPARED, self.num_timed))
        expected = self.run(
            NO_IMPLEMENTATIONS[self.part], [tensor.to(torch.float32, copy=True) for tensor in inputs], dout.float()
        )
        results = self.run(implementation, [tensor.clone() for tensor in inputs], dout)
        return max(
            ((ours.float() - right).abs().max() / right.abs().max()).item()
            for ours, right in zip(results, expected, strict=True)
        )

    def measure(self, implementation: Implementation) -> float:
        inputs, dout = self.draw(self.num_timed)
        return measure_seconds(lambda: self.run(implementation, inputs, dout), self.device, NUM_TIMED)


def count_timed(num_rows: int, row: tuple[int, ...], dtype: torch.dtype) -> int:
    return max(1, min(num_rows, TIMED_BYTES // (math.prod(row) * dtype.itemsize)))


def _run_norm(kind: NormKind, implementation: str, hidden: Tensor, weight: Tensor) -> Tensor:
    if implementation == "transformers":
        return formulas.normalize(hidden, weight, EPS, kind)[0]
    norm = nn.Module()
    norm.weight = nn.Parameter(weight.detach())
    return Normalize.apply(hidden, weight, norm, EPS, kind, implementation)


def _run_rotary(implementation: str, rows: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    if implementation != "transformers":
        return Rotate.apply(rows, cos.detach(), sin.detach(), implementation)
    first, second = rows.chunk(2, -1)
    return rows * cos.detach() + torch.cat([-second, first], -1) * sin.detach()


def _run_gate(implementation: str, gates: Tensor, values: Tensor) -> Tensor:
    return (
        functional.silu(gates) * values
        if implementation == "transformers"
        else Gate.apply(gates, values, implementation)
    )


def _run_loss(implementation: Implementation, rows: Tensor, _: Tensor) -> list[Tensor]:
    """Losses and gradients, which a tile has at once. The logits are lost, their values do not matter to time."""
    logits = rows.flatten(0, -2)
    labels = torch.arange(len(logits), device=logits.device) % logits.size(-1)
    return list(
        compute_losses(logits, labels, HeadRule(), with_grad=True, overwrites=True, implementation=implementation)
    )


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
