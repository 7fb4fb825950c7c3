"""Tests that YAML text becomes a Recipe or every mistake with its place, whatever the text."""

import json
import re
from pathlib import Path

import pytest
import yaml
from hypothesis import example, given
from hypothesis import strategies as st
from support.recipes import VALID, load

from ulysses_cli.plan.problem import RecipeError
from ulysses_cli.plan.recipe.loader import load_recipe, parse_recipe
from ulysses_cli.plan.recipe.recipe import compute_recipe_hash
from ulysses_cli.plan.recipe.schema import inspect_annotation, parse_number, walk_settings


def complain(text: str, *overrides: str) -> list[str]:
    with pytest.raises(RecipeError) as caught:
        parse_recipe(text, "r.yaml", overrides)
    return [str(problem).strip() for problem in caught.value.problems]


def test_a_small_recipe_loads() -> None:
    loaded = load()
    assert loaded.recipe.data.max_length == 8192
    assert loaded.recipe.parallel.sp_size == 4
    assert (loaded.places["parallel.sp_size"].line, loaded.places["parallel.sp_size"].column) == (4, 12)
    assert str(loaded.locate("parallel.zero_stage")) == "r.yaml:4:3"  # not written: the section's place


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("500_000", 500_000),
        ("500K", 500_000),
        ("512Ki", 524_288),
        ("1M", 10**6),
        ("1.5K", 1500),
        ("-3", -3),
        ("1e-5", 1e-5),
        ("1e3", 1000.0),
        (".5", 0.5),
        ("1Kib", "1Kib"),
        ("0x10", "0x10"),
        ("1e", "1e"),
        ("", ""),
    ],
)
def test_numbers(text: str, value: object) -> None:
    assert parse_number(text) == value
    assert type(parse_number(text)) is type(value)


def test_a_scalar_is_read_as_its_setting_expects() -> None:
    recipe = load("model.revision=1e5", "train.learning_rate=1", "train.max_steps=1e3", "run.run_name=500K").recipe
    assert (recipe.model.revision, recipe.run.run_name) == ("1e5", "500K")
    assert (recipe.train.learning_rate, recipe.train.max_steps) == (1.0, 1000)
    assert isinstance(recipe.train.learning_rate, float)


def test_spellings_of_values() -> None:
    recipe = load(
        "model.bf16=false", "data.packing=off", "memory.offload_optimizer=null", "train.optim=adamw_torch"
    ).recipe
    assert recipe.model.dtype == "float32"
    assert load("model.bf16=true").recipe.model.dtype == "bfloat16"
    assert recipe.data.packing == "off"
    assert recipe.memory.offload_optimizer == "none"
    assert recipe.train.optim == "adamw"
    assert load("data.sample_packing=true").recipe.data.packing == "documents"


def test_every_alias_is_accepted_and_shown() -> None:
    samples = {
        "model.dtype": "float32",
        "data.added_tokens": "[a]",
        "lora.target_modules": "[q_proj]",
        "lora.modules_to_save": "[norm]",
        "lora.dropout": "0.5",
        "data.chat_template_kwargs": "{a: 1}",
    }
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


