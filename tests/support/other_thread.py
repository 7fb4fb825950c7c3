"""Runs backwards as a GPU does: in a thread of their own, in which no context variable is set."""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import _tensor, autograd
from torch.autograd import graph


def run_in_thread(function: Callable[..., Any], *args: Any, **options: Any) -> Any:
    """Returns what the function returns in a new thread, or raises what it raises there. A new thread has its own
    context, an empty one."""
    results: list[Any] = []
    errors: list[BaseException] = []

    def run() -> None:
        try:
            results.append(function(*args, **options))
        except BaseException as error:  # noqa: BLE001 - raised again below
            errors.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    if errors:
        raise errors[0]
    return results[0]


@contextmanager
def backward_in_another_thread() -> Iterator[list[int]]:
    """Counts the backwards. One that starts inside another stays in that one's thread, as on a GPU."""
    original, main, count = graph._engine_run_backward, threading.get_ident(), [0]

    def run_backward(*args: Any, **options: Any) -> Any:
        if threading.get_ident() != main:
            return original(*args, **options)
        count[0] += 1
        return run_in_thread(original, *args, **options)

    modules: list[Any] = [module for module in (graph, autograd, _tensor) if hasattr(module, "_engine_run_backward")]
    for module in modules:
        module._engine_run_backward = run_backward
    try:
        yield count
    finally:
        for module in modules:
            module._engine_run_backward = original
