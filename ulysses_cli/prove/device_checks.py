"""Checks of `doctor` that run on the devices: all-to-all of NCCL (on CPUs gloo) at several sizes, each attention
kernel, matrix products, page-locked copies.  Each result is compared with the expected one before it is timed.
Imports torch: doctor.py loads it when it is needed."""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist

from ulysses_cli.plan.attention import BACK_ENDS, Need, list_needs
from ulysses_cli.plan.hardware import Gpu
from ulysses_cli.plan.ledger.job import is_known
from ulysses_cli.plan.planner.lever_choice import choose_levers
from ulysses_cli.plan.speed import explain_packed
from ulysses_cli.plan.units import format_count
from ulysses_cli.prove.ranks import RankFailureError, run_on_ranks
from ulysses_cli.prove.results import CheckTarget, Finding, Verdict
from ulysses_cli.train.attention.kernels.choice import choose_kernel, join_presence, read_presence
from ulysses_cli.train.attention.kernels.trial import KernelSearch

SIZES_BYTES = {"cpu": (1 << 16, 1 << 20, 1 << 24), "cuda": (1 << 16, 1 << 20, 1 << 24, 1 << 28)}
MAX_EXCHANGING_CPU_RANKS = 4
NUM_TIMED = 7
SLOW_LINK, SLOW_MATMUL = 0.4, 0.5  # shares of the datasheet's rate; below them something is wrong
EXCHANGE_LIMIT_SECONDS = 180.0
FAST_PACKAGES = ("flash_attention_3", "flash_attention_4")
HOST_BYTES = 1 << 40  # which no kernel depends on


def check_exchange(target: CheckTarget) -> Iterator[Finding]:
    """The collective of attention under sequence parallelism: every rank sends a part to every rank."""
    sp_size = target.recipe.parallel.sp_size if target.recipe else 2
    slots = target.num_gpus if target.device == "cuda" else MAX_EXCHANGING_CPU_RANKS
    num_ranks = max(size for size in range(1, slots + 1) if sp_size % size == 0) if sp_size > 1 else min(2, slots)
    back_end = "NCCL" if target.device == "cuda" else "gloo"
    if num_ranks < 2:
        yield Finding("all-to-all", "SKIP", f"one GPU: there is no second rank for {back_end} to exchange with")
        return
    try:
        exchanges = run_on_ranks(
            num_ranks,
            time_exchanges,
            SIZES_BYTES[target.device],
            device=target.device,
            time_limit=EXCHANGE_LIMIT_SECONDS,
        )
    except RankFailureError as failure:
        fix = "run again with NCCL_DEBUG=INFO; look at firewalls, NCCL_SOCKET_IFNAME and /dev/shm"
        yield Finding("all-to-all", "FAIL", f"{back_end} over {format_count(num_ranks, 'rank')}: {failure}", fix)
        return
    for size, is_exact, seconds in exchanges:
        rate = size * (num_ranks - 1) / num_ranks / seconds
        verdict: Verdict = "PASS" if is_exact else "FAIL"
        text = f"{back_end}, {format_count(num_ranks, 'rank')}" if is_exact else f"{back_end} delivered wrong bytes"
        values = {"message_bytes": size, "exchange_seconds": seconds, "gb_per_second": rate / 1e9}
        yield Finding("all-to-all", verdict, text, "do not train on this machine: its links corrupt data", values)
    if target.device == "cuda":
        facts = torch.cuda.get_device_properties(0)
        gpu, is_known = target.hardware.recognise(facts.name, facts.total_memory, 1 << 30)
        if is_known and rate / 1e9 < SLOW_LINK * gpu.link_gb_s:
            text = f"{rate / 1e9:.0f} GB/s is below {SLOW_LINK:.0%} of the {gpu.link_gb_s:.0f} GB/s of {gpu.name}"
            yield Finding("link", "WARN", text, "see the topology below: sp ranks belong on NVLink")


def time_exchanges(device: torch.device, sizes: tuple[int, ...]) -> list[tuple[int, bool, float]]:
    """Collective over all ranks. Returns, of each size, (bytes that a rank sends, whether they arrived unchanged,
    median seconds)."""
    world, rank = dist.get_world_size(), dist.get_rank()
    exchanges = []
    for size in sizes:
        part = size // 4 // world
        send = (torch.arange(world, device=device)[:, None] + 1000 * rank).expand(world, part).int().contiguous()
        received = torch.empty_like(send)
        dist.all_to_all_single(received, send)
        expected = (1000 * torch.arange(world, device=device)[:, None] + rank).expand(world, part)
        is_exact = torch.tensor([int(torch.equal(received, expected.int()))], device=device)
        dist.all_reduce(is_exact, dist.ReduceOp.MIN)
        seconds = []
        for _ in range(NUM_TIMED):
            begin = _now(device)
            dist.all_to_all_single(received, send)
            seconds.append(_now(device) - begin)
        exchanges.append((size, bool(is_exact.item()), statistics.median(seconds)))
    return exchanges


