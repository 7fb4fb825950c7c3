"""Snapshots of messages: `tests/unit/messages.txt` holds changes of a small valid recipe, and what is said of each.

`# heading` starts a block, `> note` gives a reason. `$ words` are settings, `--num-processes`, `--model` (keys of
config.json, or a name below), `--append` (text behind the recipe) and `--text` (another recipe), as in a shell, with
escapes as in Python. Indented lines are the answer; where there are none, nothing is wrong.
"""

import argparse
import re
import shlex
import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import yaml

from support.recipes import VALID, check
from ulysses_cli.plan.problem import Problem, RecipeError

SNAPSHOT = Path(__file__).parents[1] / "unit" / "messages.txt"
FOLDER = "{folder}"  # stands for a folder with the files of make_folder
MODELS: dict[str, dict[str, Any]] = {
    "hybrid": {
        **{"model_type": "qwen3_5_text", "num_hidden_layers": 4, "linear_num_key_heads": 16},
        **{"linear_num_value_heads": 48, "num_attention_heads": 24, "num_key_value_heads": 4, "head_dim": 256},
    },
    "shared-block": {"model_type": "zamba2", "layers_block_type": ["mamba", "hybrid"] * 8, "num_hidden_layers": 16},
}


def read_blocks() -> dict[str, str]:
    """Returns each block's text by its heading."""
    parts = re.split(r"^(?=# )", SNAPSHOT.read_text(encoding="utf-8"), flags=re.MULTILINE)
    blocks = {part[2:].partition("\n")[0]: part for part in parts if part}
    assert len(blocks) == sum(map(bool, parts)), "two blocks have one heading"
    return blocks


def make_folder(folder: Path) -> Path:
    for name in ("train.jsonl", "saved/dataset_dict.json", "checkpoint/manifest.json", "adapters/adapter_config.json"):
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text("{}\n")
    return folder


def answer(block: str, folder: Path) -> str:
    """Returns the block with the answers that the rules give now."""
    lines: list[str] = []
    for line in block.rstrip("\n").splitlines():
        if not line.startswith("  "):
            lines.append(line)
        if line.startswith("$ "):
            lines += [f"  {text}" for text in _ask(line[2:], folder)]
    return "\n".join(lines) + "\n"


def _ask(words: str, folder: Path) -> Iterable[str]:
    parser = argparse.ArgumentParser()
    parser.add_argument("--num-processes", type=int)
    parser.add_argument("--model", default="{}")
    parser.add_argument("--append", type=_unescape, default="")
    parser.add_argument("--text", type=_unescape, default=VALID)
    parser.add_argument("settings", nargs="*")
    asked = parser.parse_args(shlex.split(words.replace(FOLDER, str(folder))))
    config = MODELS.get(asked.model) or yaml.safe_load(asked.model)
    text = asked.text + asked.append
    try:
        problems: Iterable[Problem] = check(*asked.settings, num_processes=asked.num_processes, text=text, **config)
    except RecipeError as error:
        problems = error.problems
    for problem in problems:
        yield from (line for line in str(problem).replace(str(folder), FOLDER).splitlines() if line)


def _unescape(text: str) -> str:
    return text.encode("latin-1", "backslashreplace").decode("unicode_escape")


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as made:
        place = make_folder(Path(made))
        SNAPSHOT.write_text("\n".join(answer(block, place) for block in read_blocks().values()), encoding="utf-8")
