"""Two machines for tests of ranks, as network namespaces."""

from collections.abc import Iterator

import pytest
from support.networks import open_or_skip


@pytest.fixture
def lan() -> Iterator[list[str]]:
    with open_or_skip(2) as names:
        yield names
