"""What a refused call says, as a text for a snapshot."""

from collections.abc import Callable

import pytest

from ulysses_cli.plan.problem import RecipeError


def explain(
    call: Callable[..., object], *words: object, error: type[Exception] = RecipeError, **options: object
) -> str:
    with pytest.raises(error) as caught:
        call(*words, **options)
    return str(caught.value).strip()
