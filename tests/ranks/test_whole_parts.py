"""Tests parts that are trained whole beside adapters (lora.modules_to_save), and DoRA: training equals plain peft on
one process at any layout and stage, and resumes at another."""

from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from support.rank_pool import run_on_ranks
from support.run_harness import RunHarness, run_and_save
from support.small_run import CONFIG
from support.tiers import mark_by
from support.training import MemoryRows, Trajectory, make_recipe, measure_difference, train_plainly
from transformers import AutoConfig, AutoModelForCausalLM

from ulysses_cli.data.steps import make_batching, plan_step
from ulysses_cli.plan.models.shape import read_model_shape
from ulysses_cli.plan.recipe.recipe import Recipe
from ulysses_cli.plan.resolved import resolve
from ulysses_cli.train.loop import train

NUM_STEPS = 3
ROWS = [[(40, 0), (1, 0), (7, 3)], [(30, 0), (31, 31)], [(64, 0)], [(5, 0), (9, 9), (20, 15)], [(50, 48)]]
SIZES = {"hidden_size": 64, "intermediate_size": 96, "head_dim": 16}
ALL_LEVERS = ("memory.tiled_mlp=true", "memory.tiled_loss=true", "memory.attention_head_chunks=2")
EVERYTHING = ("embed_tokens", "lm_head", "norm")
WHOLE, DORA = f"lora.modules_to_save=[{','.join(EVERYTHING)}]", "lora.use_dora=true"


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Returns a small model in files."""
    folder = tmp_path_factory.mktemp("base")
    torch.manual_seed(0)
    config = AutoConfig.for_model(**{**CONFIG, **SIZES})
    AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(folder)
    return folder


def make_case(base: Path, *more: str) -> Recipe:
    words = (f"model.name_or_path={base}", "model.config=null", "lora.r=4", "train.lr_scheduler_type=linear")
    return make_recipe(*words, *more)


def make_plain_model(base: Path, recipe: Recipe) -> Any:
    """The model as peft's own examples make it."""
    model: Any = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32, attn_implementation="eager")
    torch.manual_seed(recipe.run.seed)
    settings = LoraConfig(
        r=4,
        lora_alpha=32,
        target_modules="all-linear",
        use_dora=recipe.lora.use_dora,
        modules_to_save=list(recipe.lora.modules_to_save) or None,
    )
    return get_peft_model(model, settings)


def train_reference(base: Path, recipe: Recipe) -> Trajectory:
    model = make_plain_model(base, recipe).base_model.model
    rows, shape = MemoryRows(ROWS), read_model_shape(model.config.to_dict(), "test")
    batching = make_batching(recipe, shape, resolve(recipe, shape))
    steps = [list(plan_step(rows, batching, step * batching.rows_per_step, 1000).rows) for step in range(NUM_STEPS)]
    rates = [recipe.train.learning_rate * (1 - step / NUM_STEPS) for step in range(NUM_STEPS)]
    return train_plainly(model.train(), rows, steps, recipe, rates)


def train_on_ranks(recipe: Recipe) -> dict[str, Any]:
    harness = RunHarness(recipe, MemoryRows(ROWS), NUM_STEPS)
    train(harness.train_state)
    weights = {name.removeprefix("model."): weight for name, weight in harness.read_weights().items()}
    norms = [result.update.grad_norm for result in harness.results]
    return {"losses": harness.losses, "norms": norms, "weights": weights}


CASES = [
    (WHOLE, 2, 1, 3), (DORA, 2, 1, 2), (WHOLE, 1, 2, 2), (DORA, 1, 2, 1), (WHOLE, 2, 1, 1), (DORA, 2, 2, 2),
    (WHOLE, 2, 2, 3),
]  # fmt: skip


@pytest.mark.parametrize(
    ("setting", "sp_size", "dp_size", "stage"),
    [pytest.param(*case, marks=mark_by(False, case in CASES[:1])) for case in CASES],
)
@pytest.mark.parametrize("levers", [ALL_LEVERS, pytest.param((), marks=pytest.mark.full)], ids=["levers", "plain"])
def test_training_equals_plain_peft(
    base: Path, setting: str, sp_size: int, dp_size: int, stage: int, levers: tuple[str, ...]
) -> None:
    words = (f"parallel.sp_size={sp_size}", f"parallel.dp_shard_size={dp_size}", f"parallel.zero_stage={stage}")
    recipe = make_case(base, setting, *words, f"train.gradient_accumulation_steps={2 // dp_size}", *levers)
    expected = train_reference(base, recipe)
    weights = {name.replace(".modules_to_save.default", ""): value for name, value in expected.weights.items()}
    for ours in run_on_ranks(sp_size * dp_size, train_on_ranks, recipe):
        assert ours["losses"] == pytest.approx(expected.losses, rel=1e-5)
        assert ours["norms"] == pytest.approx(expected.norms, rel=1e-5)
        assert measure_difference(ours["weights"], weights) < 1e-5


@pytest.mark.parametrize(
    ("settings", "stage"),
    [pytest.param((WHOLE,), 3, marks=pytest.mark.full), pytest.param((WHOLE, DORA), 2, marks=pytest.mark.full)],
    ids=["whole", "both"],
)
def test_a_run_resumes_at_another_layout(base: Path, tmp_path: Path, settings: tuple[str, ...], stage: int) -> None:
    split = make_case(base, *settings, "parallel.sp_size=2", f"parallel.zero_stage={stage}")
    whole = run_on_ranks(2, run_and_save, split, MemoryRows(ROWS), str(tmp_path / "a"), None, 4)[0]
    assert run_on_ranks(2, run_and_save, split, MemoryRows(ROWS), str(tmp_path / "b"), None, 2)[0] == whole[:2]
    other = make_case(base, *settings, "parallel.zero_stage=1")
    assert run_on_ranks(1, run_and_save, other, MemoryRows(ROWS), str(tmp_path / "b"), 2, 4)[0] == pytest.approx(
        whole[2:], rel=1e-5
    )
