"""`ulysses sample` where the model ends at once: it says so, and names the chat template that was not used."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
from support.real_model import READY, needs_real_model

from ulysses_cli.commands.sample import describe_empty

EMPTY = "empty: the model ends at once, since an end is its most likely token there"
HINT = "hint: the model has a chat template: with --chat a prompt is what a user says"


def test_an_empty_answer_is_explained() -> None:
    assert describe_empty(1, 1, has_template=True) == f"the answer is {EMPTY}\n{HINT}"
    assert describe_empty(1, 2, has_template=False) == f"1 of 2 answers is {EMPTY}"
    assert describe_empty(2, 3, has_template=False) == f"2 of 3 answers are {EMPTY}"


@pytest.mark.check
@needs_real_model
def test_a_chat_model_without_its_template() -> None:
    command = [
        sys.executable,
        "-m",
        "ulysses_cli",
        "sample",
        str(READY),
        "What is the capital of France?",
        "--device=cpu",
    ]
    plain = subprocess.run([*command, "--format=json"], capture_output=True, text=True, check=True)
    assert [(each["text"], each["num_tokens"]) for each in json.loads(plain.stdout)] == [("", 0)]
    assert f"the answer is {EMPTY}\n{HINT}" in plain.stderr
    chat = subprocess.run([*command, "--chat", "--max-new-tokens=8"], capture_output=True, text=True, check=True)
    assert chat.stdout == "The capital of France is Paris.\n"
    assert EMPTY not in chat.stderr
