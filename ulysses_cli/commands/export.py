"""`ulysses export`: turns a checkpoint into a Hugging Face model folder, on a machine without GPUs too."""

from __future__ import annotations

import json
import os
import subprocess
import tempfile
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any, NoReturn

import typer

from ulysses_cli.commands.options import Format, FormatOption, end_with
from ulysses_cli.plan.problem import DONE, FAILED

LAST_BYTES = 1 << 16


class Dtype(StrEnum):
    bfloat16 = "bfloat16"
    float16 = "float16"
    float32 = "float32"


def export(
    checkpoint: Annotated[
        Path,
        typer.Argument(
            metavar="CHECKPOINT", help="output_dir/checkpoints/step-N, or an output_dir for its newest valid checkpoint"
        ),
    ],
    to: Annotated[Path, typer.Option("--to", help="the folder to write; it must not exist")],
    best: Annotated[
        bool,
        typer.Option(
            "--best",
            help="of an output_dir, the best checkpoint by run.keep_best: lowest eval loss, highest score or metric",
        ),
    ] = False,
    merge_lora: Annotated[bool, typer.Option("--merge-lora", help="merge the adapters into the base model")] = False,
    trust_remote_code: Annotated[
        bool, typer.Option("--trust-remote-code", help="run Python code that comes with the model on this machine")
    ] = False,
    dtype: Annotated[
        Dtype | None, typer.Option(help="dtype of the tensors  [default: the recipe's model.dtype]")
    ] = None,
    output: FormatOption = Format.text,
) -> None:
    """Turn a checkpoint of any number of ranks into a folder that transformers loads (or peft, for adapters).

    Needs no GPU. Tensors are copied layer by layer, so that the model need not fit in memory. The folder is loaded
    again and compared with the checkpoint before it gets its final name.

    \b
    Examples:
      ulysses export runs/mine --to model
      ulysses export runs/mine --best --to model
      ulysses export runs/mine/checkpoints/step-400 --to model-400
      ulysses export runs/mine/checkpoints/step-400 --to merged --merge-lora --dtype bfloat16
    """
    from ulysses_cli.report import printing
    from ulysses_cli.run import preflight

    if problems := list(preflight.check_export(checkpoint, to)):
        end_with(problems, output)
    words = [str(checkpoint), "--to", str(to), *(["--merge-lora"] if merge_lora else [])]
    words += ["--best"] if best else []
    if trust_remote_code:
        words.append("--trust-remote-code")
        printing.print_message("trust_remote_code is on: code that comes with the model runs on this machine")
    words += [f"--dtype={dtype}"] if dtype is not None else []
    export_and_exit(words, to, output)


def export_and_exit(words: list[str], to: Path, output: Format) -> NoReturn:
    """Runs the export and shows its result or its problem."""
    from ulysses_cli.report import printing, recipe

    try:
        code, last, log = run_export(words, to)
    except (KeyboardInterrupt, SystemExit):  # SIGTERM ends this process too
        printing.print_message(recipe.explain_interrupted_export(to))
        raise
    if code == DONE and "result" in last:
        for note in ("checked", "carried", "note"):
            if note in last["result"]:
                printing.print_message(last["result"][note])
        if output is Format.json:
            printing.print_json(last["result"])
        else:
            printing.print_data(last["result"]["folder"])
        raise typer.Exit(DONE)
    problem = last.get("problem") or f"the export {recipe.describe_end(code)}: {(log or [''])[-1]}"
    printing.print_message(problem)
    if output is Format.json:
        printing.print_json({"problems": [{"message": problem}]})
    raise typer.Exit(code if code > 0 else FAILED)


def run_export(words: list[str], to: Path) -> tuple[int, dict[str, Any], list[str]]:
    """Runs the export in a child process and prints its phases. Returns its exit code, its last event, and the last
    lines of its log."""
    from ulysses_cli.report import printing
    from ulysses_cli.run import host

    read_end, write_end = os.pipe()
    environ = {"DS_ACCELERATOR": "cpu", **os.environ}
    last: dict[str, Any] = {}
    with (
        tempfile.TemporaryFile() as log,  # a pipe could fill up before the last event is read
        host.start_module(
            "ulysses_cli.train.export", [*words, f"--events={write_end}"], pass_fds=(write_end,), env=environ,
            stdout=log, stderr=log, stdin=subprocess.DEVNULL, umask=host.narrow_umask(to.absolute().parent),
        ) as child,
        host.ending(child),
    ):  # fmt: skip
        os.close(write_end)
        with os.fdopen(read_end, encoding="utf-8") as events:
            for line in events:
                last = json.loads(line)
                if "phase" in last:
                    printing.print_message(last["phase"])
        child.wait()
        log.seek(max(0, log.tell() - LAST_BYTES))
        return child.returncode, last, log.read().decode("utf-8", "replace").strip().splitlines()
