"""`ulysses push`: publishes a run's model or adapters on the Hugging Face hub. `train` calls push_run too."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ulysses_cli.commands.options import Format, FormatOption, or_exit

if TYPE_CHECKING:
    from ulysses_cli.report.run_summary import RecordedRun

MODEL_FILES = ("config.json", "adapter_config.json")
YOUR_ACCOUNT = "YOUR-ACCOUNT"


def push(
    run_dir: Annotated[Path, typer.Argument(help="the run's folder: run.output_dir of its recipe")],
    repo: Annotated[
        str | None, typer.Option(help="owner/name, or a name of your own account  [default: the run's name]")
    ] = None,
    private: Annotated[bool, typer.Option("--private", help="make a repository that only you can see")] = False,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="print what would be uploaded and the card; ask and send nothing")
    ] = False,
    output: FormatOption = Format.text,
) -> None:
    """Publish a run's model or adapters on the Hugging Face hub, with a card.

    The card has data, losses by length, layout, exact versions, how to load the model in transformers and vLLM, and the
    base model's licence. Local paths and secrets are left out. The token is HF_TOKEN or the one of `hf auth login`. An
    upload that fails is tried again; a second call sends only what is missing.

    \b
    Examples:
      ulysses push runs/mine --dry-run
      ulysses push runs/mine --repo my-team/qwen3-8b-128k --private
    """
    from ulysses_cli.report import printing

    if dry_run:
        upload = or_exit(lambda: plan_upload(run_dir, repo, is_private=private), output)
        printing.print_json(upload) if output is Format.json else printing.print_data(_format_upload(upload))
        return
    name, address = or_exit(lambda: push_run(run_dir, repo, is_private=private, report=printing.print_message), output)
    if output is Format.json:
        printing.print_json({"repo": name, "address": address})
    else:
        printing.print_data(address)


def push_run(run_dir: Path, repo: str | None, *, is_private: bool, report: Callable[[str], None]) -> tuple[str, str]:
    """Returns the repository's name and address. Raises RecipeError."""
    from ulysses_cli.commands.children.publishing import HubModels, complete_card, list_files
    from ulysses_cli.plan.rules.public_names import find_public_name
    from ulysses_cli.run.records import note_notification

    run, folder = _load_model_run(run_dir)
    models = HubModels(report)
    name = models.complete_name(choose_name(run, run_dir, repo))
    check_repo_name(name)
    base = find_public_name(run.get_part("recipe").get("model", {}).get("name_or_path")) or ""
    licence = models.find_licence(base) if "/" in base else {}
    card = complete_card(read_card(folder, name), name, run, folder, licence)
    report(f"uploading {folder} to {name}{', private' if is_private else ''}")
    step = run.metrics[-1]["step"] if run.metrics else 0
    address = models.publish(folder, name, card, is_private=is_private, message=f"The model after step {step}")
    size = sum(file.stat().st_size for file in list_files(folder))
    note_notification(run_dir, "hub", name, f"published the model after step {step}, {size:,} bytes: {address}")
    return name, address


def plan_upload(run_dir: Path, repo: str | None, *, is_private: bool) -> dict[str, Any]:
    """What a push would upload. Asks no network: the account's name and the base's licence are left open."""
    from ulysses_cli.commands.children.publishing import CARD, complete_card, list_files, measure_sent

    run, folder = _load_model_run(run_dir)
    name = choose_name(run, run_dir, repo)
    shown = check_repo_name(name) if "/" in name else f"{YOUR_ACCOUNT}/{check_repo_name(name)}"
    card = complete_card(read_card(folder, shown), shown, run, folder, {})
    sizes = {file.relative_to(folder).as_posix(): measure_sent(file) for file in list_files(folder)}
    sizes[CARD] = len(card.encode())
    files = [{"path": path, "bytes": size} for path, size in sizes.items()]
    return {"repo": shown, "private": is_private, "files": files, "bytes": sum(sizes.values()), "card": card}


def _format_upload(upload: Mapping[str, Any]) -> str:
    from ulysses_cli.report.quantities import format_quantity

    kind = "private" if upload["private"] else "public, or as it is where it exists"
    lines = [f"repository  {upload['repo']}, {kind}"]
    lines += [f"file        {file['path']}, {format_quantity(file['bytes'], 'bytes')}" for file in upload["files"]]
    lines += [f"together    {format_quantity(upload['bytes'], 'bytes')}; nothing was sent", "", upload["card"].rstrip()]
    return "\n".join(lines)


def _load_model_run(run_dir: Path) -> tuple[RecordedRun, Path]:
    from ulysses_cli.commands.children.publishing import list_files
    from ulysses_cli.plan.models.model_files import find_damaged_weights
    from ulysses_cli.plan.problem import Problem, RecipeError
    from ulysses_cli.report.run_summary import load_run

    run, folder = load_run(run_dir), run_dir / "model"
    if not any((folder / name).is_file() for name in MODEL_FILES):
        hint = f"finish the run, or `ulysses export {run_dir} --to {folder}` for its newest checkpoint"
        raise RecipeError([Problem("", f"{run_dir} holds no model", hint)])
    list_files(folder)  # before anything in it is read
    if damage := find_damaged_weights(folder):
        hint = f"move {folder} away and write it again: ulysses export {run_dir} --to {folder}"
        raise RecipeError([Problem("", f"{damage}; nothing was uploaded", hint)])
    return run, folder


def read_card(folder: Path, name: str) -> str:
    """The card that the export wrote."""
    from ulysses_cli.commands.children.publishing import CARD

    file = folder / CARD
    return file.read_text(encoding="utf-8", errors="replace") if file.is_file() else f"---\n---\n\n# {name}\n"


def choose_name(run: RecordedRun, run_dir: Path, repo: str | None) -> str:
    """The repository that was asked for, or the run's name, which must be one that the hub accepts."""
    return repo or check_repo_name(str(run.facts.get("run_name") or run_dir.resolve().name))


def check_repo_name(name: str) -> str:
    """Raises RecipeError for a name that the hub does not accept."""
    from ulysses_cli.plan.problem import Problem, RecipeError
    from ulysses_cli.plan.rules.files import HUB_NAME

    if not HUB_NAME.fullmatch(name):
        raise RecipeError([Problem("--repo", f"{name} is not the name of a repository", "write owner/name")])
    return name
