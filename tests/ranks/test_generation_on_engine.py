"""Generation on a live training engine: groups of ranks with other prompts, under ZeRO-3, between two steps."""

from copy import deepcopy
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support.hybrids import describe_hybrid
from support.rank_pool import run_on_ranks
from support.run_harness import RunHarness
from support.training import MemoryRows, make_recipe
from transformers import AutoModelForCausalLM

from ulysses_cli.data.tokenizing.tokenizer import make_bytes_tokenizer
from ulysses_cli.plan.layout import Layout
from ulysses_cli.plan.recipe.recipe import Recipe
from ulysses_cli.train.generation.decoding import agree_on_stop_tokens, generating
from ulysses_cli.train.loop import train
from ulysses_cli.train.processes.groups import make_groups

PROMPTS = [[[*range(3, 40), 7], [*range(3, 40), 9, 11]], [[*range(20, 41)]]]  # of each group
NUM_NEW = (4, 9)


def make_case(overrides: tuple[str, ...], model_type: str) -> Recipe:
    num_groups = dist.get_world_size() // 2
    words = ("parallel.sp_size=2", "train.max_steps=2", f"parallel.dp_shard_size={num_groups}", *overrides)
    return make_recipe(*words, config=describe_hybrid(model_type, initializer_range=0.1) if model_type else None)


def train_with_generation(gathers_once: bool | None, overrides: tuple[str, ...], model_type: str) -> list[float]:
    """Trains two steps, generates with the weights after the first, and compares with the plain model."""
    harness = RunHarness(make_case(overrides, model_type), MemoryRows([[(40, 0), (24, 0)]] * 8), 2)
    state, built = harness.train_state, harness.built
    group = state.groups.dp_index

    def check(*_: object) -> None:
        weights = {name.removeprefix("model."): value for name, value in harness.read_weights().items()}
        with generating(state.engine, gathers_once=gathers_once) as generator:
            generator.read(PROMPTS[group])
            answers = generator.generate(NUM_NEW[group])
        plain = AutoModelForCausalLM.from_config(deepcopy(built.config), attn_implementation="eager").float().eval()
        plain.load_state_dict(weights, strict=not model_type)  # weights that layers share have further names
        for prompt, answer in zip(PROMPTS[group], answers, strict=True):
            ids = torch.tensor([prompt])
            out = plain.generate(
                ids, attention_mask=torch.ones_like(ids), max_new_tokens=NUM_NEW[group], do_sample=False,
                eos_token_id=None, pad_token_id=0,
            )  # fmt: skip
            assert out[0, len(prompt) :].tolist() == answer

    state.post_step_hooks = (*state.post_step_hooks, check)
    train(state)
    return harness.losses


def train_plainly(model_type: str) -> list[float]:
    harness = RunHarness(make_case((), model_type), MemoryRows([[(40, 0), (24, 0)]] * 8), 2)
    train(harness.train_state)
    return harness.losses


CASES = [
    pytest.param(2, None, (), "", marks=pytest.mark.check),
    pytest.param(4, None, (), "", marks=pytest.mark.full),
    pytest.param(4, False, ("memory.tiled_loss=true", "memory.tiled_mlp=true"), "", marks=pytest.mark.full),
    pytest.param(2, False, ("parallel.zero_stage=1",), "", marks=pytest.mark.full),
    *(pytest.param(2, gathers_once, (), "zamba2", marks=pytest.mark.full) for gathers_once in (True, False)),
]


@pytest.mark.parametrize(("num_ranks", "gathers_once", "overrides", "model_type"), CASES)
def test_a_run_generates_between_its_steps(
    num_ranks: int, gathers_once: bool | None, overrides: tuple[str, ...], model_type: str
) -> None:
    losses = run_on_ranks(num_ranks, train_with_generation, gathers_once, overrides, model_type)[0]
    assert losses == pytest.approx(run_on_ranks(num_ranks, train_plainly, model_type)[0], abs=1e-6)


def agree_with_own_files() -> set[int]:
    """Each rank's generation config names another token, as where a machine lacks the file."""
    config = SimpleNamespace(eos_token_id=5 + dist.get_rank())
    wrapped = SimpleNamespace(module=SimpleNamespace(model=SimpleNamespace(generation_config=config)))
    groups = make_groups(Layout(sp_size=2, dp_shard_size=1, dp_replicate_size=1), timedelta(seconds=60))
    engine: Any = SimpleNamespace(wrapped=wrapped, groups=groups)
    return agree_on_stop_tokens(engine, make_bytes_tokenizer())


def test_all_ranks_stop_at_the_tokens_of_rank_0() -> None:
    first, second = run_on_ranks(2, agree_with_own_files)
    assert first == second
    assert 5 in first
    assert 6 not in first
