"""What a Python program calls: `from ulysses_cli.api import train, estimate, plan, validate`. Each function is the
command of the same name without its printing: it returns values and raises exceptions. Imports nothing heavy.
"""

from __future__ import annotations

import json
import os
import re
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeVar

from ulysses_cli.plan.problem import Problem, RecipeError

if TYPE_CHECKING:
    from torch import Tensor

    from ulysses_cli.plan.planner.candidates import SearchResult
    from ulysses_cli.plan.planner.estimate import Estimate
    from ulysses_cli.validate import Validated

__all__ = [
    "EvalResult", "Problem", "RecipeError", "RunError", "Step", "TrainResult", "estimate", "plan", "train", "validate",
]  # fmt: skip

RecipeLike = str | os.PathLike[str] | Mapping[str, Any]  # a file, or its content
Overrides = Mapping[str, Any] | Sequence[str]  # {"train.max_steps": 10} or ["train.max_steps=10"]
LineType = TypeVar("LineType", "Step", "EvalResult")


@dataclass(frozen=True)
class Step:
    """A line of metrics.jsonl: one optimizer step. None where a value was not measured. `measures`: of preferences, by
    TRL's names, such as rewards/margins."""

    step: int
    loss: float | None = None
    epoch: float | None = None
    grad_norm: float | None = None
    learning_rate: float | None = None
    tokens: int = 0
    supervised_tokens: int = 0
    step_seconds: float = 0.0
    tokens_per_second: float = 0.0
    tokens_per_second_per_gpu: float = 0.0
    tflops: float | None = None
    mfu: float | None = None
    peak_memory_bytes: int | None = None
    host_peak_memory_bytes: int | None = None
    communication_share: float | None = None
    early_optimizer_share: float | None = None
    expert_load: float | None = None
    idle_experts: float | None = None
    router_aux_loss: float | None = None
    router_z_loss: float | None = None
    step_parts: Mapping[str, float] | None = None
    applied: bool = True
    measures: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class EvalResult:
    """A line of eval.jsonl: the loss on held-out documents after a step; step 0 is the base model's. `measures` as in
    Step."""

    step: int
    loss: float | None = None
    perplexity: float | None = None
    tokens: int = 0
    by_position: Mapping[str, Any] | None = None
    by_class: Mapping[str, Any] | None = None
    by_turn: Mapping[str, Any] | None = None
    measures: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class TrainResult:
    """A run that ended well. `model_dir`: the exported model; None after an early stop, which `stopped_by` explains,
    and on machines other than the first. `steps` and `evals` include those before a resume."""

    run_dir: Path
    model_dir: Path | None
    stopped_by: str
    steps: tuple[Step, ...]
    evals: tuple[EvalResult, ...]

    @property
    def loss(self) -> float | None:
        """The last step's loss."""
        return self.steps[-1].loss if self.steps else None


class RunError(Exception):
    """A run that failed. `exit_code` is the command's; `failure` the record of the first rank that failed."""

    def __init__(self, message: str, exit_code: int, failure: Mapping[str, Any]) -> None:
        super().__init__(message)
        self.exit_code, self.failure = exit_code, failure


def validate(
    recipe: RecipeLike, overrides: Overrides = (), *, num_processes: int | None = None, online: bool = False
) -> Validated:
    """Returns every problem of a recipe, or its resolved plan. Raises nothing for a bad recipe."""
    from ulysses_cli.validate import validate_recipe

    file, text = ("the recipe", _write_yaml(recipe)) if isinstance(recipe, Mapping) else (os.fspath(recipe), None)
    return validate_recipe(file, _list_words(overrides), num_processes, online=online, text=text)


def estimate(
    recipe: RecipeLike, gpu: str | None = None, overrides: Overrides = (), *, online: bool = False
) -> Estimate:
    """Predicts memory, time and price of a recipe on a kind of GPU; None: `run.gpu`, or h100-80gb. Raises
    RecipeError."""
    from ulysses_cli.commands.estimate_memory import DEFAULT_GPU, find_own_gpu
    from ulysses_cli.hardware_table import load_hardware
    from ulysses_cli.plan.planner.estimate import compute_estimate

    valid = validate(recipe, overrides, online=online)
    if valid.problems or valid.loaded is None or valid.shape is None:
        raise RecipeError(valid.problems)
    table = load_hardware()
    kind = find_own_gpu(valid.loaded, table) if gpu is None else table.get_gpu(gpu, "gpu")
    return compute_estimate(valid.loaded.recipe, valid.shape, kind or table.get_gpu(DEFAULT_GPU))


def plan(
    model: str,
    max_length: int | str,
    *,
    tokens: int | str | None = None,
    gpus: Mapping[str, int] | str | None = None,
    budget: float | None = None,
    deadline: str | None = None,
    method: Literal["auto", "full", "lora", "qlora"] = "auto",
    nvme_path: str | None = None,
    tokens_per_step: int | str | None = None,
    online: bool = False,
) -> SearchResult:
    """Finds GPUs, layouts and memory levers for a model and a row length: `by_cost` and `by_time`, best first, or
    `walls`, which say why nothing fits. `nvme_path`: a folder on each machine's local disk, which plans may use.
    `tokens_per_step`: the same in every plan; None chooses them.
    Raises RecipeError for arguments that cannot be read."""
    from ulysses_cli.commands import plan as command
    from ulysses_cli.hardware_table import load_hardware
    from ulysses_cli.plan.planner.search import SHOWN, list_methods, search_methods

    words = (
        gpus if gpus is None or isinstance(gpus, str) else ",".join(f"{kind}:{count}" for kind, count in gpus.items())
    )
    offers = command.read_offers(words, load_hardware())
    request, _ = command.read_request(
        model, str(max_length), None if tokens is None else str(tokens), budget, deadline,
        longest=False, online=online, nvme_path=nvme_path,
        tokens_per_step=None if tokens_per_step is None else str(tokens_per_step),
    )  # fmt: skip
    requests = list_methods(request, None if method == "auto" else method)
    return search_methods(requests, offers, max(SHOWN, len(offers) if words else 0))[1]


