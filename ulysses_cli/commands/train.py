"""`ulysses train`: validate, prepare, launch, and say how it ended."""

from __future__ import annotations

import json
import os
import sys
from contextlib import ExitStack
from pathlib import Path
from typing import Annotated

import typer

from ulysses_cli.commands.options import or_exit
from ulysses_cli.plan.exit_codes import DONE, FAILED, USAGE


def train(
    words: Annotated[
        list[str],
        typer.Argument(
            metavar="RECIPE [KEY=VALUE ...] [-- LAUNCHER ARGS]", help="a recipe file, and settings laid over it"
        ),
    ],
    num_processes: Annotated[
        int | None, typer.Option(min=1, max=1 << 20, help="processes of the run; left out: the recipe's own product")
    ] = None,
    resume: Annotated[
        str | None, typer.Option(help="a checkpoint folder, or `auto` for the newest valid one in output_dir")
    ] = None,
    resume_anyway: Annotated[
        bool, typer.Option("--resume-anyway", help="resume although model, data or lengths have changed")
    ] = False,
    overwrite: Annotated[
        bool,
        typer.Option(
            "--overwrite", help="start anew; an earlier run's results in output_dir go once the new model stands"
        ),
    ] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="everything but the steps")] = False,
    nnodes: Annotated[int | None, typer.Option(min=1, help="machines of the run [NNODES]")] = None,
    node_rank: Annotated[int | None, typer.Option(min=0, help="which of them this is [NODE_RANK]")] = None,
    master_addr: Annotated[str | None, typer.Option(help="where machines meet [MASTER_ADDR]")] = None,
    master_port: Annotated[int | None, typer.Option(min=1, max=65535, help="[MASTER_PORT], 29400")] = None,
) -> None:
    """Fine-tune a model as a recipe says, and leave a Hugging Face folder in output_dir/model.

    One process per GPU; with run.device: cpu, one CPU process per rank. A first Ctrl-C or SIGTERM stops after the
    present step, with a checkpoint, exit code 0; a second one stops at once, exit code 130 or 143. While the model is
    loading there is nothing to save, and the first one stops at once. The hub is asked for a model whose shape is not
    known here.

    Machines of one run share a key: ULYSSES_RUN_KEY, or a file in run.output_dir on a disk that all of them see. One
    with another key is refused.

    --resume goes on from a checkpoint with the rows and losses of a run that was never stopped. What may change then:
    train.max_steps and train.num_train_epochs (a longer run; the learning rate follows the longer schedule from there
    on), model.attn_implementation, model.trust_remote_code, data.store_dir, data.num_workers, data.pad_to_multiple_of,
    train.gradient_accumulation_steps and train.per_device_train_batch_size (if rows per step stay the same), and all of
    parallel, memory, deepspeed and run (but run.seed). Any other change needs --resume-anyway.

    \b
    Examples:
      ulysses train recipes/tiny-cpu.yaml
      ulysses train my.yaml train.max_steps=100 parallel.sp_size=8
      ulysses train my.yaml --resume auto
      ulysses train my.yaml --resume auto train.max_steps=2000
      ulysses train my.yaml --nnodes 2 --node-rank 0 --master-addr gpu01
      ulysses train my.yaml --dry-run parallel.dp_shard_size=8
    """
    from ulysses_cli import validate
    from ulysses_cli.commands.prepare import prepare_recipe
    from ulysses_cli.launch import launcher as launch
    from ulysses_cli.launch import preflight
    from ulysses_cli.report import printing, run_end

    extra = sys.argv[sys.argv.index("--") + 1 :] if "--" in sys.argv else []
    files, overrides = validate.split_words(words[: len(words) - len(extra)])
    if len(files) != 1:
        printing.print_problems([validate.no_recipe(words) if not files else validate.several_recipes(files)])
        raise typer.Exit(USAGE)
    if resume:
        overrides = [*overrides, f"run.resume_from_checkpoint={json.dumps(resume)}"]
    result = validate.validate_recipe(files[0], overrides, num_processes, online=True, starts_anew=overwrite)
    loaded, resolved = result.loaded, result.resolved
    if result.problems or loaded is None or resolved is None:
        printing.print_problems(result.problems)
        raise typer.Exit(USAGE)
    recipe, world_size = loaded.recipe, resolved.layout.world_size
    nodes = or_exit(
        lambda: launch.find_nodes(
            world_size,
            os.environ,
            nnodes=nnodes,
            node_rank=node_rank,
            master_addr=master_addr,
            master_port=master_port,
        )
    )
    printing.print_talk(run_end.format_start(result, nodes.count))
    run_dir = Path(os.path.expanduser(recipe.run.output_dir))
    wanted = recipe.run.resume_from_checkpoint
    lock = or_exit(lambda: launch.lock_run(run_dir, nodes.rank, recipe.model_dump(mode="json")))
    starts_anew = not wanted and not dry_run and nodes.rank == 0
    inputs = [path for path in (recipe.model.name_or_path, *(each.path for each in recipe.data.datasets)) if path]
    if starts_anew:
        or_exit(lambda: launch.check_run_dir(run_dir, inputs, overwrite=overwrite))
    obstacles = preflight.find_obstacles(
        loaded, processes_here=nodes.processes_here, resumes_anyway=resume_anyway, is_rehearsal=dry_run
    )
    if obstacles:
        printing.print_problems(obstacles)
        raise typer.Exit(USAGE)
    data = prepare_recipe(files[0], overrides)
    if data.exit_code != DONE:
        raise typer.Exit(data.exit_code)
    vocabulary = result.shape.vocab_size if result.shape else 0
    outside = [source for source in data.report["sources"] if source["max_id"] >= vocabulary]
    if outside:
        printing.print_problems([run_end.explain_tokens(loaded, outside[0], vocabulary)])
        raise typer.Exit(USAGE)
    rank_args = ["--recipe", files[0], "--data", str(data.report["path"]), *(f"--set={text}" for text in overrides)]
    rank_args += [f"--resume={wanted}"] if wanted else []
    rank_args += ["--resume-anyway"] if resume_anyway else []
    device = recipe.run.device
    if dry_run:
        rank_args.append("--dry-run")
        if world_size > launch.count_places(device):
            rank_args.append("--pretend")
            nodes, device = launch.Nodes(), "cpu"
    with ExitStack() as stack:
        meeting = or_exit(lambda: stack.enter_context(launch.open_meeting(nodes, run_dir, os.environ)))
        aside = launch.set_results_aside(run_dir) if starts_anew else None
        launcher_args = launch.make_launcher_args(nodes, recipe.run.max_restarts, meeting, extra)
        environ = launch.make_environment(os.environ, device, nodes.processes_here, meeting)
        outcome = launch.launch(launcher_args, rank_args, environ, run_dir / "logs", lock)
    model = run_dir / "model"
    is_whole = outcome.exit_code == DONE and not dry_run and launch.is_model_of_newest(run_dir)
    if is_whole:
        launch.drop_replaced_results(run_dir)
    elif aside is not None:
        is_back = launch.restore_results(run_dir, aside)
        kept = "are back in their place" if is_back else f"are kept in {aside} until a new model stands"
        printing.print_talk(f"the earlier run's results {kept}")
    if outcome.exit_code > FAILED + USAGE:
        printing.print_talk(run_end.format_interruption(outcome.failure, launch.find_newest_checkpoint(run_dir)))
    elif outcome.exit_code != DONE:
        printing.print_talk(run_end.format_failure(outcome.failure, run_dir / "logs"))
    elif is_whole:
        printing.print_data(str(model))
    raise typer.Exit(outcome.exit_code)
