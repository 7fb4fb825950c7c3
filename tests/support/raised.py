"""What an error says, to be compared with a snapshot."""

from collections.abc import Callable

import pytest


def read_error(kind: type[BaseException], run: Callable[[], object]) -> str:
    """Returns the message of the error that `run` must raise."""
    with pytest.raises(kind) as raised:
        run()
    return str(raised.value)
