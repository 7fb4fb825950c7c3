"""Tests chats and tokenizers without a template before a run, and rows for added tokens.

A missing template is one problem that says how to set one. Rows are counted from files as the tokenizers library
numbers tokens.
"""

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.recipes import LLAMA, VALID
from support.tiers import sample_every
from support.tokenizers_trained import KINDS, train, wrap
from syrupy.assertion import SnapshotAssertion

from ulysses_cli.data.tokenizing.tokenizer import load_tokenizer, make_bytes_tokenizer
from ulysses_cli.hub import find_model_config, find_model_shape, find_tokenizer
from ulysses_cli.plan.ledger.weights import read_weights
from ulysses_cli.plan.models.model_files import compute_vocab_size, describe_bytes, predict_vocab_size, read_tokenizer
from ulysses_cli.plan.recipe.loader import parse_recipe
from ulysses_cli.plan.recipe.recipe import Model
from ulysses_cli.report.recipe import describe_plan, format_plan
from ulysses_cli.validate import validate_recipe

MARKERS = ["<|im_start|>", "<|im_end|>"]


def save_model(folder: Path, *, vocab_size: int | None = None, kind: str = "gpt2", **more: Any) -> int:
    """Saves a model's config and its tokenizer, without weights; returns the tokenizer's size."""
    tokenizer = wrap(train(kind), **more)
    tokenizer.save_pretrained(folder)
    (folder / "config.json").write_text(json.dumps({**LLAMA, "vocab_size": vocab_size or len(tokenizer)}))
    return len(tokenizer)


def find_problems(folder: Path, *overrides: str) -> list[Any]:
    override = (f"model.name_or_path={folder / 'm'}", f"run.output_dir={folder / 'out'}", *overrides)
    return list(validate_recipe("r.yaml", override, text=VALID).problems)


CHATS = "data.datasets.0.type=chat"


def test_one_problem_for_chats_without_a_template(tmp_path: Path, snapshot: SnapshotAssertion) -> None:
    save_model(tmp_path / "m")
    (problem,) = find_problems(tmp_path, CHATS)
    assert str(problem) == snapshot
    assert not find_problems(tmp_path, CHATS, "data.chat_template=chatml")
    assert not find_problems(tmp_path)
    assert not find_problems(tmp_path, CHATS, "data.chat_template={{ messages }}")
    text = VALID.replace("  max_length", "  chat_template: {{ messages }}\n  max_length")
    (problem,) = validate_recipe("r.yaml", [f"model.name_or_path={tmp_path / 'm'}"], text=text).problems
    assert str(problem) == snapshot


@pytest.mark.parametrize(
    "name", ["tokenizer_config.json", "chat_template.jinja", "chat_template.json"], ids=["settings", "file", "old file"]
)
def test_a_template_of_the_tokenizer_is_used(name: str, tmp_path: Path) -> None:
    save_model(tmp_path / "m")
    file = tmp_path / "m" / name
    given = {**json.loads(file.read_text()), "chat_template": "{{ messages }}"} if file.exists() else {}
    file.write_text(json.dumps(given) if given else "{{ messages }}")
    assert not find_problems(tmp_path, CHATS)


def test_the_first_row_of_a_file_shows_whether_it_holds_chats(tmp_path: Path) -> None:
    save_model(tmp_path / "m")
    for row, is_chat in (({"messages": []}, True), ({"conversations": []}, True), ({"text": "a"}, False)):
        (tmp_path / "d.jsonl").write_text(json.dumps(row) + "\n")
        assert len(find_problems(tmp_path, f"data.datasets.0.path={tmp_path / 'd.jsonl'}")) == is_chat


