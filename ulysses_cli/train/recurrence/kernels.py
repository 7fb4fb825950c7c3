"""Chooses how recurrences and convolutions run: by kernels of installed packages (flash-linear-attention, mamba-ssm,
causal-conv1d) where these equal transformers' own torch code on packed documents, else by that torch code.
"""

from __future__ import annotations

import inspect
import math
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol

import torch
from torch import Tensor

# packed: the package's kernel, called once with the bounds of documents; by document: called for each document.
Kernel = Literal["packed", "by document", "torch"]
FAST: tuple[Kernel, ...] = ("packed", "by document")
# Largest relative error of any token's vector against float32, as for attention: bfloat16 keeps 8 bits. A lost token
# causes a far larger error. A state that is carried into the next document may have decayed: see PackedProbe.find_leak.
PROBE_TOLERANCE = {torch.bfloat16: 0.1, torch.float32: 1e-3}
POSITIONAL = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
MILLION = 1e6
PROBE_LENGTHS = (300, 1, 64, 33)  # longer than a chunk of any kernel, one token, no multiple of a chunk


class KernelProbe(Protocol):
    def run(self, kernel: Kernel, dtype: torch.dtype) -> Sequence[Tensor]:
        """Returns results and gradients for packed documents."""

    def find_leak(self, kernel: Kernel, dtype: torch.dtype) -> str:
        """Says what of a document changes with another one, or ''."""


@dataclass(frozen=True)
class RecurrenceChoice:
    """The kernel of one function, and why it was chosen."""

    kernel: Kernel
    reason: str


def pick_function(original: Callable[..., Any], kernel: Kernel) -> Callable[..., Any]:
    """transformers wraps its torch code with a function that calls an installed package instead."""
    return getattr(original, "__wrapped__", original) if kernel == "torch" else original


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


def describe_cost(seconds: float, max_length: int) -> str:
    """`seconds`: of one rank, per million tokens of a row. `max_length`: of a row of this run."""
    return (
        f"at least {seconds:,.1f} s in a step for each million tokens of a row, {seconds * max_length / MILLION:,.2f} "
        f"s for each row of {max_length:,} tokens of this run, and float32 copies of whole rows; "
        "pip install 'ulysses-cli[recurrent]'"
    )


def choose_recurrence_kernel(
    try_kernel: Callable[[Kernel], str], kernels: Sequence[Kernel] = FAST, explain_cost: Callable[[], str] = str
) -> RecurrenceChoice:
    """Returns the first of `kernels`, those of a package, that has no obstacle, else torch. `explain_cost` says what
    torch's code costs."""
    notes = list[str]()
    for kernel in kernels:
        obstacle = try_kernel(kernel)
        if not obstacle:
            return RecurrenceChoice(kernel, "; ".join(["equals torch's code on packed documents", *notes]))
        notes.append(f"{kernel} {obstacle}")
    return RecurrenceChoice("torch", "; ".join(filter(None, [explain_cost(), *notes])))


def find_obstacle(probe: KernelProbe, kernel: Kernel, dtype: torch.dtype) -> str:
    """Why a package's kernel cannot be used, or '': its results must equal those of torch's code in float32. A kernel
    that takes packed documents must also keep each document's bits whatever the others hold."""
    expected = probe.run("torch", torch.float32)
    try:
        results = probe.run(kernel, dtype)
        leak = probe.find_leak(kernel, dtype) if kernel == "packed" else ""
    except Exception as error:  # noqa: BLE001 - a foreign package may raise anything
        lines = str(error).strip().splitlines() or [type(error).__name__]
        return f"failed its probe: {lines[0][:160]}"
    errors = [measure_error(result, right) for result, right in zip(results, expected, strict=True)]
    worst = max(math.inf if math.isnan(error) else error for error in errors)
    if worst > PROBE_TOLERANCE[dtype]:
        return f"differs from torch's code by {worst:.2g} on packed documents"
    return f"leaks: {leak}" if leak else ""


def measure_error(result: Tensor, expected: Tensor) -> float:
    """The largest relative error of any vector of the last dimension. Vectors near zero use the mean norm."""
    norm = torch.linalg.vector_norm(expected, dim=-1)
    floor = 0.1 * norm.square().mean().sqrt()
    difference = torch.linalg.vector_norm(result.float() - expected, dim=-1)
    return (difference / torch.maximum(norm, floor).clamp_min(1e-30)).max().item()
