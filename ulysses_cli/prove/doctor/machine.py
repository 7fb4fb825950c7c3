"""Checks of the machine: GPUs, driver, clocks, which GPUs NVLink joins, memory, disks, limits.

Reads what the system reports; runs nothing on a GPU.
"""

from __future__ import annotations

import os
import re
import resource
import shutil
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from ulysses_cli.plan.hardware import GIB
from ulysses_cli.plan.layout import GPUS_PER_NODE
from ulysses_cli.plan.ledger.host import PROCESS_BYTES
from ulysses_cli.plan.ledger.job import make_job
from ulysses_cli.plan.ledger.ledger import compute_ledger
from ulysses_cli.plan.ledger.zero.swapping import compute_node_disk_bytes
from ulysses_cli.plan.models.shape import ModelShape
from ulysses_cli.plan.nouns import format_count
from ulysses_cli.plan.planner.lever_choice import choose_levers
from ulysses_cli.plan.recipe.recipe import Recipe
from ulysses_cli.plan.resolved import make_layout
from ulysses_cli.prove.doctor.checkup import CheckTarget, Finding, run_command
from ulysses_cli.prove.results import Verdict, find_version
from ulysses_cli.train.processes.host_memory import (
    count_free_bytes,
    count_host_bytes,
    count_usable_bytes,
    read_memory_limit,
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
    parameters = shape.num_parameters or 0
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
    levers = choose_levers(recipe, shape, gpu).levers
    job = make_job(recipe, shape, levers, gpus_per_node=gpu.gpus_per_node)
    without_overlap = compute_ledger(replace(job, levers=replace(job.levers, early_groups=0)))
    return compute_ledger(job).host_peak_bytes, without_overlap.host_peak_bytes, compute_node_disk_bytes(job)


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
