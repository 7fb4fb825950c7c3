"""Runs one rank from start-up to teardown, read from top to bottom: inputs -> connected ranks -> assembled run ->
training -> model. Each stage takes the values of those before it.

Sees the recipe. The loop and the hooks get plain values, which are chosen here once."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from ulysses_cli.data.steps import Rows, make_eval_batching, plan_step
from ulysses_cli.data.tokenizing.renderer import TemplateProblem
from ulysses_cli.data.tokenizing.tokenizer import get_template
from ulysses_cli.evaluate.suites import Amount
from ulysses_cli.plan.flops import compute_model_flops
from ulysses_cli.plan.hardware import GIB
from ulysses_cli.plan.planner.estimate import explain_memory
from ulysses_cli.plan.recipe.recipe import Recipe, Run, Train
from ulysses_cli.plan.recipe.sections import UNPAIRED, WITHOUT_REFERENCE
from ulysses_cli.plan.resolved import find_sharing_obstacle
from ulysses_cli.plan.schedule import SCORE_MEASURE, name_measure
from ulysses_cli.plan.units import format_count
from ulysses_cli.run.bucket import Bucket
from ulysses_cli.run.checkpoints import CheckpointError, choose_checkpoint, find_damage, get_step
from ulysses_cli.run.records import name_asker, write_early_stop
from ulysses_cli.run.resume import describe_longer_run
from ulysses_cli.train.attention.kernels.choice import measure_mix
from ulysses_cli.train.checkpoint.collection import Collector
from ulysses_cli.train.checkpoint.format import load_start
from ulysses_cli.train.checkpoint.saves import NoUploads, SavePolicy, Saves, Uploads, find_shortage
from ulysses_cli.train.evaluation import EvalSuite, Evaluation, ModelChoice, Samples, encode_prompts, rehearse
from ulysses_cli.train.export.base_model import BaseModel
from ulysses_cli.train.export.weights import check_adapter, check_model, export_model, make_probe
from ulysses_cli.train.generation.decoding import agree_on_stop_tokens
from ulysses_cli.train.inputs import Connected, Inputs, Launch, connect, get_run_name, read_inputs
from ulysses_cli.train.loop import SIGNAL, StepResult, StopConditions, TrainState, check_progress, every, train
from ulysses_cli.train.loss import NextToken, Objective
from ulysses_cli.train.metrics import BadSteps, BadStepsError, Meter
from ulysses_cli.train.model.build import AssembledRun, assemble_run, make_schedule
from ulysses_cli.train.model.loading import find_key_mapping
from ulysses_cli.train.optimizer.shards import count_parameters
from ulysses_cli.train.preferences import PreferenceObjective, PreferenceSettings, UnpairedObjective
from ulysses_cli.train.processes.device import GpuMemoryError, StartError
from ulysses_cli.train.processes.groups import Groups
from ulysses_cli.train.processes.interruption import STOP_SHARE
from ulysses_cli.train.processes.watchdog import WRITING, Watchdog
from ulysses_cli.train.record import (
    Record,
    describe_machine,
    list_base_warnings,
    list_versions,
    make_card,
    write_run_file,
)
from ulysses_cli.train.reference import ComputedReferences, ReferenceFile, References

SHARD_SLACK = 1.1  # parameters are padded to a multiple of the ranks


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
        raise explain_out_of_memory(connected, error) from error
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
    point, recipe = connected.resume_point, connected.plan.recipe
    run = assemble_run(
        connected.plan, connected.groups, inputs.device, inputs.rows, connected.length,
        eval_rows=inputs.eval_rows, batching=connected.batching, stop=connected.stop, report=record.report,
        swap_folder=connected.swap_folder, objective=choose_objective(recipe, connected.groups),
    )  # fmt: skip
    kernel = run.built.kernel
    for line in connected.forecast.explain_attention(
        connected.plan, [*kernel.by_head_dim.values(), kernel.name], measure_mix(inputs.rows).lengths
    ):
        record.report(line)
    if recipe.preference is not None:
        obstacle = find_sharing_obstacle(recipe, inputs.shape) or "as the recipe says"
        alone = f"each answer has a copy of its prompt: {obstacle}"
        record.report("answers read one copy of their prompt" if inputs.rows.shares_prompts else alone)
    run = replace(run, context=replace(run.context, disk_owners=connected.disks.owners))
    record.describe_step = partial(describe_step, run.state)
    assert_sharded(run, record)
    num_steps = connected.length.num_steps
    if warning := describe_longer_run(point, recipe.model_dump(mode="json"), num_steps, make_schedule_of):
        record.warn(warning)
    if connected.has_steps_ahead:
        first = plan_step(inputs.rows, connected.batching, point.position, connected.length.end)
        record.report(
            f"step {point.step + 1}: {format_count(len(first.rows), 'row')}, {first.num_tokens:,} tokens, "
            f"{first.num_targets:,} targets; {run.built.num_trained:,} trained parameters"
        )
    return run


def choose_objective(recipe: Recipe, groups: Groups) -> Objective:
    if recipe.preference is None:
        return NextToken()
    settings = PreferenceSettings(**recipe.preference.model_dump(exclude={"share_prompts"}))
    if recipe.preference.loss in UNPAIRED:
        return UnpairedObjective(settings, groups.sp_axis, dist.group.WORLD if groups.layout.world_size > 1 else None)
    return PreferenceObjective(settings, groups.sp_axis)


def choose_references(launch: Launch, inputs: Inputs, connected: Connected, state: TrainState) -> References:
    """What the objective compares with; nothing where it compares with nothing."""
    recipe, batching = connected.plan.recipe, make_eval_batching(inputs.shape, inputs.resolved)
    if recipe.preference is None or recipe.preference.loss in WITHOUT_REFERENCE:
        return References(inputs.eval_rows, batching)
    deciding = recipe.model_dump(mode="json", include={"model", "lora"})
    key = {"data": launch.options.data.name, "seed": recipe.run.seed, **deciding}
    layout = {"layout": vars(connected.plan.layout), "batching": connected.batching, "levers": connected.plan.levers}
    folder = launch.run_dir / "reference"
    return ComputedReferences(
        inputs.eval_rows,
        batching,
        state,
        [ReferenceFile(folder / f"{split}.npz", key, layout) for split in ("train", "eval")],
    )


def make_schedule_of(recipe: Mapping[str, Any], num_steps: int) -> Callable[[int], float]:
    """The schedule of a recipe as a checkpoint holds it."""
    return make_schedule(Train.model_validate(recipe["train"]), num_steps)


def train_and_finish(launch: Launch, inputs: Inputs, connected: Connected, run: AssembledRun, record: Record) -> None:
    """Collective over all ranks. No result (checkpoint, metrics, run.json) is written before this stage. The
    rehearsal comes before the checkpoint's state is loaded."""
    settings, state, point = connected.plan.recipe.run, run.state, connected.resume_point
    bad_steps = BadSteps(settings.max_bad_steps, record.warn)
    is_async = settings.async_save and connected.disks.is_shared
    if is_async != settings.async_save:
        record.warn("run.async_save needs a run.output_dir that all machines share: steps wait for saves")
    keeps_best = settings.keep_best is not None
    state.measure = settings.keep_best
    stop_timeout = min(settings.stop_timeout, settings.step_timeout)
    goes_on, stop_seconds = settings.on_save_error == "continue", STOP_SHARE * stop_timeout
    policy = SavePolicy(settings.save_total_limit, is_async, goes_on, keeps_best, stop_seconds)
    uploads = open_uploads(launch, run, record)
    references = choose_references(launch, inputs, connected, state)
    saves = Saves(
        run.context, record, policy, list_checkpoint_facts(launch, inputs, connected), bad_steps, uploads,
        lambda: launch.interruption.is_hurried,
    )  # fmt: skip
    choice = ModelChoice(
        saves.save if keeps_best else ignore,
        settings.early_stopping_patience, settings.early_stopping_threshold, record.report,
    )  # fmt: skip
    eval_batching = make_eval_batching(inputs.shape, inputs.resolved)
    judges: list[Callable[[TrainState], None]] = [choice.judge, ignore]
    judge_loss, judge_score = reversed(judges) if settings.keep_best == SCORE_MEASURE else judges
    evaluation = Evaluation(references.eval_rows, eval_batching, record.write_eval, judge_loss)
    stop_tokens = agree_on_stop_tokens(state.engine, inputs.tokenizer, inputs.turn_ends)
    samples = make_samples(inputs, connected.plan.recipe, stop_tokens, record)
    suite = make_suite(inputs, connected, stop_tokens, record, judge_score)
    if connected.has_steps_ahead:
        check_disk(launch, inputs, connected, run, record)
        if settings.rehearsal:
            rehearse_and_report(launch, references.eval_rows, inputs, connected, run, record)
    references.fill(state, record.set_phase, is_fresh=point.path is None)
    if point.path is not None:
        record.set_phase("loading the checkpoint")
        saves.resume(state, point)
    else:
        saves.begin()
        start_from_run(launch, connected, run, record)
    record.start_files(state.step or -1, state.num_steps)  # a run that begins anew measures its base again, too
    if connected.groups.is_first:
        write_run_file(launch.run_dir, list_run_facts(launch, inputs, connected, run))
    meter = Meter(partial(compute_model_flops, inputs.shape), connected.forecast.peak_tflops, record.write_step)
    post_step_hooks: list[Callable[[TrainState, StepResult], None]] = [meter.record, references.check, bad_steps.check]
    post_step_hooks += [every(settings.eval_steps, evaluation.run)] if settings.eval_steps else []
    post_step_hooks += [every(settings.save_steps, saves.save)] if settings.save_steps else []
    # after the save: generation needs memory of its own, and a failure there must not cost the steps
    post_step_hooks += [every(settings.sample_steps, samples.run)] if settings.sample_steps else []
    post_step_hooks += [every(settings.eval_suite_steps, suite.run)] if settings.eval_suite_steps else []
    post_step_hooks += [saves.check_pending] if settings.async_save or settings.checkpoint_uri else []
    state.pre_step_hooks, state.post_step_hooks = (meter.start,), tuple(post_step_hooks)
    record.set_phase("training")
    if words := record.clock.describe():
        record.report(words)
    connected.groups.wait_without_limit()
    launch.interruption.wait_for_boundary(stop_timeout)
    context = run.context
    watchdog = Watchdog(state, settings.step_timeout, context.rank, context.world_size, launch.run_dir)
    if state.step:
        measure_again(state, settings, evaluation, samples, suite)
    elif settings.eval_on_start:
        evaluation.measure(state)
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
    finish(launch, inputs, run, saves, evaluation, samples, suite, record, reason)
    watchdog.stop()


