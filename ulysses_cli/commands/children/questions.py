"""What `evaluate` asks: which suites read --path, which documents a run has held out, and what it will take."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ulysses_cli.evaluate.suites import Amount, Plan, Sources
    from ulysses_cli.plan.hardware import Gpu
    from ulysses_cli.plan.models.shape import ModelShape

RUN_FILE = "run.json"


def find_reader(suites: Sequence[str], path: str | None) -> str:
    """The suite that --path is read for; '' where no path is given."""
    from ulysses_cli.evaluate.files import FILE_SUITES
    from ulysses_cli.evaluate.losses import TASK as LOSS
    from ulysses_cli.evaluate.suites import CALLS, HARNESS
    from ulysses_cli.plan.problem import Problem, RecipeError

    if path is None:
        return ""
    readers = [name for name in suites if name in (LOSS, CALLS, *FILE_SUITES)]
    readers += [name for name in suites if name.startswith(HARNESS)][:1]  # one folder serves all of lm-eval's tasks
    if len(readers) > 1:
        message = f"--path is read for one suite, and there are {', '.join(readers)}"
        raise RecipeError([Problem("--suite", message, "evaluate them one after the other")])
    return readers[0] if readers else ""


def find_documents(model: str, path: str | None) -> tuple[dict[str, Any], ...]:
    """The data sets whose loss is measured, or whose calls are asked: what --path names, else the held-out ones of the
    run whose model it is."""
    from ulysses_cli.plan.problem import Problem, RecipeError
    from ulysses_cli.plan.recipe.data_section import Dataset
    from ulysses_cli.plan.rules.files import check_dataset

    if path and "://" in path:
        raise RecipeError([Problem("--path", f"{path} is an address", "download it, and name the file")])
    missing = check_dataset(Dataset(path=path), "--path") if path else ()
    if found := [replace(problem, key="--path") for problem in missing]:
        raise RecipeError(found)
    return ({"path": path},) if path else _list_held_out(Path(model).expanduser())


def plan_questions(
    model: str, suites: Sequence[str], path: str | None, sources: Sources, amount: Amount
) -> tuple[Sources, Plan]:
    """Finds the files and documents that --path names, and plans the suites. Raises RecipeError."""
    from ulysses_cli.evaluate.files import FILE_SUITES
    from ulysses_cli.evaluate.losses import TASK as LOSS
    from ulysses_cli.evaluate.suites import CALLS, HARNESS, plan_suites
    from ulysses_cli.launch.suite_files import find_suite_path
    from ulysses_cli.plan.problem import Problem, RecipeError
    from ulysses_cli.report import printing

    reader = find_reader(suites, path)
    documents = find_documents(model, path) if {LOSS, CALLS} & set(suites) else ()
    files = find_suite_path(path or "", printing.print_message) if reader in FILE_SUITES else None
    harness = Path(path) if path and reader.startswith(HARNESS) else None
    sources = replace(sources, path=files, harness=harness, documents=documents)
    plan = plan_suites(suites, sources, amount)
    if path is not None and not reader:
        hint = f"leave it out, or add one of {', '.join((LOSS, CALLS, *FILE_SUITES))}, {HARNESS}TASK"
        raise RecipeError([Problem("--path", f"no suite of {', '.join(suites)} reads files", hint)])
    return sources, plan


def predict_evaluation(
    shape: ModelShape,
    plan: Plan,
    lengths: Sequence[int],
    *,
    made: Sequence[int],
    limit: int,
    num_samples: int,
    sp_size: int,
    num_ranks: int,
    bytes_per_number: int,
    gpu: Gpu | None,
    quantized: str | None,
    is_on_host: bool,
    num_models: int,
    price: float | None,
    thinking: int = 0,
) -> list[dict[str, Any]]:
    """Memory, operations, seconds and dollars by length. `made`: lengths of the tasks that are made; questions from
    files have up to `limit` tokens. `num_models`: they answer the same questions, one after the other."""
    from ulysses_cli.plan.planner.generation import NEW_TOKENS, judge_room, predict, predict_questions, predict_seconds

    predictions = []
    for length in lengths:
        samples = plan.samples if length == limit else ()
        new_tokens = thinking + max([NEW_TOKENS, *(sample.max_new_tokens for sample in samples)])
        each = predict(shape, length, sp_size, num_ranks, bytes_per_number, new_tokens, quantized)
        each["weights_are_on"] = "host" if is_on_host else "GPU"
        seconds = predict_seconds(shape, length, sp_size, bytes_per_number, gpu) if gpu is not None else None
        each["prefill_seconds"], each["token_seconds"] = seconds or (None, None)
        each["questions"] = (len(plan.tasks) * num_samples if length in made else 0) + len(samples)
        taken = predict_questions(seconds, each["questions"], num_ranks // sp_size, new_tokens)
        each["questions_seconds"] = None if taken is None else num_models * taken
        is_priced = price is not None and taken is not None
        each["usd"] = each["questions_seconds"] / 3600 * num_ranks * price if is_priced else None
        each["room"] = judge_room(each, gpu) if gpu is not None else "unknown"
        predictions.append(each)
    return predictions


def list_uncounted(plan: Plan, against: str | None, against_retrieval: bool) -> list[str]:
    """What a prediction leaves out, and what it counts twice."""
    parts = ["the loss of documents"] * plan.has_loss + ["the calls of chats"] * plan.has_calls
    parts += ["lm-eval's tasks"] * bool(plan.harness)
    parts += ["what --against-retrieval asks beside the whole context"] * against_retrieval
    notes = [f"{', '.join(parts)}: not in the time of the questions"] if parts else []
    return [*notes, *(["both models answer the questions, each in turn: their time is the sum"] * bool(against))]


def _list_held_out(path: Path) -> tuple[dict[str, Any], ...]:
    """`data.eval_datasets` of the run that a model, a checkpoint or a run's folder belongs to."""
    folder = find_own_run(path)
    if folder is None:
        return ()
    try:
        sets = json.loads((folder / RUN_FILE).read_text(encoding="utf-8"))["recipe"]["data"]["eval_datasets"]
        return tuple({name: value for name, value in each.items() if value is not None} for each in sets or ())
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return ()  # another program's run.json, or a damaged one: --path names the documents


def find_own_run(path: Path) -> Path | None:
    """The folder of the run that a model, a checkpoint or a run's folder belongs to."""
    if not path.is_dir():
        return None
    whole = path.absolute()
    return next((each for each in (whole, *whole.parents[:2]) if (each / RUN_FILE).is_file()), None)
