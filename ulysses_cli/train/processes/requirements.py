"""Checks what a recipe needs besides torch and DeepSpeed: packages, and operators that this machine must be able to
build. Runs before any process group exists.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
import shutil
from collections.abc import Mapping
from pathlib import Path


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


COMMON_CPU, COMMON_WIDTH = "x86-64-v3", "-D__AVX256__"  # the compiler's name of it, and DeepSpeed's


def settle_cpu_flags(environ: Mapping[str, str] = os.environ) -> None:
    """Where the folder of built operators is for all CPUs with AVX2, has DeepSpeed build them so. It would compile for
    the CPU of this machine, on which alone such an operator may run."""
    if environ.get("TORCH_EXTENSIONS_DIR", "").endswith(f"-{COMMON_CPU}"):
        builder = importlib.import_module("deepspeed.ops.op_builder.builder").OpBuilder
        builder.cpu_arch = lambda _: f"-march={COMMON_CPU}"
        builder.simd_width = lambda _: COMMON_WIDTH


def build_cpu_adam() -> None:
    """For an image."""
    settle_cpu_flags()
    importlib.import_module("deepspeed.ops.op_builder").CPUAdamBuilder().load()


def find_missing_compiler(environ: Mapping[str, str] = os.environ) -> str:
    """'' when DeepSpeed's CPU Adam is built here or can be; else what is wrong. Otherwise the run would find out when
    the optimizer is made, after all weights are loaded."""
    builder = importlib.import_module("deepspeed.ops.op_builder").CPUAdamBuilder()
    folder = environ.get("TORCH_EXTENSIONS_DIR")
    if _is_installed(builder.absolute_name()) or (folder and any(Path(folder).rglob("cpu_adam*.so"))):
        return ""
    lacking = [] if any(map(shutil.which, (environ.get("CXX", "c++"), "g++"))) else ["a C++ compiler"]
    lacking += [] if shutil.which("ninja") else ["ninja"]
    if not lacking:
        return ""
    return (
        "memory.offload_optimizer needs DeepSpeed's CPU Adam, which is compiled at its first use: "
        f"{' and '.join(lacking)} not found on this machine: install it (apt-get install g++, pip install ninja), or "
        "set memory.offload_optimizer=none"
    )


def _is_installed(name: str) -> bool:
    """Whether an operator was built when DeepSpeed was installed."""
    try:
        return importlib.util.find_spec(name) is not None
    except ImportError:
        return False


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