def _now(device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()


def check_kernels(target: CheckTarget) -> Iterator[Finding]:
    """Forward and backward of each kernel on packed documents, compared with the definition of attention."""
    device = torch.device("cuda", 0) if target.device == "cuda" else torch.device("cpu")
    shape, recipe = target.shape, target.recipe
    needs, window = [Need(64, dtype="bfloat16")], None
    if shape is not None and recipe is not None:
        window = min(shape.windows) if shape.windows else None
        needs = list(list_needs(shape, recipe.model.dtype))
    requested = recipe.model.attn_implementation if recipe else "auto"
    is_fast = False
    for need in needs:
        title = "" if len(needs) == 1 else f", heads of {need.head_dim}"
        for finding in _check_kernels_of(need, title, requested, device, window if need.has_window else None):
            is_fast = is_fast or (finding.verdict == "PASS" and finding.name.startswith(FAST_PACKAGES))
            yield finding
    if device.type == "cuda" and requested == "auto" and not is_fast:
        facts = torch.cuda.get_device_properties(0)
        gpu, is_known = target.hardware.recognise(facts.name, facts.total_memory, HOST_BYTES)
        yield from find_slow_rows(target, gpu) if is_known else ()


def find_slow_rows(target: CheckTarget, gpu: Gpu) -> Iterator[Finding]:
    """What the recipe's packed rows are predicted to cost without a package that has a faster kernel for this GPU."""
    recipe, shape = target.recipe, target.shape
    if recipe is None or shape is None or not is_known(shape):
        return
    job = choose_levers(recipe, shape, gpu).make_job(recipe, shape, gpu)
    if words := explain_packed(job, gpu):
        text, _, fix = words.rpartition(": ")
        yield Finding("packed rows", "WARN", text, fix)


def _check_kernels_of(
    need: Need, title: str, requested: str, device: torch.device, window: int | None
) -> Iterator[Finding]:
    num_exact = 0
    presence = join_presence([read_presence(device)])
    search = KernelSearch(need, device, window)
    for name, back_end in BACK_ENDS.items():
        obstacle = back_end.find_obstacle(need, search.kind, presence.capabilities[0])
        obstacle = obstacle or presence.missing.get(name, "")
        if obstacle:  # it cannot be run here
            verdict: Verdict = "FAIL" if name == requested else "SKIP"
            yield Finding(f"{name}{title}", verdict, obstacle, "model.attn_implementation=auto")
            continue
        try:
            choose_kernel(name, search, presence)
        except ValueError as error:
            reason = str(error).removeprefix(f"attention {name} ").partition(";")[0]
            fix = "model.attn_implementation=auto" if name == requested else ""  # auto skips it
            yield Finding(f"{name}{title}", "FAIL" if name == requested else "WARN", reason, fix)
            continue
        num_exact += 1
        yield Finding(f"{name}{title}", "PASS", f"exact: forward and backward, head_dim {need.head_dim}, {need.dtype}")
    if not num_exact:
        yield Finding("attention", "FAIL", "no kernel is exact here", "pip install a torch built for this GPU")


def check_arithmetic(target: CheckTarget) -> Iterator[Finding]:
    """The rate of a matrix product; GPUs are timed one by one, since one slow GPU slows all."""
    if target.device == "cpu":
        yield Finding("matrix product", "PASS", "CPU, float32", values={"tflops": _time_matmul("cpu", 1024)})
        return
    facts = torch.cuda.get_device_properties(0)
    gpu, is_known = target.hardware.recognise(facts.name, facts.total_memory, 1 << 30)
    for index in range(target.num_gpus):
        rate = _time_matmul(f"cuda:{index}", 8192)
        is_slow = is_known and rate < SLOW_MATMUL * gpu.tflops
        text = f"{torch.cuda.get_device_name(index)}, bfloat16; datasheet {gpu.tflops:.0f}"
        fix = "look at clocks, power limit and temperature (nvidia-smi -q -d PERFORMANCE)"
        yield Finding(f"GPU {index}", "WARN" if is_slow else "PASS", text, fix, {"tflops": rate})


def _time_matmul(device_name: str, size: int) -> float:
    """TFLOPS of the fastest of five products."""
    device = torch.device(device_name)
    a = torch.randn(size, size, device=device, dtype=torch.float32 if device.type == "cpu" else torch.bfloat16)
    seconds = []
    for _ in range(5):
        begin = _now(device)
        a @ a
        seconds.append(_now(device) - begin)
    return 2 * size**3 / min(seconds) / 1e12


def check_pinned(target: CheckTarget) -> Iterator[Finding]:
    """Page-locked host memory can be had, and its copies to a GPU are timed."""
    if target.device == "cpu":
        yield Finding("page-locked memory", "SKIP", "no GPU: nothing is copied to one")
        return
    fix = "raise the limit of locked memory (ulimit -l unlimited; docker: --ulimit memlock=-1)"
    try:
        host = torch.empty(1 << 28, dtype=torch.uint8, pin_memory=True)
    except RuntimeError as error:
        yield Finding("page-locked memory", "FAIL", str(error).splitlines()[0][:160], fix)
        return
    on_gpu: Any = torch.empty(1 << 28, dtype=torch.uint8, device="cuda")
    best = float("inf")
    for _ in range(5):
        begin = _now(on_gpu.device)
        on_gpu.copy_(host, non_blocking=True)
        best = min(best, _now(on_gpu.device) - begin)
    yield Finding("page-locked memory", "PASS", "host to GPU", values={"gb_per_second": 2**28 / best / 1e9})