def test_an_override_wins_over_any_name_of_its_setting() -> None:
    text = VALID.replace("sp_size", "ulysses_size")
    assert load("parallel.sp_size=2", text=text).recipe.parallel.sp_size == 2
    assert load("data.datasets.0.path=other/set").recipe.data.datasets[0].path == "other/set"
    assert load("lora.r=8").recipe.lora is not None
    assert load("lora.r=8", "lora=null").recipe.lora is None
    assert load("deepspeed.a.b=1").recipe.deepspeed == {"a": {"b": 1}}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            VALID + "trian:\n  max_steps: 3\n",
            "r.yaml:11:1: trian: unknown key\n\nhint: did you mean train?",
        ),
        (
            VALID + "  max_stps: 3\n",
            "r.yaml:11:3: train.max_stps: unknown key\n\nhint: did you mean train.max_steps?",
        ),
        (
            VALID + "  max_length: 3\n",
            "r.yaml:11:3: train.max_length: unknown key\n\nhint: write it as data.max_length",
        ),
        (
            VALID + "max_seq_len: 3\n",
            "r.yaml:11:1: max_seq_len: unknown key\n\nhint: write it as data.max_length",
        ),
        (
            VALID + "  max_steps: 3\n",
            "r.yaml:11:3: train.max_steps: written twice, first in line 10\n\nhint: keep one of the two",
        ),
        (
            VALID + "  optim: admw\n",
            "r.yaml:11:10: train.optim: 'admw' is not `adamw` or `adamw_8bit`\n\nhint: did you mean `adamw`?",
        ),
        (
            VALID + "  micro_batch_size: 0\n",
            "r.yaml:11:21: train.per_device_train_batch_size: 0 is not a whole number from 1 to 65,536 (rows)\n\n"
            "hint: use 1 or more",
        ),
        (
            VALID + "  micro_batch_size: '2'\n",
            "r.yaml:11:21: train.per_device_train_batch_size: '2' is not a whole number from 1 to 65,536 (rows)\n\n"
            "hint: take the quotes away",
        ),
        (
            VALID + "memory: {tiled_mlp: yes}\n",
            "r.yaml:11:21: memory.tiled_mlp: 'yes' is not `auto`, true or false\n\nhint: write true or false",
        ),
        (
            VALID + "run: {seed: !!python/object/apply:os.system [ls]}\n",
            "r.yaml:11:13: run.seed: the tag tag:yaml.org,2002:python/object/apply:os.system is refused: "
            "a recipe is plain data\n\nhint: remove the tag",
        ),
        (
            VALID + "parallel: {context_parallel_size: 2, sp_size: 2}\n",
            "r.yaml:11:1: parallel: written twice, first in line 3\n\nhint: keep one of the two",
        ),
        (
            VALID.replace("  sp_size: 4\n", "  sp_size: 4\n  ulysses_size: 4\n"),
            "r.yaml:5:3: parallel.ulysses_size: says again what parallel.sp_size says\n\nhint: keep one of the two",
        ),
        (
            VALID.replace("  name_or_path: owner/model\n", "  attn_implementation: eager\n"),
            "r.yaml:2:24: model.attn_implementation: eager is refused\n\nhint: use auto; eager attention builds a "
            "[sequence, sequence] matrix per head: 512 GiB at 512Ki",
        ),
        (VALID + "  [", "r.yaml:11:3: not valid YAML: expected <block end>, but found '['"),
        (
            "a: [",
            "r.yaml:1:5: not valid YAML: expected the node content, but found '<stream end>'\n\n"
            "hint: close the bracket, or write what is missing here",
        ),
        ("- a\n", "r.yaml:1:1: a recipe is a mapping of sections\n\nhint: start with `model:`"),
    ],
)
def test_mistakes(text: str, message: str) -> None:
    assert complain(text) == [message]


@pytest.mark.parametrize(
    ("override", "message"),
    [
        (
            "max_steps",
            "command line: max_steps: has no value\n\nhint: write train.max_steps=VALUE",
        ),
        ("train.max_stps=3", "command line: train.max_stps: unknown key\n\nhint: did you mean train.max_steps?"),
        (
            "data.datasets.7.path=x",
            "command line: data.datasets.7.path: data.datasets has no element `7`\n\n"
            "hint: it has 1 element, counted from 0; data.datasets.1 adds one",
        ),
        (
            "data.datasets.path=x",
            "command line: data.datasets.path: data.datasets has no element `path`\n\n"
            "hint: count its elements from 0: data.datasets.0.path",
        ),
        (
            "train.max_steps.x=3",
            "command line: train.max_steps.x: train.max_steps has no element `x`\n\nhint: write train.max_steps=VALUE",
        ),
        ("=3", "command line: '=3' names no setting\n\nhint: write section.key=value, as in train.max_steps=10"),
        (
            "run.report_to=[",
            "command line: run.report_to: not valid YAML: expected the node content, but found '<stream end>'\n\n"
            "hint: lists are [a, b], mappings {a: b}; quote what YAML reads as its own, such as '*.jsonl'",
        ),
    ],
)
def test_mistakes_in_overrides(override: str, message: str) -> None:
    assert complain(VALID, override) == [message]


def test_all_mistakes_at_once_in_the_order_of_the_file() -> None:
    result = complain(VALID + "  optim: x\n  warmup_steps: -1\nrun: {sed: 1}\n")
    assert [line.split(": ")[1] for line in result] == ["train.optim", "train.warmup_steps", "run.sed"]


