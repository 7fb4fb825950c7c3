"""Tests data sets and tokenizers of a hub that cannot be reached: one attempt, one problem, no line of a library."""

import json
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from ulysses_cli.data import sources
from ulysses_cli.data.sources import load_hub_set
from ulysses_cli.data.tokenizing.tokenizer import load_tokenizer, make_bytes_tokenizer
from ulysses_cli.plan.problem import RecipeError
from ulysses_cli.plan.recipe.recipe import Model
from ulysses_cli.plan.recipe.sections import Dataset

NOWHERE = "http://127.0.0.1:9"  # nothing listens there


@pytest.fixture(params=[False, True], ids=["no network", "HF_HUB_OFFLINE"])
def obstacle(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[str]:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", request.param)
    monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", NOWHERE)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    sources.find_obstacle.cache_clear()
    yield "HF_HUB_OFFLINE forbids downloads" if request.param else f"{NOWHERE} cannot be reached ("
    sources.find_obstacle.cache_clear()


def test_a_data_set_that_cannot_be_downloaded(obstacle: str, capfd: pytest.CaptureFixture[str]) -> None:
    start = time.monotonic()
    for _ in range(2):  # the second is told the same
        with pytest.raises(RecipeError) as error:
            load_hub_set(Dataset(path="owner/chats"), "data.datasets.0")
        (problem,) = error.value.problems
        assert problem.key == "data.datasets.0.path"
        assert problem.message.startswith(f"owner/chats is not on this machine, and {obstacle}")
        assert "run `hf download owner/chats --repo-type dataset --local-dir DIR` elsewhere" in problem.hint
    assert time.monotonic() - start < 20, "the library alone tries for half a minute"
    assert capfd.readouterr().err == ""


def test_a_tokenizer_that_cannot_be_downloaded(obstacle: str, capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(RecipeError) as error:
        load_tokenizer(Model(name_or_path="owner/model"))
    (problem,) = error.value.problems
    assert problem.key == "model.name_or_path"
    assert problem.message.startswith(f"the tokenizer of owner/model is not on this machine, and {obstacle}")
    assert "run `hf download owner/model --local-dir DIR` elsewhere" in problem.hint
    assert capfd.readouterr().err == ""


def test_a_config_that_transformers_refuses_is_not_blamed_on_the_tokenizer(tmp_path: Path) -> None:
    make_bytes_tokenizer().save_pretrained(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama", "rms_norm_eps": "tiny"}))
    (tmp_path / "tokenizer_config.json").unlink()  # which names the class, so that the config is not read
    with pytest.raises(RecipeError, match=r"config.json cannot be used: .*rms_norm_eps"):
        load_tokenizer(Model(name_or_path=str(tmp_path)))


def test_a_broken_tokenizer_on_this_machine_is_not_blamed_on_the_hub(obstacle: str, tmp_path: Path) -> None:
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken" / "tokenizer.json").write_text("{")
    with pytest.raises(RecipeError, match=r"broken/tokenizer.json is not valid JSON: Expecting property name"):
        load_tokenizer(Model(name_or_path=str(tmp_path / "broken")))
    (tmp_path / "empty").mkdir()
    with pytest.raises(RecipeError, match=r"empty holds no tokenizer.json"):
        load_tokenizer(Model(name_or_path=str(tmp_path / "empty")))