def start_from_run(launch: Launch, connected: Connected, run: AssembledRun, record: Record) -> None:
    """Collective over all ranks. Takes the weights of run.start_from, and its optimizer's moments. Rank 0 chooses the
    checkpoint; no rank loads it unless all see it."""
    settings, context = connected.plan.recipe.run, run.context
    if settings.start_from is None:
        return
    record.set_phase("loading the run to start from")
    found: Path | str = ""
    if connected.groups.is_first:
        try:
            found = choose_checkpoint(Path(os.path.expanduser(settings.start_from)), record.report)
        except (CheckpointError, OSError) as error:
            found = str(error)
    found = context.gather(found)[0]
    unseen = find_damage(found, is_quick=True) if isinstance(found, Path) else found
    if problem := next(filter(None, context.gather(unseen)), ""):
        raise StartError(f"run.start_from: {problem}")
    assert isinstance(found, Path)
    saved = load_start(context, found, with_moments=settings.start_moments)
    run.state.optimizer_steps = int(saved["optimizer_steps"]) if settings.start_moments else 0
    what = "weights and moments" if settings.start_moments else "weights"
    record.report(f"step 1 starts from the {what} of {found}, after its step {saved['step']}")


def measure_again(state: TrainState, settings: Run, evaluation: Evaluation, samples: Samples, suite: EvalSuite) -> None:
    """Collective over all ranks, after a resume: the evaluation, the samples and the questions of the checkpoint's
    step, as far as a signal or a kill had ended them. What is known of that step is rank 0's, on all ranks."""
    if settings.eval_steps and state.last_eval_step < state.step:
        every(settings.eval_steps, evaluation.run)(state, None)
    if settings.sample_steps:
        every(settings.sample_steps, samples.run)(state, None)
    if settings.eval_suite_steps:
        every(settings.eval_suite_steps, suite.run)(state, None)


