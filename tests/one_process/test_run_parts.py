"""Tests parts of a run that need no ranks: stop conditions, evaluation buckets, metrics, trackers, schedules, the
card."""

import errno
import json
import math
import os
import shutil
import subprocess
import sys
import types
import warnings
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import yaml
from hypothesis import given
from hypothesis import strategies as st
from support.recipes import load, make_plan
from support.refusals import explain
from support.small_run import CONFIG
from support.training import make_recipe
from syrupy.assertion import SnapshotAssertion
from transformers import EarlyStoppingCallback, TrainerControl, TrainerState, TrainingArguments, get_scheduler

from ulysses_cli.data.tokenizing import renderer
from ulysses_cli.data.tokenizing.renderer import TemplateProblem
from ulysses_cli.data.tokenizing.tokenizer import make_bytes_tokenizer
from ulysses_cli.plan.models.model_files import find_weight_problem, read_metadata
from ulysses_cli.plan.models.shape import read_model_shape
from ulysses_cli.plan.problem import RecipeError
from ulysses_cli.plan.recipe.recipe import Train
from ulysses_cli.plan.resolved import hash_plan
from ulysses_cli.plan.rules.public_names import make_public
from ulysses_cli.plan.schedule import choose_best, has_stalled
from ulysses_cli.report.page.run_page import make_run_page
from ulysses_cli.report.run_summary import load_run, summarize_run
from ulysses_cli.run import launcher, records
from ulysses_cli.run.folder import lock_run
from ulysses_cli.run.lock import RunLock
from ulysses_cli.run.records import LineFile, cut_lines, keep_room, write_failure_record
from ulysses_cli.train import inputs
from ulysses_cli.train.__main__ import main
from ulysses_cli.train.attention.kernels.choice import KernelChoice
from ulysses_cli.train.checkpoint.saves import compute_needed_bytes, find_shortage
from ulysses_cli.train.evaluation import ModelChoice, encode_prompts, list_bounds, summarize_losses
from ulysses_cli.train.loop import LIMITS, StopConditions, check_progress
from ulysses_cli.train.model.build import make_schedule
from ulysses_cli.train.processes.consistency import DisagreementError, compare_machines
from ulysses_cli.train.processes.device import bind_to_device, find_near_cores, find_siblings, read_list, take_share
from ulysses_cli.train.record import PhaseClock, Record, make_card, make_trackers
from ulysses_cli.train.tensor_file import write_tensors


def test_the_report_reads_the_kernel_that_a_run_writes(tmp_path: Path) -> None:
    (tmp_path / "run.json").write_text(json.dumps({"attention": vars(KernelChoice("sdpa", "the fastest"))}))
    run = load_run(tmp_path)
    assert "<td>attention kernel</td><td>sdpa</td><td>the fastest</td>" in make_run_page(run, summarize_run(run))


def test_max_hours_and_max_cost_stop_a_run() -> None:
    stop = StopConditions(max_hours=2.0, max_cost=30.0, usd_per_hour=16.0)
    assert stop.name(stop.read_flags()) == ""
    stop.hours_before = 1.9
    assert stop.name(stop.read_flags()) == "run.max_cost"  # 1.9 x 16 = 30.4
    stop.hours_before = 2.1
    assert stop.name(stop.read_flags()) == "run.max_hours"
    stop.is_asked = lambda: True
    assert stop.name(stop.read_flags()) == "a signal"
    assert StopConditions().read_flags() == (0, 0, 0)


@pytest.mark.parametrize("reason", LIMITS)
def test_a_start_that_a_limit_ends_before_it_made_a_step_is_refused(reason: str, snapshot: SnapshotAssertion) -> None:
    assert explain(check_progress, reason, 0) == snapshot
    check_progress(reason, 1)
    check_progress("a signal", 0)
    check_progress("", 0)


def test_buckets_cover_every_position_once() -> None:
    assert list_bounds(100) == [2048]
    assert list_bounds(2049) == [2048, 8192]
    assert list_bounds(1 << 20)[-2:] == [524288, 2097152]
    bounds = torch.tensor(list_bounds(40_000))
    positions = torch.tensor([0, 2047, 2048, 8191, 8192, 39_999])
    assert torch.bucketize(positions, bounds, right=True).tolist() == [0, 0, 1, 1, 2, 3]


