"""`doctor`: runs every check on this machine (and on a recipe, if one is named) and lists what to fix: GPUs, driver,
clocks, NVLink, memory, disks, limits; versions, those that clash, compilers, DeepSpeed's operators, stale build
locks.  Imports no torch before a check that needs it: it must also run where torch is broken."""

from __future__ import annotations

import base64
import hashlib
import importlib
import os
import re
import resource
import shlex
import shutil
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import yaml
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet

from ulysses_cli.plan.hardware import GIB, Hardware
from ulysses_cli.plan.layout import GPUS_PER_NODE
from ulysses_cli.plan.ledger.ledger import weigh_ledger
from ulysses_cli.plan.ledger.machine import PROCESS_BYTES, compute_node_disk_bytes
from ulysses_cli.plan.ledger.weights import find_num_parameters
from ulysses_cli.plan.models.model_files import find_weight_problem
from ulysses_cli.plan.models.shape import ModelShape
from ulysses_cli.plan.planner.lever_choice import choose_levers
from ulysses_cli.plan.recipe.recipe import Recipe
from ulysses_cli.plan.resolved import make_layout
from ulysses_cli.plan.units import format_count
from ulysses_cli.prove.ranks import RankFailureError, run_on_ranks
from ulysses_cli.prove.results import (
    PACKAGES,
    Check,
    CheckTarget,
    Finding,
    Findings,
    Report,
    Verdict,
    find_version,
    run_checks,
    run_command,
)
from ulysses_cli.run.host import FOLDER, HINT, find_write_problem, get_builds_folder, list_dead_locks
from ulysses_cli.train.processes.host import (
    count_free_bytes,
    count_host_bytes,
    count_usable_bytes,
    find_missing_package,
    read_memory_limit,
    settle_cpu_flags,
)

STATE_BYTES, MODEL_BYTES = 12, 2  # of a trained parameter in a checkpoint; of any parameter in the exported model
LEAST_OPEN_FILES = 4096
LEAST_SHARED_BYTES = GIB
SLOW_LINKS = ("SYS", "NODE", "PHB", "PXB", "PIX")  # nvidia-smi topo: all links that are not NVLink
HOT_CELSIUS = 85
ALARMS = {
    "clocks_throttle_reasons.hw_slowdown": "slowed down by its own hardware (heat or power)",
    "ecc.errors.uncorrected.volatile.total": "uncorrected memory errors",
}
QUERY = ("index", "name", "driver_version", "clocks.sm", "clocks.max.sm", "temperature.gpu", "memory.used",
         "power.limit", "power.max_limit")  # fmt: skip


def check_gpus(target: CheckTarget) -> Iterator[Finding]:
    recipe = target.recipe
    if not target.num_gpus:
        verdict: Verdict = "FAIL" if target.wants_gpu else "SKIP"
        text, fix = explain_no_gpus(run_command("nvidia-smi"), find_version("torch"))
        yield Finding("GPUs", verdict, text, fix)
        return
    alarms = read_alarms(
        run_command("nvidia-smi", f"--query-gpu=index,{','.join(ALARMS)}", "--format=csv,noheader,nounits")
    )
    table = run_command("nvidia-smi", f"--query-gpu={','.join(QUERY)}", "--format=csv,noheader,nounits")
    for line in table.splitlines():
        facts = dict(zip(QUERY, (cell.strip() for cell in line.split(",")), strict=False))
        yield _judge_gpu(facts, alarms.get(facts["index"], ""))
    if recipe is not None:
        yield from _judge_count(make_layout(recipe).world_size, target.num_gpus)


def explain_no_gpus(smi_output: str, torch_version: str) -> tuple[str, str]:
    """(what nvidia-smi and torch disagree about, what to do). `smi_output` is '' where there is no driver."""
    match = re.search(r"Driver Version:\s*(\S+)\s+CUDA Version:\s*(\S+)", smi_output)
    on_cpu = "on a CPU: run.device=cpu"
    if not match:
        return "torch sees none, and nvidia-smi does not answer", f"install NVIDIA's driver; {on_cpu}"
    driver = f"driver {match[1]} (up to CUDA {match[2]})"
    if "+cpu" in torch_version:
        fix = f"install a torch for CUDA {match[2]} or older (https://pytorch.org/get-started/locally)"
        return f"torch {torch_version} is built for CPUs only, but there is {driver}", f"{fix}; {on_cpu}"
    fix = "install a newer driver, or a torch built for an older CUDA; check CUDA_VISIBLE_DEVICES"
    return f"torch {torch_version} sees none, though nvidia-smi does: {driver}", f"{fix}; {on_cpu}"


