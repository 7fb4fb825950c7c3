"""Writes a run's record: run.json and the model card, events for the user's display, lines for programs, numbers for
trackers (one class for each service). Only rank 0 has any of them; on every other rank the same calls write nothing.

Says when the loss stays far above its own past, and decides nothing: a run goes on."""

from __future__ import annotations

import contextlib
import json
import math
import os
import platform
import sys
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import UTC, datetime
from functools import partial
from importlib import metadata
from pathlib import Path
from typing import Any, Protocol

import psutil
import torch

from ulysses_cli.plan.files import write_whole
from ulysses_cli.plan.ledger.weights import find_num_parameters
from ulysses_cli.plan.models.model_files import CLOCK, list_variables, read_date
from ulysses_cli.plan.models.shape import ModelShape
from ulysses_cli.plan.resolved import changes_positions
from ulysses_cli.plan.rules.public_names import LOCAL_FOLDER, make_public
from ulysses_cli.plan.secrets import collect_secrets, mask_secrets, mask_text
from ulysses_cli.run.lock import RunLock
from ulysses_cli.run.records import LineFile, cut_lines, note_notification, read_lines

PACKAGES = ("torch", "transformers", "deepspeed", "peft", "datasets", "safetensors")
TOOL = "ulysses-cli"


def get_own_version() -> str:
    """That of this code. The package need not be installed: a checkout on the path will do. Its root is loaded before
    any of its modules."""
    return str(sys.modules["ulysses_cli"].__version__)


def list_versions() -> dict[str, str]:
    versions = {"ulysses": get_own_version(), "python": platform.python_version()}
    return versions | {name: metadata.version(name) for name in PACKAGES}


def describe_machine(device: torch.device) -> dict[str, Any]:
    here = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    if device.type != "cuda":
        return {"device": f"CPU, {platform.machine()}", "processes_per_machine": here}
    facts = torch.cuda.get_device_properties(device)
    return {"device": facts.name, "device_memory_bytes": facts.total_memory, "processes_per_machine": here}


def mask_facts(content: dict[str, Any]) -> dict[str, Any]:
    """The facts without the recipe's secrets and without this process's."""
    masked: dict[str, Any] = mask_secrets(content, known=collect_secrets(content.get("recipe"), os.environ))
    return masked


def write_run_file(run_dir: Path, content: dict[str, Any]) -> None:
    started = datetime.now(UTC).isoformat(timespec="seconds")
    write_whole(run_dir / "run.json", json.dumps({**mask_facts(content), "started": started}, indent=1))


LOADING = """\
# The base model with the positions that these adapters were trained with, and the adapters on it
from peft import PeftModel
from transformers import AutoConfig, AutoModelForCausalLM

folder = "."  # where this card is
config = AutoConfig.from_pretrained(f"{{folder}}/base_config"){own_size}
model = AutoModelForCausalLM.from_pretrained({base!r}, config=config, dtype={dtype!r}{mapping}){growth}
model = PeftModel.from_pretrained(model, folder)"""
MAPPING = """,
    key_mapping={mapping},  # the base's files hold other parts too
"""
OWN_SIZE = """
config.vocab_size = {own}  # rows in the base model's files"""
GROWTH = """
model.resize_token_embeddings({grown}, mean_resizing=False)
for part in (model.get_input_embeddings(), model.get_output_embeddings()):
    rows = part.weight.data  # tokens that were added begin, and stay, at the mean of the others
    rows[{own}:] = rows[:{own}].double().mean(0).to(rows.dtype)"""
VARIABLES_NOTE = """\
Chats were rendered with variables of the template. A server gets them with each request, such as vLLM and SGLang by
`"chat_template_kwargs": {variables}`, and transformers' `apply_chat_template` as arguments. tokenizer_config.json has
them too, for `ulysses evaluate` and `ulysses sample`."""
DATE_NOTE = """\
The chat template writes a date. Training wrote {date} into every chat, and so do `ulysses evaluate` and `ulysses
sample`. A server writes the day's, which the model has not seen{remedy}."""
DATE_VARIABLE, DATE_FORM = "date_string", "%d %b %Y"  # of Llama's templates
RECIPE_NOTE = "All defaults included; what names folders and services of the machine is left out:"