def train(
    recipe: RecipeLike,
    overrides: Overrides = (),
    *,
    resume: str | None = None,
    resume_anyway: bool = False,
    overwrite: bool = False,
    num_processes: int | None = None,
    token_loss: Callable[[Tensor], Tensor] | str | None = None,
    on_step: Callable[[Step], object] | None = None,
    on_eval: Callable[[EvalResult], object] | None = None,
    nnodes: int | None = None,
    node_rank: int | None = None,
    master_addr: str | None = None,
    master_port: int | None = None,
) -> TrainResult:
    """Trains as a recipe says, with a process per GPU, and returns when the model is saved.

    `on_step` and `on_eval` run in this process, on the first machine, for every line of metrics.jsonl and eval.jsonl;
    the run stops with a checkpoint if one returns True or raises. `token_loss` is a function at the top of a module,
    which ranks import; see train.token_loss. Raises RecipeError before ranks start, and RunError.
    """
    from ulysses_cli.commands.children.training import Machine, PreparationError, TrainOptions, run_recipe
    from ulysses_cli.plan.problem import DONE, get_signal_code
    from ulysses_cli.run.host import refuse_core_files
    from ulysses_cli.run.launcher import open_listener

    if threading.current_thread() is not threading.main_thread():
        raise RuntimeError("train() handles signals, and must run in the main thread")
    words = _list_words(overrides)
    if token_loss is not None:
        reference = token_loss if isinstance(token_loss, str) else name_function(token_loss)
        words.append(f"train.token_loss={json.dumps(reference)}")
    options = TrainOptions(num_processes, resume, resume_anyway, overwrite)
    machine = Machine(nnodes, node_rank, master_addr, master_port)

    def receive(split: str, line: dict[str, Any]) -> object:
        if split == "train":
            return on_step(_read_line(Step, line)) if on_step is not None else None
        return on_eval(_read_line(EvalResult, line)) if on_eval is not None else None

    refuse_core_files(os.environ)
    with ExitStack() as stack:
        file = stack.enter_context(_as_file(recipe))
        has_listener = on_step is not None or on_eval is not None
        listener = stack.enter_context(open_listener(receive)) if has_listener else None
        try:
            finished = run_recipe(file, words, options, machine, listener)
        except PreparationError as error:
            raise RunError(str(error), error.exit_code, {}) from None
    if listener is not None and listener.error is not None:
        raise listener.error
    outcome = finished.outcome
    if outcome.exit_code == get_signal_code(2):
        raise KeyboardInterrupt
    if outcome.exit_code != DONE:
        message = str(outcome.failure.get("message") or f"the run ended with exit code {outcome.exit_code}")
        raise RunError(message, outcome.exit_code, outcome.failure)
    run_dir = finished.run_dir
    steps, evals = _read_lines(Step, run_dir / "metrics.jsonl"), _read_lines(EvalResult, run_dir / "eval.jsonl")
    return TrainResult(run_dir, finished.model_dir, outcome.stopped_by, steps, evals)


def name_function(function: Callable[..., Any]) -> str:
    """Returns how ranks, which are processes of their own, find a function: FILE.py:NAME or MODULE:NAME."""
    name, module = getattr(function, "__qualname__", ""), sys.modules.get(getattr(function, "__module__", None) or "")
    file = getattr(module, "__file__", None)
    if module is None or not name.isidentifier() or getattr(module, name, None) is not function or file is None:
        hint = "ranks are processes of their own and import it: define it at the top of a .py file"
        raise ValueError(f"token_loss: {name or function!r} cannot be imported; {hint}")
    return f"{module.__name__}:{name}" if module.__package__ else f"{os.path.abspath(file)}:{name}"


@contextmanager
def _as_file(recipe: RecipeLike) -> Iterator[str]:
    """A recipe's content becomes a file, since ranks read it."""
    if not isinstance(recipe, Mapping):
        yield os.fspath(recipe)
        return
    from tempfile import TemporaryDirectory

    with TemporaryDirectory(prefix="ulysses-recipe-") as folder:
        file = Path(folder) / "recipe.yaml"
        if isinstance(base := recipe.get("extends"), str):  # relative to the caller's folder, not to this one
            recipe = {**recipe, "extends": os.path.abspath(os.path.expanduser(base))}
        file.write_text(_write_yaml(recipe), encoding="utf-8")
        yield str(file)


def _write_yaml(recipe: Mapping[str, Any]) -> str:
    import yaml

    text: str = yaml.safe_dump(json.loads(json.dumps(recipe, default=str)), sort_keys=False, allow_unicode=True)
    return text


def _list_words(overrides: Overrides) -> list[str]:
    if isinstance(overrides, Mapping):
        return [f"{key}={json.dumps(value, default=str)}" for key, value in overrides.items()]
    return list(overrides)


def _read_line(kind: type[LineType], line: Mapping[str, Any]) -> LineType:
    names = {each.name for each in fields(kind)}
    known = {name: value for name, value in line.items() if name in names}
    return kind(**known, measures={name: value for name, value in line.items() if name not in names})


def _read_lines(kind: type[LineType], file: Path) -> tuple[LineType, ...]:
    if not file.is_file():
        return ()
    lines = re.findall(r"^\{.*\}$", file.read_text(encoding="utf-8"), re.MULTILINE)
    return tuple(_read_line(kind, json.loads(line)) for line in lines)
