"""Compiled functions without kernels, for tests of what torch's compiler is given."""

from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest
import torch

from ulysses_cli.train.elementwise.operators import compile_once


@pytest.fixture
def compiled_graphs(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[list[Any]]]:
    """Has torch trace functions and run their graphs as they are. The list gets the inputs of each graph."""
    graphs: list[list[Any]] = []

    def note_and_run(graph: Any, inputs: list[Any]) -> Any:
        graphs.append(inputs)
        return graph.forward

    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend=note_and_run))
    compile_once.cache_clear()
    yield graphs
    compile_once.cache_clear()
