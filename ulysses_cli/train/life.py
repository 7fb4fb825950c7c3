"""What a rank does from its first breath to its last, in order. Joins the parts; holds no arithmetic of its own.

Words to the person are events for a display that rank 0 is handed; facts for programs go to the run directory.
"""

from __future__ import annotations

import argparse
import os
import random
import socket
import sys
import time
from collections.abc import Callable, Mapping
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import torch
import torch.distributed as dist

from ulysses_cli.data.rows import PackedRows, open_rows
from ulysses_cli.data.steps import NO_ROW, Batching, plan_step
from ulysses_cli.data.tokenizer import load_tokenizer
from ulysses_cli.plan.flops import compute_model_flops
from ulysses_cli.plan.load import Loaded
from ulysses_cli.plan.model_shape import ModelShape, read_model_shape
from ulysses_cli.plan.packing import Work
from ulysses_cli.plan.resolved import compute_pad_multiple, make_layout, resolve
from ulysses_cli.train import checkpoint, run_record
from ulysses_cli.train.agreement import gather_values
from ulysses_cli.train.build import Built, build, load_model_config
from ulysses_cli.train.evaluation import evaluate
from ulysses_cli.train.export import export_model
from ulysses_cli.train.groups import Groups, make_groups
from ulysses_cli.train.loop import Course, StepResult, train
from ulysses_cli.train.metrics import LineFile, Meter, cut_lines
from ulysses_cli.train.rehearsal import rehearse
from ulysses_cli.train.shards import count_held
from ulysses_cli.train.stop import StopWishes

START_TIMEOUT = timedelta(minutes=30)  # loading and compiling
SHARD_SLACK = 1.1


class StartError(ValueError):
    """Something that the recipe needs is not there."""


class BadStepsError(RuntimeError):
    """Too many steps without a finite loss."""


class Display(Protocol):
    """Where words for the person go."""

    def emit(self, event: Mapping[str, Any]) -> None: ...

    def close(self) -> None: ...


