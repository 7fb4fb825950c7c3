"""Last stage of a rank: the last save, the last evaluation, and the export of the model on rank 0."""

from __future__ import annotations

import os
from functools import partial
from pathlib import Path

import torch

from ulysses_cli.data.tokenizing.tokenizer import get_template
from ulysses_cli.plan.models.model_choice import name_measure
from ulysses_cli.run_folder.archive import CheckpointError, find_damage, get_step
from ulysses_cli.run_folder.early_stop import name_asker, write_early_stop
from ulysses_cli.train.assembly.run import AssembledRun
from ulysses_cli.train.assembly.text_part import find_key_mapping
from ulysses_cli.train.checkpoint.collection import Collector
from ulysses_cli.train.checkpoint.saves import Saves
from ulysses_cli.train.evaluation import Evaluation
from ulysses_cli.train.export.check import check_adapter, check_model, make_probe
from ulysses_cli.train.export.weights import export_model
from ulysses_cli.train.export.wrapper import BaseModel
from ulysses_cli.train.guard.stop_conditions import SIGNAL, StopConditions
from ulysses_cli.train.guard.watchdog import WRITING
from ulysses_cli.train.hooks.eval_suite import EvalSuite
from ulysses_cli.train.hooks.samples import Samples
from ulysses_cli.train.inputs import Inputs, Launch, get_run_name
from ulysses_cli.train.telemetry.record import Record
from ulysses_cli.train.telemetry.run_file import list_base_warnings, make_card
from ulysses_cli.train.train_state import TrainState


def finish(
    launch: Launch,
    inputs: Inputs,
    run: AssembledRun,
    saves: Saves,
    evaluation: Evaluation,
    samples: Samples,
    suite: EvalSuite,
    record: Record,
    reason: str,
) -> None:
    """Collective over all ranks. `reason`: why training stopped before its last step, or ''."""
    state, recipe = run.state, run.plan.recipe
    saves.save_last(state)
    if reason := reason or measure_last_step(state, evaluation, samples, suite):
        saves.finish_uploads(state)
        reason = name_asker(reason) if reason == SIGNAL else reason
        write_early_stop(reason)
        record.emit(event="stopped", reason=f"by {reason} after step {state.step} of {state.num_steps}")
        return
    record.set_phase(WRITING)
    state.phase = WRITING
    launch.interruption.end_at_once()
    saves.prune(state)
    checkpoint = saves.choose_for_export(state, wants_best=recipe.run.export_best)
    if run.context.is_spread:
        collector = Collector(run.context.disk_owners, run.context.rank, state.groups.host_group)
        if problem := collector.collect(checkpoint, [0]):
            raise CheckpointError(f"{checkpoint} cannot be exported: {problem}")
    if state.groups.is_first:
        write_model(launch, inputs, run, checkpoint, record)
    run.context.wait()
    saves.finish_uploads(state, launch.run_dir / "model")
    for warning in list_base_warnings(recipe.model.model_dump()) if run.built.adapter is not None else []:
        record.warn(warning)
    record.end(launch.run_dir / "model")


def measure_last_step(state: TrainState, evaluation: Evaluation, samples: Samples, suite: EvalSuite) -> str:
    """Collective over all ranks. Returns the reason to stop that ended it early, or ''."""
    signals = StopConditions(is_asked=state.stop.is_asked)  # all steps are done: max_hours and max_cost are over
    measures = [evaluation.run] if state.last_eval_step != state.step else []
    for measure in (*measures, samples.run, suite.run):
        measure(state, signals)
        if reason := signals.decide(state.groups.host_group):
            return reason
    return ""


def write_model(launch: Launch, inputs: Inputs, run: AssembledRun, checkpoint: Path, record: Record) -> None:
    """Runs on rank 0 alone."""
    recipe, built, step = run.plan.recipe, run.built, get_step(checkpoint)
    if step != run.state.step and (damage := find_damage(checkpoint)):
        raise CheckpointError(
            f"{checkpoint}, the best by {name_measure(run.state.measure)}, cannot be exported: {damage}; "
            "export another one with ulysses export"
        )
    dtype = getattr(torch, recipe.model.dtype)
    named = recipe.model.name_or_path
    base = BaseModel(named, recipe.model.revision) if named is not None else None
    probe = make_probe(inputs.tokenizer, built.config.vocab_size)
    check = partial(
        check_model, checkpoint, config=built.config, dtype=dtype, report=record.set_phase, probe=probe, base=base
    )
    export_model(
        checkpoint,
        launch.run_dir / "model",
        config=built.config,
        tokenizer=inputs.tokenizer,
        adapter_config=built.adapter.peft_config["default"] if built.adapter is not None else None,
        dtype=dtype,
        check=check if built.adapter is None else partial(check_adapter, checkpoint, dtype=dtype),
        card=make_card(
            recipe.model_dump(mode="json"),
            get_run_name(launch),
            inputs.shape,
            inputs.num_own_tokens,
            key_mapping=find_key_mapping(os.path.expanduser(named), recipe.model.revision) if named else None,
            template=get_template(inputs.tokenizer),
        ),
        step=step,
        run_step=run.state.step,
        base=base,
        tell=record.report,
        turn_ends=inputs.turn_ends,
    )
