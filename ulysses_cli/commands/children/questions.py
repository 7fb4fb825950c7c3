"""What `evaluate` asks: which suites read --path, and which documents a run has held out."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ulysses_cli.evaluate.suites import Plan, Sources

RUN_FILE = "run.json"


def find_reader(suites: Sequence[str], path: str | None) -> str:
    """The suite that --path is read for; '' where no path is given."""
    from ulysses_cli.evaluate.files import FILE_SUITES
    from ulysses_cli.evaluate.losses import TASK as LOSS
    from ulysses_cli.evaluate.suites import HARNESS
    from ulysses_cli.plan.problem import Problem, RecipeError

    if path is None:
        return ""
    readers = [name for name in suites if name in (LOSS, *FILE_SUITES)]
    readers += [name for name in suites if name.startswith(HARNESS)][:1]  # one folder serves all of lm-eval's tasks
    if len(readers) > 1:
        message = f"--path is read for one suite, and there are {', '.join(readers)}"
        raise RecipeError([Problem("--suite", message, "evaluate them one after the other")])
    return readers[0] if readers else ""


def find_documents(model: str, path: str | None) -> tuple[dict[str, Any], ...]:
    """The data sets whose loss is measured: what --path names, else the held-out ones of the run whose model it is."""
    from ulysses_cli.plan.problem import Problem, RecipeError
    from ulysses_cli.plan.recipe.data_section import Dataset
    from ulysses_cli.plan.rules.files import check_dataset

    if path and "://" in path:
        raise RecipeError([Problem("--path", f"{path} is an address", "download it, and name the file")])
    missing = check_dataset(Dataset(path=path), "--path") if path else ()
    if found := [replace(problem, key="--path") for problem in missing]:
        raise RecipeError(found)
    return ({"path": path},) if path else _list_held_out(Path(model).expanduser())


def plan_questions(model: str, suites: Sequence[str], path: str | None, sources: Sources) -> tuple[Sources, Plan]:
    """Finds the files and documents that --path names, and plans the suites. Raises RecipeError."""
    from ulysses_cli.evaluate.files import FILE_SUITES
    from ulysses_cli.evaluate.losses import TASK as LOSS
    from ulysses_cli.evaluate.suites import HARNESS, plan_suites
    from ulysses_cli.launch.suite_files import find_suite_path
    from ulysses_cli.plan.problem import Problem, RecipeError
    from ulysses_cli.report import printing

    reader = find_reader(suites, path)
    documents = find_documents(model, path) if LOSS in suites else ()
    files = find_suite_path(path or "", printing.print_message) if reader in FILE_SUITES else None
    harness = Path(path) if path and reader.startswith(HARNESS) else None
    sources = replace(sources, path=files, harness=harness, documents=documents)
    plan = plan_suites(suites, sources)
    if path is not None and not reader:
        hint = f"leave it out, or add one of {', '.join((LOSS, *FILE_SUITES))}, {HARNESS}TASK"
        raise RecipeError([Problem("--path", f"no suite of {', '.join(suites)} reads files", hint)])
    return sources, plan


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
