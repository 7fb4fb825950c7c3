"""Tests the line in which validate-config explains the ring: each of its answers, through the command."""

import json
from pathlib import Path

import pytest
from support.commands import run
from support.recipes import LLAMA, VALID

HEADS = "num_attention_heads"
CONVOLUTIONS = {"model_type": "lfm2", "layer_types": ["conv", "full_attention"], "conv_L_cache": 3}
INSIDE = "heads are exchanged inside a machine of 8 GPUs; only keys and values leave it"


@pytest.mark.parametrize(
    ("words", "changes", "line"),
    [
        (["sp_size=4"], {}, ""),
        (["sp_size=8"], {}, ""),
        (["sp_size=1", "ring_size=1"], {}, "none: one rank has all heads; as the recipe says"),
        (["sp_size=4", "ring_size=1"], {}, "none: 4 ranks exchange heads; as the recipe says"),
        (
            ["sp_size=4", "ring_size=2"],
            {},
            "2 shares of a row's queries, each of 2 ranks that exchange heads: as the recipe says",
        ),
        (
            ["sp_size=8"],
            {HEADS: 28, "hidden_size": 3584, "num_key_value_heads": 4},
            "2 shares of a row's queries, each of 4 ranks that exchange heads: 8 ranks do not divide the 28 attention "
            "heads, 4 do",
        ),
        (
            ["sp_size=8"],
            {HEADS: 9, "hidden_size": 1152, "num_key_value_heads": 3},
            "8 shares of a row's queries, each of one rank: 8 ranks do not divide the 9 attention heads, so each holds "
            "all of them",
        ),
        (["sp_size=16"], {}, f"2 shares of a row's queries, each of 8 ranks that exchange heads: {INSIDE}"),
        (
            ["sp_size=16"],
            {"num_key_value_heads": 32},
            "none: 16 ranks exchange heads; a ring would send no fewer bytes between machines than heads are",
        ),
        (
            ["sp_size=16"],
            CONVOLUTIONS,
            "none: 16 ranks exchange heads; no ring is possible: convolution layers need the tokens of a row in order",
        ),
    ],
)
def test_the_line_says_why_the_ring_has_its_size(
    words: list[str], changes: dict[str, object], line: str, tmp_path: Path
) -> None:
    (tmp_path / "config.json").write_text(json.dumps({**LLAMA, **changes}))
    recipe = tmp_path / "r.yaml"
    recipe.write_text(VALID.replace("owner/model", str(tmp_path)))
    done = run("validate-config", str(recipe), *(f"parallel.{word}" for word in words))
    assert done.returncode == 0, done.stderr
    shown = [text.removeprefix("ring").strip() for text in done.stdout.splitlines() if text.startswith("ring ")]
    assert shown == [line] * bool(line)
    described = run("validate-config", str(recipe), *(f"parallel.{word}" for word in words), "--format", "json").stdout
    (plan,) = json.loads(described)["plans"]
    assert line.endswith(plan["ring_reason"])
