"""GPUs, links and prices: turns mappings (the shipped hardware.yaml, then the user's) into checked values.

Opens no file. Rates are datasheet numbers; Efficiency holds the shares of them that a step reaches.
"""

from __future__ import annotations

import difflib
import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, fields, replace
from typing import Any, TypeVar

from ulysses_cli.plan.problem import Problem, RecipeError

GIB = 1 << 30
KEY = "--gpu"


@dataclass(frozen=True)
class Efficiency:
    """Shares of a datasheet's rate; names that end in gb_s are rates themselves."""

    matmul: float = 0.72
    memory: float = 0.8
    link: float = 0.75
    host: float = 0.8
    network: float = 0.8
    host_memory_gb_s: float = 30.0
    disk_gb_s: float = 5.0
    narrow_heads: float = 1.0
    narrow_packed_heads: float = 1.0


@dataclass(frozen=True)
class HostCosts:
    """What a processor takes to launch a step's work: milliseconds of the core on which benchmarks/host.py measured, by
    names that hardware.yaml explains. `core_speed`: of the core in use, in that one's. Without costs, nothing waits."""

    core_speed: float = 1.0
    yardstick: float = 1.0
    on_gpu: float = 1.0
    layer_zero1: float = 0.0
    layer_zero2: float = 0.0
    layer_zero3: float = 0.0
    rank: float = 0.0
    recomputation: float = 0.0
    part_recomputation: float = 0.0
    head_norms: float = 0.0
    adapters: float = 0.0
    leaf_layers: float = 0.0
    exchange: float = 0.0
    head_chunk: float = 0.0
    tile: float = 0.0
    loss_tile: float = 0.0
    offloaded_layer: float = 0.0
    offload_optimizer: float = 0.0
    optimizer: float = 0.0
    optimizer_layer: float = 0.0

    def get_layer(self, zero_stage: int, num_ranks: int) -> float:
        """Without recomputation and levers. At stage 3, DeepSpeed cuts each weight and gradient into a part for each
        rank, one by one."""
        if zero_stage == 3:
            return self.layer_zero3 + self.rank * num_ranks
        return self.layer_zero2 if zero_stage == 2 else self.layer_zero1


@dataclass(frozen=True)
class Gpu:
    """One kind of GPU in its usual machine. Rates as datasheets state them; links in one direction."""

    key: str
    name: str
    memory_bytes: int
    tflops: float
    memory_gb_s: float
    link_gb_s: float
    host_gb_s: float
    network_gb_s: float
    attention_forward: float
    attention_backward: float
    gpus_per_node: int
    host_bytes_per_gpu: int
    usd_low: float | None
    usd_high: float | None
    source: str
    price_source: str
    price_date: str
    efficiency: Efficiency = Efficiency()
    host: HostCosts = HostCosts()
    packed_attention: tuple[float, float] | None = None

    def get_attention(self, *, is_packed: bool, is_narrow: bool) -> tuple[float, float]:
        """Shares of the peak, forward and backward. `is_packed`: by torch's own kernel for many documents. `is_narrow`:
        heads of 64 and less."""
        own = self.packed_attention if is_packed else None
        forward, backward = own or (self.attention_forward, self.attention_backward)
        narrow = self.efficiency.narrow_packed_heads if own else self.efficiency.narrow_heads
        return (narrow * forward, narrow * backward) if is_narrow else (forward, backward)

    @property
    def is_amd(self) -> bool:
        return self.name.startswith("AMD")

    @property
    def usd_middle(self) -> float | None:
        """The geometric mean, because prices differ by factors."""
        return None if self.usd_low is None or self.usd_high is None else math.sqrt(self.usd_low * self.usd_high)

    def get_host_bytes(self, num_gpus: int) -> int:
        """Host memory of the machine with the most ranks of a run."""
        return self.host_bytes_per_gpu * min(num_gpus, self.gpus_per_node)


