"""What `evaluate` does before and after the child process: finds the model, checks it, shows what it answered."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from ulysses_cli.commands.options import Format, check_page, or_exit, write_page
from ulysses_cli.plan.exit_codes import FAILED

if TYPE_CHECKING:
    from ulysses_cli.plan.models.shape import ModelShape


@dataclass(frozen=True)
class ModelQuestion:
    """How a model is loaded."""

    sp_size: int
    num_ranks: int
    max_length: int
    dtype: str
    tokenizer: str | None
    device: str
    trust_remote_code: bool


def find_model(name: str, folder: Path, label: str, *, trust_remote_code: bool) -> str:
    """A model's folder, or its name on the hub. A checkpoint, or a run's newest one, is exported into `folder` once,
    under a name with its hash: step 400 of another run is another model."""
    from ulysses_cli.commands.export import run_export
    from ulysses_cli.launch import preflight
    from ulysses_cli.plan.problem import Problem, RecipeError
    from ulysses_cli.report import printing
    from ulysses_cli.run_folder.archive import CheckpointError, choose_checkpoint, find_run_dir
    from ulysses_cli.run_folder.manifest import MANIFEST, load_state

    path = Path(name).expanduser()
    is_checkpoint = (path / MANIFEST).is_file()
    if (path / "config.json").is_file() or not (is_checkpoint or find_run_dir(path)):
        return name
    try:
        checkpoint = path if is_checkpoint else choose_checkpoint(path, printing.print_message)
        digest = hashlib.sha256((checkpoint / MANIFEST).read_bytes()).hexdigest()[:12]
        has_adapters = load_state(checkpoint)["recipe"].get("lora") is not None
    except (CheckpointError, ValueError, OSError) as error:
        raise RecipeError([Problem("MODEL", str(error), "name another checkpoint")]) from None
    export_folder = folder / f"{label}-{digest}"
    if not export_folder.exists():
        if problems := list(preflight.check_export(checkpoint, export_folder)):
            raise RecipeError(problems)
        words = [str(checkpoint), "--to", str(export_folder), *(["--merge-lora"] if has_adapters else [])]
        words += ["--trust-remote-code"] if trust_remote_code else []
        code, last, log = run_export(words, export_folder)
        if code or "result" not in last:
            message = last.get("problem") or f"{name} cannot be exported: {(log or [''])[-1]}"
            raise RecipeError([Problem("MODEL", str(message), "try ulysses export")])
    return str(export_folder)


def prepare_model(name: str, question: ModelQuestion, *, online: bool) -> tuple[str, ModelShape]:
    """The text of a recipe that loads the model, and the model's shape. Raises RecipeError."""
    import yaml

    from ulysses_cli import hub
    from ulysses_cli.plan.files.weight_files import find_weight_problem
    from ulysses_cli.plan.models.shape import read_model_shape
    from ulysses_cli.plan.problem import Problem, RecipeError
    from ulysses_cli.plan.recipe.loader import parse_recipe

    settings: dict[str, Any] = {
        "model": {
            "name_or_path": name,
            "dtype": question.dtype,
            "trust_remote_code": question.trust_remote_code,
            **({"tokenizer": question.tokenizer} if question.tokenizer else {}),
        },
        "data": {"datasets": [{"type": "synthetic"}], "max_length": max(question.max_length, question.sp_size)},
        "parallel": {"sp_size": question.sp_size, "dp_shard_size": question.num_ranks // question.sp_size},
        "memory": {"gradient_checkpointing": False, "tiled_mlp": True, "tiled_loss": True, "offload_optimizer": "none"},
        "run": {"device": question.device},
    }
    text = yaml.safe_dump(settings)
    recipe = parse_recipe(text, "evaluate", []).recipe
    config, _ = hub.find_model_config(recipe, online=online)
    shape = read_model_shape(config, name, "MODEL")
    folder = Path(name).expanduser()
    if folder.is_dir() and (problem := find_weight_problem(folder)):
        raise RecipeError([Problem("MODEL", problem, "copy the model's folder again, or name another")])
    if question.sp_size not in shape.sp_sizes:
        legal = ", ".join(str(size) for size in shape.sp_sizes)
        message = f"{question.sp_size} does not divide the {shape.common_heads} attention heads"
        raise RecipeError([Problem("--sp-size", message, f"use {legal}")])
    if shape.inexact and question.sp_size > 1:
        message = f"{name} cannot be split over ranks: {shape.inexact}"
        raise RecipeError([Problem("--sp-size", message, "use --sp-size 1")])
    return text, shape


def run(options: dict[str, Any], device: str, output: Format, html: Path | None) -> None:
    """Runs the evaluation in a child process, shows its findings and exits with its exit code."""
    import os

    from ulysses_cli.commands.children.proving import run_child
    from ulysses_cli.host.operator_builds import watch_builds
    from ulysses_cli.launch import launcher
    from ulysses_cli.plan.problem import Problem
    from ulysses_cli.report import printing, quality

    or_exit(lambda: check_page(html), output)
    environ = launcher.make_environment(os.environ, device, 1)
    task = {"command": "evaluate", "device": device, "recipe": "", "overrides": [], "config": {}, "options": options}
    with watch_builds(environ, printing.print_message):
        findings, code = run_child(task, environ)
    if not findings:
        printing.print_message(f"evaluate ended without a result, with exit code {code}")
        raise typer.Exit(code if code > 0 else FAILED)
    if "problems" in findings:
        if output is Format.json:
            printing.print_json(findings)
        else:
            entries = findings["problems"]
            printing.print_problems([Problem(entry["key"], entry["message"], entry["hint"]) for entry in entries])
        raise typer.Exit(code)
    folder = Path(options["output"])
    (folder / "quality.json").write_text(json.dumps(findings, indent=1, ensure_ascii=False), encoding="utf-8")
    if output is Format.json:
        printing.print_json({key: value for key, value in findings.items() if key != "results"})
    else:
        printing.print_data(quality.format_quality(findings))
        printing.print_message(f"every question with its answer: {folder / 'quality.json'}")
    if html is not None:
        write_page(html, quality.make_quality_page(findings))
    raise typer.Exit(code)