def test_an_evaluation_is_one_sum_over_one_count() -> None:
    result = summarize_losses(torch.tensor([[10.0, 4], [0, 0], [2, 2]], dtype=torch.float64), [2048, 8192, 32768])
    assert result["loss"] == 2.0
    assert result["perplexity"] == pytest.approx(math.exp(2))
    assert result["tokens"] == 6
    assert result["by_position"] == {"0-2K": {"loss": 2.5, "tokens": 4}, "8-32K": {"loss": 1.0, "tokens": 2}}
    nothing = summarize_losses(torch.zeros(1, 2, dtype=torch.float64), [2048])
    assert math.isnan(nothing["loss"])
    assert nothing["by_position"] == {}


def test_lines_after_the_resumed_step_and_a_half_written_one_are_cut(tmp_path: Path) -> None:
    file = tmp_path / "metrics.jsonl"
    cut_lines(file, 3)
    lines = LineFile(file)
    for step in range(1, 6):
        lines.write({"step": step, "loss": math.nan if step == 2 else 1.0})
    lines.close()
    with open(file, "a") as stream:
        stream.write('{"step": 1, "lo')
    cut_lines(file, 3)
    kept = [json.loads(line) for line in file.read_text().splitlines()]
    assert [(line["step"], line["loss"]) for line in kept] == [(1, 1.0), (2, None), (3, 1.0)]


