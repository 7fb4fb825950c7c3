"""`ulysses export`: a checkpoint -> a Hugging Face folder, on a machine without the run's GPUs."""

from __future__ import annotations

import json
import os
import subprocess
import tempfile
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import typer

from ulysses_cli.commands.options import Format, FormatOption, end_with
from ulysses_cli.plan.exit_codes import DONE, FAILED

LAST_BYTES = 1 << 16


class Dtype(StrEnum):
    bfloat16 = "bfloat16"
    float16 = "float16"
    float32 = "float32"


def export(
    checkpoint: Annotated[
        Path,
        typer.Argument(metavar="CHECKPOINT", help="output_dir/checkpoints/step-N; of an output_dir, the newest valid"),
    ],
    to: Annotated[Path, typer.Option("--to", help="the folder to make; it must not exist")],
    merge_lora: Annotated[bool, typer.Option("--merge-lora", help="add the adapters to the base model")] = False,
    trust_remote_code: Annotated[
        bool, typer.Option("--trust-remote-code", help="run Python code that comes with the model, on this machine")
    ] = False,
    dtype: Annotated[Dtype | None, typer.Option(help="of the tensors; left out: model.dtype of the recipe")] = None,
    output: FormatOption = Format.text,
) -> None:
    """Make a folder that transformers (or peft, for adapters) loads, from a checkpoint of any number of ranks.

    Tensors are streamed, layer by layer. The folder is loaded again and compared with the checkpoint before it gets
    its name.

    \b
    Examples:
      ulysses export runs/mine --to model
      ulysses export runs/mine/checkpoints/step-400 --to model-400
      ulysses export runs/mine/checkpoints/step-400 --to merged --merge-lora --dtype bfloat16
    """
    from ulysses_cli.host import children
    from ulysses_cli.launch import preflight
    from ulysses_cli.report import printing, run_end

    if problems := list(preflight.check_export(checkpoint, to)):
        end_with(problems, output)
    ours, theirs = os.pipe()
    words = [str(checkpoint), "--to", str(to), f"--events={theirs}", *(["--merge-lora"] if merge_lora else [])]
    if trust_remote_code:
        words.append("--trust-remote-code")
        printing.print_message("trust_remote_code is on: code that comes with the model runs on this machine")
    words += [f"--dtype={dtype}"] if dtype is not None else []
    environ = {"DS_ACCELERATOR": "cpu", **os.environ}
    last: dict[str, Any] = {}
    with (
        tempfile.TemporaryFile() as log,  # a pipe would be full before the last event has come
        children.start_module(
            "ulysses_cli.train.export", words, pass_fds=(theirs,), env=environ, stdout=log, stderr=log,
            stdin=subprocess.DEVNULL, umask=children.narrow_umask(to.absolute().parent),
        ) as child,
        children.ending(child),
    ):  # fmt: skip
        os.close(theirs)
        with os.fdopen(ours, encoding="utf-8") as events:
            for line in events:
                last = json.loads(line)
                if "phase" in last:
                    printing.print_message(last["phase"])
        child.wait()
        log.seek(max(0, log.tell() - LAST_BYTES))
        said = log.read().decode("utf-8", "replace").strip().splitlines()
    if child.returncode == DONE and "result" in last:
        printing.print_message(last["result"]["checked"])
        if output is Format.json:
            printing.print_json(last["result"])
        else:
            printing.print_data(last["result"]["folder"])
        raise typer.Exit(DONE)
    problem = last.get("problem") or f"the export {run_end.describe_end(child.returncode)}: {(said or [''])[-1]}"
    printing.print_message(problem)
    if output is Format.json:
        printing.print_json({"problems": [{"message": problem}]})
    raise typer.Exit(child.returncode if child.returncode > 0 else FAILED)
