"""`ulysses sample` where the model ends at once: it says so, and names the chat template that was not used."""

import json
import subprocess
from pathlib import Path

import pytest
import yaml
from support.real_model import READY, needs_real_model
from support.served import write_python
from support.small_run import BYTES_CONFIG as CONFIG
from support.training import make_recipe
from syrupy.assertion import SnapshotAssertion
from transformers import AutoConfig, AutoModelForCausalLM
from typer.testing import CliRunner

from ulysses_cli.cli import app
from ulysses_cli.commands import sample
from ulysses_cli.commands.sample import describe_empty
from ulysses_cli.data.tokenizing.tokenizer import load_tokenizer, make_bytes_tokenizer
from ulysses_cli.evaluate.sample import Sample
from ulysses_cli.evaluate.suites import Amount, Sources
from ulysses_cli.prove.quality.evaluation import ModelEvaluation
from ulysses_cli.train.export import sampling


def test_an_empty_answer_is_explained(snapshot: SnapshotAssertion) -> None:
    cases = ((1, 1, True), (1, 2, False), (2, 3, False))
    assert [describe_empty(*counts, has_template=has_template) for *counts, has_template in cases] == snapshot


def test_an_answer_beyond_the_models_positions_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, snapshot: SnapshotAssertion
) -> None:
    sizes = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 1}
    config = AutoConfig.for_model("qwen3", **sizes, num_key_value_heads=1, head_dim=8, vocab_size=260)
    config.max_position_embeddings = 16
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    make_bytes_tokenizer().save_pretrained(tmp_path)
    monkeypatch.setattr(sample, "_ask", sampling.answer)
    for num_new, is_beyond in ((4, False), (32, True)):
        with monkeypatch.context() as patch:
            patch.setattr(sampling, "list_stop_tokens", lambda *_: set())
            result = CliRunner().invoke(app, ["sample", str(tmp_path), "abcd", f"--max-new-tokens={num_new}"])
        assert result.exit_code == 0, result.output
        notes = [line for line in result.stderr.splitlines() if line.startswith("note: ")]
        assert notes == (snapshot if is_beyond else [])


TEMPLATE = "{{- 'a' * (8 if long else 1) }}{%- for m in messages %}{{- m.content }}{%- endfor %}"


def test_a_model_is_asked_with_the_templates_variables_of_its_training(tmp_path: Path) -> None:
    """They are in its folder. A training of that model without variables writes none."""
    make_bytes_tokenizer().save_pretrained(tmp_path / "base")
    settings = {"data.chat_template": TEMPLATE, "model.tokenizer": str(tmp_path / "base")}
    recipes = {}
    for name, variables in (("with", "{long: true}"), ("without", "{}")):
        words = [f"{key}={value}" for key, value in settings.items()]
        recipe = recipes[name] = make_recipe(*words, f"data.chat_template_kwargs={variables}", config=CONFIG)
        load_tokenizer(recipe.model, recipe.data).save_pretrained(tmp_path / name)
        AutoModelForCausalLM.from_config(AutoConfig.for_model(**CONFIG)).save_pretrained(tmp_path / name)
        settings["model.tokenizer"] = str(tmp_path / name)  # the next training begins with this one's model
    request = {"prompts": ["b"], "as_chat": True, "device": "cpu", "dtype": None, "trust_remote_code": False}
    sizes = [
        sampling.answer({**request, "model": str(tmp_path / name), "max_new_tokens": 1})["longest"]
        for name in ("with", "without")
    ]
    assert sizes == [8 + 1 + 1, 1 + 1 + 1]
    prompts = []
    for name in ("with", "without"):
        words = [f"model.tokenizer={tmp_path / name}"]
        text = yaml.safe_dump(make_recipe(*words, config=CONFIG).model_dump(mode="json", exclude_unset=True))
        evaluation = ModelEvaluation(text, ("vt",), Amount((300,)), Sources(), 1, "")
        own = load_tokenizer(make_recipe(*words, config=CONFIG).model, make_recipe().data, is_finished=True)
        prompts.append(evaluation.make_prompter(own).render(Sample("vt", "b", ("c",), "all", 1))[0])
    assert prompts == ["a" * 8 + "b", "ab"]


@pytest.mark.check
@needs_real_model
def test_a_chat_model_without_its_template() -> None:
    command = [
        str(write_python()), "-m", "ulysses_cli", "sample", str(READY), "What is the capital of France?",
        "--device=cpu",
    ]  # fmt: skip
    plain = subprocess.run([*command, "--format=json"], capture_output=True, text=True, check=True)
    assert [(each["text"], each["num_tokens"]) for each in json.loads(plain.stdout)] == [("", 0)]
    explained = describe_empty(1, 1, has_template=True)
    assert explained in plain.stderr
    chat = subprocess.run([*command, "--chat", "--max-new-tokens=8"], capture_output=True, text=True, check=True)
    assert "Paris" in chat.stdout
    assert explained not in chat.stderr
