"""Chooses among implementations that should compute the same: each candidate is tried, those that are exact are timed,
the fastest is taken, and every other one has its reason. A room brings candidates, reference, inputs and tolerance.

A foreign package is tried in a child process. What was chosen is kept on disk. Only rank 0 chooses in a run, and all
ranks get its choice (model/parts.py), since times and what is kept differ from rank to rank."""

from __future__ import annotations

import ctypes
import hashlib
import json
import os
import pickle
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from functools import cache, wraps
from importlib import metadata
from itertools import groupby
from pathlib import Path
from typing import IO, Any, Generic, TypeVar

import torch
from torch import Tensor

from ulysses_cli.plan.files import write_whole

Name = TypeVar("Name", bound=str)
LEAST_NORM = 0.5  # of the mean norm: what a smaller vector is compared with
LIMIT_SECONDS = 300.0  # of a child: FlashAttention 4 compiles its kernels at the first call
UNKNOWN = "unknown"
PR_SET_PDEATHSIG = 1
MOST_KINDS = 64  # of inputs of one compiled function
COMMAND = (sys.executable, "-m", "ulysses_cli.train.choosing")


@dataclass(frozen=True)
class Outcome:
    """Of a trial. `obstacle`: why the candidate cannot be used, or ''. `seconds` of forward and backward. `is_lasting`:
    a later run would meet the same obstacle, which a full GPU or a busy machine does not explain."""

    obstacle: str = ""
    seconds: float = 0.0
    is_lasting: bool = False


@dataclass(frozen=True)
class Candidate(Generic[Name]):
    """`try_out` compares it with a reference, and times it. `obstacle`: why it is passed over without a trial, or ''.
    `speed_class`: it is tried only where none of a lower number is exact."""

    name: Name
    try_out: Callable[[], Outcome]
    obstacle: str = ""
    speed_class: int = 0


@dataclass(frozen=True)
class Choice(Generic[Name]):
    """What was chosen, and why. `is_lasting`: a later run may use it."""

    name: Name
    reason: str
    is_lasting: bool = True


@dataclass(frozen=True)
class Tally(Generic[Name]):
    """`seconds` of candidates that are exact, the fastest first; `notes`: why others were passed over."""

    seconds: Mapping[Name, float]
    notes: Sequence[str]
    is_lasting: bool

    def find_best(self) -> Name | None:
        return next(iter(self.seconds), None)

    def format_times(self) -> str:
        return ", ".join(f"{name} {value * 1e3:.2f} ms" for name, value in self.seconds.items())


def try_candidates(candidates: Iterable[Candidate[Name]]) -> Tally[Name]:
    """Tries one speed class after the other, until one of a class is exact."""

    def get_class(candidate: Candidate[Name]) -> int:
        return candidate.speed_class

    seconds: dict[Name, float] = {}
    notes, is_lasting = list[str](), True
    for _, equals in groupby(sorted(candidates, key=get_class), get_class):
        for candidate in equals:
            outcome = Outcome(candidate.obstacle, is_lasting=True) if candidate.obstacle else candidate.try_out()
            if outcome.obstacle:
                notes.append(f"{candidate.name} {outcome.obstacle}")
                is_lasting &= outcome.is_lasting
            else:
                seconds[candidate.name] = outcome.seconds
        if seconds:
            break
    return Tally(dict(sorted(seconds.items(), key=lambda each: each[1])), notes, is_lasting)


def measure_error(result: Tensor, expected: Tensor) -> float:
    """The largest relative error of any vector of the last dimension: norm of the difference over norm of the expected
    vector, so that a late token, whose values are means of many, counts nearly like an early one. A gradient may be
    computed from terms that cancel and whose rounding does not: one near zero is compared with a share of the mean
    norm."""
    norm = torch.linalg.vector_norm(expected, dim=-1)
    floor = LEAST_NORM * norm.square().mean().sqrt()
    difference = torch.linalg.vector_norm(result.float() - expected, dim=-1)
    return (difference / torch.maximum(norm, floor).clamp_min(1e-30)).max().item()


def measure_seconds(run: Callable[[], object], device: torch.device, num_timed: int) -> float:
    """The least of so many runs after a first one, which may compile."""
    seconds = []
    for _ in range(1 + num_timed):
        _wait_for(device)
        start = time.perf_counter()
        run()
        _wait_for(device)
        seconds.append(time.perf_counter() - start)
    return min(seconds)


