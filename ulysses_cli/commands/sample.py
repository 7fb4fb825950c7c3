"""`ulysses sample`: continues prompts with a trained model, greedily."""

from __future__ import annotations

import json
import os
import subprocess
import tempfile
from dataclasses import replace
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ulysses_cli.commands.export import Dtype
from ulysses_cli.commands.options import Format, FormatOption, end_with
from ulysses_cli.plan.problem import FAILED

if TYPE_CHECKING:
    from ulysses_cli.plan.problem import Problem

LAST_BYTES = 1 << 12


class Device(StrEnum):
    auto = "auto"
    cpu = "cpu"


def sample(
    model: Annotated[
        str, typer.Argument(metavar="MODEL", help="an output_dir, a folder with a model or adapters, or a hub name")
    ],
    prompts: Annotated[list[str], typer.Argument(metavar="PROMPT...", help="texts to continue")],
    max_new_tokens: Annotated[int, typer.Option(min=1, max=1 << 20, help="tokens of a continuation")] = 64,
    chat: Annotated[bool, typer.Option("--chat", help="a prompt is what a user says, in the chat template")] = False,
    device: Annotated[Device, typer.Option(help="where to compute; auto = all GPUs, else the CPU")] = Device.auto,
    dtype: Annotated[Dtype | None, typer.Option(help="dtype of the weights  [default: the model's own]")] = None,
    trust_remote_code: Annotated[
        bool, typer.Option("--trust-remote-code", help="run Python code that comes with the model on this machine")
    ] = False,
    output: FormatOption = Format.text,
) -> None:
    """Continue prompts with a trained model, by the most likely token at each place.

    Takes what `train` and `export` write, and any model of transformers. Adapters are put on their base model as it was
    trained. run.sample_prompts does the same during a run.

    \b
    Examples:
      ulysses sample runs/mine "Once upon a time"
      ulysses sample runs/mine "What is a quine?" --chat --max-new-tokens 200
      ulysses sample Qwen/Qwen3-0.6B "one, two," "a, b," --format json
    """
    from ulysses_cli.plan.problem import Problem
    from ulysses_cli.report import printing

    path = Path(os.path.expanduser(model))
    if problems := _check_name(model, path):
        end_with(problems, output)
    if path.is_dir() and not (path / "config.json").is_file() and (path / "model").is_dir():
        path = path / "model"  # of a run
    has_model = (path / "config.json").is_file() or (path / "adapter_config.json").is_file()
    if path.is_dir() and not has_model:
        hint = "name a run whose model is written, or make one with ulysses export"
        end_with([Problem("MODEL", f"{model} holds no model: config.json is missing", hint)], output)
    if path.is_dir() and (found := _find_problem(path)) is not None:
        end_with([found], output)
    if empty := [prompt for prompt in prompts if not prompt.strip()]:
        end_with([Problem("PROMPT", f"{empty[0]!r} is empty", "write a text to continue")], output)
    request = {
        "model": str(path) if path.is_dir() else model,
        "prompts": prompts,
        "max_new_tokens": max_new_tokens,
        "as_chat": chat,
        "device": device.value,
        "dtype": dtype.value if dtype is not None else None,
        "trust_remote_code": trust_remote_code,
    }
    if trust_remote_code:
        printing.print_message("trust_remote_code is on: code that comes with the model runs on this machine")
    result = _ask(request)
    if "problem" in result:
        problem = f"{model} cannot be sampled: {result['problem']}"
        printing.print_message(problem)
        if output is Format.json:
            printing.print_json({"problems": [{"message": problem}]})
        raise typer.Exit(FAILED)
    if num_empty := sum(not each["num_tokens"] for each in result["answers"]):
        has_hint = result["has_template"] and not chat
        printing.print_message(describe_empty(num_empty, len(prompts), has_template=has_hint))
    if result["num_positions"] and result["longest"] > result["num_positions"]:
        beyond = f"{result['longest']:,} tokens with its prompt, more than the {result['num_positions']:,} positions"
        printing.print_message(f"note: an answer has {beyond} that {model} was made for")
    if output is Format.json:
        printing.print_json(result["answers"])
        return
    for each in result["answers"]:
        printing.print_data(f"{each['prompt']}{each['text']}" if not chat else each["text"])


def describe_empty(number: int, total: int, *, has_template: bool) -> str:
    """What is said about answers without a token. `has_template`: one that was not used."""
    which = "the answer is" if total == 1 else f"{number} of {total} answers {'is' if number == 1 else 'are'}"
    words = f"{which} empty: the model ends at once, since an end is its most likely token there"
    hint = "\nhint: the model has a chat template: with --chat a prompt is what a user says"
    return words + (hint if has_template else "")


def _check_name(model: str, path: Path) -> list[Problem]:
    """What is neither a folder nor a model that the cache or the hub has."""
    from ulysses_cli import hub
    from ulysses_cli.plan.problem import Problem, RecipeError, Where

    if model.endswith((".yaml", ".yml")):
        hint = "name its run.output_dir, a folder with a model, or a hub name"
        return [Problem("MODEL", f"{model} is a recipe", hint)]
    if path.exists():
        what, hint = f"{model} is a file, not a folder", "name the folder that holds it"
        return [] if path.is_dir() else [Problem("MODEL", what, hint)]
    try:
        hub.check_model(model)
    except RecipeError as error:
        found = f"no folder {model} is here"
        return [
            replace(problem, key="MODEL", message=f"{found}; {problem.message}", where=Where())
            for problem in error.problems
        ]
    return []


def _find_problem(folder: Path) -> Problem | None:
    """What is wrong with a model's files, before they are loaded."""
    from ulysses_cli import hub
    from ulysses_cli.plan.models.model_files import find_weight_problem
    from ulysses_cli.plan.problem import Problem, RecipeError, Where

    if not (folder / "config.json").is_file():
        return None  # adapters alone
    try:
        hub.read_config(folder / "config.json")
    except RecipeError as error:
        return replace(error.problems[0], key="MODEL", where=Where())
    problem = find_weight_problem(folder)
    return Problem("MODEL", problem, "copy the model's folder again, or name another") if problem else None


def _ask(request: dict[str, Any]) -> dict[str, Any]:
    """Runs the model in a child process."""
    from ulysses_cli.report import recipe
    from ulysses_cli.run import host

    environ = {"DS_ACCELERATOR": "cpu", **os.environ}
    with (
        tempfile.TemporaryFile() as log,
        host.start_module(
            "ulysses_cli.train.export.sampling",
            [],
            env=environ,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=log,
        ) as child,
    ):
        answer, _ = child.communicate(json.dumps(request))
        try:
            result: dict[str, Any] = json.loads(answer)
        except ValueError:
            log.seek(max(0, log.tell() - LAST_BYTES))
            lines = log.read().decode("utf-8", "replace").strip().splitlines()
            result = {"problem": f"its process {recipe.describe_end(child.returncode)}: {(lines or [''])[-1]}"}
    return result
