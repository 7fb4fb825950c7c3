"""A model that was really trained, by the docs' own commands: its tokenizer, template and weights hide no fault that
random ones do."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from support.commands import succeed
from support.real_model import READY, needs_real_model
from transformers import AutoModelForCausalLM, AutoTokenizer

pytestmark = [needs_real_model, pytest.mark.check]
QUESTIONS = {"What is the capital of France?": "Paris.", "Which animal barks?": "A dog.", "What is 2 + 2?": "4."}


def write_recipe(folder: Path, **sections: dict[str, Any]) -> None:
    settings = {
        "model": {"name_or_path": str(READY), "dtype": "float32"},
        "data": {"datasets": [{"path": "chats.jsonl"}], "max_length": 128, "assistant_only_loss": True},
        "train": {"max_steps": 1, "learning_rate": 1e-4, "gradient_accumulation_steps": 1},
        "run": {"output_dir": "run", "device": "cpu", "rehearsal": False},
    }
    (folder / "r.yaml").write_text(yaml.safe_dump({**settings, **sections}))


@pytest.fixture(scope="module")
def adapted(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with chats, and a run that has adapted the model to them."""
    folder = tmp_path_factory.mktemp("real")
    chats = [
        {"messages": [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]}
        for question, answer in QUESTIONS.items()
    ]
    (folder / "chats.jsonl").write_text("".join(json.dumps(chat) + "\n" for chat in chats))
    write_recipe(folder, lora={"r": 4})
    succeed("train", "r.yaml", cwd=folder)
    return folder


def test_the_model_knows_what_it_was_taught() -> None:
    """Or its files were converted wrongly, and no other test here would mean anything."""
    tokenizer = AutoTokenizer.from_pretrained(READY)
    model = AutoModelForCausalLM.from_pretrained(READY, dtype=torch.float32)
    chat = [{"role": "user", "content": "What is the capital of France?"}]
    prompt = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    answer = model.generate(**prompt, max_new_tokens=8, do_sample=False)[0, prompt["input_ids"].size(1) :]
    assert tokenizer.decode(answer, skip_special_tokens=True) == "The capital of France is Paris."


def test_adapters_are_merged_and_evaluated(adapted: Path) -> None:
    merged = succeed("export", "run", "--to", "merged", "--merge-lora", cwd=adapted)
    assert "272 tensors" in merged.stderr
    evaluate(adapted, "merged")


def evaluate(folder: Path, model: str, *words: str) -> None:
    (folder / "text.txt").write_text("The river rises in the hills above the town, and the road follows it. " * 8)
    amount = ("--suite", "loss", "--path", "text.txt", "--max-length", "64", "--samples", "1", "--output", "found")
    succeed("evaluate", model, *amount, *words, "--device", "cpu", "--dtype", "float32", cwd=folder)


@pytest.mark.full
def test_a_run_is_evaluated_beside_its_base(adapted: Path) -> None:
    evaluate(adapted, "run", "--against", str(READY))


def test_its_machine_is_verified(adapted: Path) -> None:
    """Nine heads divide no power of two."""
    succeed("verify", "r.yaml", "parallel.sp_size=2", "parallel.dp_shard_size=1", cwd=adapted)


def test_what_is_pushed_is_listed(adapted: Path) -> None:
    succeed("push", "run", "--dry-run", cwd=adapted)


AGENT: list[dict[str, str]] = [
    {"role": "system", "content": "You can call sky(city)."},
    {"role": "user", "content": "How is the sky over Bergen?"},
    {"role": "assistant", "content": '<think>\nI ask.\n</think>\n\n<tool_call>{"name": "sky", "arguments": '
     '{"city": "Bergen"}}</tool_call>'},
    {"role": "tool", "content": "rain"},
    {"role": "assistant", "content": "<think>\nIt rains.\n</think>\n\nTake a coat."},
]  # fmt: skip


@pytest.mark.full
def test_a_chat_with_thoughts_and_a_tool_is_learned(tmp_path: Path) -> None:
    """By the model's own template, from JSONL to answers that transformers gives."""
    (tmp_path / "chats.jsonl").write_text(json.dumps({"messages": AGENT}) + "\n")
    training = {"max_steps": 12, "learning_rate": 2e-4, "lr_scheduler_type": "constant", "num_train_epochs": None}
    write_recipe(tmp_path, train=training)
    shown = succeed("prepare", "r.yaml", "--show", "0:1", cwd=tmp_path)
    assert "[[<think>" in shown.stdout + shown.stderr
    succeed("train", "r.yaml", cwd=tmp_path)
    folder = tmp_path / "run" / "model"
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    for at in (2, 4):
        prompt = tokenizer.apply_chat_template(
            AGENT[:at], add_generation_prompt=True, return_tensors="pt", return_dict=True
        )
        answer = model.generate(**prompt, max_new_tokens=48, do_sample=False)[0, prompt["input_ids"].size(1) :]
        assert tokenizer.decode(answer, skip_special_tokens=True) == AGENT[at]["content"]


@pytest.mark.full
def test_all_weights_are_trained(adapted: Path) -> None:
    write_recipe(adapted, run={"output_dir": "whole", "device": "cpu"})
    succeed("train", "r.yaml", "data.eval_split=0.3", cwd=adapted)
    first = json.loads((adapted / "whole" / "metrics.jsonl").read_text().splitlines()[0])
    assert first["loss"] < 4, "a trained model is surprised by little"


@pytest.mark.full
def test_adapters_learn_which_answers_are_preferred(tmp_path: Path) -> None:
    """Held-out pairs ask other questions and prefer an answer over an excuse, too."""
    facts = {"the capital of France": "Paris", "the color of the sky": "blue", "two plus two": "four"}
    pairs = [
        {
            "prompt": [{"role": "user", "content": f"Question {number}: what is {thing}?"}],
            "chosen": [{"role": "assistant", "content": f"It is {fact}."}],
            "rejected": [{"role": "assistant", "content": f"I would rather not speak of {thing}."}],
        }
        for number in range(25)
        for thing, fact in [list(facts.items())[number % 3]]
    ]
    (tmp_path / "pairs.jsonl").write_text("".join(json.dumps(pair) + "\n" for pair in pairs))
    write_recipe(
        tmp_path,
        data={"datasets": [{"path": "pairs.jsonl"}], "max_length": 512, "eval_split": 0.2},
        train={"max_steps": 2, "learning_rate": 5e-4},
        lora={"r": 8},
        preference={"loss": "sigmoid"},
    )
    succeed("train", "r.yaml", cwd=tmp_path)
    first, last = (json.loads(line) for line in (tmp_path / "run/eval.jsonl").read_text().splitlines())
    assert first["rewards/chosen"] == first["rewards/rejected"] == 0
    assert last["rewards/margins"] > 0.5
    assert last["rewards/accuracies"] == 1