@dataclass(frozen=True)
class Hardware:
    gpus: dict[str, Gpu]
    aliases: dict[str, str]

    def get_gpu(self, name: str, option: str = KEY) -> Gpu:
        """By its key or an alias; hyphens and capitals do not matter. `option` is where the name was written."""
        key = name.strip().lower().replace("_", "-").replace(" ", "-")
        bare = {known.replace("-", ""): known for known in (*self.aliases, *self.gpus)}.get(key.replace("-", ""), key)
        bare = self.aliases.get(bare, bare)
        if bare in self.gpus:
            return self.gpus[bare]
        close = difflib.get_close_matches(key, [*self.gpus, *self.aliases], n=1)
        near = f"did you mean {close[0]}? " if close else ""
        message = f"no GPU is called {name}" if name else "names no GPU"
        how = "write KIND:MOST, such as h100-80gb:8; " if option == "--gpus" else ""
        how = "write --gpu again for each; " if option == KEY and "," in name else how
        raise RecipeError([Problem(option, message, f"{how}{near}known: {', '.join(self.gpus)}")])

    def recognise(self, device_name: str, memory_bytes: int, host_bytes: int) -> tuple[Gpu, bool]:
        """The entry for the device name that a driver gives, with the memory that the device really has, and whether
        the name is known. A GPU that is not in the table gets the rates of the one with the most similar memory."""
        words = set(device_name.lower().replace("-", " ").split())
        scores = {key: sum(word in words for word in key.split("-")) for key in self.gpus}
        best = max(scores.values())
        alike = [gpu for key, gpu in self.gpus.items() if scores[key] == best]
        nearest = min(alike, key=lambda gpu: abs(gpu.memory_bytes - memory_bytes))
        return replace(nearest, memory_bytes=memory_bytes, host_bytes_per_gpu=host_bytes), best > 0


Numbers = TypeVar("Numbers", Efficiency, HostCosts)
SECTIONS = ("gpus", "efficiency", "host")
NUMBERS = {"tflops", "memory_gb_s", "link_gb_s", "host_gb_s", "network_gb_s"}
REQUIRED = {*NUMBERS, "name", "memory_mib", "attention", "gpus_per_node", "host_gib_per_gpu"}
OPTIONAL = {"aliases", "efficiency", "packed_attention", "usd_per_hour", "source", "price_source", "price_date"}


def read_hardware(*tables: tuple[str, Any]) -> Hardware:
    """Merges (file, content) pairs, later ones over earlier ones. Raises RecipeError with every mistake at once."""
    problems: list[Problem] = []
    entries: dict[str, dict[str, Any]] = {}
    efficiency, host = Efficiency(), HostCosts()
    origin: dict[str, str] = {}
    for file, content in tables:
        if not isinstance(content, Mapping):
            problems.append(Problem("", f"{file} holds no mapping", "write `gpus:` and below it a GPU's name"))
            continue
        problems += [
            Problem(str(section), f"unknown section of {file}", f"sections are {', '.join(SECTIONS)}")
            for section in content.keys() - set(SECTIONS)
        ]
        efficiency = _read_shares(file, content.get("efficiency") or {}, efficiency, problems)
        host = _read_numbers(file, "host", content.get("host") or {}, host, problems)
        gpus = content.get("gpus") or {}
        if not isinstance(gpus, Mapping):
            problems.append(
                Problem("gpus", f"{file}: is not a mapping of GPUs", "write a name and below it its numbers")
            )
            continue
        for key, entry in gpus.items():
            if not isinstance(entry, Mapping):
                problems.append(Problem(f"gpus.{key}", f"{file}: is not a mapping", "write its numbers below it"))
                continue
            entries[str(key).lower()] = {**entries.get(str(key).lower(), {}), **entry}
            origin[str(key).lower()] = file
    read = {key: _read_gpu(origin[key], key, entry, efficiency, host, problems) for key, entry in entries.items()}
    if problems:
        raise RecipeError(problems)
    gpus = {key: gpu for key, gpu in read.items() if gpu is not None}
    aliases = {str(alias).lower(): key for key in gpus for alias in entries[key].get("aliases") or ()}
    return Hardware(gpus, aliases)


def _read_shares(file: str, written: Any, known: Efficiency, problems: list[Problem]) -> Efficiency:
    hint = "; shares lie above 0 and at most 1"
    return _read_numbers(file, "efficiency", written, known, problems, lambda key: key.endswith("_gb_s"), hint)


def _read_numbers(
    file: str,
    section: str,
    written: Any,
    known: Numbers,
    problems: list[Problem],
    is_rate: Callable[[str], bool] = lambda _: True,
    hint: str = "",
) -> Numbers:
    """The known numbers, replaced key by key. Those that are no rates are at most 1."""
    names = {field.name for field in fields(known)}
    if not isinstance(written, Mapping):
        problems.append(Problem(section, f"{file}: is not a mapping", f"keys are {', '.join(sorted(names))}"))
        return known
    for name, value in written.items():
        if name not in names or not _is_number(value, 10_000.0 if is_rate(name) else 1.0):
            hints = f"keys are {', '.join(sorted(names))}{hint}"
            problems.append(Problem(f"{section}.{name}", f"{file}: {value!r} cannot be used", hints))
        else:
            known = replace(known, **{name: float(value)})
    return known


