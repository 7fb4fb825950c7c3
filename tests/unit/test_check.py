"""Tests rules where more than a message is at stake; what they say of wrong recipes is in messages.txt."""

import json
from pathlib import Path

import pytest
from support.messages import RULES
from support.recipes import check, load, make_plan, make_shape
from support.refusals import explain
from syrupy.assertion import SnapshotAssertion

from ulysses_cli.plan.files import take_lock
from ulysses_cli.plan.layout import compute_kv_heads
from ulysses_cli.plan.recipe.recipe import compute_recipe_hash
from ulysses_cli.plan.resolved import find_sharing_obstacle, hash_plan, parse_plan, read_plan, resolve
from ulysses_cli.plan.rules import adapters
from ulysses_cli.plan.rules import check as check_module
from ulysses_cli.plan.rules import files as check_files
from ulysses_cli.plan.rules import model as check_model
from ulysses_cli.plan.rules import training as check_training


def only(*overrides: str) -> str:
    problems = check(*overrides)
    assert len(problems) == 1, [str(problem) for problem in problems]
    return str(problems[0]).strip()


def test_every_rule_says_something_in_the_snapshot() -> None:
    of_model = (*check_model.MODEL_RULES, *adapters.ADAPTER_RULES, *check_model.POSITION_RULES)
    for rule in (*check_module.RULES, *of_model, *check_training.TRAINING_RULES, *check_files.RULES):
        is_code = f"test_{rule.__name__}" in globals()  # its message follows what a folder holds
        assert is_code or "\n  " in RULES.blocks[rule.__name__], rule.__name__


def test_paths_that_are_not_names_on_the_hub(tmp_path: Path) -> None:
    for path in ("data/", "my data set"):
        assert f"{path} does not" in only(f"data.datasets.0.path='{path}'")
    (tmp_path / "x[1].jsonl").write_text("{}")
    assert check(f"data.datasets.0.path='{tmp_path}/x[1].jsonl'") == []


def test_the_chosen_base_covers_what_the_rest_does_not() -> None:
    """The numbers are by hand: 5e5 x 8^1.65, and x 4^1.65 where yarn covers a half."""
    shape = make_shape(rope_theta=5e5, max_position_embeddings=8192)
    stretch = "model.rope_scaling={type: yarn, factor: 2}"
    words = [[], ["model.rope_theta=auto"], ["model.rope_theta=auto", stretch], ["model.rope_theta=8M"]]
    bases = [resolve(load("data.max_length=64Ki", *each).recipe, shape).rope_theta for each in words]
    assert bases == [None, 1.55e7, 4.92e6, 8e6]
    assert resolve(load("model.rope_theta=auto", "data.max_length=4Ki").recipe, shape).rope_theta == 5e5


def test_check_output_dir(tmp_path: Path, snapshot: SnapshotAssertion) -> None:
    """A folder whose run has ended is in commands.txt."""
    here = f"run.output_dir={tmp_path}"
    (tmp_path / "run.json").write_text(json.dumps({"recipe_hash": compute_recipe_hash(load(here).recipe)}))
    assert check(here) == []
    old = load(here, "train.max_steps=7").recipe.model_dump(mode="json")
    (tmp_path / "run.json").write_text(json.dumps({"recipe_hash": "another", "recipe": old}))
    changed = (here, "train.max_steps=30")
    ended = only(*changed)
    with open(tmp_path / "lock-0", "w") as lock:
        take_lock(lock.fileno(), shares=True)
        live = only(*changed)
    assert only(*changed) == ended
    (tmp_path / "lock-1").mkdir()  # cannot be opened, as another user's file
    said = [ended, live, only(*changed)]
    assert check(here, "run.resume_from_checkpoint=auto") == []
    (tmp_path / "run.json").write_text("{")
    assert [*said, only(here)] == snapshot


def test_a_run_of_an_earlier_version_is_of_the_same_recipe(tmp_path: Path, snapshot: SnapshotAssertion) -> None:
    """A setting that it did not know is no change, unless the recipe sets it."""
    here = f"run.output_dir={tmp_path}"
    old = load(here).recipe.model_dump(mode="json")
    del old["run"]["eval_on_start"], old["train"]["z_loss_weight"], old["data"]["datasets"][0]["columns"]
    (tmp_path / "run.json").write_text(json.dumps({"recipe_hash": "of other settings", "recipe": old}))
    assert check(here) == []
    assert only(here, "run.eval_on_start=false") == snapshot