def test_markers_that_are_not_in_the_vocabulary(tmp_path: Path, snapshot: SnapshotAssertion) -> None:
    save_model(tmp_path / "m")
    (problem,) = find_problems(tmp_path, CHATS, "data.chat_template=gemma", 'data.added_tokens=["<x>"]')
    assert str(problem) == snapshot
    line = problem.hint.removeprefix("write ").replace(": ", "=", 1)
    assert not find_problems(tmp_path, CHATS, "data.chat_template=gemma", line)


@pytest.mark.parametrize(("spare", "grown"), [(0, 2), (1, 1), (5, 0)])
def test_the_shape_has_room_for_added_tokens(spare: int, grown: int, tmp_path: Path) -> None:
    size = save_model(tmp_path / "m")
    save_model(tmp_path / "m", vocab_size=size + spare)
    text = VALID.replace("owner/model", str(tmp_path / "m"))
    before = find_model_shape(parse_recipe(text).recipe).shape
    recipe = parse_recipe(text, "r.yaml", ['data.added_tokens=["<|im_end|>", "<a>", "<b>"]']).recipe
    after = find_model_shape(recipe).shape
    assert after.vocab_size == size + spare + grown
    num_before, num_after = (read_weights(each, None).num_elements for each in (before, after))
    assert num_after == num_before + 2 * grown * before.hidden_size
    assert find_model_config(recipe)[0]["vocab_size"] == after.vocab_size


def test_the_plan_says_how_new_rows_begin(tmp_path: Path, snapshot: SnapshotAssertion) -> None:
    size = save_model(tmp_path / "m")
    override = (f"model.name_or_path={tmp_path / 'm'}", f"run.output_dir={tmp_path / 'out'}")
    added = 'data.added_tokens=["<a>"]'
    for more in ((), (added,), (added, "lora.r=4")):
        shown = format_plan(describe_plan(validate_recipe("r.yaml", (*override, *more), text=VALID)))
        lines = [line for line in shown.splitlines() if line.startswith("vocabulary")]
        assert [line.replace(f"{size + 1} tokens", "one token more") for line in lines] == snapshot


def test_a_vocabulary_that_is_not_local_may_lack_rows() -> None:
    text = VALID.replace("owner/model", "meta-llama/Llama-3.1-8B")
    recipe = parse_recipe(text, "r.yaml", ['data.added_tokens=["<a>", "<b>"]']).recipe
    assert find_tokenizer(recipe) is None
    assert find_model_shape(recipe).shape.vocab_size == 128256 + 2


@pytest.mark.parametrize("kind", sample_every(4, KINDS))
def test_token_numbers_from_files_equal_the_librarys(kind: str, tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    wrap(train(kind), pad_token="<pad>").save_pretrained(tmp_path)
    facts = read_tokenizer(tmp_path, "t")
    words = st.sampled_from([*MARKERS, "<s>", "<pad>", "<a>", "<b>", "a", "the", "▁the"])

    @settings(max_examples=10)
    @given(st.lists(words, unique=True, max_size=5), st.integers(0, 900))
    def check(added: list[str], config_size: int) -> None:
        tokenizer = AutoTokenizer.from_pretrained(tmp_path)
        grown = load_tokenizer(Model(tokenizer=str(tmp_path)), make_data(added))
        ids = grown.convert_tokens_to_ids(added)
        assert facts.vocabulary.list_ids(added) == ids
        assert predict_vocab_size(config_size, added, facts) == compute_vocab_size(config_size, ids)
        assert max(ids, default=0) < len(grown)
        for token in added:
            assert grown(f"x{token}x", add_special_tokens=False)["input_ids"].count(ids[added.index(token)]) == 1
        assert len(grown) == len(tokenizer) + len(set(added) - set(tokenizer.get_vocab()))

    check()


def make_data(added: list[str]) -> Any:
    return parse_recipe(VALID, "r.yaml", [f"data.added_tokens={json.dumps(added)}"]).recipe.data


def test_the_embedded_tokenizer() -> None:
    assert dict(describe_bytes().vocabulary.ids) == make_bytes_tokenizer().get_vocab()