def test_missing_sections_list_their_settings() -> None:
    result = complain("")
    assert result[0].startswith(
        "r.yaml:1:1: model: required and not written\n\nhint: write model, a section with name_or"
    )
    assert complain("model: {name_or_path: x}\ndata: {max_length: 8}\n") == [
        "r.yaml:2:7: data.datasets: required and not written\n\n"
        "hint: write datasets, a list, each element with path, name, split, type, columns, data_files, weight, share, "
        "min_tokens, max_tokens, train_field, chat_template_kwargs, join_files, streaming"
    ]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("lora:", "r.yaml:11:6: lora: is empty\n\nhint: write lora: {} for its defaults or lora: null for none"),
        ("memory:", "r.yaml:11:8: memory: is empty\n\nhint: write memory: {} for its defaults"),
        (
            "run: {output_dir: null}",
            "r.yaml:11:19: run.output_dir: null is not text (path)\n\nhint: leave it out for runs/default, its default",
        ),
        (
            "run: {report_to: wandbb}",
            "r.yaml:11:18: run.report_to.0: 'wandbb' is not `tensorboard`, `wandb`, `mlflow` or `trackio`"
            "\n\nhint: did you mean `wandb`?",
        ),
        (
            "run: {max_hours: 30m}",
            "r.yaml:11:18: run.max_hours: '30m' is not a number above 0 to 100,000 or null (hours)\n\n"
            "hint: write a plain number, such as 10, 0.01 or 1e-5",
        ),
        (
            "\trun: {}",
            "r.yaml:11:1: not valid YAML: found character '\\t' that cannot start any token\n\n"
            "hint: indent with spaces; YAML takes no tabs",
        ),
        (
            "run: {a: \x07}",
            "r.yaml:11:10: not valid YAML: character '\\x07' is not allowed\n\n"
            "hint: remove it; an editor may not show it",
        ),
        ("run {}", "r.yaml:11:1: not valid YAML: could not find expected ':'\n\nhint: a setting is written key: value"),
        ("run: " + "[" * 100_000, "r.yaml:1:1: not valid YAML: nested too deeply"),
    ],
    ids=lambda value: value[:40],
)
def test_more_mistakes(line: str, message: str) -> None:
    assert complain(VALID + line + "\n") == [message]


def test_true_is_not_the_number_1() -> None:
    assert complain(VALID, "parallel.zero_stage=true")[0].startswith(
        "command line: parallel.zero_stage: true is not `1`, `2` or `3`"
    )


def test_an_override_changes_one_place_of_an_anchor() -> None:
    text = VALID.replace(
        "  datasets:\n    - path: owner/texts\n", "  datasets: &d [{path: a/b}]\n  eval_datasets: *d\n"
    )
    data = load("data.eval_datasets.0.path=c/d", text=text).recipe.data
    assert (data.datasets[0].path, data.eval_datasets[0].path) == ("a/b", "c/d")


def test_rules_check_what_can_be_read(tmp_path: Path) -> None:
    from ulysses_cli.validate import validate_recipe

    file = tmp_path / "r.yaml"
    file.write_text(
        VALID.replace("owner/model", "Qwen/Qwen3-8B").replace("sp_size: 4", "sp_size: 7") + "  max_stps: 3\n"
    )
    assert [problem.key for problem in validate_recipe(str(file)).problems] == ["data.max_length", "train.max_stps"]


def test_written_keys_win_over_merged_mappings() -> None:
    text = VALID.replace("train:\n", "train:\n  <<: {max_steps: 3, warmup_steps: 2}\n")
    assert load(text=text).recipe.train.max_steps == 10
    assert load(text=text).recipe.train.warmup_steps == 2


def test_files_that_are_no_recipes(tmp_path: Path) -> None:
    binary, missing, huge = tmp_path / "a.yaml", tmp_path / "b.yaml", tmp_path / "c.yaml"
    binary.write_bytes(b"model:\n  \xff\xfe")
    huge.write_bytes(b"#" * (1 << 21))
    for file, reason in (
        (binary, "not UTF-8 text"),
        (missing, "No such file"),
        (huge, "not a recipe"),
        (tmp_path, "directory"),
    ):
        with pytest.raises(RecipeError, match=reason):
            load_recipe(file)