def _is_number(value: Any, most: float) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 < value <= most


def _is_pair(value: Any, most: float) -> bool:
    return isinstance(value, list | tuple) and len(value) == 2 and all(_is_number(number, most) for number in value)


def _read_gpu(
    file: str, key: str, entry: Mapping[str, Any], efficiency: Efficiency, host: HostCosts, problems: list[Problem]
) -> Gpu | None:
    before = len(problems)

    def complain(name: str, message: str, hint: str = "") -> None:
        problems.append(Problem(f"gpus.{key}.{name}", f"{file}: {message}", hint))

    for name in sorted(entry.keys() - REQUIRED - OPTIONAL, key=str):
        complain(str(name), "unknown key", f"keys are {', '.join(sorted(REQUIRED | OPTIONAL))}")
    for name in sorted(REQUIRED - entry.keys()):
        complain(name, "missing", "a GPU of your own needs all numbers; one that is shipped, only what differs")
    for name in sorted(NUMBERS & entry.keys()):
        if not _is_number(entry[name], 1e6):
            complain(name, f"{entry[name]!r} is not a positive number")
    for name in ("memory_mib", "gpus_per_node", "host_gib_per_gpu"):
        if name in entry and not (_is_number(entry[name], 1e9) and entry[name] == int(entry[name])):
            complain(name, f"{entry[name]!r} is not a positive whole number")
    for name in ("attention", "packed_attention"):
        if name in entry and not _is_pair(entry[name], 1.0):
            complain(name, f"{entry[name]!r} is not a pair of shares", "write [forward, backward]")
    price = entry.get("usd_per_hour")
    if _is_number(price, 1e4):
        price = [price, price]
    if price is not None and not (_is_pair(price, 1e4) and price[0] <= price[1]):
        complain("usd_per_hour", f"{price!r} is neither a price nor [low, high]")
    if not isinstance(entry.get("aliases") or [], list):
        complain("aliases", "is not a list of names")
    if len(problems) > before:
        return None
    own = _read_shares(file, entry.get("efficiency") or {}, efficiency, problems)
    low, high = (float(price[0]), float(price[1])) if price is not None else (None, None)
    forward, backward = entry["attention"]
    packed = entry.get("packed_attention")
    return Gpu(
        key=key,
        name=str(entry["name"]),
        memory_bytes=int(entry["memory_mib"]) << 20,
        **{name: float(entry[name]) for name in NUMBERS},
        attention_forward=float(forward),
        attention_backward=float(backward),
        gpus_per_node=int(entry["gpus_per_node"]),
        host_bytes_per_gpu=int(entry["host_gib_per_gpu"]) * GIB,
        usd_low=low,
        usd_high=high,
        source=str(entry.get("source") or ""),
        price_source=str(entry.get("price_source") or ""),
        price_date=str(entry.get("price_date") or ""),
        efficiency=own,
        host=host,
        packed_attention=(float(packed[0]), float(packed[1])) if packed else None,
    )


def list_untested(gpus: Iterable[Gpu]) -> list[str]:
    """A note for each named kind that is not NVIDIA's: no plan proposes one by itself."""
    reason = "nothing of this tool was tried or is described on AMD's GPUs, whose torch is ROCm's"
    return [f"{key}: {reason}" for key in dict.fromkeys(gpu.key for gpu in gpus if gpu.is_amd)]


def compute_cost(seconds: float, num_gpus: int, gpu: Gpu) -> tuple[float, float] | None:
    """USD at the low and at the high price of the GPUs for that time; None where no price is known."""
    if gpu.usd_low is None or gpu.usd_high is None:
        return None
    return compute_price(seconds, num_gpus, gpu.usd_low), compute_price(seconds, num_gpus, gpu.usd_high)


def compute_price(seconds: float, num_gpus: int, usd_per_gpu_hour: float) -> float:
    """USD for GPUs during that time. All prices that are shown, compared or added up come from here."""
    return seconds / 3600 * num_gpus * usd_per_gpu_hour
