"""A turn of a chat is learned as it is written: its log-probability in packed rows of split chats is that of prompt and
answer alone, in a plain model and float64."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from ulysses_cli.data.prepare import prepare_data
from ulysses_cli.data.store import open_rows
from ulysses_cli.data.tokenizing.tokenizer import load_tokenizer
from ulysses_cli.plan.recipe.loader import parse_recipe

# Thoughts stand in the last turn alone, as in templates of Qwen3's kind.
TEMPLATE = """\
{%- for m in messages %}{{- '<' + m.role[0] + '>' }}
{%- if m.role == 'assistant' and loop.last and m.reasoning_content %}{{- '[' + m.reasoning_content + ']' }}{%- endif %}
{{- m.content + eos_token }}{%- endfor %}{%- if add_generation_prompt %}{{- '<a>' }}{%- endif %}"""
SIZES = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2}


def turn(content: str, thought: str = "") -> dict[str, Any]:
    return {"role": "assistant", "content": content, **({"reasoning_content": thought} if thought else {})}


USER = {"role": "user", "content": "Why?"}
CHATS: list[list[dict[str, Any]]] = [
    [USER, turn("As so.", "one"), USER, turn("Not so."), USER, turn("Well.", "three")],
    [USER, turn("Yes.")],
    [USER, turn("No.", "two"), USER, turn("Never.", "four")],
]


def make_model() -> Any:
    torch.manual_seed(0)
    config = AutoConfig.for_model("llama", **SIZES, num_key_value_heads=2, vocab_size=260, initializer_range=0.5)
    return AutoModelForCausalLM.from_config(config, attn_implementation="eager").double().eval()


@torch.no_grad()
def test_the_log_probability_of_a_turn_is_that_of_prompt_and_answer_alone(tmp_path: Path) -> None:
    (tmp_path / "d.jsonl").write_text("".join(json.dumps({"messages": chat}) + "\n" for chat in CHATS))
    recipe = parse_recipe(
        json.dumps({
            "model": {"config": {"model_type": "llama"}, "tokenizer": "bytes"},
            "data": {
                **{"datasets": [{"path": str(tmp_path / "d.jsonl")}], "max_length": 150, "assistant_only_loss": True},
                **{"chat_template": TEMPLATE, "on_rewritten_turns": "split", "store_dir": str(tmp_path / "store")},
            },
        }), "r.yaml", [],
    ).recipe  # fmt: skip
    rows, model = open_rows(prepare_data(recipe, 2, lambda _: None).path, "train"), make_model()
    found: list[float] = []
    for row in range(len(rows)):
        part, lengths = rows.read(row, 0, rows.count_tokens(row)), torch.tensor(rows.get_lengths(row))
        assert len(lengths) > 1, "rows hold several texts"
        owner = torch.repeat_interleave(torch.arange(len(lengths)), lengths)
        sees = (owner[:, None] == owner[None]) & torch.ones(len(owner), len(owner)).tril().bool()
        mask = torch.where(sees, 0.0, -torch.inf).double()[None, None]
        ids, positions = torch.from_numpy(part.input_ids)[None], torch.from_numpy(part.positions)[None]
        logits = model(ids, attention_mask=mask, position_ids=positions, use_cache=False).logits[0]
        labels = torch.from_numpy(part.labels)
        each = torch.log_softmax(logits, -1).gather(1, labels.clamp(min=0)[:, None])[:, 0]
        is_target = (labels >= 0).tolist()
        starts = [at for at, is_one in enumerate(is_target) if is_one and not (at and is_target[at - 1])]
        for start in starts:
            stop = next((at for at in range(start, len(labels)) if not is_target[at]), len(labels))
            found.append(each[start:stop].sum().item())
    expected = []
    tokenizer = load_tokenizer(recipe.model, recipe.data)
    for chat in CHATS:
        for at in range(1, len(chat), 2):
            prompt = tokenizer.apply_chat_template(chat[:at], tokenize=False, add_generation_prompt=True)
            whole = tokenizer.apply_chat_template(chat[: at + 1], tokenize=False)
            before, ids = (tokenizer(text, add_special_tokens=False)["input_ids"] for text in (prompt, whole))
            logits = model(torch.tensor([ids]), use_cache=False).logits[0]
            each = torch.log_softmax(logits[:-1], -1).gather(1, torch.tensor(ids[1:])[:, None])[:, 0]
            expected.append(each[len(before) - 1 :].sum().item())
    assert len(found) == 6
    assert sorted(found) == pytest.approx(sorted(expected), rel=1e-12)
