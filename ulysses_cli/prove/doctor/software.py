"""Checks of the software: versions, those that clash, compilers, DeepSpeed's operators, stale build locks."""

from __future__ import annotations

import base64
import hashlib
import importlib
import os
import shlex
import shutil
import time
from collections.abc import Callable, Iterator
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import yaml
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet

from ulysses_cli.host.operator_builds import FOLDER, HINT, find_write_problem, get_builds_folder, list_dead_locks
from ulysses_cli.plan.files.weight_files import find_weight_problem
from ulysses_cli.prove.doctor.checkup import CheckTarget, Finding
from ulysses_cli.prove.ranks.ranks import RankFailureError, run_on_ranks
from ulysses_cli.prove.results import PACKAGES, find_version
from ulysses_cli.train.processes.requirements import find_missing_package, settle_cpu_flags

BAD_VERSIONS = Path(__file__).parent / "bad_versions.yaml"
BUILD_LIMIT_SECONDS = 420.0
CUTE_PACKAGE, CUTE_FOLDER = "flash-attn-4", ("flash_attn", "cute")
ADAM_TOLERANCE = 1e-5
OPERATORS = {"CPUAdamBuilder": "memory.offload_optimizer: cpu", "AsyncIOBuilder": "offload to nvme"}
INGREDIENTS = {"async_io": "apt-get install libaio-dev, and a C++ compiler and ninja"}


def check_packages(target: CheckTarget) -> Iterator[Finding]:
    if not find_version("ulysses-cli"):
        text = "is not installed, and runs from a folder: which packages it needs is not known here"
        yield Finding("ulysses-cli", "WARN", text, "pip install -e . in the checkout")
    for requirement in map(Requirement, _list_requirements()):
        if requirement.marker is not None and not requirement.marker.evaluate({"extra": ""}):
            continue
        package, version = requirement.name, find_version(requirement.name)
        fix = f"pip install --force-reinstall '{package}{requirement.specifier}'"
        if not version:
            yield Finding(package, "FAIL", "is not installed", fix)
        elif not requirement.specifier.contains(version.partition("+")[0], prereleases=True):
            yield Finding(package, "FAIL", f"is {version}, this tool needs {requirement.specifier}", fix)
        elif package in PACKAGES and (reason := find_import_error(package)):
            yield Finding(package, "FAIL", f"{version} cannot be imported: {reason}", fix)
        elif package in PACKAGES:
            yield Finding(package, "PASS", f"{version}, imported")
    for entry in yaml.safe_load(BAD_VERSIONS.read_text(encoding="utf-8")):
        if clashes(entry, find_version):
            both = entry["package"] + (f" with {entry['with']}" if "with" in entry else "")
            yield Finding(both, "FAIL", f"{entry['because']} ({entry['source']})", entry["fix"])
    yield from check_overwritten()
    yield from _check_recipe_needs(target)


def _list_requirements() -> list[str]:
    return (metadata.requires("ulysses-cli") or []) if find_version("ulysses-cli") else []


def check_overwritten(find: Callable[[str], metadata.Distribution] = metadata.distribution) -> Iterator[Finding]:
    """flash-attn 2 and flash-attn-4 both install flash_attn/cute: the one that came last has overwritten the other's
    files. The record of flash-attn-4 holds the hashes of its own."""
    try:
        package = find(CUTE_PACKAGE)
    except metadata.PackageNotFoundError:
        return
    files = [file for file in package.files or [] if file.hash is not None and file.parts[:2] == CUTE_FOLDER]
    changed = [str(file) for file in files if _hash_file(Path(str(file.locate()))) != file.hash.value]  # type: ignore
    if changed:
        text = (
            f"{len(changed)} of its {len(files)} files in flash_attn/cute are another package's, such as {changed[0]}"
        )
        fix = f"pip install --force-reinstall --no-deps {CUTE_PACKAGE}=={package.version}, after flash-attn"
        yield Finding(CUTE_PACKAGE, "FAIL", text, fix)


