"""Tests training of adapters on a base in 4 or 8 bits: it equals peft and bitsandbytes on one process, also with an
evaluation between steps, and resumes at another layout."""

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
from transformers import AutoConfig, AutoModelForCausalLM, BitsAndBytesConfig

from ulysses_cli.data.steps import plan_step, read_micro_batch
from ulysses_cli.plan.recipe.recipe import Recipe
from ulysses_cli.train.loop import train

NUM_STEPS = 3
ROWS = [[(40, 0), (1, 0), (7, 3)], [(30, 0), (31, 31)], [(64, 0)], [(5, 0), (9, 9), (20, 15)], [(50, 48)]]
SIZES = {"hidden_size": 64, "intermediate_size": 96, "head_dim": 16}
ALL_LEVERS = ("memory.tiled_mlp=true", "memory.tiled_loss=true", "memory.attention_head_chunks=2")


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Returns a small model in files."""
    folder = tmp_path_factory.mktemp("base")
    torch.manual_seed(0)
    config = AutoConfig.for_model(**{**CONFIG, **SIZES})
    AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(folder)
    return folder


def make_quantized_recipe(base: Path, kind: str, *more: str) -> Recipe:
    words = (f"model.name_or_path={base}", "model.config=null", f"lora.quantize_base={kind}", "lora.r=4")
    return make_recipe(*words, "parallel.zero_stage=2", "train.lr_scheduler_type=linear", *more)


def train_reference(base: Path, kind: str, recipe: Recipe) -> Trajectory:
    """Trains as the libraries' own examples do."""
    settings = {"load_in_8bit": True, "llm_int8_threshold": 0.0}
    if kind == "nf4":
        settings = {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4", "bnb_4bit_use_double_quant": True}
        settings["bnb_4bit_compute_dtype"] = torch.float32
    model: Any = AutoModelForCausalLM.from_pretrained(
        base, quantization_config=BitsAndBytesConfig(**settings), dtype=torch.float32, attn_implementation="eager"
    )
    torch.manual_seed(recipe.run.seed)
    get_peft_model(model, LoraConfig(r=4, lora_alpha=32, target_modules="all-linear"))
    rows, per_step = MemoryRows(ROWS), 2
    from ulysses_cli.data.steps import make_batching
    from ulysses_cli.plan.models.shape import read_model_shape
    from ulysses_cli.plan.resolved import resolve

    shape = read_model_shape(model.config.to_dict(), "test")
    batching = make_batching(recipe, shape, resolve(recipe, shape))
    assert batching.rows_per_step == per_step
    steps = [list(plan_step(rows, batching, step * per_step, 1000).rows) for step in range(NUM_STEPS)]
    rates = [recipe.train.learning_rate * (1 - step / NUM_STEPS) for step in range(NUM_STEPS)]
    return train_plainly(model.train(), rows, steps, recipe, rates)


def train_on_ranks(recipe: Recipe) -> dict[str, Any]:
    """Trains on one rank, with an evaluation before each step."""
    harness = RunHarness(recipe, MemoryRows(ROWS), NUM_STEPS)
    state = harness.train_state

    def evaluate(_: Any) -> None:
        plan = plan_step(state.rows, state.batching, 0, 1000)
        axis = state.groups.sp_axis
        state.engine.compute_token_losses(
            read_micro_batch(state.rows, plan, state.groups.dp_index, 0, axis.rank, axis.size)
        )

    state.pre_step_hooks = (evaluate,)
    train(state)
    weights = {name.removeprefix("model."): weight for name, weight in harness.read_weights().items()}
    kinds = {type(module).__name__ for module in harness.built.module.modules()}
    frozen = {p.dtype for p in harness.built.module.parameters() if not p.requires_grad}
    norms = [result.update.grad_norm for result in harness.results]
    return {"losses": harness.losses, "norms": norms, "weights": weights, "kinds": kinds, "frozen": frozen}


CASES = [("nf4", 2, 1, 2), ("nf4", 2, 2, 1), ("nf4", 1, 1, 1), ("int8", 2, 1, 2)]


@pytest.mark.parametrize(
    ("kind", "sp_size", "dp_size", "stage"),
    [pytest.param(*case, marks=mark_by(False, case in (CASES[0], CASES[3]))) for case in CASES],
)
def test_training_equals_peft_and_bitsandbytes(base: Path, kind: str, sp_size: int, dp_size: int, stage: int) -> None:
    words = (f"parallel.sp_size={sp_size}", f"parallel.dp_shard_size={dp_size}", f"parallel.zero_stage={stage}")
    recipe = make_quantized_recipe(base, kind, *words, f"train.gradient_accumulation_steps={2 // dp_size}", *ALL_LEVERS)
    expected = train_reference(base, kind, recipe)
    for ours in run_on_ranks(sp_size * dp_size, train_on_ranks, recipe):
        assert ours["losses"] == pytest.approx(expected.losses, rel=1e-5)
        assert ours["norms"] == pytest.approx(expected.norms, rel=1e-5)
        assert measure_difference(ours["weights"], expected.weights) < 1e-5
        assert ("Linear4bit" if kind == "nf4" else "Linear8bitLt") in ours["kinds"]
        assert (torch.uint8 if kind == "nf4" else torch.int8) in ours["frozen"]


@pytest.mark.full
def test_a_run_resumes_at_another_layout(base: Path, tmp_path: Path) -> None:
    split = make_quantized_recipe(base, "nf4", "parallel.sp_size=2")
    whole = run_on_ranks(2, run_and_save, split, MemoryRows(ROWS), str(tmp_path / "a"), None, 4)[0]
    assert run_on_ranks(2, run_and_save, split, MemoryRows(ROWS), str(tmp_path / "b"), None, 2)[0] == whole[:2]
    resumed = run_on_ranks(
        1, run_and_save, make_quantized_recipe(base, "nf4"), MemoryRows(ROWS), str(tmp_path / "b"), 2, 4
    )[0]
    assert resumed == pytest.approx(whole[2:], rel=1e-5)


def read_start(recipe: Recipe) -> dict[str, torch.Tensor]:
    return RunHarness(recipe, MemoryRows(ROWS), 1).read_weights()


@pytest.mark.full
def test_ranks_start_from_adapters_under_zero_3(base: Path, tmp_path: Path) -> None:
    model: Any = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    adapted = get_peft_model(model, LoraConfig(r=4, lora_alpha=32, target_modules="all-linear"))
    for parameter in adapted.parameters():
        if parameter.requires_grad:
            torch.nn.init.normal_(parameter)
    adapted.save_pretrained(tmp_path)
    words = (f"model.name_or_path={base}", "model.config=null", "lora.r=4", f"lora.adapter_name_or_path={tmp_path}")
    expected = {f"model.{name}": value for name, value in model.named_parameters() if value.requires_grad}
    for ours in run_on_ranks(2, read_start, make_recipe(*words, "parallel.sp_size=2")):
        assert measure_difference(ours, expected) == 0