def make_card(
    recipe: dict[str, Any],
    name: str,
    shape: ModelShape,
    num_own_tokens: int,
    *,
    is_merged: bool = False,
    key_mapping: Mapping[str, str] | None = None,
    template: str = "",
) -> str:
    """The model card: what was trained, on what, how to load adapters, and the whole recipe. `num_own_tokens`: rows of
    the base model's embedding in its files. `key_mapping`: transformers', where the base's files are those of a
    multimodal model. `template`: the chats'. The card may be published: it says nothing of the machine."""
    import yaml

    holds_adapters = bool(recipe["lora"]) and not is_merged
    known, public = collect_secrets(recipe, os.environ), make_public(recipe)
    model, max_length = public["model"], public["data"]["max_length"]
    base = model["name_or_path"]
    lines = ["---", f"library_name: {'peft' if holds_adapters else 'transformers'}"]
    lines += [f"base_model: {base}"] if base not in (None, LOCAL_FOLDER) else []
    lines += ["---", "", f"# {name}", ""]
    num_parameters = find_num_parameters(shape)
    size = f", {num_parameters:,} parameters" if num_parameters else ""
    origin = {None: "A model from random weights", LOCAL_FOLDER: "A model from a local folder"}.get(base, base)
    summary = f"{origin} ({shape.model_type}{size}), fine-tuned at {max_length:,} tokens per row"
    lines += [f"{summary} with ulysses {get_own_version()}.", ""]
    if recipe["run"].get("start_from"):
        lines += ["Its training went on from the weights of an earlier run, not from the base model's.", ""]
    if holds_adapters and base:
        sizes = {"own": num_own_tokens, "grown": shape.vocab_size}
        has_grown = shape.vocab_size > num_own_tokens
        code = LOADING.format(
            base="the base model's folder" if base == LOCAL_FOLDER else base,
            dtype=model["dtype"],
            mapping=MAPPING.format(mapping=dict(key_mapping)) if key_mapping else "",
            own_size=OWN_SIZE.format(**sizes) if has_grown else "",
            growth=GROWTH.format(**sizes) if has_grown else "",
        )
        lines += ["## Loading", "", "```python", *code.splitlines(), "```", ""]
    if notes := _describe_template(public["data"].get("chat_template_kwargs") or {}, template):
        lines += ["## Chat template", "", "\n\n".join(notes), ""]
    lines += ["## Recipe", "", RECIPE_NOTE, ""]
    written = yaml.safe_dump(mask_secrets(public, known=known), sort_keys=False, allow_unicode=True)
    return "\n".join([mask_text("\n".join(lines), known), "```yaml", written.rstrip(), "```", ""])


def _describe_template(variables: Mapping[str, Any], template: str) -> list[str]:
    """What a server must know to write the prompts of training."""
    given = {name: value for name, value in variables.items() if name != CLOCK}
    notes = [VARIABLES_NOTE.format(variables=json.dumps(given, ensure_ascii=False))] if given else []
    read = list_variables(template)
    if CLOCK in read and DATE_VARIABLE not in given:
        date = read_date(variables)
        known = json.dumps({DATE_VARIABLE: date.strftime(DATE_FORM)})
        remedy = f', unless it gets `"chat_template_kwargs": {known}`' if DATE_VARIABLE in read else ""
        notes.append(DATE_NOTE.format(date=f"{date:%Y-%m-%d}", remedy=remedy))
    return notes


EXPERTS_LEFT_OUT = (
    "vLLM has left adapters of experts out without a word (vllm-project/vllm #41384, #52198): merge them before you "
    "serve them, by `ulysses export CHECKPOINT --to DIR --merge-lora`"
)