def _hash_file(file: Path) -> str:
    """As the record of an installed package writes it; '' for a file that is not there."""
    try:
        digest = hashlib.sha256(file.read_bytes()).digest()
    except OSError:
        return ""
    return base64.urlsafe_b64encode(digest).rstrip(b"=").decode()


def _check_recipe_needs(target: CheckTarget) -> Iterator[Finding]:
    """What this recipe needs beyond the packages: its optimizer, its trackers, its model's files."""
    recipe = target.recipe
    if recipe is None:
        return
    if problem := find_missing_package(recipe.train.optim):
        text, _, fix = problem.rpartition(": ")
        yield Finding("optimizer", "FAIL", text, fix)
    for name in recipe.run.report_to:
        if find_spec(name) is None:
            fix = f"pip install 'ulysses-cli[{name}]', or leave it out of run.report_to"
            yield Finding(name, "FAIL", "is named in run.report_to, but is not installed", fix)
    folder = Path(os.path.expanduser(recipe.model.name_or_path or ""))
    if recipe.model.name_or_path and folder.is_dir() and (problem := find_weight_problem(folder)):
        yield Finding("weights", "FAIL", problem, "copy the model's folder again, or name another")


def find_import_error(package: str) -> str:
    """The first line of the error that an import raises; '' where it succeeds."""
    try:
        importlib.import_module(package)
    except Exception as error:  # noqa: BLE001 - a broken package raises anything
        return (str(error).splitlines() or [type(error).__name__])[0][:160]
    return ""


def clashes(entry: dict[str, Any], find: Any) -> bool:
    """Whether the installed versions are those of an entry of bad_versions.yaml."""
    pairs = [(entry["package"], entry["versions"])]
    pairs += [(entry["with"], entry["with_versions"])] if "with" in entry else []
    return all(
        bool(version := find(name)) and SpecifierSet(bounds).contains(version.partition("+")[0], prereleases=True)
        for name, bounds in pairs
    )


def check_compilers(target: CheckTarget) -> Iterator[Finding]:
    programs = {"c++ compiler": ("g++", "c++", "clang++"), "ninja": ("ninja",)}
    if target.device == "cuda":
        programs["nvcc"] = ("nvcc", "/usr/local/cuda/bin/nvcc")
    for what, names in programs.items():
        path = next((path for name in names if (path := shutil.which(name))), "")
        text = path or "not found: DeepSpeed's operators cannot be built"
        fix = "pip install ninja" if what == "ninja" else f"install a {what}"
        yield Finding(what, "PASS" if path else "WARN", text, fix)


def check_locks(target: CheckTarget) -> Iterator[Finding]:
    """A process that was killed while it built an operator leaves a lock that every later one waits for."""
    stale = list_dead_locks(os.environ)
    if problem := find_write_problem(os.environ):
        is_needed = target.device == "cpu" or _is_needed(target, "async_io") or _is_needed(target, "cpu_adam")
        yield Finding("folder of builds", "FAIL" if is_needed else "WARN", problem, HINT)
    for lock in stale:
        yield Finding(
            "stale lock",
            "WARN",
            f"{lock}: every process that builds this operator would wait for it without end",
            f"rm {lock}",
        )
    if not stale:
        yield Finding("build locks", "PASS", f"none stale below {get_builds_folder(os.environ)}")


