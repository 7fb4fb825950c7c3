"""Trains a model that grows by added tokens on ranks, against a plain model grown by transformers, and loads its export
with plain transformers."""

import copy
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from support.exports import run_card
from support.rank_pool import run_on_ranks
from support.run_harness import RunHarness
from support.tokenizers_trained import train, wrap
from support.training import CONFIG, MemoryRows, make_recipe, measure_difference, plan_rows, train_plainly
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from ulysses_cli.data.tokenizing.tokenizer import load_tokenizer
from ulysses_cli.hub import find_model_shape
from ulysses_cli.plan.ledger.weights import read_weights
from ulysses_cli.plan.models.shape import ModelShape
from ulysses_cli.plan.recipe.recipe import Recipe
from ulysses_cli.plan.secrets import mask_secrets
from ulysses_cli.train.export.job import ExportJob
from ulysses_cli.train.model.loading import load_model_config, read_shape

ADDED = ("<|im_start|>", "<|turn|>", "<|stop|>")  # the first is in the vocabulary already
NUM_STEPS = 3


def save_base(folder: Path, *, is_tied: bool) -> int:
    """Saves a model whose embedding has exactly one row for each token; returns the number of rows."""
    tokenizer = wrap(train("qwen"))
    tokenizer.save_pretrained(folder)
    torch.manual_seed(7)
    config = AutoConfig.for_model(**{**CONFIG, "vocab_size": len(tokenizer), "tie_word_embeddings": is_tied})
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    return len(tokenizer)


def make_grown_recipe(folder: Path, *overrides: str) -> Recipe:
    added = f"data.added_tokens={json.dumps(ADDED)}"
    where = ("model.config=null", f"model.name_or_path={folder}", "model.tokenizer=null")
    return make_recipe(*where, added, "data.chat_template=chatml", "train.lr_scheduler_type=constant", *overrides)


def make_rows(vocabulary: int) -> MemoryRows:
    """Yields documents in which the new tokens occur."""
    rows = MemoryRows([[(20, 0), (9, 3)], [(30, 0)], [(16, 5), (12, 0)], [(25, 0)]], vocabulary)
    for documents in rows.documents:
        for tokens, labels in documents:
            tokens[2], tokens[5], labels[1] = vocabulary - 1, vocabulary - 2, vocabulary - 1
    return rows


def grow_with_transformers(folder: Path, num_own: int, vocabulary: int) -> Any:
    model = AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager", dtype=torch.float32)
    model.resize_token_embeddings(vocabulary, mean_resizing=False)
    for part in (model.get_input_embeddings(), model.get_output_embeddings()):
        part.weight.data[num_own:] = part.weight.data[:num_own].double().mean(0).float()
    return model


def train_on_ranks(recipe: Recipe, shape: ModelShape, run_dir: str) -> tuple[dict[str, torch.Tensor], list[float]]:
    from ulysses_cli.train.loop import train as train_course

    harness = RunHarness(recipe, make_rows(shape.vocab_size), NUM_STEPS, run_dir, shape=shape)
    train_course(harness.train_state)
    harness.saves.save_last(harness.train_state)
    return harness.read_weights(), harness.losses


