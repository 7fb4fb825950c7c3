"""Tests what a run says about itself between its steps: greedy continuations that equal transformers' own."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support.commands import succeed
from support.faults import Runs
from support.rank_pool import run_on_ranks
from support.run_harness import RunHarness, train_alone
from support.small_run import make_settings
from support.training import MemoryRows, make_recipe

from ulysses_cli.train.evaluation import SamplePrompt, Samples
from ulysses_cli.train.loop import every, train

PROMPTS = [SamplePrompt("a", tuple(range(3, 30))), SamplePrompt("b", (5,)), SamplePrompt("c", (9, 9, 60))]
NUM_NEW, STOP = 6, 7
ROWS = [[(40, 0), (24, 0)]] * 8


def sample_between_steps(overrides: tuple[str, ...]) -> tuple[list[float], list[dict[str, Any]]]:
    recipe = make_recipe("parallel.sp_size=2", "train.max_steps=3", *overrides)
    harness, lines = RunHarness(recipe, MemoryRows(ROWS), 3), list[dict[str, Any]]()
    samples = Samples(PROMPTS, {STOP}, NUM_NEW, lambda tokens: " ".join(map(str, tokens)), lines.append)
    models, state = list[Any](), harness.train_state

    def keep(_: object) -> None:
        models.append(harness.make_plain_model())

    state.post_step_hooks = (*state.post_step_hooks, every(2, samples.run), every(2, keep))
    train(state)
    for prompt, sample in zip(PROMPTS, lines[0]["samples"], strict=True):
        ids = torch.tensor([prompt.tokens])
        options = {"max_new_tokens": NUM_NEW, "do_sample": False, "eos_token_id": STOP, "pad_token_id": 0}
        out = models[0].generate(ids, attention_mask=torch.ones_like(ids), **options)[0, ids.size(1) :].tolist()
        assert sample["text"] == " ".join(map(str, out[:-1] if out[-1] == STOP else out))
    return harness.losses, lines


@pytest.mark.parametrize(
    ("num_ranks", "overrides"),
    [
        pytest.param(2, ("parallel.zero_stage=2",), marks=pytest.mark.full),
        pytest.param(2, ("parallel.ring_size=2",), marks=pytest.mark.check),
        pytest.param(4, ("parallel.dp_shard_size=2", "memory.tiled_mlp=true"), marks=pytest.mark.full),
    ],
)
def test_samples_equal_transformers_and_change_no_step(num_ranks: int, overrides: tuple[str, ...]) -> None:
    results = run_on_ranks(num_ranks, sample_between_steps, overrides)
    losses, lines = results[0]
    assert [line["step"] for line in lines] == [2]
    assert [sample["prompt"] for sample in lines[0]["samples"]] == ["a", "b", "c"]
    assert all(result[1] == lines for result in results)
    recipe = make_recipe("parallel.sp_size=2", "train.max_steps=3", *overrides)
    assert run_on_ranks(num_ranks, train_alone, recipe, MemoryRows(ROWS), 3)[0] == losses


def stop_between_tokens(overrides: tuple[str, ...]) -> tuple[list[float], list[dict[str, Any]], str]:
    """The last rank alone is asked to stop, while it says its third token at step 1."""
    recipe = make_recipe("parallel.sp_size=2", "train.max_steps=3", *overrides)
    harness, lines = RunHarness(recipe, MemoryRows(ROWS), 3), list[dict[str, Any]]()
    samples, state = Samples(PROMPTS, (), 20, str, lines.append), harness.train_state
    is_last, phases = dist.get_rank() == dist.get_world_size() - 1, list[str]()
    state.stop.is_asked = lambda: is_last and state.step == 1 and state.phase.endswith("token 3")
    state.post_step_hooks = (*state.post_step_hooks, every(1, samples.run), lambda *_: phases.append(state.phase))
    train(state)
    return harness.losses, lines, phases[0]


@pytest.mark.parametrize(
    ("num_ranks", "overrides"),
    [
        pytest.param(2, ("parallel.zero_stage=2",), marks=pytest.mark.check),
        pytest.param(4, ("parallel.dp_shard_size=2",), marks=pytest.mark.full),
        pytest.param(4, ("parallel.dp_shard_size=2", "memory.offload_param=cpu"), marks=pytest.mark.full),
    ],
)
def test_a_reason_to_stop_of_one_rank_ends_samples_of_all_between_tokens(
    num_ranks: int, overrides: tuple[str, ...]
) -> None:
    results = run_on_ranks(num_ranks, stop_between_tokens, overrides)
    recipe = make_recipe("parallel.sp_size=2", "train.max_steps=3", *overrides)
    plain = run_on_ranks(num_ranks, train_alone, recipe, MemoryRows(ROWS), 3)[0]
    for losses, lines, phase in results:
        assert [line["step"] for line in lines] == [2], "the samples of step 1 were left out, those of step 2 were not"
        assert re.fullmatch(r"sample [12] of 3, token [234]", phase), "groups read prompts of other lengths"
        assert losses == plain


@pytest.mark.full
def test_the_command_says_what_the_run_said_at_its_end(tmp_path: Path) -> None:
    prompts = ["Once upon a time", "b"]
    settings = make_settings(
        parallel={"sp_size": 2},
        train={"max_steps": 6, "learning_rate": 0.05},
        run={"rehearsal": False, "sample_prompts": prompts, "sample_steps": 4, "sample_max_new_tokens": 12},
    )
    runs = Runs(tmp_path, settings)
    output = runs.finish("run")
    lines = runs.read_lines("run", "samples")
    assert [line["step"] for line in lines] == [4, 6]
    assert "sample step=6 'Once upon a time' continues" in output
    done = succeed("sample", "run", *prompts, "--max-new-tokens=12", "--format=json", cwd=tmp_path)
    assert json.loads(done.stdout) == lines[1]["samples"]
