"""Tests that `ulysses verify` detects each planted fault by a number, and passes without a fault."""

import json
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from support.commands import succeed
from support.json_page import find_undocumented
from support.paths import TINY_RECIPE
from support.rank_pool import RankError, run_on_ranks
from support.tiers import mark_by
from support.training import make_recipe

from ulysses_cli.plan.layout import Layout
from ulysses_cli.plan.models.shape import read_model_shape
from ulysses_cli.plan.problem import Problem, RecipeError
from ulysses_cli.prove.results import Row

# Fewer key/value heads than ranks, a window, several documents in a row.
CONFIG: dict[str, Any] = {
    "model_type": "mistral", "hidden_size": 512, "intermediate_size": 1024, "num_hidden_layers": 9,
    "num_attention_heads": 4, "num_key_value_heads": 1, "vocab_size": 32000, "max_position_embeddings": 4096,
    "sliding_window": 512, "tie_word_embeddings": False,
}  # fmt: skip


ON_TWO = Layout(sp_size=2)


def prove_with(
    plant: Callable[[], list[Any]],
    folder: Path,
    *overrides: str,
    config: dict[str, Any] = CONFIG,
    layout: Layout = ON_TWO,
    proof_config: dict[str, Any] | None = None,
) -> list[Row]:
    """Proves a recipe on ranks that have a fault. `proof_config`: of the small model, in place of a shrunk one."""
    from ulysses_cli.prove.shrink import make_proof_recipe
    from ulysses_cli.prove.verify import judge, make_reference, make_task

    words = (f"parallel.sp_size={layout.sp_size}", "train.gradient_accumulation_steps=2", *overrides)
    shape = read_model_shape(config, "test")
    proof = make_proof_recipe(make_recipe(*words, config=config), config, shape, layout, "cpu")[0]
    if proof_config is not None:
        proof = proof.model_copy(update={"model": proof.model.model_copy(update={"config": proof_config})})
    shape = read_model_shape(proof.model.config or {}, "test")
    task = make_task(proof, shape, folder)
    traced = run_on_ranks(layout.world_size, trace_with, plant, task)[0]
    return judge(f"sp {layout.sp_size}", traced, make_reference(task), shape)


ALWAYS_PROVEN = {"loss", "gradients", "weights", "leak: late tokens", "leak: the token before a window of 40"}


def check_passes(rows: list[Row]) -> None:
    assert {row.verdict for row in rows} == {"PASS"}, [row for row in rows if row.verdict != "PASS"]


def list_failed(rows: list[Row]) -> set[str]:
    return {row.name for row in rows if row.verdict == "FAIL"}


def trace_with(plant: Callable[[], list[Any]], task: Any) -> Any:
    from ulysses_cli.prove.verify import trace_on_rank

    with ExitStack() as planted:
        for each in plant():
            planted.enter_context(each)
        return trace_on_rank(torch.device("cpu"), task)


def patch(where: str, make: Callable[[Any], Any]) -> Any:
    """Replaces what `where` names by a function of it."""
    module, _, name = where.rpartition(".")
    holder: Any = __import__(module, fromlist=["_"]) if not module[module.rfind(".") + 1].isupper() else None
    if holder is None:
        outer, _, inner = module.rpartition(".")
        holder = getattr(__import__(outer, fromlist=["_"]), inner)
    return mock.patch.object(holder, name, make(getattr(holder, name)))


def plant_mean() -> list[Any]:
    """Each rank divides by its own number of targets."""

    def make(real: Any) -> Any:
        def step(self: Any, batch: Any, num_targets: int) -> Any:
            return real(self, batch, int((batch.labels >= 0).sum()) * self.groups.layout.world_size)

        return step

    return [patch("ulysses_cli.train.engine.Engine.train_micro_step", make)]


def plant_lost_kv_gradient() -> list[Any]:
    """The gradient of the shared key/value head loses the share of rank 1's query heads."""

    def make(real: Any) -> Any:
        def backward(*args: Any) -> Any:
            grads, dsinks = real(*args)
            is_kept = args[-1].axis.rank == 0
            return [grads[0], *(grad * is_kept for grad in grads[1:])], dsinks

        return backward

    return [patch("ulysses_cli.train.attention.ulysses._attend_backward", make)]


def plant_boundary() -> list[Any]:
    def make(real: Any) -> Any:
        def documents(lengths: Any, device: Any, **more: Any) -> Any:
            if len(lengths) > 1 and lengths[0] > 1:
                lengths = (lengths[0] - 1, lengths[1] + 1, *lengths[2:])
            return real(lengths, device, **more)

        return documents

    return [patch("ulysses_cli.train.engine.make_documents", make)]


