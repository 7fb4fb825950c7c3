"""What the assistant said and a chat template does not show: found in templates of known models' manners, counted,
refused until the recipe allows it, and never a target that is an end mark alone."""

import json
from pathlib import Path
from typing import Any

import pytest
from support.real_model import READY, needs_real_model
from support.refusals import explain
from support.tiers import sample
from support.tokenizers_trained import train, wrap
from syrupy.assertion import SnapshotAssertion

from ulysses_cli.data.prepare import Prepared, prepare_data
from ulysses_cli.data.store import TARGET
from ulysses_cli.data.tokenizing.encoder import Encoder, EncoderSettings
from ulysses_cli.data.tokenizing.lost_parts import find_lost_parts
from ulysses_cli.plan.models.model_files import find_switch
from ulysses_cli.plan.recipe.loader import parse_recipe
from ulysses_cli.readers.columns import read_sample
from ulysses_cli.readers.problems import DataError
from ulysses_cli.report.data_report import format_report, make_data_page

Row = dict[str, Any]
IM = ("<|im_start|>", "<|im_end|>")
HEAD = "{%- for m in messages %}{{- '<|im_start|>' + m.role + '\n' }}"
TAIL = "{{- '<|im_end|>\n' }}{%- endfor %}{%- if add_generation_prompt %}{{- '<|im_start|>assistant\n' }}{%- endif %}"
THOUGHTS = "{%- if m.reasoning_content %}{{- '<think>\n' + m.reasoning_content + '\n</think>\n\n' }}{%- endif %}"
# As the newest templates: a variable keeps thoughts of earlier turns.
SWITCHED = (
    HEAD + "{%- if (preserve_thinking is defined and preserve_thinking) or loop.last %}" + THOUGHTS + "{%- endif %}"
    "{{- m.content }}" + TAIL
)


def call(name: str = "find", **arguments: Any) -> Row:
    return {"type": "function", "function": {"name": name, "arguments": arguments}}


def turn(content: str = "", thought: str = "", calls: list[Row] | None = None) -> Row:
    more = {"reasoning_content": thought} if thought else {}
    return {"role": "assistant", "content": content, **more, **({"tool_calls": calls} if calls else {})}


USER = {"role": "user", "content": "Why?"}
THINKING = [USER, turn("Because.", "First thought."), USER, turn("So.", "Second thought.")]
CALLING = [USER, turn(calls=[call(path="a/b", depth=2, deep=True, text='say "é"\n')]), {"role": "tool", "content": "x"}]
INLINE = [USER, turn("<think>\nHm.\n</think>\n\nBecause.")]
BOTH = [USER, turn("I look.", "Hm.", [call(a=1), call(b=[2, {"c": 3.5}])]), {"role": "tool", "content": "x"}]


def make_encoder(template: str, *, only_said: bool = True) -> Encoder:
    tokenizer = wrap(train("qwen"), chat_template=template)
    tokenizer.add_special_tokens({"additional_special_tokens": list(IM)})
    return Encoder(tokenizer, EncoderSettings(assistant_only_loss=only_said))


@pytest.mark.parametrize(
    ("prompt", "off", "said"),
    [
        ("", "<think>\\n\\n</think>\\n\\n", "So.<|im_end|>"),
        ("<think>\\n", "<think>\\n\\n</think>\\n\\n", "So.<|im_end|>"),
        ("<think>", "</think>", "So.<|im_end|>"),
        ("<think>\\n", "<think>\\n", "\n\n</think>\n\nSo.<|im_end|>"),  # the first token crosses the bound
    ],
    ids=["Qwen3", "Qwen3.5", "GLM", "no switch"],
)
def test_an_empty_thought_of_the_prompt_is_no_target(prompt: str, off: str, said: str) -> None:
    """As templates write it for a turn without a thought, and their prompt when thinking is turned off."""
    empty = off if off.endswith("</think>") or "n</think>" in off else "<think>\\n\\n</think>\\n\\n"
    turns = "{%- if m.role == 'assistant' %}{%- if m.reasoning_content %}" + THOUGHTS + "{%- else %}{{- 'EMPTY' }}"
    template = HEAD + turns.replace("EMPTY", empty) + "{%- endif %}{%- endif %}{{- m.content + '<|im_end|>\n' }}"
    template += "{%- endfor %}{%- if add_generation_prompt %}{{- '<|im_start|>assistant\n' }}"
    template += (
        f"{{{{- '{off}' if enable_thinking is defined and not enable_thinking else '{prompt}' }}}}{{%- endif %}}"
    )
    encoder = make_encoder(template)
    chat = [USER, turn("Because."), USER, turn("So.")]
    ids, flags = encoder.encode(read_sample("chat", {"messages": chat}))
    assert encoder.tokenizer.decode(ids[(flags & TARGET) > 0]) == said.replace("So.", "Because.") + said
    ids, flags = encoder.encode(read_sample("chat", {"messages": [USER, turn("So.", "Hm.")]}))
    assert encoder.tokenizer.decode(ids[(flags & TARGET) > 0]).endswith("Hm.\n</think>\n\nSo.<|im_end|>")


