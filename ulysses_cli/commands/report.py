"""`ulysses report`: makes an HTML page of a run."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from ulysses_cli.commands.options import Format, FormatOption, or_exit

PAGE_NAME = "report.html"


def report(
    run_dir: Annotated[Path, typer.Argument(help="the run's folder: run.output_dir of its recipe")],
    to: Annotated[
        Path | None, typer.Option("--output", "-o", help="file or folder  [default: report.html in RUN_DIR]")
    ] = None,
    output: FormatOption = Format.text,
) -> None:
    """Make one HTML page of a run: loss, speed, memory, cost, and the recipe, data and software it used.

    Works during a run too. The page needs no network and shows no secrets. With --format json the summary is printed
    as JSON, and a page is written only if --output names one.

    \b
    Examples:
      ulysses report runs/tiny-cpu
      ulysses report runs/tiny-cpu --output report.html
      ulysses report runs/tiny-cpu --format json
    """
    from ulysses_cli.report import printing, run_files, run_summary
    from ulysses_cli.report.page import run_page

    run = or_exit(lambda: run_files.load_run(run_dir))
    summary = run_summary.summarize_run(run)
    target = to or (run_dir / PAGE_NAME if output is Format.text else None)
    if target is not None:
        target_path, page = target, run_page.make_run_page(run, summary)
        target = or_exit(lambda: run_files.save_page(target_path, page))
    if output is Format.json:
        printing.print_json(summary)
    else:
        printing.print_data(run_summary.format_summary(summary))
    if target is not None:
        printing.print_message(f"wrote {target}")
