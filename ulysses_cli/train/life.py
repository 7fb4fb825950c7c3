"""What a rank does from its first breath to its last, in order. Joins the parts; holds no arithmetic of its own."""

from __future__ import annotations

import argparse
import os
import socket
import time
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from ulysses_cli.data.batching import count_rows, make_batching, make_eval_batching
from ulysses_cli.data.rows import open_rows
from ulysses_cli.data.steps import plan_step
from ulysses_cli.data.tokenizer import load_tokenizer
from ulysses_cli.plan.estimate import explain_memory
from ulysses_cli.plan.flops import compute_model_flops
from ulysses_cli.plan.hardware import Hardware
from ulysses_cli.plan.ledger.swapping import compute_swap_need
from ulysses_cli.plan.lever_choice import choose_levers
from ulysses_cli.plan.load import Loaded
from ulysses_cli.plan.resolved import make_layout, resolve
from ulysses_cli.plan.weight_files import find_weight_problem
from ulysses_cli.train.agreement import compare_machines, gather_values
from ulysses_cli.train.bad_steps import BadSteps, BadStepsError
from ulysses_cli.train.build import build, load_model_config, make_schedule, read_shape
from ulysses_cli.train.checkpoint import Owner
from ulysses_cli.train.device import StartError, choose_device, recognise_gpu
from ulysses_cli.train.evaluation import evaluate
from ulysses_cli.train.export import export_model
from ulysses_cli.train.export_check import check_adapter, check_model
from ulysses_cli.train.forecast import Forecast
from ulysses_cli.train.groups import make_groups
from ulysses_cli.train.interruption import Interruption
from ulysses_cli.train.loop import Course, StepResult, every, train
from ulysses_cli.train.meeting import join_ranks
from ulysses_cli.train.metrics import Meter
from ulysses_cli.train.randomness import seed_all
from ulysses_cli.train.record import Display, Record, make_trackers
from ulysses_cli.train.rehearsal import rehearse
from ulysses_cli.train.requirements import find_missing_operator, find_missing_package
from ulysses_cli.train.resume import FRESH, adapt, count_restarts, describe_longer_run, describe_restart, find_beginning
from ulysses_cli.train.run_file import describe_machine, list_base_warnings, list_versions, make_card, write_run_file
from ulysses_cli.train.run_lock import RunLock
from ulysses_cli.train.saves import SAVING, Habits, Saves, find_shortage
from ulysses_cli.train.shards import count_held
from ulysses_cli.train.stop import StopWishes
from ulysses_cli.train.swap_folder import leave_folder, name_folder, open_folder
from ulysses_cli.train.watchdog import WRITING, Watchdog

START_TIMEOUT = timedelta(minutes=30)  # loading, compiling
SHARD_SLACK = 1.1  # parameters are padded to a multiple of the ranks


