"""Tests training of adapters: on a base in 4 or 8 bits, with parts that are trained whole (lora.modules_to_save), and
DoRA. It equals peft and bitsandbytes on one process, with an evaluation between steps, and resumes at another layout.
"""

from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from support.rank_pool import run_on_ranks
from support.run_harness import RunHarness, resume, train_and_save
from support.small_run import CONFIG
from support.tiers import mark_by
from support.training import MemoryRows, make_recipe, measure_difference, train_as_planned
from transformers import AutoConfig, AutoModelForCausalLM, BitsAndBytesConfig

from ulysses_cli.data.steps import plan_step, read_micro_batch
from ulysses_cli.plan.recipe.recipe import Recipe
from ulysses_cli.train.loop import train

NUM_STEPS = 3
ROWS = [[(40, 0), (1, 0), (7, 3)], [(30, 0), (31, 31)], [(64, 0)], [(5, 0), (9, 9), (20, 15)], [(50, 48)]]
SIZES = {"hidden_size": 64, "intermediate_size": 96, "head_dim": 16}
ALL_LEVERS = ("memory.tiled_mlp=true", "memory.tiled_loss=true", "memory.attention_head_chunks=2")
NF4, INT8, DORA = "lora.quantize_base=nf4", "lora.quantize_base=int8", "lora.use_dora=true"
WHOLE = "lora.modules_to_save=[embed_tokens,lm_head,norm]"


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
    """The model as the libraries' own examples make it."""
    options: dict[str, Any] = {"dtype": torch.float32, "attn_implementation": "eager"}
    if recipe.lora.quantize_base == "int8":
        options["quantization_config"] = BitsAndBytesConfig(load_in_8bit=True, llm_int8_threshold=0.0)
    elif recipe.lora.quantize_base == "nf4":
        options["quantization_config"] = BitsAndBytesConfig(
            load_in_4bit=True,
            bnb_4bit_quant_type="nf4",
            bnb_4bit_use_double_quant=True,
            bnb_4bit_compute_dtype=torch.float32,
        )
    model: Any = AutoModelForCausalLM.from_pretrained(base, **options)
    torch.manual_seed(recipe.run.seed)
    settings = LoraConfig(
        r=4,
        lora_alpha=32,
        target_modules="all-linear",
        use_dora=recipe.lora.use_dora,
        modules_to_save=list(recipe.lora.modules_to_save) or None,
    )
    return get_peft_model(model, settings).base_model.model


def train_on_ranks(recipe: Recipe) -> dict[str, Any]:
    """Trains on one rank, with an evaluation before each step."""
    harness = RunHarness(recipe, MemoryRows(ROWS), NUM_STEPS)
    state = harness.train_state

    def evaluate(_: Any) -> None:
        plan, axis = plan_step(state.rows, state.batching, 0, 1000), state.groups.sp_axis
        batch = read_micro_batch(state.rows, plan, state.groups.dp_index, 0, axis.rank, axis.size)
        state.engine.compute_token_losses(batch)

    state.pre_step_hooks = (evaluate,)
    train(state)
    kinds = {type(module).__name__ for module in harness.built.module.modules()}
    frozen = {p.dtype for p in harness.built.module.parameters() if not p.requires_grad}
    results = {"losses": harness.losses, "norms": harness.norms, "weights": harness.read_plain_weights()}
    return {**results, "kinds": kinds, "frozen": frozen}


CASES = [
    (NF4, 2, 1, 2), (INT8, 2, 1, 2), (NF4, 2, 2, 1), (NF4, 1, 1, 1), (WHOLE, 2, 1, 3), (DORA, 2, 1, 2),
    (WHOLE, 1, 2, 2), (DORA, 1, 2, 1), (WHOLE, 2, 1, 1), (DORA, 2, 2, 2), (WHOLE, 2, 2, 3),
]  # fmt: skip
CHECKED = (CASES[0], CASES[1], CASES[4])
PARTS = {NF4: ("Linear4bit", torch.uint8), INT8: ("Linear8bitLt", torch.int8)}  # of a quantized base


@pytest.mark.parametrize(
    ("setting", "sp_size", "dp_size", "stage"),
    [pytest.param(*case, marks=mark_by(False, case in CHECKED)) for case in CASES],
)
@pytest.mark.parametrize("levers", [ALL_LEVERS, pytest.param((), marks=pytest.mark.full)], ids=["levers", "plain"])
def test_training_equals_peft_and_bitsandbytes(
    base: Path, setting: str, sp_size: int, dp_size: int, stage: int, levers: tuple[str, ...]
) -> None:
    words = (f"parallel.sp_size={sp_size}", f"parallel.dp_shard_size={dp_size}", f"parallel.zero_stage={stage}")
    recipe = make_case(base, setting, *words, f"train.gradient_accumulation_steps={2 // dp_size}", *levers)
    expected = train_as_planned(make_plain_model(base, recipe), MemoryRows(ROWS), recipe, NUM_STEPS)
    weights = {name.replace(".modules_to_save.default", ""): value for name, value in expected.weights.items()}
    for ours in run_on_ranks(sp_size * dp_size, train_on_ranks, recipe):
        assert ours["losses"] == pytest.approx(expected.losses, rel=1e-5)
        assert ours["norms"] == pytest.approx(expected.norms, rel=1e-5)
        assert measure_difference(ours["weights"], weights) < 1e-5
        if setting in PARTS:
            kind, dtype = PARTS[setting]
            assert kind in ours["kinds"]
            assert dtype in ours["frozen"]


@pytest.mark.full
@pytest.mark.parametrize(("words", "stage"), [((WHOLE,), 3), ((WHOLE, DORA), 2), ((NF4,), 2)])
def test_a_run_resumes_at_another_layout(base: Path, tmp_path: Path, words: tuple[str, ...], stage: int) -> None:
    split = make_case(base, *words, "parallel.sp_size=2", f"parallel.zero_stage={stage}")
    other, given = make_case(base, *words, "parallel.zero_stage=1"), (MemoryRows(ROWS), str(tmp_path), 2, 4)
    expected = run_on_ranks(2, train_and_save, split, *given)[0]
    resumed = run_on_ranks(1, resume, other, *given)[0]
    assert resumed.losses == pytest.approx(expected.losses, rel=1e-5)


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
    recipe = make_case(base, f"lora.adapter_name_or_path={tmp_path}", "parallel.sp_size=2")
    expected = {f"model.{name}": value for name, value in model.named_parameters() if value.requires_grad}
    for ours in run_on_ranks(2, read_start, recipe):
        assert measure_difference(ours, expected) == 0
