"""`ulysses report`: makes an HTML page of a run."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from ulysses_cli.commands.options import Format, FormatOption, end_with, or_exit

PAGE_NAME = "report.html"
FREE_PORT = 1024
OF_A_RUN = {"run.json", "metrics.jsonl", "eval.jsonl", "checkpoints", "logs", "lock-0"}


def report(
    run_dir: Annotated[Path, typer.Argument(help="the run's folder: run.output_dir of its recipe")],
    to: Annotated[
        Path | None, typer.Option("--output", "-o", help="file or folder  [default: report.html in RUN_DIR]")
    ] = None,
    live: Annotated[
        bool, typer.Option("--live", help="serve the page on localhost, and refresh it while the run goes on")
    ] = False,
    port: Annotated[int, typer.Option(min=0, max=65535, help="port of --live; 0 = a free one")] = 0,
    output: FormatOption = Format.text,
) -> None:
    """Make one HTML page of a run: loss, speed, memory, cost, and the recipe, data and software it used.

    Works during a run too: --live serves the page on this machine's loopback interface until Ctrl-C, and the browser
    refreshes it every 5 seconds. Its address ends with a token, without which other users of the machine do not get it.
    From elsewhere: ssh -L 8000:localhost:8000 HOST. The page needs no network and shows no secrets. With --format json
    the summary is printed as JSON, and a page is written only if --output names one.

    \b
    Examples:
      ulysses report runs/tiny-cpu
      ulysses report runs/tiny-cpu --output report.html
      ulysses report runs/tiny-cpu --format json
      ulysses report runs/tiny-cpu --live --port 8000
    """
    from ulysses_cli.report import printing, proofs, run_summary
    from ulysses_cli.report.page import run_page

    if live:
        _serve(run_dir, to, port, output)
        return
    run = or_exit(lambda: run_summary.load_run(run_dir))
    summary = run_summary.summarize_run(run)
    target = to or (run_dir / PAGE_NAME if output is Format.text else None)
    if target is not None:
        found = proofs.make_evaluation_blocks(run.evaluations)
        target_path, page = target, run_page.make_run_page(run, summary, found)
        target = or_exit(lambda: run_summary.save_page(target_path, page))
    if output is Format.json:
        printing.print_json(summary)
    else:
        printing.print_data(run_summary.format_summary(summary))
    if target is not None:
        printing.print_message(f"wrote {target}")


def _serve(run_dir: Path, to: Path | None, port: int, output: Format) -> None:
    """Serves the page until Ctrl-C. The run's first step may come later."""
    from ulysses_cli.plan.problem import Problem, RecipeError
    from ulysses_cli.report import printing, run_summary
    from ulysses_cli.report.page.live_page import LivePage
    from ulysses_cli.report.page.run_page import make_run_page
    from ulysses_cli.report.proofs import make_evaluation_blocks

    if to is not None or output is Format.json:
        end_with([Problem("--live", "serves the page, and writes none", "leave out --output and --format")], output)
    if not run_dir.exists():
        hint = f"start the run first{suggest_folder(run_dir)}; --live takes the folder that run.output_dir names"
        end_with([Problem("", f"{run_dir} does not exist", hint)], output)
    if not run_dir.is_dir():
        end_with([Problem("", f"{run_dir} is a file, not a run directory", "name run.output_dir")], output)
    if (others := {file.name for file in run_dir.iterdir()}) and not others & OF_A_RUN:
        hint = "name the folder that run.output_dir of the recipe names"
        end_with([Problem("", f"{run_dir} holds other files, and nothing of a run", hint)], output)

    def make() -> str:
        try:
            run = run_summary.load_run(run_dir)
        except RecipeError as error:
            raise ValueError(error.problems[0].message) from None
        found = make_evaluation_blocks(run.evaluations)
        return printing.hide_known(make_run_page(run, run_summary.summarize_run(run), found))

    try:
        page = LivePage(make, port)
    except OSError as error:
        hint = (
            "name another port, 1024 or more: smaller ones belong to the system"
            if 0 < port < FREE_PORT
            else ("name another port")
        )
        end_with([Problem("--port", f"{port} cannot be used: {error.strerror}", hint)], output)
    printing.print_message(f"{page.address} shows {run_dir}; Ctrl-C ends it")
    page.serve()


def suggest_folder(run_dir: Path) -> str:
    """Folders beside it with a similar name."""
    import difflib

    parent = run_dir.parent
    names = [folder.name for folder in parent.iterdir() if folder.is_dir()] if parent.is_dir() else []
    close = difflib.get_close_matches(run_dir.name, names, n=2)
    return f", or did you mean {' or '.join(str(parent / name) for name in close)}?" if close else ""
