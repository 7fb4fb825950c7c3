"""`ulysses train`: validates the recipe, prepares its data, launches the ranks, and reports how the run ended."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Annotated

import typer

from ulysses_cli.commands.options import Format, complete_words, end_with


def train(
    words: Annotated[
        list[str],
        typer.Argument(
            metavar="RECIPE [KEY=VALUE ...] [-- AGENT ARGS]",
            help="a recipe file, settings that override it, and after -- arguments for torch's elastic agent",
            autocompletion=complete_words,
        ),
    ],
    num_processes: Annotated[
        int | None,
        typer.Option(
            min=1,
            max=1 << 20,
            help="processes of the run, one per GPU  [default: the product of the recipe's parallel sizes]",
        ),
    ] = None,
    resume: Annotated[
        str | None, typer.Option(help="a checkpoint folder, or `auto` for the newest valid one in output_dir")
    ] = None,
    resume_anyway: Annotated[
        bool, typer.Option("--resume-anyway", help="resume even if settings have changed that decide losses")
    ] = False,
    overwrite: Annotated[
        bool,
        typer.Option(
            "--overwrite",
            help="start a new run; the earlier results in output_dir are deleted when its model is complete",
        ),
    ] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="do everything but the training steps")] = False,
    nnodes: Annotated[int | None, typer.Option(min=1, help="machines of the run; also NNODES")] = None,
    node_rank: Annotated[int | None, typer.Option(min=0, help="number of this machine, from 0; also NODE_RANK")] = None,
    master_addr: Annotated[
        str | None, typer.Option(help="host name of the machine with number 0; also MASTER_ADDR")
    ] = None,
    master_port: Annotated[
        int | None, typer.Option(min=1, max=65535, help="port on that machine; also MASTER_PORT  [default: 29400]")
    ] = None,
    hostfile: Annotated[
        Path | None, typer.Option(help="DeepSpeed's list of machines: a line `host slots=N` for each, number 0 first")
    ] = None,
) -> None:
    """Fine-tune a model as a recipe says, and save it as a Hugging Face folder in output_dir/model.

    Starts one process per GPU, or per CPU rank with run.device: cpu. Downloads the model's config.json and weights if
    they are not on this machine.

    Ctrl-C or SIGTERM stops the run after the current step, with a checkpoint and exit code 0, or 75 under a scheduler,
    which starts the job again then (run.stop_exit_code). run.max_hours and run.max_cost do the same. A second signal
    stops it at once, with exit code 130 or 143; so does the first one while the model is loading, when there is nothing
    to save.

    On several machines, start the command on each with its own --node-rank. SLURM (srun), Kubeflow, SkyPilot, dstack,
    RunPod and mpirun say by themselves which machine this is. The machines share a key: ULYSSES_RUN_KEY, or a
    file in run.output_dir on a disk that all machines can read. A machine with another key is refused.

    With run.checkpoint_uri, checkpoints and the model are uploaded while steps go on, and --resume auto on an empty
    machine downloads the newest valid one.

    --resume continues from a checkpoint, with the same rows and losses as a run that never stopped. What may change:
    train.max_steps and train.num_train_epochs (a longer run; the learning rate follows the longer schedule from there
    on), model.attn_implementation, model.experts_implementation, model.trust_remote_code, data.store_dir,
    data.num_workers, data.pad_to_multiple_of, train.gradient_accumulation_steps and
    train.per_device_train_batch_size (if rows per step stay the same), and all of parallel, memory, deepspeed and run
    (but run.seed). Any other change needs --resume-anyway.

    \b
    Examples:
      ulysses train recipes/tiny-cpu.yaml
      ulysses train my.yaml train.max_steps=100 parallel.sp_size=8
      ulysses train my.yaml --resume auto
      ulysses train my.yaml --resume auto train.max_steps=2000
      ulysses train my.yaml --resume auto run.checkpoint_uri=s3://bucket/mine
      ulysses train my.yaml --nnodes 2 --node-rank 0 --master-addr gpu01
      ulysses train my.yaml --dry-run parallel.dp_shard_size=8
    """
    from ulysses_cli.commands.children.training import Machine, PreparationError, TrainOptions, run_recipe
    from ulysses_cli.plan.problem import RecipeError
    from ulysses_cli.report import printing
    from ulysses_cli.run.environments import choose_stop_code
    from ulysses_cli.validate import no_recipe, several_recipes, split_words

    extra = sys.argv[sys.argv.index("--") + 1 :] if "--" in sys.argv else []
    words = words[: len(words) - len(extra)]
    files, overrides = split_words(words)
    if len(files) != 1:
        end_with([no_recipe(words) if not files else several_recipes(files)], Format.text)
    options = TrainOptions(num_processes, resume, resume_anyway, overwrite, dry_run, tuple(extra))
    machine = Machine(nnodes, node_rank, master_addr, master_port, hostfile)
    try:
        finished = run_recipe(files[0], overrides, options, machine)
    except RecipeError as error:
        end_with(error.problems, Format.text)
    except PreparationError as error:
        raise typer.Exit(error.exit_code) from None
    if finished.model_dir is not None:
        printing.print_data(str(finished.model_dir))
    if finished.outcome.stopped_by:
        raise typer.Exit(choose_stop_code(finished.run_settings.stop_exit_code, os.environ))
    raise typer.Exit(finished.outcome.exit_code)