class Life:
    """One rank of a run."""

    def __init__(self, loaded: Loaded, options: argparse.Namespace, show: Callable[[int], Display]) -> None:
        self.loaded, self.options, self.show = loaded, options, show
        self.recipe = loaded.recipe
        self.layout = make_layout(self.recipe)
        self.run_dir = Path(os.path.expanduser(self.recipe.run.output_dir))
        self.phase = "start"
        self.course: Course | None = None
        self.bad_steps = 0
        self.display: Display | None = None
        self.lines: dict[str, LineFile] = {}
        self.last_saved: int | None = None

    # ---- the order of events

    def run(self) -> None:
        self.read_inputs()
        self.meet_others()
        self.build_all()
        if self.options.dry_run:
            self.tell(event="done", note="dry run: everything but the steps")
            return self.tear_down()
        self.resume()
        self.rehearse()
        reason = train(self.get_course())
        self.finish(reason)
        return self.tear_down()

    def read_inputs(self) -> None:
        """Whatever a file or a package can spoil is found before any process group exists."""
        self.enter("reading inputs")
        recipe = self.recipe
        self.rows = open_rows(self.options.data, "train")
        self.eval_rows: PackedRows | None = open_rows(self.options.data, "eval")
        if not len(self.eval_rows):
            self.eval_rows = None
        self.tokenizer = load_tokenizer(recipe.model)
        name = str(recipe.model.name_or_path or "the model of model.config")
        self.shape: ModelShape = read_model_shape(load_model_config(recipe).to_dict(), name)
        if len(self.tokenizer) > self.shape.vocab_size:
            raise StartError(
                f"the tokenizer has {len(self.tokenizer):,} tokens, the model's embedding only "
                f"{self.shape.vocab_size:,}: name the tokenizer that belongs to the model"
            )
        self.device = self.choose_device()
        self.trackers = run_record.make_trackers(recipe.run.report_to, self.run_dir, recipe.run.run_name or "")

    def choose_device(self) -> torch.device:
        if self.recipe.run.device == "cpu" or self.options.pretend:
            return torch.device("cpu")
        if not torch.cuda.is_available():
            raise StartError("no GPU is seen by torch: set run.device: cpu, or see what `nvidia-smi` says")
        here = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
        if here > torch.cuda.device_count():
            raise StartError(f"{here} processes on this machine, but {torch.cuda.device_count()} GPUs")
        device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
        torch.cuda.set_device(device)
        return device

    def meet_others(self) -> None:
        self.enter("meeting the other ranks")
        if self.options.pretend:
            from torch.testing._internal.distributed.fake_pg import FakeStore

            dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=self.layout.world_size)
        else:
            backend = "gloo" if self.device.type == "cpu" else "nccl"
            dist.init_process_group(backend, timeout=START_TIMEOUT)
        self.groups: Groups = make_groups(self.layout, START_TIMEOUT)
        facts = {
            "recipe": resolve(self.recipe, self.shape).recipe_hash,
            "layout": str(self.layout),
            "data": self.options.data.name,
            "processes per machine": os.environ.get("LOCAL_WORLD_SIZE"),
            **run_record.list_versions(),
        }
        if not self.options.pretend:
            compare_machines(gather_values((socket.gethostname(), facts), self.groups.host_group))
        if self.groups.is_first:
            self.display = self.show(self.count_steps())
        self.wishes = StopWishes(
            self.recipe.run.max_hours,
            self.recipe.run.max_cost,
            (self.recipe.run.price_per_gpu_hour or 0.0) * self.layout.world_size,
        )
        self.wishes.listen()

    def build_all(self) -> None:
        self.enter("loading the model")
        seed_all(self.recipe.run.seed)
        built = build(self.recipe, self.shape, self.groups, self.device, self.count_steps(), self.say)
        self.built: Built = built
        self.assert_sharded()
        self.owner = checkpoint.Owner(
            built.module,
            built.engine.wrapped.optimizer,
            self.groups.rank,
            self.layout.world_size,
            wait=lambda: dist.barrier(group=self.groups.host_group),
            tell_all=lambda value: gather_values(value, self.groups.host_group),
        )
        self.course = Course(
            engine=built.engine,
            groups=self.groups,
            rows=self.rows,
            batching=self.make_batching(),
            num_steps=self.count_steps(),
            end=self.count_rows(),
            wishes=self.wishes,
        )
        seed_all(self.recipe.run.seed + self.groups.rank)
        first = plan_step(self.rows, self.course.batching, 0, self.course.end)
        self.say(
            f"step 1: {len(first.rows)} rows, {first.num_tokens:,} tokens, {first.num_targets:,} targets; "
            f"{built.num_trained:,} trained parameters"
        )

    def resume(self) -> None:
        path = self.find_checkpoint()
        if path is None:
            self.start_record(last_step=0)
            return
        self.enter("resuming")
        course = self.get_course()
        state = checkpoint.load_checkpoint(self.owner, path)
        course.step, course.position = int(state["step"]), int(state["position"])
        course.optimizer_steps = int(state["optimizer_steps"])
        self.bad_steps = int(state["bad_steps"])
        self.wishes.hours_before = float(state["hours"])
        self.last_saved = course.step
        self.start_record(last_step=course.step)
        self.say(f"resumed from {path} after step {course.step}")

    def rehearse(self) -> None:
        course = self.get_course()
        if not self.recipe.run.rehearsal or course.step or course.step >= course.num_steps:
            return
        self.enter("rehearsal")
        started = time.perf_counter()
        scratch = self.run_dir / "rehearsal"
        longest = rehearse(
            course, self.eval_rows, self.make_eval_batching(), self.owner, scratch, lambda text: self.enter(text)
        )
        seconds = time.perf_counter() - started
        peak = run_record.read_peak_bytes(self.device)
        memory = f", peak {peak / 2**30:.2f} GiB" if peak else ""
        self.say(f"rehearsed a step, an evaluation and a save at {longest:,} tokens per row in {seconds:.1f} s{memory}")
        if self.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self.device)

    def finish(self, reason: str) -> None:
        course = self.get_course()
        self.save(course)
        if reason:
            self.tell(event="stopped", reason=f"stopped by {reason} after step {course.step} of {course.num_steps}")
            return
        if self.eval_rows is not None:
            self.evaluate(course)
        self.enter("writing the model")
        if self.groups.is_first:
            self.export()
        self.owner.wait()
        self.tell(event="done", model_dir=str(self.run_dir / "model"))

    def tear_down(self) -> None:
        self.phase = "tear down"
        if self.display is not None:
            self.display.close()
        for lines in self.lines.values():
            lines.close()
        for tracker in self.trackers:
            tracker.close()
        self.built.engine.wrapped.destroy()
        dist.destroy_process_group()

    # ---- chores of the loop

    def start_record(self, last_step: int) -> None:
        course = self.get_course()
        run = self.recipe.run
        if self.groups.is_first:
            for name in ("metrics", "eval"):
                cut_lines(self.run_dir / f"{name}.jsonl", last_step)
                self.lines[name] = LineFile(self.run_dir / f"{name}.jsonl")
            run_record.write_run_file(
                self.run_dir, self.loaded, self.shape, self.layout, self.options.data, self.rows, self.built.kernel,
                course.num_steps, self.device,
            )  # fmt: skip
        meter = Meter(partial(compute_model_flops, self.shape), None, self.record_step)
        after: list[Callable[[Course, StepResult], None]] = [meter.record, self.judge]
        if self.eval_rows is not None and run.eval_steps:
            after.append(every(run.eval_steps, self.evaluate))
        if run.save_steps:
            after.append(every(run.save_steps, self.save))
        course.before, course.after = (meter.start,), tuple(after)
        self.phase = "training"

    def record_step(self, line: dict[str, Any]) -> None:
        if not self.groups.is_first or line["step"] % self.recipe.run.logging_steps:
            return
        self.lines["metrics"].write(line)
        self.tell(event="step", **line)
        for tracker in self.trackers:
            tracker.write("train", line)

    def judge(self, course: Course, result: StepResult) -> None:
        """A step whose gradient or loss is not finite was not applied: its rows are named, and there may be only so
        many. All ranks come here for the same steps."""
        if result.update.was_applied:
            return
        self.bad_steps += 1
        own = [
            result.plan.rows[member]
            for micro, loss in enumerate(result.micro_losses)
            if not torch.isfinite(torch.tensor(loss))
            for member in result.plan.shares[self.groups.dp_index][micro]
            if member != NO_ROW
        ]
        found = sorted({row for rows in gather_values(own, self.groups.host_group) for row in rows})
        rows = ", ".join(map(str, found or result.plan.rows))
        said = f"step {course.step}: loss {result.loss:.4g}, gradient norm {result.update.grad_norm:.4g}; not applied; "
        said += f"rows {rows}"
        self.tell(event="warning", message=said)
        if self.bad_steps > self.recipe.run.max_bad_steps:
            last = f"step-{self.last_saved}" if self.last_saved is not None else "none"
            raise BadStepsError(f"{self.bad_steps} steps without a finite loss; {said}; last checkpoint: {last}")

    def evaluate(self, course: Course) -> None:
        if self.eval_rows is None:
            return
        course.phase = "evaluation"
        line = {"step": course.step, **evaluate(course.engine, self.groups, self.eval_rows, self.make_eval_batching())}
        if self.groups.is_first:
            self.lines["eval"].write(line)
            for tracker in self.trackers:
                tracker.write("eval", line)
        self.tell(event="eval", **line)

    def save(self, course: Course) -> None:
        if self.last_saved == course.step:
            return
        course.phase = "saving"
        started = time.perf_counter()
        state = {
            "step": course.step,
            "position": course.position,
            "optimizer_steps": course.optimizer_steps,
            "bad_steps": self.bad_steps,
            "hours": self.wishes.hours,
            "world_size": self.layout.world_size,
            "layout": vars(self.layout),
            "rows_per_step": course.batching.rows_per_step,
            "recipe": self.recipe.model_dump(mode="json"),
            "recipe_hash": resolve(self.recipe, self.shape).recipe_hash,
            "data": self.options.data.name,
            "versions": run_record.list_versions(),
        }
        path = checkpoint.save_checkpoint(self.owner, self.run_dir, course.step, state)
        if self.groups.is_first:
            checkpoint.prune_checkpoints(self.run_dir, self.recipe.run.save_total_limit)
        self.last_saved = course.step
        self.tell(event="saved", path=str(path), seconds=time.perf_counter() - started)

    def export(self) -> None:
        adapter = self.built.adapter
        export_model(
            self.run_dir / "checkpoints" / f"step-{self.get_course().step}",
            self.run_dir / "model",
            config=self.built.config,
            tokenizer=self.tokenizer,
            adapter_config=adapter.peft_config["default"] if adapter is not None else None,
            dtype=getattr(torch, self.recipe.model.dtype),
            card=run_record.make_card(self.loaded, self.shape),
        )

    # ---- small facts

    def tell(self, **event: Any) -> None:
        if self.display is not None:
            self.display.emit(event)

    def say(self, text: str) -> None:
        self.tell(event="plan", text=text)

    def enter(self, phase: str) -> None:
        self.phase = phase
        self.tell(event="phase", name=phase)

    def describe_phase(self) -> str:
        course = self.course
        if course is None or self.phase not in ("training", "rehearsal"):
            return self.phase
        return f"{self.phase}, step {course.step + 1}, {course.phase}"

    def get_course(self) -> Course:
        if self.course is None:
            raise AssertionError("not built yet")
        return self.course

    def count_rows(self) -> int:
        """Rows of the whole run; the last step may be short of some."""
        train_section = self.recipe.train
        if train_section.max_steps is not None:
            return train_section.max_steps * self.make_batching().rows_per_step
        return max(1, round(len(self.rows) * (train_section.num_train_epochs or 1.0)))

    def count_steps(self) -> int:
        return -(-self.count_rows() // self.make_batching().rows_per_step)

    def make_batching(self) -> Batching:
        section = self.recipe.train
        shape = self.shape
        return Batching(
            dp_size=self.layout.dp_size,
            rows_per_micro_step=section.per_device_train_batch_size,
            micro_steps=section.gradient_accumulation_steps,
            pad_multiple=compute_pad_multiple(self.recipe),
            seed=self.recipe.run.seed,
            work=make_work(shape),
            fixed_row_tokens=self.find_fixed_tokens(),
        )

    def make_eval_batching(self) -> Batching:
        """One row at a time and sp group, in order: the same rows at every layout."""
        return Batching(
            self.layout.dp_size, 1, 1, compute_pad_multiple(self.recipe), 0, make_work(self.shape), is_shuffled=False
        )

    def find_fixed_tokens(self) -> int | None:
        parallel = self.recipe.parallel
        if parallel.sp_seq_length_is_variable:
            return None
        return resolve(self.recipe, self.shape).row_tokens

    def find_checkpoint(self) -> Path | None:
        wanted = self.options.resume
        if not wanted:
            return None
        if wanted != "auto":
            return Path(os.path.expanduser(wanted))
        found = None
        if self.groups.is_first:
            found = checkpoint.find_newest_valid(self.run_dir, lambda text: self.tell(event="warning", message=text))
        return gather_values(found, self.groups.host_group)[0]

    def assert_sharded(self) -> None:
        """Under ZeRO-3 this rank holds about its share of the parameters, and no more."""
        if self.recipe.parallel.zero_stage != 3:
            return
        held, whole, small = count_held(self.built.module)
        share = whole / self.layout.world_size
        if held > share * SHARD_SLACK + small:
            raise AssertionError(f"this rank holds {held:,} of {whole:,} parameters, its share is {share:,.0f}")
        self.say(f"each rank holds {held:,} of {whole:,} parameters")

    def explain_out_of_memory(self, error: BaseException) -> dict[str, Any]:
        resolved = resolve(self.recipe, self.shape)
        first = (str(error).strip().splitlines() or ["out of memory"])[0]
        return {
            "message": f"out of memory at rows of {resolved.row_tokens:,} tokens "
            f"({resolved.local_tokens:,} per rank): {first[:300]}",
            "hint": "",
        }


def every(period: int, chore: Callable[[Course], None]) -> Callable[[Course, StepResult], None]:
    """A chore of each `period`-th step; the last step's is done at the end of the run."""

    def due(course: Course, _: StepResult) -> None:
        if course.step % period == 0 and course.step < course.num_steps:
            chore(course)

    return due


def make_work(shape: ModelShape) -> Work:
    """Cost of tokens and of pairs in this model, as operations."""
    per_token = compute_model_flops(shape, [1])
    with_window = [layer for layer in shape.layers if layer.window_tokens is None]
    return Work(per_token, 12.0 * shape.num_heads * shape.head_dim * len(with_window))


def compare_machines(told: list[tuple[str, Mapping[str, Any]]]) -> None:
    """Every rank sees the same difference, so all stop with the same words."""
    first_host, first = told[0]
    for host, facts in told[1:]:
        for name, value in facts.items():
            if value != first[name]:
                raise StartError(f"{host} and {first_host} differ in {name}: {value} and {first[name]}")


def seed_all(seed: int) -> None:
    random.seed(seed)
    torch.manual_seed(seed)
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed(seed % 2**32)