def test_the_hash_changes_with_settings_that_decide_values() -> None:
    base = compute_recipe_hash(load().recipe)
    for same in ("parallel.sp_size=2", "memory.tiled_mlp=true", "run.output_dir=x", "data.num_workers=2"):
        assert compute_recipe_hash(load(same).recipe) == base
    for other in ("train.learning_rate=1", "data.max_length=4Ki", "run.seed=1", "lora.r=4", "model.dtype=float32"):
        assert compute_recipe_hash(load(other).recipe) != base


YAML_WORDS = ["model: ", "data: ", "deepspeed:", "rope_scaling:", "max_length", "null", "true", "1e999", "500K", "é"]
YAML_MARKS = [
    "  ",
    "\n",
    "- ",
    "&a ",
    "*a",
    "<<: ",
    "{",
    "}",
    "[",
    "]",
    ": ",
    "? ",
    "|",
    ">",
    "'",
    '"',
    "#",
    "%",
    "@",
    "=",
]
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
        keys = {re.sub(r"\.\d+$", "", problem.key) for problem in error.problems}
        assert keys <= values.keys() | {"data.datasets"}


def test_text_on_the_command_line_stays_as_typed() -> None:
    for text in (
        "*.jsonl",
        "&c",
        "@x",
        "%d",
        "!x",
        "#5",
        "`a`",
        "|",
        "> x",
        "[ab]*.jsonl",
        "{a,b}.jsonl",
        "a: b",
        "a #b",
    ):
        assert load(f"data.datasets.0.path={text}").recipe.data.datasets[0].path == text
    assert load("data.chat_template={{ a }}").recipe.data.chat_template == "{{ a }}"
    assert load("run.output_dir=[a, b]").recipe.run.output_dir == "[a, b]"
    assert load("run.run_name='a b'").recipe.run.run_name == "a b"
    assert load("run.run_name=null").recipe.run.run_name is None
    assert load("deepspeed.comms_logger=*").recipe.deepspeed == {"comms_logger": "*"}
    assert complain(VALID, "train.max_steps=*") == [
        "command line: train.max_steps: '*' is not a whole number from 1 to 1,099,511,627,776 or null (steps)\n\n"
        "hint: write a whole number, such as 10, 65_536, 500K or 64Ki"
    ]


def test_an_element_may_stand_for_a_list_of_one(tmp_path: Path) -> None:
    assert load("run.report_to=wandb").recipe.run.report_to == ("wandb",)
    assert load("run.report_to=none").recipe.run.report_to == ()
    assert load("lora.target_modules=q_proj").recipe.lora.target_modules == ("q_proj",)  # type: ignore[union-attr]
    assert load("lora.target_modules=all-linear").recipe.lora.target_modules == "all-linear"  # type: ignore[union-attr]
    assert load("data.datasets.0.data_files=*.jsonl").recipe.data.datasets[0].data_files == ("*.jsonl",)
    one = "data: {datasets: {path: a/b}, max_length: 8}\nmodel: {name_or_path: c/d}\n"
    assert [each.path for each in load(text=one).recipe.data.datasets] == ["a/b"]
    assert load("data.datasets.0.path=c/d", text=one).recipe.data.datasets[0].path == "c/d"
    assert load("data.datasets.1.path=c/d", text=one).recipe.data.datasets[1].path == "c/d"
    assert load("data.eval_datasets.0.path=c/d").recipe.data.eval_datasets[0].path == "c/d"


@pytest.mark.parametrize(
    ("words", "files", "overrides"),
    [
        ("r.yaml train.max_steps=3", ["r.yaml"], ["train.max_steps=3"]),
        ("r.yaml train.max_steps", ["r.yaml"], ["train.max_steps"]),
        ("r.yaml train.max_steps 3 lora.r=2", ["r.yaml"], ["train.max_steps 3", "lora.r=2"]),
        ("train.max_steps = 3 r.yaml", ["r.yaml"], ["train.max_steps 3"]),
        ("max_steps r.yaml", ["r.yaml"], ["max_steps"]),
        ("trian.max_steps", [], ["trian.max_steps"]),
        ("train.yaml model.yml x", ["train.yaml", "model.yml", "x"], []),
    ],
)
def test_keys_without_a_value_are_no_files(words: str, files: list[str], overrides: list[str]) -> None:
    from ulysses_cli.validate import split_words

    assert split_words(words.split()) == (files, overrides)


def test_a_key_without_a_value_gets_a_hint() -> None:
    template = "command line: {}: has no value\n\nhint: write {}"
    assert complain(VALID, "train.max_steps") == [template.format("train.max_steps", "train.max_steps=VALUE")]
    assert complain(VALID, "max_steps 10") == [template.format("max_steps", "train.max_steps=10")]


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


