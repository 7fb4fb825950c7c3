"""What a recipe needs to have installed beside torch and DeepSpeed. Looked for before any process group exists."""

from __future__ import annotations

import importlib


def find_missing_package(optim: str) -> str:
    """'' when there is all that the optimizer needs; else what is wrong and what to do."""
    if optim != "adamw_8bit":
        return ""
    try:
        importlib.import_module("bitsandbytes")
    except ImportError as error:
        reason = "is not installed" if getattr(error, "name", "") == "bitsandbytes" else f"cannot be imported: {error}"
    except Exception as error:  # noqa: BLE001 - whatever a broken build raises
        reason = f"cannot be imported: {error}"
    else:
        return ""
    return (
        f"train.optim: adamw_8bit needs the package bitsandbytes, which {reason}: "
        "pip install 'ulysses-cli[bitsandbytes]', or use train.optim: adamw"
    )
