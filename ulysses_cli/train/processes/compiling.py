"""Compiles functions that several threads of a rank call."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any

import torch

MOST_KINDS = 64  # of inputs of one compiled function


def compile_for_all_threads(function: Callable[..., Any], **options: Any) -> Callable[..., Any]:
    """torch.compile, for up to MOST_KINDS kinds of inputs. A GPU's backward runs in a thread of its own, with its
    recomputations, and torch 2.12 and later keep their settings for each thread: the limit is set where a call is."""
    compiled = torch.compile(function, **options)

    @wraps(function)
    def call(*args: Any, **keywords: Any) -> Any:
        settings: Any = torch._dynamo.config
        if settings.recompile_limit < MOST_KINDS:
            settings.recompile_limit = MOST_KINDS
        return compiled(*args, **keywords)

    return call