def plant_leak() -> list[Any]:
    def make(real: Any) -> Any:
        return lambda lengths, device, **more: real([sum(lengths)], device, **more)

    return [patch("ulysses_cli.train.engine.make_documents", make)]


def plant_local_positions() -> list[Any]:
    def make(real: Any) -> Any:
        def load(self: Any, batch: Any) -> Any:
            loaded = real(self, batch)
            return loaded | {"positions": torch.arange(batch.input_ids.shape[1])[None].expand(batch.input_ids.shape)}

        return load

    return [patch("ulysses_cli.train.engine.Engine._load", make)]


def plant_local_window() -> list[Any]:
    """The window is compared with the slice, which is shorter, and so is switched off."""

    def make(real: Any) -> Any:
        def attention(q: Any, k: Any, v: Any, documents: Any, rule: Any, **more: Any) -> Any:
            return real(q, k, v, documents, replace(rule, window_tokens=None), **more)

        return attention

    return [patch("ulysses_cli.train.attention.interface.ulysses_attention", make)]


def plant_unsharded_evaluation() -> list[Any]:
    """Every rank evaluates the whole row by itself."""
    from ulysses_cli.train.processes.groups import SequenceAxis

    def read(real: Any) -> Any:
        return lambda rows, plan, group, micro_step, rank, size: real(rows, plan, group, micro_step, 0, 1)

    def attend(real: Any) -> Any:
        def attention(q: Any, k: Any, v: Any, documents: Any, rule: Any, *, axis: SequenceAxis, **more: Any) -> Any:
            is_whole = q.shape[0] * q.shape[1] == documents.num_tokens
            return real(q, k, v, documents, rule, axis=SequenceAxis(None, 1, 0) if is_whole else axis, **more)

        return attention

    return [
        patch("ulysses_cli.train.evaluation.read_micro_batch", read),
        patch("ulysses_cli.train.attention.interface.ulysses_attention", attend),
    ]


def plant_longer_prompt() -> list[Any]:
    """The rejected answer sees the beginning of the chosen one."""

    def make(real: Any) -> Any:
        def documents(lengths: Any, device: Any, shared: Any, **more: Any) -> Any:
            return real(lengths, device, shared=tuple(at + 2 if at else 0 for at in shared), **more)

        return documents

    return [patch("ulysses_cli.train.engine.make_documents", make)]


def plant_counted_prompt() -> list[Any]:
    """One token of the prompt counts as one of the answer."""

    def make(real: Any) -> Any:
        def add_up(self: Any, losses: Any, answers: Any) -> Any:
            sums = real(self, losses, answers)
            return replace(sums, targets=sums.targets + 1)

        return add_up

    return [patch("ulysses_cli.train.preferences.PreferenceObjective.sum_answers", make)]


def plant_own_sums() -> list[Any]:
    """Each rank compares what it has of the answers."""
    from ulysses_cli.train.processes.groups import NO_AXIS

    def make(real: Any) -> Any:
        return lambda self, losses, answers: real(mock.Mock(axis=NO_AXIS), losses, answers)

    return [patch("ulysses_cli.train.preferences.PreferenceObjective.sum_answers", make)]


Plant = Callable[[], list[Any]]
FAULTS: dict[str, tuple[Plant, str]] = {  # and what finds it
    "mean": (plant_mean, "gradients"),
    "kv gradient": (plant_lost_kv_gradient, "gradients"),
    "boundary": (plant_boundary, "loss"),
    "leak": (plant_leak, "leak: the first document"),
    "positions": (plant_local_positions, "loss"),
    "window": (plant_local_window, "evaluation loss"),
    "evaluation": (plant_unsharded_evaluation, "evaluation tokens"),
}


@pytest.mark.check
@pytest.mark.parametrize("lora", [pytest.param(False, marks=pytest.mark.full), True])
def test_without_a_fault_everything_passes(lora: bool, tmp_path: Path) -> None:
    rows = prove_with(list, tmp_path, *(["lora.r=4"] if lora else []))
    check_passes(rows)
    assert {row.name for row in rows} >= ALWAYS_PROVEN


@pytest.mark.parametrize(
    "fault",
    [pytest.param(each, marks=mark_by(each == "kv gradient", each in ("boundary", "leak"))) for each in FAULTS],
)
def test_a_planted_fault_fails(fault: str, tmp_path: Path) -> None:
    plant, found_by = FAULTS[fault]
    assert found_by in list_failed(prove_with(plant, tmp_path))