@pytest.mark.parametrize(
    ("override", "message", "hint"),
    [
        (
            "memory.activation_offloading=1.5",
            "1.5 is not `auto`, true, false or a whole number from 0 to 10,000 (layers)",
            "use 1 or 2",
        ),
        ("train.max_steps=2.5", "2.5 is not a whole number from 1 to 1,099,511,627,776 or null (steps)", "use 2 or 3"),
        ("parallel.zero_stage=1.5", "1.5 is not `1`, `2` or `3`", "leave it out for 3, its default"),
        ("parallel.zero_stage='2'", "'2' is not `1`, `2` or `3`", "take the quotes away"),
        (
            "data.max_length=200Ti",
            "200Ti is not a whole number from 2 to 1,099,511,627,776 (tokens)",
            "use 1,099,511,627,776 or less",
        ),
        ("train.adam_beta1=1", "1 is not a number from 0 to below 1 (share)", "use less than 1"),
        ("run.max_hours=0", "0 is not a number above 0 to 100,000 or null (hours)", "use more than 0"),
        ("model=gpt2", "'gpt2' is not a section", "write model: {name_or_path: gpt2}"),
        ("lora=16", "16 is not a section or null", "write lora: {r: 16}"),
        ("data.datasets.0=5", "5 is not a section", "write {path: ...}"),
        ("run.report_to=[wandb, wandb, wandb, wandb, wandb]", "has 5 elements", "write 4 at most"),
        ("run.run_name=''", "is an empty text", "write something, or leave it out"),
        ("run.run_name=" + "x" * 5000, "has 5,000 letters", "write 4,096 at most"),
        (
            "train.optim=[adamw]",
            "a list is not `adamw` or `adamw_8bit`",
            "write one value without brackets",
        ),
        ("run.seed=\x00", "character '\\x00' is not allowed", "remove it; an editor may not show it"),
    ],
)
def test_a_hint_says_what_to_write_instead(override: str, message: str, hint: str) -> None:
    key = override.partition("=")[0]
    assert complain(VALID, override) == [f"command line: {key}: {message}\n\nhint: {hint}"]


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
def test_no_text_holds_a_control_character(letter: str) -> None:
    """One rule for every setting that takes a text, in a file and on a command line, except texts of several lines."""
    base = yaml.safe_load(VALID.replace("8Ki", "8192"))
    exempt = set()
    for setting in walk_settings():
        if "[]" in setting.key or not (setting.accepts.is_text or setting.accepts.item is not None):
            continue
        inner = setting.accepts if setting.accepts.is_text else inspect_annotation(setting.accepts.item)
        if not inner.is_text:
            continue
        section, name = setting.key.split(".", 1)
        if "." in name:
            continue
        value = f"a{letter}b" if setting.accepts.is_text else [f"a{letter}b"]
        text = json.dumps(base | {section: (base.get(section) or {}) | {name: value}})
        override = f"{setting.key}={json.dumps(value)}"
        for written, overrides in ((text, ()), (VALID, (override,))):
            try:
                parse_recipe(written, "r.yaml", overrides)
                exempt.add(setting.key)
            except RecipeError as error:
                (problem,) = (each for each in error.problems if each.key.startswith(setting.key))
                words = "has several lines" if letter == "\n" else f"character {letter!r} is not allowed"
                assert problem.message == words
    assert exempt == {"data.chat_template", "data.added_tokens", "run.sample_prompts"}


@pytest.mark.parametrize("letter", CONTROLS)
def test_no_key_override_or_name_of_a_file_holds_one(letter: str, tmp_path: Path) -> None:
    odd = json.dumps(f"a{letter}b")
    for text in (f"{VALID}\ndeepspeed: {{{odd}: 1}}", f"{VALID}\ndeepspeed: {{a: {odd}}}"):
        assert re.search("is not allowed|has several lines|a key holds the control character", complain(text)[0])
    for override in (f"train.max_steps=3{letter}", f"deepspeed.a{letter}b=1", f"data.datasets.0.path=x{letter}y"):
        assert len(complain(VALID, override)) == 1
    file = tmp_path / f"r{letter}.yaml"
    file.write_text(VALID)
    with pytest.raises(RecipeError, match="its name holds the control character"):
        load_recipe(file)
