"""Fine-tune language models on very long sequences. What a Python program imports from here is loaded at its first use:
docs/python.md.
"""

import sys
from types import ModuleType
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"
__all__ = [
    "EvalResult",
    "Problem",
    "RecipeError",
    "RunError",
    "SequenceParallel",
    "Step",
    "TrainResult",
    "__version__",
    "estimate",
    "plan",
    "train",
    "validate",
]

if TYPE_CHECKING:
    from ulysses_cli.api import EvalResult, RunError, Step, TrainResult, estimate, plan, train, validate
    from ulysses_cli.plan.problem import Problem, RecipeError
    from ulysses_cli.train.sequence_parallel import SequenceParallel

_PLACES = dict.fromkeys(__all__, "ulysses_cli.api") | {
    "Problem": "ulysses_cli.plan.problem",
    "RecipeError": "ulysses_cli.plan.problem",
    "SequenceParallel": "ulysses_cli.train.sequence_parallel",
}


class _Package(ModuleType):
    """Python sets a package's attribute to each submodule that is imported. `train`, `plan` and `validate` are
    functions here; the submodules of these names are reached by `from ulysses_cli.train.loop import ...`."""

    def __setattr__(self, name: str, value: Any) -> None:
        if not (name in _PLACES and isinstance(value, ModuleType)):
            super().__setattr__(name, value)

    def __getattr__(self, name: str) -> Any:
        if name not in _PLACES:
            raise AttributeError(f"module {self.__name__!r} has no attribute {name!r}")
        from importlib import import_module

        value = getattr(import_module(_PLACES[name]), name)
        super().__setattr__(name, value)
        return value

    def __dir__(self) -> list[str]:
        return sorted({*super().__dir__(), *__all__})


sys.modules[__name__].__class__ = _Package