JUDGED = {
    "a mixture": ("preference.loss=[sigmoid, bco_pair, sft]",),
    "kto": ("preference.loss=kto", "train.per_device_train_batch_size=2"),
    "simpo with adapters": ("preference.loss=simpo", "lora.r=4"),
    "a base in 4 bits": ("preference.loss=apo_zero", "lora.r=4", "lora.quantize_base=nf4", "parallel.zero_stage=2"),
    "a ring and ZeRO-1": ("preference.loss=hinge", "parallel.ring_size=2", "parallel.zero_stage=1"),
    "offload": ("preference.loss=sigmoid_norm", "memory.offload_optimizer=cpu"),
    "two copies": ("preference.loss=orpo", "preference.share_prompts=false", "data.packing=off"),
}


@pytest.mark.parametrize(
    "case", [pytest.param(case, marks=mark_by(False, case in ("a mixture", "kto"))) for case in JUDGED]
)
def test_preferences_are_proven(case: str, tmp_path: Path) -> None:
    check_passes(prove_with(list, tmp_path, *JUDGED[case]))


@pytest.mark.parametrize(
    ("plant", "found_by"),
    [
        (plant_longer_prompt, "leak: late tokens"),
        pytest.param(plant_counted_prompt, "loss", marks=pytest.mark.check),
        pytest.param(plant_own_sums, "", marks=pytest.mark.check),
    ],
)
def test_a_planted_fault_of_preferences_fails(plant: Callable[[], list[Any]], found_by: str, tmp_path: Path) -> None:
    """Ranks that compare their own parts of answers differ from the reference at once."""
    if not found_by:
        with pytest.raises(RankError, match="at step 1,"):
            prove_with(plant, tmp_path, "preference.loss=ipo")
        return
    assert {found_by, "gradients"} <= list_failed(prove_with(plant, tmp_path, "preference.loss=ipo"))


@pytest.mark.full
@pytest.mark.parametrize(
    ("words", "groups"),
    [((), {"sp 1", "sp 2"}), (("parallel.sp_size=4", "parallel.ring_size=2"), {"sp 1", "sp 4 (ring 2)"})],
)
def test_the_command_proves(words: tuple[str, ...], groups: set[str], tmp_path: Path) -> None:
    """tests/one_process/test_proof_commands.py proves the other recipes."""
    page = tmp_path / "verify.html"
    answer = json.loads(succeed("verify", str(TINY_RECIPE), *words, "--format", "json", "--html", str(page)).stdout)
    assert answer["passed"]
    assert not find_undocumented("ulysses verify", answer)
    assert {row["group"] for row in answer["rows"]} == groups
    assert all(row["verdict"] == "PASS" for row in answer["rows"])
    assert "evaluation tokens" in page.read_text()


@pytest.mark.check
def test_a_rank_that_raises_or_dies_is_reported() -> None:
    from ulysses_cli.prove.ranks import RankFailureError
    from ulysses_cli.prove.ranks import run_on_ranks as run

    with pytest.raises(RankFailureError) as raised:
        run(2, raise_on_one)
    assert (raised.value.rank, raised.value.kind, raised.value.message) == (1, "ValueError", "one is odd")
    with pytest.raises(RankFailureError) as killed:
        run(2, die_on_one)
    assert (killed.value.rank, killed.value.kind) == (1, "killed")


@pytest.mark.check
def test_problems_of_an_input_that_a_rank_refuses_are_told() -> None:
    from ulysses_cli.prove.__main__ import prove
    from ulysses_cli.prove.ranks import run_on_ranks as run

    def refuse(*_: Any) -> Any:
        return run(1, refuse_input)

    task = {"plan": "", "command": "evaluate"}
    with mock.patch("ulysses_cli.prove.__main__.run", refuse):
        answer, code = prove(task, print, Path("log"))
    assert code == 2
    assert [each["message"] for each in answer["problems"]] == ["holds other results"]


def refuse_input(device: torch.device) -> None:
    raise RecipeError([Problem("--output", "holds other results", "name another folder")])


def raise_on_one(device: torch.device) -> None:
    if torch.distributed.get_rank() == 1:
        raise ValueError("one is odd")
    torch.distributed.barrier()


def die_on_one(device: torch.device) -> None:
    import os
    import signal

    if torch.distributed.get_rank() == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    torch.distributed.barrier()