def read_alarms(table: str) -> dict[str, str]:
    """GPU index -> the alarms that its driver reports."""
    alarms = {}
    for line in table.splitlines():
        index, *cells = (cell.strip() for cell in line.split(","))
        words = [
            text for cell, text in zip(cells, ALARMS.values(), strict=False) if cell == "Active" or _read(cell) > 0
        ]
        alarms[index] = ", ".join(words)
    return alarms


def _judge_gpu(facts: dict[str, str], alarm: str) -> Finding:
    name = f"GPU {facts['index']}"
    text = f"{facts['name']}, driver {facts['driver_version']}, {facts['clocks.sm']} of {facts['clocks.max.sm']} MHz"
    if alarm:
        return Finding(name, "WARN", f"{text}; {alarm}", "see nvidia-smi -q; a GPU with memory errors needs a reset")
    if _read(facts["temperature.gpu"]) > HOT_CELSIUS:
        return Finding(
            name, "WARN", f"{text}, {facts['temperature.gpu']} degrees", "cool it: a hot GPU lowers its clock"
        )
    if _read(facts["memory.used"]) > 1024:
        fix = "find the process with `nvidia-smi` and end it"
        return Finding(name, "WARN", f"{text}; {facts['memory.used']} MiB are in use by another process", fix)
    if _read(facts["power.limit"]) < 0.9 * _read(facts["power.max_limit"]):
        limit = f"limited to {facts['power.limit']} of {facts['power.max_limit']} W"
        return Finding(name, "WARN", f"{text}, {limit}", "raise it with nvidia-smi -pl, if you are allowed to")
    return Finding(name, "PASS", text)


def _read(cell: str) -> float:
    try:
        return float(cell)
    except ValueError:  # [N/A]
        return 0.0


