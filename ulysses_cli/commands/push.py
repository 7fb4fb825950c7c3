"""`ulysses push`: publishes a run's model or adapters on the Hugging Face hub."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import typer

from ulysses_cli.commands.options import Format, FormatOption, or_exit


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
    from ulysses_cli.commands.children.publishing import plan_upload, push_run
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


def _format_upload(upload: Mapping[str, Any]) -> str:
    from ulysses_cli.report.quantities import format_quantity

    kind = "private" if upload["private"] else "public, or as it is where it exists"
    lines = [f"repository  {upload['repo']}, {kind}"]
    lines += [f"file        {file['path']}, {format_quantity(file['bytes'], 'bytes')}" for file in upload["files"]]
    lines += [f"together    {format_quantity(upload['bytes'], 'bytes')}; nothing was sent", "", upload["card"].rstrip()]
    return "\n".join(lines)
