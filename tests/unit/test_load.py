"""Tests that YAML text becomes a Recipe or every mistake with its place, whatever the text."""

import json
import re
from pathlib import Path

import pytest
import yaml
from hypothesis import example, given
from hypothesis import strategies as st
from support.recipes import VALID, check, load
from support.refusals import explain
from syrupy.assertion import SnapshotAssertion

from ulysses_cli.plan.problem import RecipeError
from ulysses_cli.plan.recipe.loader import load_recipe, parse_recipe
from ulysses_cli.plan.recipe.recipe import compute_recipe_hash
from ulysses_cli.plan.recipe.schema import inspect_annotation, parse_number, walk_settings


def complain(text: str, *overrides: str) -> list[str]:
    with pytest.raises(RecipeError) as caught:
        parse_recipe(text, "r.yaml", overrides)
    return [str(problem).strip() for problem in caught.value.problems]


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("500_000", 500_000), ("500K", 500_000), ("512Ki", 524_288), ("1M", 10**6), ("1.5K", 1500), ("-3", -3),
        ("1e-5", 1e-5), ("1e3", 1000.0), (".5", 0.5), ("1Kib", "1Kib"), ("0x10", "0x10"), ("1e", "1e"), ("", ""),
    ],
)  # fmt: skip
def test_numbers(text: str, value: object) -> None:
    assert parse_number(text) == value
    assert type(parse_number(text)) is type(value)


def test_every_alias_is_accepted_and_shown() -> None:
    samples = {
        "model.dtype": "float32", "data.added_tokens": "[a]", "lora.target_modules": "[q_proj]",
        "lora.modules_to_save": "[norm]", "lora.dropout": "0.5", "data.chat_template_kwargs": "{a: 1}",
        "preference.loss": "ipo",
    }  # fmt: skip
    num_aliases = 0
    for setting in walk_settings():
        for alias in setting.aliases if setting.key.count(".") == 1 else ():
            accepts, section = setting.accepts, setting.key.partition(".")[0]
            value = str(accepts.literals[0]) if accepts.literals else "true" if bool in accepts.scalars else "2"
            loaded = load(f"{section}.{alias}={samples.get(setting.key, value)}")
            assert setting.key in loaded.places, alias
            assert f"{section}.{alias} is understood as {setting.key}" in loaded.notes
            num_aliases += 1
    assert num_aliases > 30


def test_all_mistakes_at_once_in_the_order_of_the_file() -> None:
    result = complain(VALID + "  optim: x\n  warmup_steps: -1\nrun: {sed: 1}\n")
    assert [line.split(": ")[1] for line in result] == ["train.optim", "train.warmup_steps", "run.sed"]
    assert str(load().locate("parallel.zero_stage")) == "r.yaml:4:3"  # not written: the section's place


def test_the_hash_changes_with_settings_that_decide_values() -> None:
    base = compute_recipe_hash(load().recipe)
    for same in ("parallel.sp_size=2", "memory.tiled_mlp=true", "run.output_dir=x", "data.num_workers=2"):
        assert compute_recipe_hash(load(same).recipe) == base
    for other in ("train.learning_rate=1", "data.max_length=4Ki", "run.seed=1", "lora.r=4", "model.dtype=float32"):
        assert compute_recipe_hash(load(other).recipe) != base


YAML_WORDS = ["model: ", "data: ", "deepspeed:", "rope_scaling:", "max_length", "null", "true", "1e999", "500K", "é"]
YAML_MARKS = ["  ", "\n", "<<: ", ": ", "? ", "- ", "&a ", "*a", *"{}[]|>'\"#%@="]
YAML_TRAPS = ["!!python/object:x ", "!x ", "\x00", "\t", "\u2028", "\\0", "--- ", "..."]
YAML_BITS = st.sampled_from([*YAML_WORDS, *YAML_MARKS, *YAML_TRAPS])


@pytest.mark.check
@given(
    st.one_of(st.text(max_size=200), st.lists(YAML_BITS, max_size=40).map("".join)),
    st.lists(st.text(max_size=20), max_size=2),
)
@example("a: " + "[" * 5000, [])
@example("model: {config: &a {x: *a}}", [])
@example("a: &a [1]\nb: &b [*a, *a]\n", ["b=&c [*c]"])
@example('model: {name_or_path: "\\0"}', [])
@example("run: {seed: 1e400}\ntrain: {learning_rate: .nan}", [])
@example("x: !!binary ????", ["run.max_cost=9" + "9" * 38 + "T"])
def test_no_text_raises_anything_but_recipe_error(text: str, overrides: list[str]) -> None:
    try:
        parse_recipe(text, "r.yaml", overrides)
    except RecipeError as error:
        assert error.problems
        assert all(problem.message for problem in error.problems)


SECTIONS = st.dictionaries(
    st.sampled_from([setting.key for setting in walk_settings() if setting.key.count(".") == 1]),
    st.one_of(
        st.integers(), st.floats(), st.booleans(), st.text(max_size=5), st.none(), st.lists(st.integers(), max_size=2)
    ),
    max_size=6,
)


@given(SECTIONS)
def test_no_value_raises_anything_but_recipe_error(values: dict[str, object]) -> None:
    overrides = [f"{key}={json.dumps(value)}" for key, value in values.items()]
    try:
        load(*overrides)
    except RecipeError as error:
        assert {re.sub(r"\.\d+$", "", problem.key) for problem in error.problems} <= values.keys() | {"data.datasets"}


