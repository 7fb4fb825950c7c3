"""Runs one rank from start-up to teardown, read from top to bottom: inputs -> connected ranks -> assembled run ->
training -> model. Each stage takes the values of those before it.

Sees the recipe. The loop and the hooks get plain values, which are chosen here once."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from ulysses_cli.evaluate.suites import Amount
from ulysses_cli.plan.flops import compute_model_flops
from ulysses_cli.plan.ledger.weights import find_num_parameters
from ulysses_cli.plan.schedule import SCORE_MEASURE
from ulysses_cli.run.records import name_asker, write_early_stop
from ulysses_cli.train.checkpoint.saves import SavePolicy, Saves, open_uploads
from ulysses_cli.train.document_losses import make_short_check
from ulysses_cli.train.evaluation import (
    EvalSuite,
    Evaluation,
    Measures,
    ModelChoice,
    make_samples,
    rehearse_and_report,
)
from ulysses_cli.train.export.job import write_model
from ulysses_cli.train.generation.decoding import agree_on_stop_tokens
from ulysses_cli.train.inputs import Connected, Inputs, Launch, connect, get_run_name, read_inputs
from ulysses_cli.train.loop import SIGNAL, TrainState, check_progress, every, train
from ulysses_cli.train.metrics import BadSteps, BadStepsError, Meter
from ulysses_cli.train.model.build import (
    AssembledRun,
    assemble_run,
    assert_sharded,
    choose_objective,
    choose_references,
    find_own_positions,
)
from ulysses_cli.train.processes.interruption import STOP_SHARE
from ulysses_cli.train.processes.watchdog import WRITING, Watchdog
from ulysses_cli.train.record import Record, describe_machine, list_adapter_warnings, list_versions, write_run_file
from ulysses_cli.train.reference import References


def run_worker(launch: Launch, record: Record) -> None:
    inputs = read_inputs(launch, record)
    connected = connect(launch, inputs, record)
    if connected.is_finished:
        steps = connected.length.num_steps
        record.emit(event="done", note=f"already finished: all {steps} steps are done and the model is written")
        record.close()
        dist.destroy_process_group()
        return
    try:
        run = assemble(launch, inputs, connected, record)
        if launch.options.dry_run:
            record.emit(event="done", note="dry run: everything but the steps")
        else:
            train_and_finish(launch, inputs, connected, run, record)
    except torch.OutOfMemoryError as error:
        raise connected.explain_out_of_memory(error) from error
    record.phase = "tear down"
    record.close()
    run.built.engine.close()
    launch.leftovers.close()
    dist.destroy_process_group()


def assemble(launch: Launch, inputs: Inputs, connected: Connected, record: Record) -> AssembledRun:
    """Collective over all ranks."""
    record.set_phase("loading the model")
    connected.forecast.report_to(record)
    for line in connected.forecast.explain_host(connected.plan):
        record.report(line)
    run = assemble_run(
        connected.plan, connected.groups, inputs.device, inputs.rows, connected.length,
        eval_rows=inputs.eval_rows, batching=connected.batching, stop=connected.stop, report=record.report,
        swap_folder=connected.swap_folder, objective=choose_objective(connected.plan.recipe, connected.groups),
    )  # fmt: skip
    for line in connected.explain_rows(inputs, run.built):
        record.report(line)
    run = replace(run, context=replace(run.context, disk_owners=connected.disks.owners))
    record.describe_step = run.state.describe
    assert_sharded(run, record.report)
    if warning := connected.describe_longer_run():
        record.warn(warning)
    if line := connected.describe_next_step(inputs, run.built.num_trained):
        record.report(line)
    return run


def train_and_finish(launch: Launch, inputs: Inputs, connected: Connected, run: AssembledRun, record: Record) -> None:
    """Collective over all ranks. No result (checkpoint, metrics, run.json) is written before this stage. The
    rehearsal comes before the checkpoint's state is loaded."""
    settings, state = connected.plan.recipe.run, run.state
    state.measure = settings.keep_best
    bad_steps = BadSteps(settings.max_bad_steps, record.warn)
    policy = choose_policy(connected, record)
    losses = state.measured if policy.keeps_best else None
    uploads = open_uploads(settings.checkpoint_uri, run.context, policy.total_limit, record.report, losses)
    data, references_dir = launch.options.data.name, launch.run_dir / "reference"
    references = choose_references(run, data, references_dir, inputs.eval_rows, connected.eval_batching)
    saves = Saves(
        run.context, record, policy, list_checkpoint_facts(launch, inputs, connected), bad_steps, uploads,
        lambda: launch.interruption.is_hurried,
    )  # fmt: skip
    measures = make_measures(inputs, connected, run, references, saves, record)
    if connected.has_steps_ahead:
        check_disk(inputs, connected, run, saves)
        if settings.rehearsal:
            predicted = connected.forecast.format_peak()
            rehearse_and_report(state, references.eval_rows, connected.eval_batching, run.context, record, predicted)
    references.fill(state, record.set_phase, is_fresh=connected.resume_point.path is None)
    if measures.short_check.texts:
        record.set_phase("measuring the base on the texts of run.short_check")
        measures.short_check.measure_base(state)
    resume_or_begin(connected, saves, state, record)
    record.start_files(state.step or -1, state.num_steps)  # a run that begins anew measures its base again, too
    if connected.groups.is_first:
        write_run_file(launch.run_dir, list_run_facts(launch, inputs, connected, run))
    meter = Meter(partial(compute_model_flops, inputs.shape), connected.forecast.peak_tflops, record.write_step)
    evaluate_if_due, *ask_if_due = measures.list_hooks()
    save_if_due = every(settings.save_steps, saves.save)
    state.pre_step_hooks = (meter.start,)
    # questions after the save: generation needs memory of its own, and a failure there must not cost the steps
    state.post_step_hooks = (
        meter.record, references.check, bad_steps.check, evaluate_if_due, save_if_due, *ask_if_due, saves.check_pending,
    )  # fmt: skip
    record.set_phase("training")
    if words := record.clock.describe():
        record.report(words)
    connected.groups.wait_without_limit()
    launch.interruption.wait_for_boundary(min(settings.stop_timeout, settings.step_timeout))
    watchdog = Watchdog(state, settings.step_timeout, run.context.rank, run.context.world_size, launch.run_dir)
    if state.step:
        measures.measure_again(state)
    elif settings.eval_on_start:
        measures.evaluation.measure(state)
    steps_before = state.step
    try:
        reason = train(state)
    except BadStepsError:
        saves.save_last(state)  # bad steps were not applied: the weights are good
        saves.finish_uploads(state)
        raise
    check_progress(reason, state.step - steps_before)
    if reason == SIGNAL and not state.step:
        launch.interruption.end_with_others()
    finish(launch, inputs, run, saves, measures, record, reason)
    watchdog.stop()