def test_lines_wait_while_the_disk_is_full(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lines, write, room = LineFile(tmp_path / "metrics.jsonl"), os.write, [100]

    def write_some(handle: int, text: bytes) -> int:
        if not room[0]:
            raise OSError(errno.ENOSPC, "No space left on device")
        taken = min(len(text), room[0])
        room[0] -= taken
        return write(handle, text[:taken])

    with monkeypatch.context() as patch:
        patch.setattr(os, "write", write_some)
        for step in range(1, 11):
            lines.write({"step": step, "loss": 1.5})
    assert len((tmp_path / "metrics.jsonl").read_bytes()) == 100
    lines.write({"step": 11, "loss": 1.5})
    lines.close()
    written = [json.loads(line)["step"] for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert written == list(range(1, 12))


def test_failure_records_have_space_on_a_full_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    keep_room(tmp_path, 3)
    write = records.write_whole

    def write_if_room(file: Path, text: str) -> None:
        if (tmp_path / "rank-3.room").exists():
            raise OSError(errno.ENOSPC, "No space left on device")
        write(file, text)

    monkeypatch.setattr(records, "write_whole", write_if_room)
    write_failure_record(tmp_path, 3, {"message": "so it ended"})
    assert [file.name for file in tmp_path.iterdir()] == ["rank-3.error.json"]
    assert json.loads((tmp_path / "rank-3.error.json").read_text())["message"] == "so it ended"


class Screen:
    def __init__(self) -> None:
        self.events: list[Any] = []

    def emit(self, event: Any) -> None:
        self.events.append(event)

    def close(self) -> None:
        self.events.append("closed")


def test_phases_before_the_first_step_are_told_with_their_seconds(snapshot: SnapshotAssertion) -> None:
    """From the process's own start on; a phase that comes twice counts once, with both."""
    now = [1000.0]
    clock, loading = PhaseClock(12.0, lambda: now[0]), "loading the model"
    for phase, seconds in ((loading, 0.0), ("rehearsal", 20.0), (loading, 15.2), ("training", 3.0)):
        now[0] += seconds
        clock.enter(phase)
    assert clock.describe() == snapshot


def test_trackers_get_every_number_of_a_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    messages: list[Any] = []
    log: Any = lambda values, step: messages.append((step, values))  # noqa: E731
    run = SimpleNamespace(log=log, finish=lambda: messages.append("end"))
    fake = types.ModuleType("wandb")
    fake.init = lambda **settings: messages.append(settings) or run  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "wandb", fake)
    screen = Screen()
    record = Record(tmp_path, logging_steps=2)
    record.open(screen, make_trackers(["wandb"], tmp_path, "mine"))
    record.start_files(0, 100)
    record.write_step({"step": 1, "loss": 3.0})  # not a logging step
    record.write_step({"step": 2, "loss": 2.0, "mfu": None, "step_parts": {"mlp": 1.0}})
    record.write_eval({"step": 2, "loss": 2.5, "by_position": {}})
    record.write_step({"step": 3, "loss": 9.0, "applied": False})  # not a logging step, but not applied
    record.close()
    assert messages == [
        {"project": "ulysses", "name": "mine", "dir": str(tmp_path)},
        (2, {"train/loss": 2.0}),
        (2, {"eval/loss": 2.5}),
        (3, {"train/loss": 9.0, "train/applied": False}),
        "end",
    ]
    assert [event["event"] for event in screen.events[:-1]] == ["step", "eval", "step"]
    assert [json.loads(line)["step"] for line in (tmp_path / "metrics.jsonl").read_text().splitlines()] == [2, 3]


def test_a_run_whose_loss_diverged_does_not_end_like_others(tmp_path: Path, snapshot: SnapshotAssertion) -> None:
    """A learning rate of 10: without warm-up only the first loss is one of the base model. Lines that logging_steps
    leaves out are watched too."""
    screen = Screen()
    record = Record(tmp_path, logging_steps=100)
    record.open(screen)
    record.start_files(-1, 50)
    for step in range(1, 51):
        record.write_step({"step": step, "loss": 11.3 if step == 1 else 1967.0})
    record.end(tmp_path / "model")
    resumed = Record(tmp_path)
    resumed.open(again := Screen())
    resumed.start_files(50, 60)
    resumed.write_step({"step": 51, "loss": 1960.0})
    resumed.end(tmp_path / "model")
    warnings = [event["message"] for event in screen.events if event["event"] == "warning"]
    assert warnings == snapshot
    assert [json.loads(line)["step"] for line in (tmp_path / "metrics.jsonl").read_text().splitlines()] == [17, 51]
    assert screen.events[-1]["diverged"]
    assert again.events[-1]["diverged"]
    assert [event["event"] for event in again.events] == ["step", "done"]


def test_ranks_without_a_display_print_no_line(tmp_path: Path) -> None:
    record = Record(tmp_path)
    record.start_files(0, 100)
    record.write_step({"step": 1})
    record.report("hello")
    record.close()
    assert list(tmp_path.iterdir()) == []


NUMBERS_OF_SCHEDULES: dict[str, list[dict[str, float]]] = {
    "linear": [{}],
    "cosine": [{}, {"num_cycles": 1.5}],
    "constant": [{}],
    "constant_with_warmup": [{}],
    "inverse_sqrt": [{}, {"timescale": 7.0}],
    "polynomial": [{}, {"lr_end": 1e-4, "power": 2.0}],
    "cosine_with_min_lr": [{"min_lr": 1e-4}, {"min_lr_rate": 0.1, "num_cycles": 1.0}],
    "warmup_stable_decay": [
        {"num_decay_steps": 5.0},
        {"num_decay_steps": 4.0, "num_stable_steps": 3.0, "min_lr_ratio": 0.2, "num_cycles": 0.4},
    ],
}


@given(
    choice=st.sampled_from([(name, numbers) for name, each in NUMBERS_OF_SCHEDULES.items() for numbers in each]),
    warmup=st.integers(0, 9),
    num_steps=st.integers(16, 40),
    peak=st.sampled_from([0.01, 3e-4]),
)
def test_the_schedule_is_transformers_own(choice: Any, warmup: int, num_steps: int, peak: float) -> None:
    """But for the first step of a warm-up, which changes nothing there: it stands halfway to the second here."""
    name, numbers = choice
    warmup = 0 if name == "constant" else warmup
    train = Train(learning_rate=peak, lr_scheduler_type=name, lr_scheduler_kwargs=numbers, warmup_steps=warmup)
    ours = make_schedule(train, num_steps)
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=peak)
    whole = ("num_decay_steps", "num_stable_steps", "timescale")
    options = {key: int(value) if key in whole else value for key, value in numbers.items()}
    with warnings.catch_warnings():  # both the stable steps and all steps are told
        warnings.simplefilter("ignore")
        theirs = get_scheduler(name, optimizer, warmup, num_steps, options).lr_lambdas[0]
    if warmup:
        assert ours(0) == pytest.approx(peak * (theirs(0) + theirs(1)) / 2, rel=1e-12)
        assert ours(0) > 0
    for step in range(bool(warmup), num_steps + 1):
        assert ours(step) == pytest.approx(peak * theirs(step), rel=1e-12, abs=1e-300), step


