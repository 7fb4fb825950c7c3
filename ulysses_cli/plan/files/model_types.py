"""Whether the installed transformers knows a model type. Reads the text of its table, since importing it takes
seconds."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

TABLES = "models/auto/*.py"


def is_known_type(model_type: str) -> bool:
    """True as well where transformers is not installed: then nobody knows."""
    spec = find_spec("transformers")
    if spec is None or spec.origin is None:
        return True
    tables = list(Path(spec.origin).parent.glob(TABLES))
    return not tables or any(f'"{model_type}"' in table.read_text(encoding="utf-8") for table in tables)