@pytest.mark.parametrize(
    ("heads", "kv_heads", "sp_size", "local", "repeated"),
    [(32, 8, 4, 2, False), (32, 8, 16, 1, True), (12, 3, 2, 2, True), (24, 3, 4, 2, True), (8, 1, 8, 1, True)],
)
def test_kv_heads_of_a_rank(heads: int, kv_heads: int, sp_size: int, local: int, repeated: bool) -> None:
    needed = max(
        len({h * kv_heads // heads for h in range(r * heads // sp_size, (r + 1) * heads // sp_size)})
        for r in range(sp_size)
    )
    assert needed == local
    result = compute_kv_heads(heads, kv_heads, sp_size)
    assert (result.num_local, result.is_repeated) == (local, repeated)


@pytest.mark.parametrize(("length", "sp_size", "pad"), [(8192, 4, 512), (500_000, 1, 32), (500_000, 8, 32), (12, 4, 4)])
def test_resolved_lengths(length: int, sp_size: int, pad: int) -> None:
    loaded = load(f"data.max_length={length}", f"parallel.sp_size={sp_size}", "parallel.dp_shard_size=3")
    result = resolve(loaded.recipe, make_shape(), loaded.places)
    assert result.pad_to_multiple_of == pad
    assert length % pad == 0
    assert pad % sp_size == 0
    assert result.local_tokens * sp_size == result.max_length == length
    assert (result.rows_per_step, result.tokens_per_step) == (3, 3 * length)
    assert "parallel.zero_stage: 3" in result.defaults
    assert not any(line.startswith(("data.max_length", "parallel.sp_size:")) for line in result.defaults)


def test_a_plan_is_read_as_it_was_written_and_no_other_one_is(tmp_path: Path, snapshot: SnapshotAssertion) -> None:
    """Its lists become tuples again: a template may print them."""
    free = "{a: [1, [2.5, null]], b: .inf, c: {d: [x]}}"
    plan = make_plan(load(f"data.chat_template_kwargs={free}", f"deepspeed.note={free}", "parallel.sp_size=2"))
    assert plan.loaded.recipe.data.chat_template_kwargs["a"] == (1, (2.5, None))
    text = plan.dump()
    assert parse_plan(text) == plan
    file = tmp_path / "plan.json"
    problems = [explain(read_plan, file, hash_plan(text))]
    file.write_text(text)
    assert read_plan(file, hash_plan(text)) == plan
    for other in (make_plan(load("parallel.sp_size=2")).dump(), text.replace('"sp_size": 2', '"sp_size": 4'), ""):
        file.write_text(other)
        problems.append(explain(read_plan, file, hash_plan(text)))
    assert problems == snapshot


PAIRS = ("preference.loss=sigmoid", "data.datasets.0.type=preference")
SPLIT = ("data.assistant_only_loss=true", "data.on_rewritten_turns=split")


IN_ONE_KIND_OF_LAYER = {"full": {"rope_type": "default"}, "other": {"rope_type": "dynamic", "factor": 2.0}}


@pytest.mark.parametrize(
    ("words", "changes", "is_exact"),
    [
        ((), {}, True),
        ((), {"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}, True),
        ((), {"rope_scaling": {"type": "longrope", "short_factor": [1.0], "long_factor": [2.0]}}, False),
        ((), {"rope_parameters": IN_ONE_KIND_OF_LAYER}, False),
        (("model.rope_scaling={type: dynamic, factor: 2}",), {}, False),
        (("model.attn_implementation=cudnn",), {}, False),
        ((), {"layer_types": ["linear_attention"] * 32}, False),
    ],
)
def test_answers_read_one_copy_of_their_prompt_where_that_is_exact(
    words: tuple[str, ...], changes: dict[str, object], is_exact: bool, snapshot: SnapshotAssertion
) -> None:
    shape = make_shape(**changes)
    recipe = load(*PAIRS, *words).recipe
    assert find_sharing_obstacle(recipe, shape) == (snapshot if not is_exact else "")
    for given in ((*PAIRS, *words), (*SPLIT, *words), ("data.datasets.0.type=answers", *words)):
        assert resolve(load(*given).recipe, shape).shares_prompts == is_exact
    for given in ((*PAIRS, "preference.share_prompts=false"), words, (*SPLIT, "data.packing=stream")):
        assert not resolve(load(*given).recipe, shape).shares_prompts