def check_operators(target: CheckTarget) -> Iterator[Finding]:
    """Each operator is built, can be built, or the finding says what would make it buildable."""
    for builder_name, use in OPERATORS.items():
        builder: Any = getattr(importlib.import_module("deepspeed.ops.op_builder"), builder_name)()
        name, is_needed = builder.name, _is_needed(target, builder.name)
        built = [str(file) for file in get_builds_folder(os.environ).rglob(f"{name}*.so")] or _find_installed(builder)
        if built:
            yield Finding(name, "PASS", f"built: {built[0]}")
        elif builder.is_compatible(verbose=False):
            where = f"{FOLDER}={shlex.quote(str(get_builds_folder(os.environ)))}"
            build = f'{where} python -c "from deepspeed.ops.op_builder import {builder_name} as it; it().load()"'
            text = f"not built; its first use builds it ({use}); to build it now: {build}"
            yield Finding(name, "PASS" if is_needed else "SKIP", text)
        else:
            reason = str(getattr(builder, "error_log", "") or "the system lacks what it needs")
            fix = INGREDIENTS.get(name, "install a C++ compiler and ninja")
            text = f"not built, and cannot be built: {reason}; needed for {use}; to make it buildable: {fix}"
            yield Finding(name, "FAIL" if is_needed else "SKIP", text, fix)


def _find_installed(builder: Any) -> list[str]:
    try:
        return [str(importlib.import_module(builder.absolute_name()).__file__)]
    except Exception:  # noqa: BLE001 - not built ahead
        return []


def _is_needed(target: CheckTarget, name: str) -> bool:
    if target.recipe is None:
        return False
    memory = target.recipe.memory
    if name == "async_io":
        return "nvme" in (memory.offload_optimizer, memory.offload_param)
    return memory.offload_optimizer == "cpu"


def check_cpu_adam(target: CheckTarget) -> Iterator[Finding]:
    """A step compared with torch's AdamW, in a process of its own: a build for another CPU ends it with an illegal
    instruction."""
    is_needed = _is_needed(target, "cpu_adam")
    is_built = bool(list(get_builds_folder(os.environ).rglob("cpu_adam*.so")))
    if not is_needed and not is_built:
        yield Finding("CPU Adam", "SKIP", "not built, and this recipe does not need it")
        return
    if locks := [lock for lock in list_dead_locks(os.environ) if "cpu_adam" in lock.parts]:
        text = f"{locks[0]} was left by a build that was killed; a new build would wait for it without end"
        yield Finding("CPU Adam", "FAIL" if is_needed else "WARN", text, f"rm {locks[0]}")
        return
    try:
        difference, rate = run_on_ranks(1, step_cpu_adam, time_limit=BUILD_LIMIT_SECONDS)
    except RankFailureError as failure:
        fix = f"rm -r {get_builds_folder(os.environ)} so that it is built again, or memory.offload_optimizer=none"
        yield Finding("CPU Adam", "FAIL" if is_needed else "WARN", str(failure), fix)
        return
    is_fine = difference <= ADAM_TOLERANCE
    text = f"differs from torch's AdamW by {difference:.1e} (up to {ADAM_TOLERANCE:.0e} is rounding)"
    values = {"gb_per_second": rate}
    yield Finding("CPU Adam", "PASS" if is_fine else "FAIL", text, "memory.offload_optimizer=none", values)


def step_cpu_adam(device: Any) -> tuple[float, float]:
    """Returns (largest difference after three steps, GB/s of the states that a step reads and writes)."""
    torch: Any = importlib.import_module("torch")
    adam = importlib.import_module("deepspeed.ops.adam")
    settle_cpu_flags()
    torch.manual_seed(0)
    start, grad = torch.randn(1 << 20), torch.randn(1 << 20)
    ours, expected = torch.nn.Parameter(start.clone()), torch.nn.Parameter(start.clone())
    numbers = {"lr": 1e-3, "weight_decay": 0.1}
    optimizers = [adam.DeepSpeedCPUAdam([ours], adamw_mode=True, **numbers), torch.optim.AdamW([expected], **numbers)]
    ours.grad, expected.grad = grad.clone(), grad.clone()
    seconds = []
    for _ in range(3):
        begin = time.perf_counter()
        optimizers[0].step()
        seconds.append(time.perf_counter() - begin)
        optimizers[1].step()
    return (ours - expected).abs().max().item(), 34 * ours.numel() / min(seconds) / 1e9