def choose_policy(connected: Connected, record: Record) -> SavePolicy:
    settings = connected.plan.recipe.run
    is_async = settings.async_save and connected.disks.is_shared
    if is_async != settings.async_save:
        record.warn("run.async_save needs a run.output_dir that all machines share: steps wait for saves")
    return SavePolicy(
        settings.save_total_limit,
        is_async=is_async,
        continue_on_error=settings.on_save_error == "continue",
        keeps_best=settings.keep_best is not None,
        stop_seconds=STOP_SHARE * min(settings.stop_timeout, settings.step_timeout),
    )


def make_measures(
    inputs: Inputs, connected: Connected, assembled: AssembledRun, references: References, saves: Saves, record: Record
) -> Measures:
    """Collective over all ranks."""
    state, tokenizer = assembled.state, inputs.tokenizer
    data, run = connected.plan.recipe.data, connected.plan.recipe.run
    best = saves.save if saves.policy.keeps_best else None
    choice = ModelChoice(best, run.early_stopping_patience, run.early_stopping_threshold, record.report)
    evaluation = Evaluation(references.eval_rows, connected.eval_batching, record.write_eval, choice.judge_loss)
    stop_tokens = agree_on_stop_tokens(state.engine, tokenizer, inputs.turn_ends)
    samples = make_samples(
        tokenizer, run.sample_prompts, stop_tokens, run.sample_max_new_tokens, record.write_samples,
        as_chat=run.sample_as_chat, variables=data.chat_template_kwargs,
    )  # fmt: skip
    amount = Amount(tuple(run.eval_suite_lengths or (data.max_length,)), run.eval_suite_samples, run.seed)
    suite = EvalSuite(
        run.eval_suite, amount, tokenizer, stop_tokens, record.write_quality, choice.judge_score,
        data.chat_template_kwargs, inputs.eval_rows.walk_documents() if inputs.eval_rows is not None else (),
    )  # fmt: skip
    short_check = make_short_check(
        inputs.short_texts, state, connected.eval_batching, find_own_positions(assembled), record.write_short_check
    )
    return Measures(evaluation, samples, suite, short_check, run.eval_steps, run.sample_steps, run.eval_suite_steps)


