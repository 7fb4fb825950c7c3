"""Checks docs/gpus.md: the commands that need no GPU run, and what the page says of their results is true."""

import json
import shlex
from pathlib import Path

import pytest
import yaml
from support.blocks import list_blocks
from support.commands import run
from support.generated_docs import DOCS

COMMANDS = "".join(list_blocks((DOCS / "gpus.md").read_text(), "sh")).splitlines()
LIGHT = ("init", "validate-config", "estimate-memory", "plan")


@pytest.mark.check
def test_the_page_leads_from_chats_to_a_recipe_that_fits(tmp_path: Path) -> None:
    chat = [{"role": "user", "content": "word " * 300}, {"role": "assistant", "content": "another " * 200}]
    (tmp_path / "chats.jsonl").write_text((json.dumps({"messages": chat}) + "\n") * 50)
    output = {}
    for command in COMMANDS:
        tool, name, *words = shlex.split(command)
        if tool == "ulysses" and name in LIGHT:
            done = run(name, *words, cwd=tmp_path, HF_HUB_OFFLINE="1")
            assert done.returncode == 0, f"{command}\n{done.stderr}"
            output[name] = done.stdout
    assert set(output) == set(LIGHT)
    recipe = yaml.safe_load((tmp_path / "my.yaml").read_text())
    assert "lora" in recipe  # one RTX 4090 has no room for all weights of an 8B model
    assert "quantize_base" not in recipe["lora"]
    assert "verdict    fits" in output["estimate-memory"]
    assert "8 x h100-80gb" in output["plan"]