def test_keys_and_marks_of_thoughts() -> None:
    for key in ("reasoning_content", "thinking", "reasoning"):
        assert [p.words for p in find_lost_parts({"content": "a", key: " Hm. "}, 0, "a")] == ["Hm."]
        assert not find_lost_parts({"content": "a", key: " \n"}, 0, "a")
    for opening, closing in (("<think>", "</think>"), ("[THINK]", "[/THINK]")):
        (part,) = find_lost_parts({"content": f"{opening}Hm.{closing}\na"}, 0, "a")
        assert (part.kind, part.words) == ("thought", "Hm.")
        assert not find_lost_parts({"content": f"{opening}\n\n{closing}\na"}, 0, "a"), "an empty thought"


def test_the_switch_of_a_template() -> None:
    assert find_switch(SWITCHED) == ("preserve_thinking", "true")
    clears = "{{ messages }}{% if clear_thinking is defined and not clear_thinking %}{% endif %}"
    assert find_switch(clears) == ("clear_thinking", "false")
    for text in ("{# preserve_thinking #}{{ 'preserve_thinking' }}", "{{ "):
        assert find_switch(text) is None


RECIPE = """\
model: {config: {model_type: llama}, tokenizer: TOKENIZER}
data:
  datasets:
    - path: FOLDER/d.jsonl
  max_length: 4096
  store_dir: FOLDER/store
"""


def prepare(folder: Path, chats: list[list[Row]], tokenizer: str, *overrides: str, report: Any = print) -> Prepared:
    (folder / "d.jsonl").write_text("".join(json.dumps({"messages": chat}) + "\n" for chat in chats))
    text = RECIPE.replace("FOLDER", str(folder)).replace("TOKENIZER", tokenizer)
    return prepare_data(parse_recipe(text, "r.yaml", overrides).recipe, 8, report)


def test_what_may_be_lost_is_counted_in_each_report(tmp_path: Path, snapshot: SnapshotAssertion) -> None:
    given, events = (tmp_path, [THINKING, CALLING, BOTH], "bytes"), list[Any]()
    assert explain(prepare, *given, error=DataError) == snapshot
    report = prepare(*given, "data.on_rewritten_turns=keep", report=events.append).report
    assert not [event for event in events if event["event"] == "progress"], "the store is the same"
    (source,) = report["sources"]
    assert source["lost"] == {
        "num_turns": 4, "num_chats": 3, "kinds": {"thought": 3, "calls": 2},
        "example": [f"{tmp_path}/d.jsonl", 1, 2, "thought", "First thought."],
    }  # fmt: skip
    text, page = format_report(report), make_data_page(report)
    assert [line for line in text.splitlines() if "turn" in line] == snapshot(name="report")
    assert all(words in page for words in ("thoughts of 3", "tool calls of 2", "in 3 chats", "First thought."))
    json.dumps(report)


@pytest.mark.check
@needs_real_model
@pytest.mark.parametrize("only_said", sample(["true", "false"], quick=["true"], checked=()))
def test_a_real_template_that_shows_contents_alone(tmp_path: Path, only_said: str) -> None:
    chats = [[USER, turn("So.")], BOTH]
    said = explain(prepare, tmp_path, chats, str(READY), f"data.assistant_only_loss={only_said}", error=DataError)
    assert ":2:1: " in said
    prepare(tmp_path, [[USER, turn("So.")], INLINE], str(READY))
