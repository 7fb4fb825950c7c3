"""Checks what a recipe needs besides torch and DeepSpeed: packages, and operators that this machine must be able to
build. Runs before any process group exists.
"""

from __future__ import annotations

import importlib


def find_missing_package(optim: str, quantize_base: str | None = None) -> str:
    """'' when the packages that the optimizer and a quantized base need are installed; else what is wrong and what to
    do."""
    if optim != "adamw_8bit" and quantize_base is None:
        return ""
    try:
        importlib.import_module("bitsandbytes")
    except ImportError as error:
        reason = "is not installed" if getattr(error, "name", "") == "bitsandbytes" else f"cannot be imported: {error}"
    except Exception as error:  # noqa: BLE001 - a broken build may raise anything
        reason = f"cannot be imported: {error}"
    else:
        return ""
    key, other = "train.optim: adamw_8bit", "use train.optim: adamw"
    if quantize_base is not None:
        key, other = f"lora.quantize_base: {quantize_base}", "leave quantize_base out"
    return f"{key} needs the package bitsandbytes, which {reason}: pip install 'ulysses-cli[bitsandbytes]', or {other}"


def find_missing_operator() -> str:
    """Builds DeepSpeed's operator for disks where it is not built yet. Other ranks wait for the one that builds."""
    builder = importlib.import_module("deepspeed.ops.op_builder").AsyncIOBuilder()
    try:
        builder.load(verbose=False)
    except Exception as error:  # noqa: BLE001 - compilers, linkers and the system raise any of them
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0][:200]
        if not builder.is_compatible(verbose=False):
            reason = "libaio and its headers are not found"
        return (
            f"offload to nvme needs DeepSpeed's operator async_io, which cannot be built: {reason}: "
            "install libaio-dev (apt) or libaio-devel (dnf) and a C++ compiler, or use cpu in place of nvme"
        )
    return ""
