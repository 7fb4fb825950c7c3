"""`ulysses models`: the list, one model, one family, and names that are not known."""

import json
from pathlib import Path

import pytest
from support.commands import run
from support.model_shapes import get_shape
from support.paths import ROOT
from support.recipes import VALID

from ulysses_cli.plan.models.families import FAMILIES, REFUSED_FAMILIES, find_text_types
from ulysses_cli.plan.recipe.loader import load_recipe
from ulysses_cli.plan.resolved import choose_layout

QWEN_3_5 = {
    "model_type": "qwen3_5",
    "text_config": {
        "model_type": "qwen3_5_text", "hidden_size": 4096, "intermediate_size": 12288, "num_hidden_layers": 8,
        "num_attention_heads": 20, "num_key_value_heads": 4, "head_dim": 256, "vocab_size": 1000,
        "max_position_embeddings": 32768,
    },
}  # fmt: skip


def test_the_list_names_every_family() -> None:
    listed = json.loads(run("models", "--format", "json").stdout)
    assert listed["families"] == list(FAMILIES)
    assert listed["refused"] == REFUSED_FAMILIES
    assert not FAMILIES.keys() & REFUSED_FAMILIES
    assert all(model["is_served"] for model in listed["models"])
    text = run("models").stdout
    assert text.startswith(f"{len(FAMILIES)} families are exact on rows that are split over ranks:\nllama, ")
    assert "phimoe" in text


def test_one_model_shows_its_layers_and_what_splits_them(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(QWEN_3_5))
    assert run("models", str(tmp_path)).stdout.splitlines()[1:] == [
        "family        qwen3_5_text",
        "parameters    1.76 B",
        "layers        6 x gated delta net, MLP",
        "              2 x full attention, MLP",
        "heads         20 attention heads of 256 over 4",
        "              32 linear attention heads",
        "sp sizes      1, 2, 4 by heads alone",
        "              no others by a ring: linear attention layers need the tokens of a row in order",
        "positions     32,768: a longer row needs model.rope_scaling",
        "licence gate  not known",
        "served        yes, exactly",
    ]
    model = json.loads(run("models", "meta-llama/Llama-3.1-8B", "--format", "json").stdout)
    assert (model["gated"], model["sp_sizes"], model["refused"]) == (True, [1, 2, 4, 8, 16, 32], "")


def read_line(name: str, label: str) -> str:
    (line,) = (line for line in run("models", name).stdout.splitlines() if line.startswith(label))
    return line.removeprefix(label).strip()


def test_a_ring_reaches_the_sizes_that_heads_do_not() -> None:
    """28 heads on 8 ranks are ring 2 x 4, as a recipe ships it; beyond a machine a ring keeps heads inside."""
    lines = run("models", "Qwen/Qwen2.5-7B").stdout.splitlines()
    at = lines.index("sp sizes      1, 2, 4, 7, 14, 28 by heads alone")
    assert lines[at + 1].strip() == (
        "any other with a ring; auto takes 2 by heads, 4 by heads, 8 = ring 2 x 4, 16 = ring 4 x 4, 32 = ring 8 x 4"
    )
    recipe = load_recipe(ROOT / "recipes" / "qwen2.5-7b-128k-8gpu.yaml").recipe
    model = json.loads(run("models", "Qwen/Qwen2.5-7B", "--format", "json").stdout)
    assert choose_layout(recipe, get_shape("Qwen/Qwen2.5-7B")).ring_size == model["auto_rings"]["8"] == 2
    many = run("models", "deepseek-ai/DeepSeek-V3").stdout
    assert "8 by heads, 16 by heads, 32 by heads" in many, "its keys are more bytes than its heads"


@pytest.mark.check
def test_what_a_row_past_the_positions_asks_for() -> None:
    positions = {name: read_line(name, "positions") for name in ("Qwen/Qwen3-4B", "microsoft/Phi-4-mini-instruct")}
    assert positions["Qwen/Qwen3-4B"].endswith(": a longer row needs model.rope_scaling")
    own = "131,072: no longer row, since positions of its own kind (longrope) would be taken away"
    assert positions["microsoft/Phi-4-mini-instruct"] == own
    none = "262,144: a longer row needs no stretch, since there are no rotary positions"
    assert read_line("nvidia/NVIDIA-Nemotron-3-Nano-30B-A3B-BF16", "positions") == none


def test_a_plan_says_that_rows_are_longer_than_what_needs_no_stretch_was_made_for(tmp_path: Path) -> None:
    recipe = tmp_path / "r.yaml"
    recipe.write_text(VALID.replace("owner/model", "nvidia/NVIDIA-Nemotron-3-Nano-30B-A3B-BF16"))
    line = "rows are longer than the 262,144 tokens that the model was made for; it has no rotary positions to stretch"
    long, short = (run("validate-config", str(recipe), f"data.max_length={n}").stdout for n in ("1Mi", "256Ki"))
    assert f"positions   {line}" in long
    assert "positions  " not in short


def test_a_plan_shows_the_base_of_positions_and_what_such_rows_need(tmp_path: Path) -> None:
    """0.0424 x 65536^1.628 = 2,942,000 (arXiv 2405.14591)."""
    recipe = tmp_path / "r.yaml"
    recipe.write_text(VALID.replace("owner/model", "meta-llama/Meta-Llama-3-8B"))
    low, enough = (
        run("validate-config", str(recipe), "data.max_length=64Ki", f"model.rope_theta={base}").stdout
        for base in ("1e6", "8M")
    )
    need = "arXiv 2405.14591 finds 2,900,000 necessary for such rows"
    assert f"positions   base 1,000,000, the model's own is 500,000; {need}\n" in low
    assert "positions   base 8,000,000, the model's own is 500,000\n" in enough


def test_a_refused_model_says_why(tmp_path: Path) -> None:
    config = QWEN_3_5["text_config"]
    (tmp_path / "config.json").write_text(json.dumps({**config, "model_type": "deepseek_v32"}))
    why = "an indexer chooses the keys of each token, which no kernel here does"
    assert f"served        no: {why}" in run("models", str(tmp_path)).stdout
    (tmp_path / "config.json").write_text(json.dumps({**config, "model_type": "novel"}))
    assert "served        on one rank per row only: model type novel is not" in run("models", str(tmp_path)).stdout
    assert run("models", "deepseek_v32").stdout == f"deepseek_v32 is refused where a row is split over ranks: {why}\n"


def test_one_family_lists_its_models() -> None:
    assert "LiquidAI/LFM2-1.2B" in run("models", "lfm2").stdout
    assert "No model of it is in the table" in run("models", "arcee").stdout


@pytest.mark.check
def test_a_multimodal_model_answers_as_its_text_part() -> None:
    lines = run("models", "qwen3_5_moe").stdout.splitlines()
    assert lines[0] == "qwen3_5_moe is a multimodal model. Its text part is trained; the rest stays as it was."
    assert lines[1:] == run("models", "qwen3_5_moe_text").stdout.splitlines()
    listed = json.loads(run("models", "llama4", "--format", "json").stdout)
    assert (listed["families"], listed["refused"]) == ([], {"llama4_text": REFUSED_FAMILIES["llama4_text"]})
    assert find_text_types("mistral3", FAMILIES) == ("mistral", "ministral3")
    assert not find_text_types("llama", FAMILIES)


def test_an_unknown_name() -> None:
    result = run("models", "nobody/nothing")
    assert (result.returncode, result.stdout) == (2, "")
    assert result.stderr.startswith("NAME: config.json of nobody/nothing is not on this machine")
