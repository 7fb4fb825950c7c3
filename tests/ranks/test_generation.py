"""Compares greedy generation on split rows with transformers' own `generate`, in float32: tokens and logits; also on a
live training engine, with other prompts for other groups of ranks, under ZeRO-3, between two steps."""

from datetime import timedelta
from itertools import product
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support.families import ATTENTION_ONLY, make_model
from support.hybrids import HYBRIDS, describe_hybrid, make_hybrid
from support.rank_pool import run_on_ranks
from support.run_harness import RunHarness, train_alone
from support.tiers import mark_by
from support.training import MemoryRows, make_recipe
from torch import Tensor
from transformers import DynamicCache

from ulysses_cli.data.tokenizing.tokenizer import make_bytes_tokenizer
from ulysses_cli.plan.layout import Layout
from ulysses_cli.plan.recipe.recipe import Recipe
from ulysses_cli.train.attention.documents import Documents
from ulysses_cli.train.attention.interface import register_attention, serve_rotary
from ulysses_cli.train.generation.cache import GenerationCache
from ulysses_cli.train.generation.decoding import Generator, agree_on_stop_tokens, count_shared_tokens, generating
from ulysses_cli.train.loop import train
from ulysses_cli.train.processes.groups import NO_AXIS, SequenceAxis, make_groups, make_sequence_axis
from ulysses_cli.train.recurrence.interface import serve_recurrent_layers

NUM_NEW = 6
TOLERANCE = 2e-5


def make(model_type: str, attention: str) -> Any:
    """In float32, with embeddings so far apart that tokens matter."""
    model: Any = (make_hybrid if model_type in HYBRIDS else make_model)(model_type, attention)
    with torch.no_grad():
        model.get_input_embeddings().weight.mul_(20)
    return model.float().eval()


def make_prompts(kind: str) -> list[list[int]]:
    """One prompt, or several that begin alike and end at different lengths."""
    ids: list[int] = torch.randint(3, 64, (43,), generator=torch.Generator().manual_seed(1)).tolist()
    if kind == "one":
        return [ids]
    return [[*ids, 7, 8, 9], [*ids, 30], [*ids, 7, 41, 5, 6, 12]]


def generate_plainly(model_type: str, prompts: list[list[int]]) -> tuple[list[list[int]], list[Tensor]]:
    model = make(model_type, "eager")
    answers, logits = [], []
    for prompt in prompts:
        ids = torch.tensor([prompt])
        # By default transformers cuts the cache to config.sliding_window, also of models that have no windows.
        options = {} if model_type in HYBRIDS else {"past_key_values": DynamicCache()}
        out = model.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=NUM_NEW, do_sample=False, eos_token_id=None,
            pad_token_id=0, return_dict_in_generate=True, output_logits=True, **options,
        )  # fmt: skip
        answers.append(out.sequences[0, len(prompt) :].tolist())
        logits.append(torch.stack(out.logits)[:, 0])
    return answers, logits


class PlainForward:
    """transformers' model as it is, with the logits that it gave."""

    def __init__(
        self, model_type: str, axis: SequenceAxis, chunks: int, heads: SequenceAxis, ring: SequenceAxis
    ) -> None:
        self.model = make(model_type, register_attention(heads, "sdpa", chunks, ring=ring))
        serve_rotary(self.model, axis)
        serve_recurrent_layers(self.model, axis)
        self.logits: list[Tensor] = []

    def __call__(
        self,
        tokens: Tensor,
        positions: Tensor,
        cache: GenerationCache,
        wanted: tuple[Tensor, Tensor],
        documents: Documents | None,
    ) -> Tensor:
        logits: Tensor = self.model(
            tokens, position_ids=positions, use_cache=False, generation=cache, documents=documents
        ).logits[wanted]
        if len(logits):
            self.logits.append(logits)
        return logits


def make_axis() -> SequenceAxis:
    return make_sequence_axis(dist.group.WORLD if dist.is_initialized() else None)


def make_axes(ring_size: int) -> tuple[SequenceAxis, SequenceAxis]:
    """The ranks that exchange heads, and a ring."""
    world = make_axis()
    if ring_size == 1:
        return world, NO_AXIS
    groups = make_groups(Layout(sp_size=world.size, ring_size=ring_size), timedelta(seconds=60))
    return groups.ulysses_axis, groups.ring_axis


def compare(model_type: str, kind: str, chunks: int = 1, ring_size: int = 1) -> float:
    """Asserts that tokens are equal. Returns the largest difference of logits, relative to the largest logit."""
    prompts, axis, (heads, ring) = make_prompts(kind), make_axis(), make_axes(ring_size)
    expected, expected_logits = generate_plainly(model_type, prompts)
    forward = PlainForward(model_type, axis, chunks, heads, ring)
    generator = Generator(forward, axis, heads=heads, ring=ring)
    num_read, multiple = generator.read(prompts), axis.size * (1 if ring_size == 1 else 2)
    assert num_read == count_shared_tokens(prompts) // multiple * multiple > 30
    reported: list[int] = []
    assert generator.generate(NUM_NEW, report=reported.append) == expected
    assert reported == sorted(reported)
    assert {*reported} >= {*range(1, NUM_NEW + 1)}, "each token is reported"
    longest, worst = max(map(len, prompts)), 0.0
    by_length = dict(enumerate(forward.logits[1:], min(map(len, prompts)) + 1)) | {
        min(map(len, prompts)): forward.logits[0]
    }
    for at, prompt in enumerate(prompts):
        for step in range(NUM_NEW):
            if len(prompt) + step < longest + NUM_NEW:
                own, right = by_length[len(prompt) + step][at], expected_logits[at][step]
                worst = max(worst, ((own - right).abs().max() / right.abs().max()).item())
    scores = generator.score(expected)
    for score, answer, logits in zip(scores, expected, expected_logits, strict=True):
        log_probabilities = torch.log_softmax(logits, -1)[range(NUM_NEW), answer]
        assert score.is_greedy
        assert abs(score.log_probability - log_probabilities.sum().item()) < 1e-3
    assert not any(score.is_greedy for score in generator.score([[(answer[0] + 1) % 64] for answer in expected]))
    assert generator.generate(NUM_NEW) == expected, "a score changes what is generated after it"
    return worst