class Life:
    """One rank of a run."""

    def __init__(
        self,
        loaded: Loaded,
        options: argparse.Namespace,
        show: Callable[[int], Display],
        load_hardware: Callable[[], Hardware],
        interruption: Interruption,
        lock: RunLock | None = None,
    ) -> None:
        self.loaded, self.options, self.show, self.load_hardware = loaded, options, show, load_hardware
        self.interruption, self.lock = interruption, lock
        self.recipe = loaded.recipe
        self.layout = make_layout(self.recipe)
        self.run_dir = Path(os.path.expanduser(self.recipe.run.output_dir))
        self.record = Record(self.run_dir, None, (), self.recipe.run.logging_steps)
        self.course: Course | None = None
        self.swap_folder: Path | None = None

    def run(self) -> None:
        self.read_inputs()
        self.meet_others()
        if self.is_finished:
            note = f"already finished: all {self.num_steps} steps are done, the model stands"
            self.record.tell(event="done", note=note)
            self.record.close()
            dist.destroy_process_group()
            return
        course = self.build_all()
        if self.options.dry_run:
            self.record.tell(event="done", note="dry run: everything but the steps")
        else:
            self.start(course)
            try:
                reason = train(course)
            except BadStepsError:
                self.saves.save_last(course)  # bad steps were not applied: what stands is good
                raise
            self.finish(course, reason)
            self.watchdog.stop()
        self.tear_down()

    @property
    def is_finished(self) -> bool:
        """Nothing is left to do. The same on all ranks: it comes from what rank 0 has told."""
        begin = self.beginning
        return begin.path is not None and begin.step == self.num_steps == begin.model_step

    def read_inputs(self) -> None:
        """Whatever a file or a package can spoil is found before any process group exists."""
        self.record.phase = "reading inputs"
        recipe = self.recipe
        if problem := find_missing_package(recipe.train.optim):
            raise StartError(problem)
        self.rows = open_rows(self.options.data, "train")
        held_out = open_rows(self.options.data, "eval")
        self.eval_rows = held_out if len(held_out) else None
        self.tokenizer = load_tokenizer(recipe.model, recipe.data)
        config = load_model_config(recipe)
        self.shape, self.num_own_tokens = read_shape(recipe, config, self.tokenizer), config.vocab_size
        if len(self.tokenizer) > self.shape.vocab_size:
            raise StartError(
                f"the tokenizer has {len(self.tokenizer):,} tokens, the model's embedding only "
                f"{self.shape.vocab_size:,}: name the tokenizer that belongs to the model (model.tokenizer)"
            )
        folder = Path(os.path.expanduser(recipe.model.name_or_path or ""))
        if recipe.model.name_or_path and folder.is_dir() and (problem := find_weight_problem(folder)):
            raise StartError(problem)
        self.resolved = resolve(recipe, self.shape)
        self.device = choose_device(wants_cpu=recipe.run.device == "cpu" or self.options.pretend)
        gpu, is_known = recognise_gpu(self.device, self.load_hardware())
        self.forecast = Forecast(choose_levers(recipe, self.shape, gpu), gpu, is_known)
        if recipe.memory.nvme_path is not None:
            self.open_swap_folder()
        is_first = int(os.environ.get("RANK", "0")) == 0
        said: list[str] = []
        self.beginning = FRESH
        if is_first and not self.options.dry_run:
            restarts = count_restarts(self.run_dir / "logs")
            if restarts:
                said.append(describe_restart(self.run_dir / "logs", restarts, recipe.run.max_restarts))
            self.beginning = find_beginning(self.run_dir, self.options.resume, restarts, said.append)
        self.plan_steps(said.append)
        if is_first:
            run = recipe.run
            trackers = make_trackers(run.report_to, self.run_dir, run.run_name or self.run_dir.name)
            self.record = Record(self.run_dir, self.show(self.num_steps), trackers, run.logging_steps, self.lock)
            for text in said:
                self.record.warn(text)

    def open_swap_folder(self) -> None:
        self.swap_folder = name_folder(str(self.recipe.memory.nvme_path), self.run_dir)
        sizes = compute_swap_need(self.recipe, self.shape, self.forecast.choice.levers)
        if problem := find_missing_operator() or open_folder(self.swap_folder, self.run_dir, *sizes):
            raise StartError(problem)

    def plan_steps(self, tell: Callable[[str], None] = lambda _: None) -> None:
        """How many rows and steps are ahead of the beginning. Accumulation follows the checkpoint's rows per step."""
        recipe, state = self.loaded.recipe, self.beginning.state
        if state:
            dumped, anyway = recipe.model_dump(mode="json"), self.options.resume_anyway
            fitted = adapt(state, dumped, self.options.data.name, self.layout, anyway=anyway, tell=tell)
            recipe = recipe.model_copy(
                update={"train": recipe.train.model_copy(update={"gradient_accumulation_steps": fitted})}
            )
        self.recipe, begin = recipe, self.beginning
        self.batching = make_batching(recipe, self.shape)
        whole = count_rows(recipe, len(self.rows), self.batching.rows_per_step)
        self.end, self.num_steps = begin.count_ahead(recipe.train.max_steps, whole, self.batching.rows_per_step)

    def meet_others(self) -> None:
        self.record.enter("meeting the other ranks")
        if self.options.pretend:
            from torch.testing._internal.distributed.fake_pg import FakeStore

            dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=self.layout.world_size)
        else:
            join_ranks(self.device, START_TIMEOUT)
        facts = {
            "processes per machine": os.environ.get("LOCAL_WORLD_SIZE"),
            "layout": str(self.layout),
            "recipe": self.resolved.recipe_hash,
            "data": self.options.data.name,
            **list_versions(),
        }
        if not self.options.pretend:
            name = f"{socket.gethostname()} (machine {os.environ.get('GROUP_RANK', '0')})"
            compare_machines(gather_values((name, facts), dist.group.WORLD))
        self.groups = make_groups(self.layout, START_TIMEOUT)
        if not self.options.pretend:
            self.beginning = gather_values(self.beginning, self.groups.host_group)[0]
            self.plan_steps()
        run = self.recipe.run
        usd_per_hour = (run.price_per_gpu_hour or 0.0) * self.layout.world_size
        self.wishes = StopWishes(run.max_hours, run.max_cost, usd_per_hour, lambda: self.interruption.is_asked)

    def build_all(self) -> Course:
        self.record.enter("loading the model")
        seed_all(self.recipe.run.seed)
        # memories differ a little from rank to rank; levers must not
        self.forecast = gather_values(self.forecast, self.groups.host_group)[0]
        self.forecast.say(self.record)
        levers = self.forecast.choice.levers
        built = build(
            self.recipe, self.shape, self.groups, self.device, self.num_steps, levers,
            self.record.say, self.rows.get_lengths(0), self.swap_folder,
        )  # fmt: skip
        self.built = built
        self.assert_sharded()
        self.owner = Owner(
            built.module,
            built.engine.wrapped.optimizer,
            self.groups.rank,
            self.layout.world_size,
            wait=lambda: dist.barrier(group=self.groups.host_group),
            tell_all=lambda value: gather_values(value, self.groups.host_group),
        )
        facts = {
            "world_size": self.layout.world_size,
            "layout": vars(self.layout),
            "rows_per_step": self.batching.rows_per_step,
            "num_steps": self.num_steps,
            "recipe": self.recipe.model_dump(mode="json"),
            "recipe_hash": self.resolved.recipe_hash,
            "data": self.options.data.name,
            "versions": list_versions(),
            "chat_template": self.tokenizer.chat_template,
        }
        self.bad_steps = BadSteps(self.recipe.run.max_bad_steps, self.record.warn)
        recipe, run = self.recipe, self.recipe.run
        habits = Habits(run.save_total_limit, run.async_save, run.on_save_error == "continue")
        self.saves = Saves(self.owner, self.record, habits, facts, self.bad_steps)
        if text := describe_longer_run(
            self.beginning, recipe.model_dump(mode="json"), self.num_steps, partial(make_schedule, recipe.train)
        ):
            self.record.warn(text)
        self.course = Course(built.engine, self.groups, self.rows, self.batching, self.num_steps, self.end, self.wishes)
        seed_all(self.recipe.run.seed + self.groups.rank)
        if self.beginning.step < self.num_steps:
            first = plan_step(self.rows, self.batching, self.beginning.position, self.end)
            self.record.say(
                f"step {self.beginning.step + 1}: {len(first.rows)} rows, {first.num_tokens:,} tokens, "
                f"{first.num_targets:,} targets; {built.num_trained:,} trained parameters"
            )
        return self.course

    def start(self, course: Course) -> None:
        """From here on things are written. The rehearsal comes before the checkpoint's state is loaded."""
        is_ahead = self.beginning.step < self.num_steps
        if is_ahead:
            self.check_disk()
        if is_ahead and self.recipe.run.rehearsal:
            self.rehearse(course)
        if self.beginning.path is not None:
            self.record.enter("loading the checkpoint")
            self.saves.resume(course, self.beginning)
        self.record.start_files(course.step)
        if self.groups.is_first:
            write_run_file(self.run_dir, self.list_facts())
        run = self.recipe.run
        meter = Meter(partial(compute_model_flops, self.shape), self.forecast.peak_tflops, self.record.write_step)
        course.before = (meter.start,)
        after: list[Callable[[Course, StepResult], None]] = [meter.record, self.bad_steps.judge]
        after += [every(run.eval_steps, self.evaluate)] if run.eval_steps else []
        after += [every(run.save_steps, self.saves.save)] if run.save_steps else []
        after += [self.saves.look] if run.async_save else []
        course.after = tuple(after)
        self.record.enter("training")
        self.groups.wait_without_limit()
        self.interruption.wait_for_boundary(run.step_timeout, lambda: course.phase == SAVING)
        self.watchdog = Watchdog(course, run.step_timeout, self.owner.rank, self.owner.world_size, self.run_dir)
        if run.eval_steps and 0 < course.step < self.num_steps and course.last_eval_step < course.step:
            every(run.eval_steps, self.evaluate)(course, None)  # which a signal ended

    def check_disk(self) -> None:
        """Rank 0 looks; all follow. A disk that will be full is known before the first step."""
        run, built, width = self.recipe.run, self.built, getattr(torch, self.recipe.model.dtype).itemsize
        num_saves = -(-(self.num_steps - self.beginning.step) // run.save_steps) if run.save_steps else 1
        model_bytes = width * (built.num_trained if built.adapter is not None else self.shape.num_parameters)
        look = partial(find_shortage, self.run_dir, built.num_trained, model_bytes, run.save_total_limit)
        shortage = self.owner.tell_all(look(num_saves) if self.groups.is_first else "")[0]
        if shortage and run.on_save_error == "stop":
            raise StartError(shortage)
        if shortage:
            self.record.warn(shortage)

    def rehearse(self, course: Course) -> None:
        self.record.enter("rehearsal")
        started = time.perf_counter()
        eval_batching = make_eval_batching(self.recipe, self.shape)
        longest = rehearse(
            course, self.eval_rows, eval_batching, self.owner, self.run_dir / "rehearsal", self.record.enter
        )
        memory = ""
        if self.device.type == "cuda":
            peak = torch.cuda.max_memory_allocated(self.device) / 2**30
            memory = f", peak {peak:.2f} GiB{self.forecast.format_peak()}"
            torch.cuda.reset_peak_memory_stats(self.device)
        seconds = time.perf_counter() - started
        self.record.say(f"rehearsed step, evaluation and save at {longest:,} tokens per row in {seconds:.1f} s{memory}")

    def evaluate(self, course: Course, wishes: StopWishes | None = None) -> None:
        """`wishes`: what it may be left for; the run's own."""
        if self.eval_rows is None:
            return
        course.phase = "evaluation"
        batching = make_eval_batching(self.recipe, self.shape)
        tell = partial(setattr, course, "phase")
        found = evaluate(course.engine, self.groups, self.eval_rows, batching, tell, wishes or course.wishes)
        if found:
            self.record.write_eval({"step": course.step, **found})
            course.last_eval_step = course.step

    def finish(self, course: Course, reason: str) -> None:
        self.saves.save_last(course)
        if not reason and course.last_eval_step != course.step:
            signals = StopWishes(is_asked=course.wishes.is_asked)  # all steps are done: time and money end nothing now
            self.evaluate(course, signals)
            reason = signals.agree(self.groups.host_group)
        if reason:
            self.record.tell(event="stopped", reason=f"by {reason} after step {course.step} of {course.num_steps}")
            return
        self.record.enter(WRITING)
        course.phase = WRITING
        self.interruption.end_at_once()
        if self.groups.is_first:
            adapter, recipe, config = self.built.adapter, self.recipe.model_dump(mode="json"), self.built.config
            last, dtype = self.saves.get_last_path(), getattr(torch, self.recipe.model.dtype)
            check = partial(check_model, last, config=config, dtype=dtype, tell=self.record.enter)
            export_model(
                last,
                self.run_dir / "model",
                config=config,
                tokenizer=self.tokenizer,
                adapter_config=adapter.peft_config["default"] if adapter is not None else None,
                dtype=dtype,
                check=check if adapter is None else partial(check_adapter, last, dtype=dtype),
                card=make_card(recipe, self.recipe.run.run_name or self.run_dir.name, self.shape, self.num_own_tokens),
                step=course.step,
            )
        self.owner.wait()
        for text in list_base_warnings(self.recipe.model.model_dump()) if self.built.adapter is not None else []:
            self.record.warn(text)
        self.record.tell(event="done", model_dir=str(self.run_dir / "model"))

    def tear_down(self) -> None:
        self.record.phase = "tear down"
        self.record.close()
        self.built.engine.wrapped.destroy()
        leave_folder(self.swap_folder)
        dist.destroy_process_group()

    def list_facts(self) -> dict[str, Any]:
        """What run.json holds."""
        recipe, shape = self.recipe, self.shape
        return {
            "recipe_hash": self.resolved.recipe_hash,
            "recipe_file": self.loaded.file,
            "recipe": recipe.model_dump(mode="json"),
            "run_name": recipe.run.run_name or self.run_dir.name,
            "layout": {**vars(self.layout), "world_size": self.layout.world_size},
            "model": {"name": shape.name, "model_type": shape.model_type, "num_parameters": shape.num_parameters},
            "versions": list_versions(),
            "machine": describe_machine(self.device),
            "data": {"hash": self.options.data.name, "num_rows": len(self.rows)},
            "attention": vars(self.built.kernel),
            "levers": self.forecast.list_levers(),
            "prediction": self.forecast.list_prediction(),
            "price_per_gpu_hour": recipe.run.price_per_gpu_hour,
            "num_steps": self.num_steps,
        }

    def assert_sharded(self) -> None:
        """Under ZeRO-3 this rank holds about its share of the parameters, and no more."""
        if self.recipe.parallel.zero_stage != 3:
            return
        held, whole, small = count_held(self.built.module)
        if held > whole / self.layout.world_size * SHARD_SLACK + small:
            raise AssertionError(f"this rank holds {held:,} of {whole:,} parameters, its share is 1 in {self.layout}")
        self.record.say(f"each rank holds {held:,} of {whole:,} parameters")

    def describe_phase(self) -> str:
        course = self.course
        if course is None or not course.phase:
            return self.record.phase
        return f"{self.record.phase}, step {course.step + 1}, {course.phase}"

    def explain_out_of_memory(self, error: BaseException) -> dict[str, Any]:
        """The row, the ledger's largest lines, and the smallest change of the recipe that fits."""
        first = (str(error).strip().splitlines() or ["out of memory"])[0][:300]
        rows = f"rows of {self.resolved.row_tokens:,} tokens, {self.resolved.local_tokens:,} per rank"
        gpu, hint = self.forecast.gpu, "shorter rows (data.max_length), or a larger sp_size"
        if gpu is not None:
            hint = explain_memory(self.recipe, self.shape, self.forecast.choice.levers, gpu)
        return {"message": f"out of memory with {rows}: {first}", "hint": hint}