def _judge_count(world_size: int, num_gpus: int) -> Iterator[Finding]:
    if world_size % num_gpus == 0 and world_size > num_gpus:
        machines = format_count(world_size // num_gpus, "machine like this one")
        yield Finding("processes", "PASS", f"{world_size}: {machines}")
    elif world_size > num_gpus:
        text = f"the recipe has {format_count(world_size, 'process')}, this machine {format_count(num_gpus, 'GPU')}"
        yield Finding("processes", "FAIL", text, f"parallel.sp_size={num_gpus}, or a machine with more GPUs")
    elif world_size < num_gpus:
        text = f"the recipe uses {world_size} of {format_count(num_gpus, 'GPU')}"
        yield Finding("processes", "WARN", text, "raise parallel.dp_shard_size or parallel.sp_size")
    else:
        yield Finding("processes", "PASS", f"{world_size}, one per GPU")


def check_topology(target: CheckTarget) -> Iterator[Finding]:
    """Ranks that share a row exchange most: their GPUs should be joined by NVLink."""
    sp_size = target.recipe.parallel.sp_size if target.recipe else target.num_gpus
    links = read_topology(run_command("nvidia-smi", "topo", "-m"))
    if target.num_gpus < 2 or not links:
        yield Finding("links", "SKIP", "fewer than two GPUs" if target.num_gpus < 2 else "nvidia-smi does not say")
        return
    slow = find_slow_pairs(links, sp_size)
    if slow:
        pairs = ", ".join(f"{a}-{b} by {kind}" for a, b, kind in slow[:4])
        text = f"ranks of one sp group are joined without NVLink: {pairs}"
        fix = "order GPUs with CUDA_VISIBLE_DEVICES so that neighbours share NVLink, or use a smaller parallel.sp_size"
        yield Finding("sp placement", "WARN", text, fix)
    else:
        yield Finding("sp placement", "PASS", f"all sp groups of {min(sp_size, len(links))} are joined by NVLink")


def read_topology(text: str) -> list[list[str]]:
    """Takes the output of `nvidia-smi topo -m`, returns the kind of link between GPU i and GPU j."""
    text = re.sub(r"\x1b\[[\d;]*m", "", text)  # the header is underlined
    rows = [line.split() for line in text.splitlines() if line.strip().startswith("GPU") and len(line.split()) > 1]
    rows = [row for row in rows if row[1] in ("X", *SLOW_LINKS) or row[1].startswith("NV")]
    return [row[1 : 1 + len(rows)] for row in rows]


def find_slow_pairs(links: list[list[str]], sp_size: int) -> list[tuple[int, int, str]]:
    """Pairs inside an sp group that are not joined by NVLink. Neighbouring ranks share a row."""
    return [
        (a, b, links[a][b])
        for a in range(len(links))
        for b in range(a + 1, len(links))
        if a // sp_size == b // sp_size and links[a][b] in SLOW_LINKS
    ]


@dataclass(frozen=True)
class HostNeed:
    """Bytes that a recipe needs on this machine: the peak in host memory, with and without early steps of the
    optimizer, and on disk."""

    memory_bytes: int
    memory_bytes_without_overlap: int
    checkpoint_bytes: int
    model_bytes: int
    nvme_bytes: int


def compute_host_need(target: CheckTarget, recipe: Recipe, shape: ModelShape) -> HostNeed:
    parameters = find_num_parameters(shape) or 0
    trained = parameters if recipe.lora is None else parameters // 50
    memory = STATE_BYTES * trained + PROCESS_BYTES // 3 * make_layout(recipe).world_size
    num_checkpoints = (recipe.run.save_total_limit or 3) + 1  # a new one is written before the oldest is deleted
    nvme = STATE_BYTES * trained if recipe.memory.offload_optimizer == "nvme" else 0
    nvme += MODEL_BYTES * parameters if recipe.memory.offload_param == "nvme" else 0
    without_overlap = memory
    if target.device == "cuda":
        memory, without_overlap, nvme = _estimate_host(target, recipe, shape)
    return HostNeed(memory, without_overlap, num_checkpoints * STATE_BYTES * trained, MODEL_BYTES * parameters, nvme)


def _estimate_host(target: CheckTarget, recipe: Recipe, shape: ModelShape) -> tuple[int, int, int]:
    """Bytes of host memory, those without early steps of the optimizer, and bytes below memory.nvme_path. Levers that
    are open are chosen as the run would choose them."""
    import torch

    facts = torch.cuda.get_device_properties(0)
    host_bytes = count_usable_bytes() // count_ranks_here(target)
    gpu, _ = target.hardware.recognise(facts.name, facts.total_memory, host_bytes)
    job = choose_levers(recipe, shape, gpu).make_job(recipe, shape, gpu)
    without_overlap = weigh_ledger(replace(job, levers=replace(job.levers, early_groups=0)))
    return weigh_ledger(job).host_peak_bytes, without_overlap.host_peak_bytes, compute_node_disk_bytes(job)


def check_memory(target: CheckTarget) -> Iterator[Finding]:
    whole = min(count_host_bytes(), read_memory_limit())
    free = count_free_bytes()
    text = f"{free / GIB:.1f} of {whole / GIB:.1f} GiB free"
    shape, recipe = target.shape, target.recipe
    if shape is None or recipe is None or (target.wants_gpu and not target.num_gpus):
        yield Finding("host memory", "PASS", text)
    else:
        host = compute_host_need(target, recipe, shape)
        need = host.memory_bytes
        verdict: Verdict = "PASS" if need <= free else "FAIL" if need > whole else "WARN"
        fix = "a machine with more memory, or less offload: memory.offload_optimizer=none"
        fix = "memory.overlap_optimizer=0" if host.memory_bytes_without_overlap <= whole < need else fix
        fix = "end other programs that use memory" if verdict == "WARN" else fix
        yield Finding("host memory", verdict, f"{text}, the recipe needs about {need / GIB:.1f}", fix)
    if os.path.isdir("/dev/shm"):
        shared = shutil.disk_usage("/dev/shm").free
        fix = "docker: --shm-size=8g or --ipc=host"
        enough: Verdict = "PASS" if shared >= LEAST_SHARED_BYTES else "WARN"
        yield Finding(
            "shared memory", enough, f"{shared / GIB:.1f} GiB in /dev/shm, which ranks exchange data through", fix
        )


def check_disks(target: CheckTarget) -> Iterator[Finding]:
    shape, recipe = target.shape, target.recipe
    if shape is None or recipe is None:
        yield Finding("disk", "SKIP", "no recipe is named, so nothing is known of what will be written")
        return
    need = compute_host_need(target, recipe, shape)
    needed_bytes = {recipe.run.output_dir: need.checkpoint_bytes + need.model_bytes, recipe.data.store_dir: 0}
    if recipe.memory.nvme_path is not None:
        needed_bytes[recipe.memory.nvme_path] = need.nvme_bytes
    for name, num_bytes in needed_bytes.items():
        folder = Path(os.path.expanduser(name)).absolute()
        while not folder.exists():
            folder = folder.parent
        free = shutil.disk_usage(folder).free
        text = f"{free / GIB:.1f} GiB free"
        what = "what is offloaded takes" if name == recipe.memory.nvme_path else "checkpoints and the model take"
        text += f", {what} about {num_bytes / GIB:.1f}" if num_bytes else ""
        if not os.access(folder, os.W_OK):
            yield Finding(name, "FAIL", f"{folder} cannot be written to", "name another folder")
        else:
            fix = "name a folder on a larger disk, or lower run.save_total_limit"
            yield Finding(name, "PASS" if num_bytes <= free else "FAIL", text, fix)


def check_limits(target: CheckTarget) -> Iterator[Finding]:
    files = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    is_few = files != resource.RLIM_INFINITY and files < LEAST_OPEN_FILES
    yield Finding("open files", "WARN" if is_few else "PASS", str(files), f"ulimit -n {LEAST_OPEN_FILES}")
    cores = len(os.sched_getaffinity(0))
    ranks = count_ranks_here(target)
    text = f"{cores} for the {format_count(ranks, 'rank')} of this machine"
    least = 2 * ranks if target.device == "cuda" else ranks
    enough: Verdict = "PASS" if cores >= least else "WARN"
    yield Finding("cores", enough, text, "use a machine with more cores: each rank launches kernels and reads data")


def count_ranks_here(target: CheckTarget) -> int:
    """The recipe's ranks on this machine: all of them on a CPU, else one for each GPU, or as many as a node has
    GPUs."""
    if target.recipe is None:
        return max(1, target.num_gpus)
    world_size = make_layout(target.recipe).world_size
    return min(world_size, target.num_gpus or GPUS_PER_NODE) if target.wants_gpu else world_size


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


GPU_HINT = (
    "to test and measure this GPU, in a checkout: make gpu (each result beside its prediction, 25 minutes); without an "
    "installation: python3 benchmarks/gpu.py --minutes 25"
)


def _load_check(name: str) -> Check:
    """A check of device_checks.py. That module imports torch, which may be broken on this machine, so its import is
    part of the check."""

    def check(target: CheckTarget) -> Iterator[Finding]:
        yield from getattr(importlib.import_module("ulysses_cli.prove.device_checks"), name)(target)

    return check


CHECKS: tuple[tuple[str, Check], ...] = (
    ("packages", check_packages),
    ("GPUs", check_gpus),
    ("arithmetic", _load_check("check_arithmetic")),
    ("topology", check_topology),
    ("exchange", _load_check("check_exchange")),
    ("attention", _load_check("check_kernels")),
    ("compilers", check_compilers),
    ("build locks", check_locks),
    ("DeepSpeed's operators", check_operators),
    ("CPU Adam", check_cpu_adam),
    ("page-locked memory", _load_check("check_pinned")),
    ("memory", check_memory),
    ("disks", check_disks),
    ("limits", check_limits),
)


def examine(
    recipe: Recipe | None, shape: ModelShape | None, hardware: Hardware, subject: str, report: Report
) -> Findings:
    findings, num_gpus = Findings("doctor", subject or "this machine"), count_gpus()
    run_checks(CheckTarget(recipe, shape, hardware, num_gpus), CHECKS, findings, report)
    if num_gpus:
        findings.notes.append(GPU_HINT)
    return findings


def count_gpus() -> int:
    """The GPUs that torch sees; 0 where torch or the driver is broken."""
    try:
        torch = importlib.import_module("torch")
        return int(torch.cuda.device_count()) if torch.cuda.is_available() else 0
    except Exception:  # noqa: BLE001 - a driver that does not fit torch raises anything
        return 0