def ignore(_: TrainState) -> None:
    """Stands for the judge of an evaluation by which nothing is chosen."""


def make_suite(
    inputs: Inputs, connected: Connected, stop_tokens: set[int], record: Record, judge: Callable[[TrainState], None]
) -> EvalSuite:
    recipe = connected.plan.recipe
    lengths = recipe.run.eval_suite_lengths or (recipe.data.max_length,)
    amount = Amount(tuple(lengths), recipe.run.eval_suite_samples, recipe.run.seed)
    variables = recipe.data.chat_template_kwargs
    return EvalSuite(
        recipe.run.eval_suite, amount, inputs.tokenizer, stop_tokens, record.write_quality, judge, variables,
        inputs.eval_rows.walk_documents() if inputs.eval_rows is not None else (),
    )  # fmt: skip


def make_samples(inputs: Inputs, recipe: Recipe, stop_tokens: set[int], record: Record) -> Samples:
    settings, variables = recipe.run, recipe.data.chat_template_kwargs
    tokenizer, texts = inputs.tokenizer, settings.sample_prompts
    if texts and settings.sample_as_chat and tokenizer.chat_template is None:
        raise StartError(
            "run.sample_as_chat: the tokenizer has no chat template: set data.chat_template, or leave it out"
        )
    try:
        prompts = encode_prompts(tokenizer, texts, as_chat=settings.sample_as_chat, variables=variables)
    except TemplateProblem as error:
        raise StartError(f"run.sample_as_chat: the tokenizer's template cannot be used: {error}") from None
    return Samples(prompts, stop_tokens, settings.sample_max_new_tokens, tokenizer.decode, record.write_samples)