def test_text_on_the_command_line_stays_as_typed() -> None:
    odd = ["*.jsonl", "&c", "@x", "%d", "!x", "#5", "`a`", "|", "> x", "[ab]*.jsonl", "{a,b}.jsonl", "a: b", "a #b"]
    for text in odd:
        assert load(f"data.datasets.0.path={text}").recipe.data.datasets[0].path == text
    assert load("data.chat_template={{ a }}").recipe.data.chat_template == "{{ a }}"
    assert load("run.output_dir=[a, b]").recipe.run.output_dir == "[a, b]"
    assert load("run.run_name='a b'").recipe.run.run_name == "a b"
    assert load("run.run_name=null").recipe.run.run_name is None
    assert load("deepspeed.comms_logger=*").recipe.deepspeed == {"comms_logger": "*"}


@pytest.mark.parametrize("name", ["datasets", "eval_datasets"])
def test_a_path_stands_for_a_source_and_a_source_for_a_list_of_one(name: str) -> None:
    empty = "model: {name_or_path: tiny}\ndata:\n  max_length: 64\n"
    empty += "" if name == "datasets" else "  datasets: {path: d}\n"
    for value in ("d.jsonl", "[d.jsonl]", "{path: d.jsonl}", "[{path: d.jsonl}]", "\n  - d.jsonl"):
        written = parse_recipe(f"{empty}  {name}: {value}\n").recipe
        assert [source.path for source in getattr(written.data, name)] == ["d.jsonl"]
    for words in ([f"{name}=d.jsonl"], [f"{name}=[d.jsonl]"], [f"{name}.0=d.jsonl"], [f"{name}.0.path=d.jsonl"]):
        loaded = parse_recipe(empty, overrides=[f"data.{word}" for word in words])
        assert [source.path for source in getattr(loaded.recipe.data, name)] == ["d.jsonl"]
    words = [f"data.{name}=owner/hub", f"data.{name}.0.split=test", f"data.{name}.1=b.jsonl"]
    sources = getattr(parse_recipe(empty, overrides=words).recipe.data, name)
    assert [(source.path, source.split) for source in sources] == [("owner/hub", "test"), ("b.jsonl", "train")]


def test_a_file_a_text_and_brackets_have_a_bound(tmp_path: Path, snapshot: SnapshotAssertion) -> None:
    (tmp_path / "large.yaml").write_bytes(b"#" * (1 << 21))
    (tmp_path / "over.yaml").write_text(f"extends: {'x' * 5000}\n")
    assert [
        *(explain(load_recipe, tmp_path / name) for name in ("large.yaml", "over.yaml")),
        *complain(VALID, f"run.run_name={'x' * 5000}"),
        *map(str, check(f"run.sample_prompts=[{'a' * 20_001}]")),
        *complain(VALID + "run: " + "[" * 100_000),
    ] == snapshot


def test_no_hint_repeats_what_a_setting_is() -> None:
    docs = {setting.doc for setting in walk_settings()}
    keys = [setting.key for setting in walk_settings() if "." in setting.key and not setting.accepts.section]
    for value in ("{a: 1}", "[]", "null", "''", "x", "-1", "1.5", "true"):
        with pytest.raises(RecipeError) as caught:
            load(*(f"{key.replace('[]', '.0')}={value}" for key in keys if not key.startswith("data.datasets")))
        assert len(caught.value.problems) > 10
        assert not docs & {problem.hint for problem in caught.value.problems}


CONTROLS = ["\n", "\r", "\t", "\x1b", "\x85", "\u2028", "\u2029", "\x7f"]


@pytest.mark.parametrize("letter", CONTROLS)
def test_no_text_holds_a_control_character(letter: str, snapshot: SnapshotAssertion) -> None:
    """One rule for every setting that takes a text, in a file and on a command line, except texts of several lines."""
    base = yaml.safe_load(VALID.replace("8Ki", "8192"))
    exempt, said = set(), set()
    for setting in walk_settings():
        section, _, name = setting.key.partition(".")
        is_text, item = setting.accepts.is_text, setting.accepts.item
        if not name or "." in name or "[]" in name:
            continue
        if not is_text and (item is None or not inspect_annotation(item).is_text):
            continue
        value = f"a{letter}b" if is_text else [f"a{letter}b"]
        text = json.dumps(base | {section: (base.get(section) or {}) | {name: value}})
        override = f"{setting.key}={json.dumps(value)}"
        for written, overrides in ((text, ()), (VALID, (override,))):
            try:
                parse_recipe(written, "r.yaml", overrides)
                exempt.add(setting.key)
            except RecipeError as error:
                (problem,) = (each for each in error.problems if each.key.startswith(setting.key))
                said.add(problem.message)
    assert said == snapshot
    assert exempt == {"data.chat_template", "data.added_tokens", "run.sample_prompts"}


@pytest.mark.parametrize("letter", CONTROLS)
def test_no_key_override_or_name_of_a_file_holds_one(letter: str, tmp_path: Path, snapshot: SnapshotAssertion) -> None:
    odd = json.dumps(f"a{letter}b")
    for override in (f"train.max_steps=3{letter}", f"deepspeed.a{letter}b=1", f"data.datasets.0.path=x{letter}y"):
        assert len(complain(VALID, override)) == 1
    file = tmp_path / f"r{letter}.yaml"
    file.write_text(VALID)
    assert [
        *(complain(f"{VALID}\ndeepspeed: {text}")[0] for text in (f"{{{odd}: 1}}", f"{{a: {odd}}}")),
        explain(load_recipe, file).partition(": ")[2],
    ] == snapshot