def _wait_for(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def describe_error(error: Exception) -> str:
    lines = str(error).strip().splitlines() or [type(error).__name__]
    return lines[0][:160]


def choose_once(
    facts: Mapping[str, Any], sources: Path, choose: Callable[[], Choice[str]], is_known: Callable[[str], bool]
) -> Choice[str]:
    """Uses what an earlier run on this machine chose, where there is one. `facts`: everything that the choice depends
    on besides this package's own code, of which digests are added: `sources` is the folder of modules that say how
    candidates are called, and by which rule they are tried."""
    facts = {"code": [digest_code(sources), digest_code(Path(__file__))], **facts}
    key = hashlib.sha256(json.dumps(facts, sort_keys=True, default=str).encode()).hexdigest()[:32]
    file = get_folder(os.environ) / f"{key}.json"
    with suppress(OSError, ValueError, KeyError, TypeError):
        kept = json.loads(file.read_text(encoding="utf-8"))
        if is_known(kept["name"]):
            return Choice(kept["name"], f"{kept['reason']} (found in an earlier run: {file})")
    choice = choose()
    if choice.is_lasting:
        content = {"name": choice.name, "reason": choice.reason, "facts": facts}
        with suppress(OSError):
            file.parent.mkdir(parents=True, exist_ok=True)
            write_whole(file, json.dumps(content, indent=1, default=str))
    return choice


def find_version(names: Sequence[str]) -> str:
    """Of the first of these distributions that is installed."""
    for name in names:
        try:
            return metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return UNKNOWN


def get_folder(environ: Mapping[str, str]) -> Path:
    base = environ.get("XDG_CACHE_HOME") or os.path.join(os.path.expanduser("~"), ".cache")
    return Path(base) / "ulysses" / "kernels"


@cache
def digest_code(path: Path) -> str:
    """Of a module, or of a folder's modules. After a change of any of them, candidates are tried again: what an earlier
    version found to be exact and fast was found with other calls."""
    files = sorted(path.glob("*.py")) if path.is_dir() else [path]
    return hashlib.sha256(b"\0".join(file.read_bytes() for file in files)).hexdigest()[:16]


def try_in_child(
    try_out: Callable[[], Outcome], limit_seconds: float = LIMIT_SECONDS, command: Sequence[str] = COMMAND
) -> Outcome:
    """Tries a foreign package in a process of its own, with a time limit: it may end its process, hang, or leave the
    GPU's context in an error that every later call would meet. However the child ends, this process goes on. `try_out`
    and its arguments are found by their names in the child."""
    with tempfile.TemporaryFile("w+", errors="replace") as messages:
        child = subprocess.Popen(
            [*command, str(os.getpid())],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=messages,
            start_new_session=True,  # its own children, such as compilers, end with it
        )
        try:
            answer, _ = child.communicate(pickle.dumps(try_out), limit_seconds)
        except subprocess.TimeoutExpired:
            return Outcome(f"did not end its probe within {limit_seconds:.0f} s")
        finally:
            with suppress(ProcessLookupError):  # the whole group has ended already
                os.killpg(child.pid, signal.SIGKILL)
            child.wait()
        return _read_answer(answer.decode(errors="replace"), child.returncode, messages)


def _read_answer(answer: str, exit_code: int, messages: IO[str]) -> Outcome:
    lines = answer.strip().splitlines()
    if exit_code == 0 and lines:
        try:
            values = json.loads(lines[-1])
            return Outcome(str(values["obstacle"]), float(values["seconds"]), bool(values["is_lasting"]))
        except (ValueError, KeyError, TypeError):  # cut short, or written by the package
            return Outcome(f"answered {lines[-1][:160]!r}")
    messages.seek(0)
    said = [line.strip() for line in messages if line.strip()]
    how = f"by signal {signal.Signals(-exit_code).name}" if exit_code < 0 else f"with exit code {exit_code}"
    return Outcome(f"ended its process {how}{': ' + said[-1][:160] if said else ''}")


def answer_parent(parent: int) -> None:
    """Runs the trial that stdin holds, writes its outcome to stdout. Ends with its parent. What a package prints goes
    to stderr."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # the parent has ended already
        return
    answer = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    try_out = pickle.load(sys.stdin.buffer)  # noqa: S301 - from the process that started this one
    answer.write(json.dumps(asdict(try_out())) + "\n")
    answer.flush()
    os._exit(0)  # not by way of a foreign package's handlers


def call_operator(operator: Any, *inputs: Any) -> Any:
    """Calls a custom operator's own function where nothing but kernels would see the operator: torch's dispatcher takes
    longer than many a small kernel. A trace and a compiler see it, as one operation."""
    function = None if torch.compiler.is_compiling() else getattr(operator, "_init_fn", None)
    if function is None or type(inputs[0]) is not Tensor or torch._C._len_torch_dispatch_stack():
        return operator(*inputs)
    return function(*inputs)


def compile_for_all_threads(function: Callable[..., Any], **options: Any) -> Callable[..., Any]:
    """torch.compile, for up to MOST_KINDS kinds of inputs. A GPU's backward runs in a thread of its own, with its
    recomputations, and torch 2.12 and later keep their settings for each thread: the limit is set where a call is."""
    compiled = torch.compile(function, **options)

    @wraps(function)
    def call(*args: Any, **keywords: Any) -> Any:
        settings: Any = torch._dynamo.config
        if settings.recompile_limit < MOST_KINDS:
            settings.recompile_limit = MOST_KINDS
        return compiled(*args, **keywords)

    return call


if __name__ == "__main__":
    answer_parent(int(sys.argv[1]))
