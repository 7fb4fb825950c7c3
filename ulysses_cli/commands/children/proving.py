"""What verify, bench and doctor share: check the recipe, run the proof in a child process, print its findings."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from ulysses_cli.commands.options import Format, check_page, end_with, or_exit, write_page
from ulysses_cli.plan.problem import FAILED, get_signal_code

if TYPE_CHECKING:
    from ulysses_cli.plan.models.shape import ModelShape
    from ulysses_cli.plan.recipe.recipe import Recipe
    from ulysses_cli.plan.resolved import ResolvedRecipe


CLEANUP_SECONDS = 3.0


@dataclass(frozen=True)
class Subject:
    """The recipe that a proof is about, and its model."""

    plan: ResolvedRecipe
    config: dict[str, Any]
    shape: ModelShape

    @property
    def recipe(self) -> Recipe:
        return self.plan.loaded.recipe


def read_subject(words: Sequence[str], output: Format, *, online: bool) -> Subject:
    """A valid recipe with its model's config.json. Problems are printed and end the command."""
    from ulysses_cli import hub
    from ulysses_cli.plan.resolved import ResolvedRecipe
    from ulysses_cli.validate import no_recipe, several_recipes, split_words, validate_recipe

    files, overrides = split_words(words)
    if len(files) != 1:
        end_with([no_recipe(words) if not files else several_recipes(files)], output)
    # nothing is written into the run's folder, so that another recipe's run may be there
    valid = validate_recipe(files[0], overrides, online=online, starts_anew=True)
    loaded, shape, resolved = valid.loaded, valid.shape, valid.resolved
    if valid.problems or loaded is None or shape is None or resolved is None:
        end_with(valid.problems, output)
    config, _ = or_exit(lambda: hub.find_model_config(loaded.recipe, online=online), output)
    return Subject(ResolvedRecipe(loaded, resolved), dict(config), shape)


def prove(
    command: str,
    subject: Subject | None,
    options: dict[str, Any],
    output: Format,
    html: Path | None,
    save: Callable[[dict[str, Any]], None] | None = None,
) -> None:
    """Runs a proof, prints its findings, and exits with its exit code."""
    from ulysses_cli.plan.problem import Problem
    from ulysses_cli.report import printing, proofs
    from ulysses_cli.run import launcher, preflight
    from ulysses_cli.run.host import watch_builds

    or_exit(lambda: check_page(html), output)
    wants_cpu = subject is not None and subject.recipe.run.device == "cpu"
    device = "cuda" if launcher.count_rank_slots("cuda") and not wants_cpu else "cpu"
    if command != "doctor" and device == "cpu" and (problems := list(preflight.check_builds_folder())):
        end_with(problems, output)
    task = {
        "command": command,
        "device": device,
        "plan": subject.plan.dump() if subject else "",
        "config": subject.config if subject else {},
        "options": options,
    }
    environ = launcher.make_environment(os.environ, device, 1)
    if subject is not None and command != "doctor" and not subject.recipe.model.trust_remote_code:
        environ.setdefault("HF_HUB_OFFLINE", "1")  # config.json is in the task: nothing waits for a network
    is_report = command == "doctor"  # it reports locks that nobody holds, and removes none
    with nullcontext() if is_report else watch_builds(environ, printing.print_message):
        findings, code = run_child(task, environ)
    if not findings:
        printing.print_message(f"{command} ended without a result, with exit code {code}")
        raise typer.Exit(code if code > 0 else FAILED)
    if output is Format.json:
        printing.print_json(findings)
    elif "problems" in findings:
        printing.print_problems(
            [Problem(entry["key"], entry["message"], entry["hint"]) for entry in findings["problems"]]
        )
    else:
        printing.print_data(proofs.format_findings(findings))
    if html is not None and "problems" not in findings:
        write_page(html, proofs.make_findings_page(findings))
    if save is not None and "problems" not in findings:
        save(findings)
    raise typer.Exit(code)


def _end(child: subprocess.Popen[str]) -> None:
    """Gives the child time to remove its temporary files, then ends it and all of its ranks."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    child.terminate()
    try:
        child.wait(CLEANUP_SECONDS)
    except subprocess.TimeoutExpired:
        pass
    try:
        os.killpg(child.pid, signal.SIGKILL)
    except ProcessLookupError:
        pass
    child.wait()


def run_child(task: dict[str, Any], environ: dict[str, str]) -> tuple[dict[str, Any], int]:
    """Runs the child in a session of its own, so that it and its ranks are ended together when this process ends.
    Returns its findings ({} when it wrote none) and its exit code."""
    from ulysses_cli.run import host

    child = host.start_module(
        "ulysses_cli.prove", [], stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environ, start_new_session=True
    )

    def stop(number: int, _: object) -> None:
        sys.exit(get_signal_code(number))

    before = signal.signal(signal.SIGTERM, stop)
    try:
        answer, _ = child.communicate(json.dumps(task))
    except BaseException:
        _end(child)
        raise
    finally:
        signal.signal(signal.SIGTERM, before)
    try:
        return json.loads(answer), child.returncode
    except ValueError:
        return {}, child.returncode