@pytest.mark.parametrize(
    ("stage", "is_tied", "lora"),
    [pytest.param(3, False, True, marks=pytest.mark.check), pytest.param(3, False, False, marks=pytest.mark.full),
     pytest.param(3, True, False, marks=pytest.mark.full), pytest.param(1, True, False, marks=pytest.mark.full),
     pytest.param(2, False, False, marks=pytest.mark.full), pytest.param(1, True, True, marks=pytest.mark.full)],
)  # fmt: skip
def test_a_grown_model(stage: int, is_tied: bool, lora: bool, tmp_path: Path) -> None:
    num_own = save_base(tmp_path / "base", is_tied=is_tied)
    more = ["lora.r=4", "lora.alpha=8"] if lora else []
    recipe = make_grown_recipe(tmp_path / "base", f"parallel.zero_stage={stage}", "parallel.dp_shard_size=2", *more)
    shape = read_shape(recipe, load_model_config(recipe), load_tokenizer(recipe.model, recipe.data))
    assert shape.vocab_size == num_own + 2
    found = find_model_shape(recipe).shape  # what the ledger counts before a run
    assert found is not None
    assert replace(found, config=shape.config) == shape
    counted = read_weights(shape, None).num_elements
    plain = grow_with_transformers(tmp_path / "base", num_own, shape.vocab_size)
    assert counted == read_weights(shape, None).num_elements == sum(p.numel() for p in plain.parameters())

    (tmp_path / "run").mkdir()
    results = run_on_ranks(2, train_on_ranks, recipe, shape, str(tmp_path / "run"))
    if lora:
        from peft import LoraConfig, get_peft_model

        torch.manual_seed(recipe.run.seed)
        get_peft_model(plain, LoraConfig(r=4, lora_alpha=8, target_modules="all-linear"))
    rows = make_rows(shape.vocab_size)
    steps, rates = plan_rows(recipe, shape, rows, NUM_STEPS), [recipe.train.learning_rate] * NUM_STEPS
    expected = train_plainly(plain, rows, steps, recipe, rates)
    for weights, losses in results:
        ours = {name.removeprefix("model."): value for name, value in weights.items()}
        ours = {name if name.startswith(("model.", "lm_head")) else f"model.{name}": v for name, v in ours.items()}
        reference = {name if name.startswith(("model.", "lm_head")) else f"model.{name}": v
                  for name, v in expected.weights.items()}  # fmt: skip
        assert measure_difference(ours, reference) < 1e-5
        assert losses == pytest.approx(expected.losses, rel=1e-5)
    check_export(tmp_path, recipe, plain, shape, is_merged=False)
    if lora:
        check_export(tmp_path, recipe, plain, shape, is_merged=True)


def check_export(tmp_path: Path, recipe: Recipe, plain: Any, shape: ModelShape, *, is_merged: bool) -> None:
    """Checks that model, tokenizer and config agree, and that plain transformers computes the trained model's logits
    from them."""
    checkpoint = next((tmp_path / "run" / "checkpoints").glob("step-*"))
    template = load_tokenizer(recipe.model, recipe.data).chat_template
    facts = {
        "step": 1, "recipe": recipe.model_dump(mode="json"), "chat_template": template, "turn_ends": ["<|im_end|>"],
    }  # fmt: skip
    state = mask_secrets(facts)
    to = tmp_path / f"to-{is_merged}"
    job = ExportJob(checkpoint, state, None, is_merged, trusts_code=False)
    job.run(to, lambda _: None)
    tokenizer = AutoTokenizer.from_pretrained(to)
    ids = tokenizer.convert_tokens_to_ids(list(ADDED))
    assert ids[1:] == [shape.vocab_size - 2, shape.vocab_size - 1]
    assert len(tokenizer) == shape.vocab_size
    assert (to / "chat_template.jinja").read_text() == template
    card = (to / "README.md").read_text()
    assert "base_model" not in card
    assert str(tmp_path) not in card
    if recipe.lora is not None and not is_merged:
        loaded = run_card(to, tmp_path / "base")
    else:
        loaded = AutoModelForCausalLM.from_pretrained(to)
        assert loaded.config.vocab_size == shape.vocab_size
        assert loaded.generation_config.eos_token_id[-1] == tokenizer.convert_tokens_to_ids("<|im_end|>")
    assert loaded.get_input_embeddings().weight.shape[0] == shape.vocab_size
    probe = torch.tensor([[1, 5, *ids, 7, ids[2], 9]])
    with torch.no_grad():
        ours, expected = (one.eval()(probe, use_cache=False).logits.double() for one in (loaded, copy.deepcopy(plain)))
    assert ((ours - expected).norm() / expected.norm()).item() < 1e-5