def open_uploads(launch: Launch, run: AssembledRun, record: Record) -> NoUploads:
    """Collective over all ranks."""
    settings = launch.loaded.recipe.run
    if settings.checkpoint_uri is None:
        return NoUploads()
    machines = run.context.gather(os.environ.get("GROUP_RANK", "0"))
    bucket = Bucket(settings.checkpoint_uri)
    losses = run.state.measured if settings.keep_best is not None else None
    return Uploads(bucket, run.context, machines, settings.save_total_limit, record.report, losses)


def check_disk(launch: Launch, inputs: Inputs, connected: Connected, run: AssembledRun, record: Record) -> None:
    """Collective over all ranks: a rank of each disk checks, all follow. Reports a disk that will be full before the
    first step."""
    recipe, built = connected.plan.recipe, run.built
    settings, width = recipe.run, getattr(torch, recipe.model.dtype).itemsize
    steps = connected.length.num_steps - connected.resume_point.step
    num_saves = -(-steps // settings.save_steps) if settings.save_steps else 1
    limit = settings.save_total_limit
    if settings.keep_best is not None:
        num_saves += steps // (
            (settings.eval_suite_steps if settings.keep_best == SCORE_MEASURE else settings.eval_steps) or steps
        )
        limit = None if limit is None else limit + 1
    model_bytes = width * (built.num_trained if built.adapter is not None else inputs.shape.num_parameters)
    find = partial(find_shortage, launch.run_dir, built.num_trained, model_bytes, limit)
    shortage = next(filter(None, run.context.gather(find(num_saves) if run.context.owns_disk else "")), "")
    if shortage and settings.on_save_error == "stop":
        raise StartError(shortage)
    if shortage:
        record.warn(shortage)


def rehearse_and_report(
    launch: Launch, eval_rows: Rows | None, inputs: Inputs, connected: Connected, run: AssembledRun, record: Record
) -> None:
    """Collective over all ranks."""
    record.set_phase("rehearsal")
    started = time.perf_counter()
    eval_batching = make_eval_batching(inputs.shape, inputs.resolved)
    scratch = launch.run_dir / "rehearsal"
    longest = rehearse(run.state, eval_rows, eval_batching, run.context, scratch, record.set_phase)
    memory = ""
    if inputs.device.type == "cuda":
        peak = torch.cuda.max_memory_allocated(inputs.device) / GIB
        memory = f", peak {peak:.2f} GiB{connected.forecast.format_peak()}"
        torch.cuda.reset_peak_memory_stats(inputs.device)
    seconds = time.perf_counter() - started
    record.report(f"rehearsed step, evaluation and save at {longest:,} tokens per row in {seconds:.1f} s{memory}")


def assert_sharded(run: AssembledRun, record: Record) -> None:
    """Under ZeRO-3 this rank holds about its share of the parameters, and no more."""
    if run.plan.recipe.parallel.zero_stage != 3:
        return
    layout = run.plan.layout
    local, total, small = count_parameters(run.built.module)
    if local > total / layout.world_size * SHARD_SLACK + small:
        raise AssertionError(f"this rank holds {local:,} of {total:,} parameters, its share is 1 in {layout}")
    record.report(f"each rank holds {local:,} of {total:,} parameters")


def describe_step(state: TrainState) -> str:
    return f"step {state.step + 1}, {state.phase}" if state.phase else ""


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
        "recipe_file": launch.loaded.file,
        "recipe": recipe.model_dump(mode="json"),
        "run_name": get_run_name(launch),
        "layout": {**vars(plan.layout), "world_size": plan.layout.world_size},
        "model": {
            **{"name": shape.name, "model_type": shape.model_type, "num_parameters": shape.num_parameters},
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


def explain_out_of_memory(connected: Connected, error: BaseException) -> GpuMemoryError:
    """Names the rows that did not fit and the smallest change of the recipe that does."""
    first_line = (str(error).strip().splitlines() or ["out of memory"])[0][:300]
    plan, gpu = connected.plan, connected.forecast.gpu
    rows = f"rows of {plan.resolved.max_length:,} tokens, {plan.resolved.local_tokens:,} per rank"
    hint = "shorter rows (data.max_length), or a larger sp_size"
    if gpu is not None:
        hint = explain_memory(plan.recipe, plan.shape, plan.levers, gpu)
    return GpuMemoryError(f"out of memory with {rows}: {first_line}", hint)


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