def check_disk(inputs: Inputs, connected: Connected, run: AssembledRun, saves: Saves) -> None:
    """Collective over all ranks. Reports a disk that will be full before the first step."""
    recipe, num_trained = connected.plan.recipe, run.built.num_trained
    settings, width = recipe.run, getattr(torch, recipe.model.dtype).itemsize
    model_bytes = width * (num_trained if run.built.adapter is not None else find_num_parameters(inputs.shape))
    num_steps = connected.length.num_steps - connected.resume_point.step
    judged_steps = settings.eval_suite_steps if settings.keep_best == SCORE_MEASURE else settings.eval_steps
    saves.check_disk(num_trained, model_bytes, num_steps, settings.save_steps, judged_steps)


def resume_or_begin(connected: Connected, saves: Saves, state: TrainState, record: Record) -> None:
    """Collective over all ranks."""
    settings, point = connected.plan.recipe.run, connected.resume_point
    if point.path is not None:
        record.set_phase("loading the checkpoint")
        saves.resume(state, point)
        return
    saves.begin()
    if settings.start_from is not None:
        record.set_phase("loading the run to start from")
        saves.start_from(state, settings.start_from, with_moments=settings.start_moments)


def list_checkpoint_facts(launch: Launch, inputs: Inputs, connected: Connected) -> dict[str, Any]:
    """The part of a checkpoint's state that does not change during a run."""
    plan = connected.plan
    return {
        "world_size": plan.layout.world_size,
        "layout": vars(plan.layout),
        "rows_per_step": connected.batching.rows_per_step,
        "num_steps": connected.length.num_steps,
        "recipe": plan.recipe.model_dump(mode="json"),
        "recipe_hash": plan.resolved.recipe_hash,
        "data": launch.options.data.name,
        "versions": list_versions(),
        "chat_template": inputs.tokenizer.chat_template,
        "turn_ends": inputs.turn_ends,
    }


def list_run_facts(launch: Launch, inputs: Inputs, connected: Connected, run: AssembledRun) -> dict[str, Any]:
    """The content of run.json."""
    plan, forecast = connected.plan, connected.forecast
    recipe, shape = plan.recipe, plan.shape
    return {
        "recipe_hash": plan.resolved.recipe_hash,
        "recipe_file": launch.plan.loaded.file,
        "recipe": recipe.model_dump(mode="json"),
        "run_name": get_run_name(launch),
        "layout": {**vars(plan.layout), "world_size": plan.layout.world_size},
        "model": {
            **{"name": shape.name, "model_type": shape.model_type, "num_parameters": find_num_parameters(shape)},
            **({"rope_theta": plan.resolved.rope_theta} if plan.resolved.rope_theta else {}),
        },
        "versions": list_versions(),
        "machine": describe_machine(inputs.device),
        "data": {"hash": launch.options.data.name, "num_rows": len(inputs.rows)},
        "attention": vars(run.built.kernel),
        "levers": forecast.list_levers(),
        "prediction": forecast.list_prediction(),
        "price_per_gpu_hour": recipe.run.price_per_gpu_hour,
        "num_steps": connected.length.num_steps,
    }


def finish(
    launch: Launch,
    inputs: Inputs,
    run: AssembledRun,
    saves: Saves,
    measures: Measures,
    record: Record,
    reason: str,
) -> None:
    """Collective over all ranks. `reason`: why training stopped before its last step, or ''."""
    state, recipe = run.state, run.plan.recipe
    saves.save_last(state)
    if reason := reason or measures.measure_last(state):
        saves.finish_uploads(state)
        reason = name_asker(reason) if reason == SIGNAL else reason
        write_early_stop(reason)
        record.emit(event="stopped", reason=f"by {reason} after step {state.step} of {state.num_steps}")
        return
    record.set_phase(WRITING)
    state.phase = WRITING
    launch.interruption.end_at_once()
    saves.prune(state)
    checkpoint = saves.bring_for_export(state, wants_best=recipe.run.export_best)
    if state.groups.is_first:
        write_model(
            run, checkpoint, inputs.tokenizer, record,
            run_name=get_run_name(launch), num_own_tokens=inputs.num_own_tokens, turn_ends=inputs.turn_ends,
        )  # fmt: skip
    run.context.wait()
    saves.finish_uploads(state, launch.run_dir / "model")
    for warning in list_adapter_warnings(recipe.model.model_dump(), recipe.lora.model_dump()) if recipe.lora else []:
        record.warn(warning)
    record.end(launch.run_dir / "model")