# family, ranks, prompts, chunks of heads, ring
Case = tuple[str, int, str, int, int]
CASES: list[Case] = [
    *product((*ATTENTION_ONLY, *HYBRIDS), (1, 2, 4), ("one", "several"), (1,), (1,)),
    *((name, 2, "one", 2, 1) for name in ATTENTION_ONLY),
    *((name, num_ranks, "several", 1, ring) for name in ATTENTION_ONLY for num_ranks, ring in ((2, 2), (3, 3), (4, 2))),
]
QUICK: list[Case] = [("gemma2", 2, "several", 1, 1)]
# of each kind of layer and each feature of attention: windows, sinks, softcaps, latents, layers of several head sizes
MANY_KINDS = ("gpt_oss", "qwen3_next", "kimi_linear", "deepseek_v3", "gemma4_text", "lfm2")
# windows of which a rank holds no key, sinks, latents, and heads that three ranks do not divide
RINGS = (("gemma2", 4, 2), ("gpt_oss", 3, 3), ("gemma4_text", 2, 2), ("deepseek_v3", 2, 2), ("llama", 3, 3))
CHECKED: list[Case] = [
    ("llama", 4, "one", 1, 1),
    ("bamba", 2, "one", 1, 1),
    *((name, 2, "several", 1, 1) for name in MANY_KINDS),
    *((name, 2, "one", 2, 1) for name in ("llama", "gpt_oss")),
    *((name, num_ranks, "several", 1, ring) for name, num_ranks, ring in RINGS),
]


@pytest.mark.parametrize(
    "case", [pytest.param(each, marks=mark_by(each in QUICK, each in CHECKED)) for each in CASES], ids=str
)
def test_tokens_and_logits_equal_those_of_transformers(case: Case) -> None:
    """A prompt may be read by chunks of heads. On a ring, more ranks than divide the heads have a share of the prefix's
    keys."""
    model_type, num_ranks, *how = case
    if num_ranks == 1:
        assert compare(model_type, *how) < TOLERANCE
    else:
        assert max(run_on_ranks(num_ranks, compare, model_type, *how)) < TOLERANCE


PROMPTS = [[[*range(3, 40), 7], [*range(3, 40), 9, 11]], [[*range(20, 41)]]]  # of each group
NUM_SAID = (4, 9)
ROWS = [[(40, 0), (24, 0)]] * 8


def make_case(num_ranks: int, overrides: tuple[str, ...], model_type: str) -> Recipe:
    num_groups = num_ranks // 2
    words = ("parallel.sp_size=2", "train.max_steps=2", f"parallel.dp_shard_size={num_groups}", *overrides)
    return make_recipe(*words, config=describe_hybrid(model_type, initializer_range=0.1) if model_type else None)


def train_with_generation(recipe: Recipe, gathers_once: bool | None) -> list[float]:
    """Trains two steps, generates with the weights after the first, and compares with the plain model."""
    harness = RunHarness(recipe, MemoryRows(ROWS), 2)
    state = harness.train_state
    group = state.groups.dp_index

    def check(*_: object) -> None:
        plain = harness.make_plain_model()
        with generating(state.engine, gathers_once=gathers_once) as generator:
            generator.read(PROMPTS[group])
            answers = generator.generate(NUM_SAID[group])
        for prompt, answer in zip(PROMPTS[group], answers, strict=True):
            ids = torch.tensor([prompt])
            out = plain.generate(
                ids, attention_mask=torch.ones_like(ids), max_new_tokens=NUM_SAID[group], do_sample=False,
                eos_token_id=None, pad_token_id=0,
            )  # fmt: skip
            assert out[0, len(prompt) :].tolist() == answer

    state.post_step_hooks = (*state.post_step_hooks, check)
    train(state)
    return harness.losses


ENGINE_CASES = [
    pytest.param(2, None, (), "", marks=pytest.mark.check),
    pytest.param(4, None, (), "", marks=pytest.mark.full),
    pytest.param(4, False, ("memory.tiled_loss=true", "memory.tiled_mlp=true"), "", marks=pytest.mark.full),
    pytest.param(2, False, ("parallel.zero_stage=1",), "", marks=pytest.mark.full),
    *(pytest.param(2, gathers_once, (), "zamba2", marks=pytest.mark.full) for gathers_once in (True, False)),
]


@pytest.mark.parametrize(("num_ranks", "gathers_once", "overrides", "model_type"), ENGINE_CASES)
def test_a_run_generates_between_its_steps(
    num_ranks: int, gathers_once: bool | None, overrides: tuple[str, ...], model_type: str
) -> None:
    recipe, plain = (make_case(num_ranks, words, model_type) for words in (overrides, ()))
    losses = run_on_ranks(num_ranks, train_with_generation, recipe, gathers_once)[0]
    assert losses == pytest.approx(run_on_ranks(num_ranks, train_alone, plain, MemoryRows(ROWS), 2)[0], abs=1e-6)


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