def test_a_warm_up_as_a_share_of_all_steps() -> None:
    ours = make_schedule(Train(learning_rate=1.0, warmup_ratio=0.25, lr_scheduler_type="constant_with_warmup"), 16)
    assert [ours(step) for step in range(6)] == [0.125, 0.25, 0.5, 0.75, 1.0, 1.0]


@pytest.mark.check
def test_a_rank_starts_without_what_it_does_not_need() -> None:
    """PEFT and bitsandbytes import a compiler, which takes more than a second of each rank's start."""
    code = "import sys, ulysses_cli.train.start; print({'peft', 'bitsandbytes', 'trl'} & sys.modules.keys())"
    shown = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert shown.strip() == "set()"


def test_the_card_holds_the_recipe_without_what_names_the_machine() -> None:
    recipe = make_recipe("lora.r=4").model_dump(mode="json")
    shape = read_model_shape(CONFIG, "test")
    _, front, text = make_card(recipe, "mine", shape, shape.vocab_size).split("---\n", 2)
    assert yaml.safe_load(front) == {"library_name": "peft"}
    assert yaml.safe_load(text.split("```yaml\n")[1].split("```")[0]) == make_public(recipe)
    assert make_public(recipe).keys() == recipe.keys()


def test_the_card_says_what_a_server_passes_to_the_template(snapshot: SnapshotAssertion) -> None:
    shape, clock = read_model_shape(CONFIG, "test"), "{{ strftime_now('%d') }}"
    plain = make_card(make_recipe().model_dump(mode="json"), "mine", shape, 64).splitlines()
    said = {}
    for words, template in (
        ("{keep: true, effort: low}", ""), ("{}", clock), ("{strftime_now: 2026-11-27}", clock + "{{ date_string }}"),
    ):  # fmt: skip
        recipe = make_recipe(f"data.chat_template_kwargs={words}").model_dump(mode="json")
        card = make_card(recipe, "mine", shape, 64, template=template)
        said[words] = [line for line in card.partition("```yaml")[0].splitlines() if line not in plain]
    assert said == snapshot


def test_cores_near_a_device_are_read_in_the_kernels_format(tmp_path: Path) -> None:
    assert read_list("0-3,8,10-11\n") == {0, 1, 2, 3, 8, 10, 11}
    (tmp_path / "0000:1b:00.0").mkdir()
    (tmp_path / "0000:1b:00.0" / "local_cpulist").write_text("2-3\n")
    assert find_near_cores("0000:1b:00.0", tmp_path) == {2, 3}
    assert find_near_cores("0000:1c:00.0", tmp_path) == set()
    allowed = os.sched_getaffinity(0)
    assert bind_to_device(torch.device("cpu")) == len(allowed)
    assert os.sched_getaffinity(0) == allowed


