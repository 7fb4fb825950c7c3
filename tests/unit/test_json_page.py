"""Tests that docs/json.md names every field that commands print for programs, and no other."""

from __future__ import annotations

import json
from typing import Any

import pytest
from support.commands import run
from support.json_page import find_undocumented, find_unused
from support.paths import ROOT

RECIPES = ROOT / "recipes"
LONG = str(RECIPES / "llama-3.1-8b-128k-8gpu.yaml")
SMALL = str(RECIPES / "qwen3-4b-32k-lora-24gb.yaml")
PLAN = ("plan", "--model", "Qwen/Qwen3-0.6B", "--gpus", "h100-80gb:1")
COMMANDS: dict[str, list[tuple[str, ...]]] = {
    "ulysses validate-config": [
        ("validate-config", LONG, "--gpu", "h100-80gb", "--nnodes", "2"),
        ("validate-config", LONG, "parallel.ring_size=3"),
    ],
    "ulysses estimate-memory": [
        ("estimate-memory", SMALL, "data.max_length=512"),
        ("estimate-memory", "--model", "Qwen/Qwen3-0.6B", "--max-length", "2Ki", "--sweep"),
    ],
    "ulysses plan": [
        (*PLAN, "--max-length", "4Ki"),
        (*PLAN, "--max-length", "64Mi"),
        (*PLAN, "--longest"),
    ],
    "ulysses models": [("models",)],
    "A model": [("models", "Qwen/Qwen3-8B")],
    "ulysses recipes list": [("recipes", "list")],
    "Problems": [("estimate-memory", LONG, "parallel.ring_size=3")],
}


@pytest.mark.parametrize("section", COMMANDS)
def test_the_page_names_the_fields_of_a_command(section: str) -> None:
    answers: list[Any] = [json.loads(run(*words, "--format", "json").stdout) for words in COMMANDS[section]]
    assert not [name for answer in answers for name in find_undocumented(section, answer)]
    assert not find_unused(section, answers)