def list_adapter_warnings(model: Mapping[str, Any], lora: Mapping[str, Any]) -> list[str]:
    """Where adapters need another base model than the plain one, or a server would leave them out. `model`, `lora`:
    the recipe's sections."""
    adapter_warnings = [EXPERTS_LEFT_OUT] if lora.get("experts") else []
    if changes_positions(model):
        adapter_warnings.append(
            "adapters do not carry the stretched positions: load the base as the README.md next to them shows, or run "
            "`ulysses export CHECKPOINT --to DIR --merge-lora`"
        )
    if model["config"] is not None:
        adapter_warnings.append("the adapters belong to a random model, which is not on disk")
    return adapter_warnings


WINDOW = 16  # steps in a row that tell a lasting rise from noise
MARGIN = 1.0  # nats between all losses of a window and all losses of the best window before
WIDE_MARGIN = 3.0  # nats, where one number or a few stand on a side: the first loss, the last losses
LAST = 3  # losses at the end of a run; also those that show that the loss is back


class LossWatch:
    """`is_high`: whether the loss is far above its past right now."""

    def __init__(self, warn: Callable[[str], None]) -> None:
        self.warn = warn
        self.last_step: int | None = None
        self.recent: deque[float] = deque(maxlen=WINDOW)
        self.num_losses = 0
        self.first = self.ceiling = math.inf  # the first loss; the highest one of the window where that was lowest
        self.ceiling_step = 0
        self.is_high = False

    def start(self, last_step: int, earlier_lines: Iterable[Mapping[str, Any]]) -> None:
        """Takes the run's last step, and the lines of metrics.jsonl of the steps before a resume."""
        self.last_step = last_step
        for line in earlier_lines:
            loss = line.get("loss")
            if isinstance(loss, int | float):
                self._add(line["step"], float(loss))
            self.is_high = bool(line.get("diverged", self.is_high))

    def mark(self, line: dict[str, Any]) -> None:
        """Adds `diverged` to a step's line where `is_high` changes, and says so. Losses that are not finite are left
        to BadSteps. Losses of pairs of answers have other scales: squares, or nats of whole answers."""
        step, loss = line["step"], line.get("loss", math.nan)
        if not math.isfinite(loss) or "rewards/margins" in line:
            return
        self._add(step, loss)
        last = list(self.recent)[-min(LAST, max(1, self.num_losses // 2)) :]
        limit = min(self.first + WIDE_MARGIN, self.ceiling + MARGIN)
        if self.is_high:
            if len(last) == LAST and max(last) <= limit:
                self.is_high = line["diverged"] = False
                self.warn(f"step {step}: the loss is back at {loss:.4g}, near its past ({self._describe_past()})")
            return
        stays = len(self.recent) == WINDOW and min(self.recent) > limit
        if stays or (step == self.last_step and min(last) > min(self.first, self.ceiling) + WIDE_MARGIN):
            self.is_high = line["diverged"] = True
            where, losses = (f"in the last {WINDOW} steps", self.recent) if stays else ("at the end", last)
            self.warn(
                f"step {step}: the loss is {loss:.4g}, far above its past: {min(losses):.4g} or more {where}; "
                f"{self._describe_past()}\n"
                "a learning rate that is too high does this: lower train.learning_rate, or add train.warmup_steps\n"
                "start anew, or resume from a checkpoint that was saved before the rise"
            )

    def _add(self, step: int, loss: float) -> None:
        self.recent.append(loss)
        self.num_losses += 1
        if self.num_losses == 1:
            self.first = loss
        if len(self.recent) == WINDOW and max(self.recent) < self.ceiling:
            self.ceiling, self.ceiling_step = max(self.recent), step

    def _describe_past(self) -> str:
        if self.ceiling <= self.first:
            return f"it was at most {self.ceiling:.4g} in {WINDOW} steps up to step {self.ceiling_step}"
        return f"it was {self.first:.4g} at first"


PROJECT = "ulysses"
LINE_PIPE = "ULYSSES_LINES"  # a FIFO; its reader is the process that started the run


class Tracker(Protocol):
    """Receives the lines of metrics.jsonl (`split` train) and eval.jsonl (eval). `place`: where a person finds them, or
    ''."""

    place: str

    def write(self, split: str, line: dict[str, Any]) -> None: ...

    def close(self) -> None: ...


class TrackerError(ValueError):
    """A tracker that the recipe names is not installed, or refuses the run."""


def make_trackers(
    names: Sequence[str], run_dir: Path, run_name: str, environ: Mapping[str, str] | None = None
) -> list[Tracker]:
    trackers: list[Tracker] = []
    run_name = mask_text(run_name)  # services show it
    for name in names:
        try:
            trackers.append(TRACKERS[name](run_dir, run_name))
        except ImportError as error:
            raise TrackerError(
                f"run.report_to: {name} is not installed ({error}): pip install ulysses-cli[{name}]"
            ) from error
        except Exception as error:  # a service may raise anything
            lines = str(error).strip().splitlines() or [type(error).__name__]
            raise TrackerError(f"run.report_to: {name} cannot start: {mask_text(lines[0][:300])}") from error
    if pipe := (environ or {}).get(LINE_PIPE):
        trackers.append(LinePipe(Path(pipe)))
    return trackers


def pick_numbers(split: str, line: Mapping[str, Any]) -> dict[str, float]:
    numbers = {name: value for name, value in line.items() if isinstance(value, int | float) and name != "step"}
    return {f"{split}/{name}": value for name, value in numbers.items()}


class TensorBoard:
    def __init__(self, run_dir: Path, run_name: str) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self.place = str(run_dir / "tensorboard" / run_name)
        self.writer = SummaryWriter(self.place)

    def write(self, split: str, line: dict[str, Any]) -> None:
        for name, value in pick_numbers(split, line).items():
            self.writer.add_scalar(name, value, line["step"])

    def close(self) -> None:
        self.writer.close()


class WeightsAndBiases:
    def __init__(self, run_dir: Path, run_name: str) -> None:
        import wandb

        self.run = wandb.init(project=PROJECT, name=run_name, dir=str(run_dir))
        self.place = str(getattr(self.run, "url", None) or run_dir / "wandb")

    def write(self, split: str, line: dict[str, Any]) -> None:
        self.run.log(pick_numbers(split, line), step=line["step"])

    def close(self) -> None:
        self.run.finish()


class MLflow:
    """Writes to MLFLOW_TRACKING_URI, or to mlflow.db in the run's folder where it is not set."""

    def __init__(self, run_dir: Path, run_name: str) -> None:
        from mlflow.tracking import MlflowClient

        address = os.environ.get("MLFLOW_TRACKING_URI") or f"sqlite:///{(run_dir / 'mlflow.db').absolute()}"
        run_dir.mkdir(parents=True, exist_ok=True)
        self.client = MlflowClient(address)
        name = os.environ.get("MLFLOW_EXPERIMENT_NAME", PROJECT)
        experiment = self.client.get_experiment_by_name(name)
        number = experiment.experiment_id if experiment is not None else self.client.create_experiment(name)
        self.run_id = self.client.create_run(number, run_name=run_name).info.run_id
        self.place = f"{mask_text(address)}, experiment {name}, run {self.run_id}"

    def write(self, split: str, line: dict[str, Any]) -> None:
        from mlflow.entities import Metric

        now, step = int(time.time() * 1000), line["step"]
        metrics = [Metric(name, float(value), now, step) for name, value in pick_numbers(split, line).items()]
        self.client.log_batch(self.run_id, metrics=metrics)

    def close(self) -> None:
        self.client.set_terminated(self.run_id)


class Trackio:
    """Writes to Trackio's folder (TRACKIO_DIR), which `trackio show` reads."""

    def __init__(self, run_dir: Path, run_name: str) -> None:
        import trackio

        self.run = trackio.init(project=PROJECT, name=run_name, embed=False)
        self.place = f"trackio show --project {PROJECT}, run {run_name}"

    def write(self, split: str, line: dict[str, Any]) -> None:
        self.run.log(pick_numbers(split, line), step=line["step"])

    def close(self) -> None:
        self.run.finish()


class LinePipe:
    """Writes each line, with its split, to a pipe. A reader that has gone away needs no lines. The line that a killed
    rank has left unfinished is ended first."""

    place = ""

    def __init__(self, path: Path) -> None:
        self.handle = os.open(path, os.O_WRONLY)
        self._send(b"\n")

    def write(self, split: str, line: dict[str, Any]) -> None:
        self._send(json.dumps({"split": split, **line}).encode() + b"\n")

    def _send(self, data: bytes) -> None:
        try:
            while data:
                data = data[os.write(self.handle, data) :]
        except BrokenPipeError:
            return

    def close(self) -> None:
        os.close(self.handle)


TRACKERS: dict[str, Callable[[Path, str], Tracker]] = {
    "tensorboard": TensorBoard,
    "wandb": WeightsAndBiases,
    "mlflow": MLflow,
    "trackio": Trackio,
}


STARTING = "starting"


class Display(Protocol):
    """Shows events to the user."""

    def emit(self, event: Mapping[str, Any]) -> None: ...

    def close(self) -> None: ...


def measure_age() -> float:
    """Seconds since this process began."""
    return max(0.0, time.time() - psutil.Process().create_time())


class PhaseClock:
    """Seconds of each phase, the first of which has taken `age` already."""

    def __init__(self, age: float, read: Callable[[], float] = time.monotonic) -> None:
        self.read, self.phase, self.since = read, STARTING, read() - age
        self.seconds: dict[str, float] = {}

    def enter(self, phase: str) -> None:
        now = self.read()
        self.seconds[self.phase] = self.seconds.get(self.phase, 0.0) + now - self.since
        self.phase, self.since = phase, now

    def describe(self) -> str:
        """The phases so far, without those that took no time."""
        parts = [f"{phase} {seconds:.0f} s" for phase, seconds in self.seconds.items() if seconds >= 0.5]
        return f"ready after {sum(self.seconds.values()):.0f} s: {', '.join(parts)}" if parts else ""


class Record:
    """One rank's record of the run: its display, its files and its trackers."""

    def __init__(self, run_dir: Path, logging_steps: int = 1, lock: RunLock | None = None) -> None:
        self.run_dir, self.logging_steps, self.lock = run_dir, logging_steps, lock
        self.display: Display | None = None
        self.trackers: Sequence[Tracker] = ()
        self.files: dict[str, LineFile] = {}
        self.watch = LossWatch(self.warn)
        self.phase = STARTING
        self.clock = PhaseClock(measure_age())
        self.describe_step: Callable[[], str] = lambda: ""

    def open(self, display: Display, trackers: Sequence[Tracker] = ()) -> None:
        """Called on rank 0 alone: the other ranks' records write nothing."""
        self.display, self.trackers = display, trackers

    def note_trackers(self, state: str) -> None:
        """Notes where the trackers write, once no result of an earlier run is in the folder any more."""
        for tracker in self.trackers:
            if tracker.place:
                note_notification(self.run_dir, "tracker", type(tracker).__name__, f"{state} {tracker.place}")

    def describe_phase(self) -> str:
        """The phase, with the step that the loop is in."""
        return ", ".join(part for part in (self.phase, self.describe_step()) if part)

    def start_files(self, last_step: int, num_steps: int) -> None:
        """Opens the metrics files without the lines after `last_step`: those steps will run again."""
        if self.display is None:
            return
        for name in ("metrics", "eval", "samples", "quality", "short_check"):
            cut_lines(self.run_dir / f"{name}.jsonl", last_step)
        for name in ("metrics", "eval"):
            self.files[name] = LineFile(self.run_dir / f"{name}.jsonl")
        self.watch.start(num_steps, read_lines(self.run_dir / "metrics.jsonl", last_step))
        self.note_trackers("writes to")

    def emit(self, **event: Any) -> None:
        if self.display is not None:
            self.display.emit(event)

    def report(self, text: str) -> None:
        self.emit(event="plan", text=text)

    def warn(self, text: str) -> None:
        """Lines after the first are details."""
        message, *details = text.splitlines() or [""]
        self.emit(event="warning", message=message, details=[line.strip() for line in details])

    def set_phase(self, phase: str) -> None:
        self.clock.enter(phase)
        self.phase = phase
        self.emit(event="phase", name=phase)

    def write_step(self, line: dict[str, Any]) -> None:
        """Every `logging_steps`-th step, every step that was not applied, and where the loss is far above its past from
        now on, or no longer."""
        if self.display is None:
            return
        self.watch.mark(line)
        if line["step"] % self.logging_steps == 0 or not line.get("applied", True) or "diverged" in line:
            self._write("metrics", "step", "train", line)

    def write_eval(self, line: dict[str, Any]) -> None:
        self._write("eval", "eval", "eval", line)

    def write_samples(self, line: dict[str, Any]) -> None:
        self._open("samples")
        self._write("samples", "samples", "samples", line)

    def write_quality(self, line: dict[str, Any]) -> None:
        self._open("quality")
        self._write("quality", "quality", "quality", line)

    def write_short_check(self, line: dict[str, Any]) -> None:
        self._open("short_check")
        self._write("short_check", "short_check", "short_check", line)

    def end(self, model_dir: Path) -> None:
        """All steps are done. A run whose loss is far above its past must not end like one that has learned."""
        self.emit(event="done", model_dir=str(model_dir), **({"diverged": True} if self.watch.is_high else {}))

    def _open(self, name: str) -> None:
        """Opens a file that most runs do not write."""
        if self.display is not None and name not in self.files:
            self.files[name] = LineFile(self.run_dir / f"{name}.jsonl")

    def _write(self, file: str, event: str, split: str, line: dict[str, Any]) -> None:
        if self.display is None:
            return
        if self.files[file].is_gone:
            if self.lock is not None:
                self.lock.put_back()
            self.files[file].begin_anew()
            self.warn(
                f"{self.files[file].path} was removed during the run: its content is lost, and a new file is started; "
                "checkpoints and logs in its folder may be gone too; no second run can start there"
            )
        self.files[file].write(line)
        self.emit(event=event, **line)
        for tracker in self.trackers:
            self._or_without(tracker, partial(tracker.write, split, line))

    def _or_without(self, tracker: Tracker, part: Callable[[], None]) -> None:
        try:
            part()
        except Exception as error:  # noqa: BLE001 - a service may raise anything, and the run goes on without it
            self.trackers = [other for other in self.trackers if other is not tracker]
            reason = mask_text((str(error).strip().splitlines() or [""])[0][:200])
            complaint = f"gets no more numbers: {type(error).__name__}: {reason}"
            self.warn(f"{type(tracker).__name__} {complaint}")
            if tracker.place:
                note_notification(self.run_dir, "tracker", type(tracker).__name__, complaint)
            _close_quietly(tracker)

    def close(self) -> None:
        for tracker in self.trackers:
            self._or_without(tracker, tracker.close)
        self.note_trackers("closed")
        for part in (*self.files.values(), self.display):
            if part is not None:
                part.close()


def _close_quietly(tracker: Tracker) -> None:
    """A tracker that has failed once may fail again; what it has got is complete where it can be closed."""
    with contextlib.suppress(Exception):
        tracker.close()