def test_ranks_of_a_socket_get_disjoint_cores_of_it(tmp_path: Path) -> None:
    """Two sockets have eight cores with two threads each, and four GPUs are at either."""
    for core in range(32):
        (tmp_path / f"cpu{core}" / "topology").mkdir(parents=True)
        twins = f"{core % 16},{core % 16 + 16}\n"
        (tmp_path / f"cpu{core}" / "topology" / "thread_siblings_list").write_text(twins)
    sockets = [{*range(8), *range(16, 24)}, {*range(8, 16), *range(24, 32)}]
    near = [sockets[gpu // 4] for gpu in range(8)]
    shares = [take_share(near, gpu, lambda core: find_siblings(core, tmp_path)) for gpu in range(8)]
    assert shares[0] == {0, 1, 16, 17}
    assert shares[7] == {14, 15, 30, 31}
    assert sum(map(len, shares)) == len(set().union(*shares)) == 32
    assert take_share([{0, 1}] * 3, 2, lambda core: {core}) == {0, 1}
    assert take_share([{0, 1, 2}] * 2, 1, lambda core: {core}) == {1}
    assert take_share([set(), set()], 1) == set()
    assert find_siblings(3, tmp_path / "nowhere") == {3}


def test_an_index_of_weight_files_that_cannot_be_loaded_is_named(tmp_path: Path, snapshot: SnapshotAssertion) -> None:
    write_tensors(tmp_path / "model.safetensors", [("a", torch.zeros(64, 64, dtype=torch.bfloat16))], {})
    problems = [find_weight_problem(tmp_path)]
    for text in (json.dumps({"weight_map": {"a": "x.safetensors"}}), "[]"):
        (tmp_path / "model.safetensors.index.json").write_text(text)
        problems.append(find_weight_problem(tmp_path))
    assert problems == snapshot


def test_machines_that_differ_are_named_with_the_field(snapshot: SnapshotAssertion) -> None:
    same = {"layout": "a", "torch": "1"}
    compare_machines([("gpu01", same), ("gpu02", dict(same))])
    many = {f"setting {number}": number for number in range(12)}
    said = []
    for ours, theirs in ((same, {**same, "torch": "2"}), (many, {key: value + 1 for key, value in many.items()})):
        facts = [("gpu01", ours), ("gpu02", theirs)]
        said.append(explain(compare_machines, facts, error=DisagreementError))
    assert said == snapshot


def test_safetensors_reads_a_tensor_file(tmp_path: Path) -> None:
    from safetensors.torch import load_file

    whole = torch.arange(24.0).view(4, 6)
    given = {
        "view": whole[1:3], "column": whole[:, 2], "half": torch.tensor([1.5], dtype=torch.bfloat16),
        "empty": torch.empty(0), "bytes": torch.tensor([1, 2, 255], dtype=torch.uint8),
    }  # fmt: skip
    digest = write_tensors(tmp_path / "x.safetensors", given.items(), {"note": "é"})
    result = load_file(tmp_path / "x.safetensors")
    assert result.keys() == given.keys()
    for name, tensor in given.items():
        assert result[name].dtype == tensor.dtype
        assert torch.equal(result[name], tensor), name
    assert read_metadata(tmp_path / "x.safetensors") == {"note": "é"}
    assert len(digest) == 64


def test_a_folder_that_is_removed_during_the_run_is_reported(tmp_path: Path, snapshot: SnapshotAssertion) -> None:
    screen = Screen()
    run_dir = tmp_path / "run"
    run_dir.mkdir()
    (run_dir / "lock-0").touch()
    record = Record(run_dir, lock=RunLock(run_dir / "lock-0"))
    record.open(screen)
    record.start_files(0, 100)
    record.write_step({"step": 1})
    shutil.rmtree(run_dir)
    for step in (2, 3):
        record.write_step({"step": step})
    (warning,) = [event["message"] for event in screen.events if event["event"] == "warning"]
    assert (run_dir / "metrics.jsonl").read_text() == '{"step": 2}\n{"step": 3}\n'
    with pytest.raises(RecipeError) as in_use:
        lock_run(run_dir, 0)
    assert [warning, str(in_use.value)] == snapshot
    record.close()
    shutil.rmtree(run_dir)
    write_failure_record(run_dir / "logs", 0, {"message": "the end"})
    assert "the end" in (run_dir / "logs" / "rank-0.error.json").read_text()


def test_ranks_that_count_other_work_of_a_row_do_not_share_rows(tmp_path: Path) -> None:
    """As where the files of a machine's transformers were changed."""
    loaded = load()
    options = SimpleNamespace(data=tmp_path)
    launch: Any = SimpleNamespace(plan=make_plan(loaded), recipe=loaded.recipe, options=options)
    shape = read_model_shape(CONFIG, "test")
    facts = [inputs.list_facts(launch, each) for each in (shape, replace(shape, vocab_size=2 * shape.vocab_size))]
    compare_machines([("a", facts[0]), ("b", dict(facts[0]))])
    with pytest.raises(DisagreementError, match="the work of a token"):
        compare_machines([("a", facts[0]), ("b", facts[1])])


def test_data_that_one_machine_cannot_read_is_a_difference_and_no_lone_error(tmp_path: Path) -> None:
    """Ranks meet after it: one that raised before would leave the others waiting."""
    missing = inputs._read_content(tmp_path / "rows" / "none")
    assert missing.startswith("unreadable (")
    with pytest.raises(DisagreementError):
        compare_machines([(name, {"the content of the data": it}) for name, it in (("a", "1"), ("b", missing))])


def test_the_template_of_sample_prompts_has_its_variables_and_is_bounded(
    monkeypatch: pytest.MonkeyPatch, snapshot: SnapshotAssertion
) -> None:
    """As every use of a template: it is a program that comes with the model. Prompts have its variables, or a run would
    be shown answers to prompts that it does not train on."""
    monkeypatch.setattr(renderer, "SECONDS", 1.0)
    tokenizer = make_bytes_tokenizer()
    (plain,) = encode_prompts(tokenizer, ["a"], as_chat=True)
    tokenizer.chat_template = "{{ messages[0]['content'] }}{% if plan is defined %} [{{ plan }}]{% endif %}"
    (planned,) = encode_prompts(tokenizer, ["a"], as_chat=True, variables={"plan": "brief"})
    assert tokenizer.decode(plain.tokens) == "<|begin|>user\na<|end|>\n<|begin|>assistant\n"
    assert tokenizer.decode(planned.tokens) == "a [brief]"
    said = []
    for template in ("{{ 'a' * 10 ** 10 }}", "{{ 10 ** (10 ** 8) }}"):
        tokenizer.chat_template = template
        with pytest.raises(TemplateProblem) as stopped:
            encode_prompts(tokenizer, ["a"], as_chat=True)
        said.append(str(stopped.value))
    assert said == snapshot


def test_a_rank_refuses_the_plan_of_another_recipe(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, snapshot: SnapshotAssertion
) -> None:
    file = tmp_path / "plan.json"
    file.write_text(make_plan(load("train.max_steps=3")).dump())
    monkeypatch.setenv("RANK", "1")
    wanted = hash_plan(make_plan(load()).dump())
    assert main(["--plan", str(file), f"--plan-hash={wanted}", "--data", "rows"]) == 1
    failure = json.loads((tmp_path / "rank-1.error.json").read_text())
    assert failure["message"] == snapshot
    assert failure["is_final"], "to start it again is of no use"


def test_only_this_user_reads_a_plan_and_it_goes_with_its_ranks(tmp_path: Path) -> None:
    file = tmp_path / "plan.json"
    with launcher._written(file, "text"):
        assert file.read_text() == "text"
        assert file.stat().st_mode & 0o777 == 0o600
    assert not file.exists()


# quarters, so that a difference that equals the threshold is exact
LOSSES = st.lists(st.integers(0, 40).map(lambda quarters: quarters / 4), min_size=1, max_size=12)


@given(LOSSES, st.integers(1, 4), st.sampled_from([0.0, 0.25, 1.0]))
def test_a_run_ends_where_transformers_would_end_it(losses: list[float], patience: int, threshold: float) -> None:
    callback = EarlyStoppingCallback(patience, threshold)
    arguments = TrainingArguments(metric_for_best_model="loss", greater_is_better=False, report_to=[])
    state, seen = TrainerState(), dict[int, float]()
    for step, loss in enumerate(losses, 1):
        control = TrainerControl()
        callback.on_evaluate(arguments, state, control, {"eval_loss": loss})
        if state.best_metric is None or loss < state.best_metric:  # as its Trainer does next
            state.best_metric, state.best_global_step = loss, step
        seen[step] = loss
        assert has_stalled(seen, patience, threshold) == control.should_training_stop
        assert choose_best(seen, seen) == state.best_global_step


def test_an_early_stop_says_by_how_much_and_how_to_train_on(snapshot: SnapshotAssertion) -> None:
    state: Any = SimpleNamespace(measured={2: 3.5, 4: 3.202}, measure=None, step=4, num_steps=30)
    lines = list[str]()
    ModelChoice(lambda _: None, 1, 5.0, lines.append).judge(state)
    assert lines == snapshot
    assert state.num_steps == 4


GIB = 2**30


def test_the_largest_need_is_counted() -> None:
    """A third checkpoint is written before the oldest is deleted, and the model beside the last one. A resumed run's
    checkpoints are there already."""
    model, one = 2 * 10**9, int(12e9 * 1.01)
    needs: dict[tuple[int | None, int, int], int] = {
        (1, 10, 0): 2 * one, (2, 10, 0): 3 * one, (2, 10, 2): one, (2, 1, 0): one + model,
        (None, 5, 0): 5 * one + model,
    }  # fmt: skip
    for saves, expected in needs.items():
        assert compute_needed_bytes(10**9, model, *saves) == expected, saves


def test_a_disk_that_will_be_full_is_refused_before_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, snapshot: SnapshotAssertion
) -> None:
    said = []
    for free in (40 * GIB, 30 * GIB):
        monkeypatch.setattr(shutil, "disk_usage", lambda _, free=free: SimpleNamespace(free=free))
        said.append(find_shortage(tmp_path / "run", 10**9, 2 * 10**9, 2, 10))
    assert said == snapshot
