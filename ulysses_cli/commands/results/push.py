"""`ulysses push`: publishes a run's model or adapters on the Hugging Face hub. `train` calls push_run too."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Annotated

import typer

from ulysses_cli.commands.options import Format, FormatOption, or_exit

MODEL_FILES = ("config.json", "adapter_config.json")


def push(
    run_dir: Annotated[Path, typer.Argument(help="the run's folder: run.output_dir of its recipe")],
    repo: Annotated[
        str | None, typer.Option(help="owner/name, or a name of your own account  [default: the run's name]")
    ] = None,
    private: Annotated[bool, typer.Option("--private", help="make a repository that only you can see")] = False,
    output: FormatOption = Format.text,
) -> None:
    """Publish a run's model or adapters on the Hugging Face hub, with a card.

    The card has data, losses by length, layout, exact versions, how to load the model in transformers and vLLM, and the
    base model's licence. Local paths and secrets are left out. The token is HF_TOKEN or the one of `hf auth login`. An
    upload that fails is tried again; a second call sends only what is missing.

    \b
    Examples:
      ulysses push runs/mine
      ulysses push runs/mine --repo my-team/qwen3-8b-128k --private
    """
    from ulysses_cli.report import printing

    name, address = or_exit(lambda: push_run(run_dir, repo, is_private=private, report=printing.print_message), output)
    if output is Format.json:
        printing.print_json({"repo": name, "address": address})
    else:
        printing.print_data(address)


def push_run(run_dir: Path, repo: str | None, *, is_private: bool, report: Callable[[str], None]) -> tuple[str, str]:
    """Returns the repository's name and address. Raises RecipeError."""
    from ulysses_cli.commands.results.model_card import complete_card
    from ulysses_cli.plan.problem import Problem, RecipeError
    from ulysses_cli.publishing import CARD, HubModels
    from ulysses_cli.report.run_files import load_run

    run, folder = load_run(run_dir), run_dir / "model"
    if not any((folder / name).is_file() for name in MODEL_FILES):
        hint = f"finish the run, or `ulysses export {run_dir} --to {folder}` for its newest checkpoint"
        raise RecipeError([Problem("", f"{run_dir} holds no model", hint)])
    recipe = run.get_part("recipe")
    models = HubModels(report)
    name = models.complete_name(repo or check_repo_name(str(run.facts.get("run_name") or run_dir.name)))
    check_repo_name(name)
    base = str(recipe.get("model", {}).get("name_or_path") or "")
    licence = models.find_licence(base) if "/" in base and not Path(base).exists() else {}
    card = (folder / CARD).read_text(encoding="utf-8") if (folder / CARD).is_file() else f"---\n---\n\n# {name}\n"
    full_card = complete_card(card, name, run, folder, licence)
    report(f"uploading {folder} to {name}{', private' if is_private else ''}")
    step = run.metrics[-1]["step"] if run.metrics else 0
    return name, models.publish(folder, name, full_card, is_private=is_private, message=f"The model after step {step}")


def check_repo_name(name: str) -> str:
    """Raises RecipeError for a name that the hub does not accept."""
    from ulysses_cli.plan.problem import Problem, RecipeError
    from ulysses_cli.plan.rules.files import HUB_NAME

    if not HUB_NAME.fullmatch(name):
        raise RecipeError([Problem("--repo", f"{name} is no name of a repository", "write owner/name")])
    return name
