"""The hardware table of this machine's user: the shipped one with calibration.yaml and
hardware.yaml of ~/.config/ulysses laid over it."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ulysses_cli.plan.hardware import Hardware

SHIPPED = Path(__file__).parent / "plan" / "hardware.yaml"
MAX_BYTES = 1 << 20


def load_hardware() -> Hardware:
    """Raises RecipeError with every mistake of the user's file."""
    from ulysses_cli import hub
    from ulysses_cli.plan.hardware import read_hardware

    tables = [("the shipped hardware.yaml", _read_yaml(SHIPPED))]
    for name in ("calibration.yaml", "hardware.yaml"):
        own = hub.get_user_folder() / name
        if own.exists():
            tables.append((str(own), _read_yaml(own) or {}))
    return read_hardware(*tables)


def _read_yaml(file: Path) -> Any:
    import yaml

    from ulysses_cli.plan.problem import Problem, RecipeError, Where

    loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)  # ten times as fast, where it was built
    try:
        with open(file, encoding="utf-8") as stream:
            return yaml.load(stream.read(MAX_BYTES), loader)
    except OSError as error:
        raise RecipeError([Problem("", f"cannot be read: {error.strerror}", "", Where(str(file)))]) from None
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        mark = getattr(error, "problem_mark", None)
        where = Where(str(file), mark.line + 1, mark.column + 1) if mark else Where(str(file))
        reason = getattr(error, "problem", None) or str(error).splitlines()[0]
        raise RecipeError([Problem("", f"not valid YAML: {reason}", "see the shipped hardware.yaml", where)]) from None
