"""Which tokens of a chat are targets: by turns, by fields of messages, by thoughts, and where a template rewrites a
turn. The expected targets are written by hand, as text."""

import re
from collections import Counter
from contextlib import closing
from functools import cache
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.prepared import PREPARING, prepare_rows
from support.recipes import VALID
from support.refusals import explain
from support.templates import CHATML, LAST_ROUND
from support.tiers import count_examples
from support.tokenizers_trained import train, wrap
from syrupy.assertion import SnapshotAssertion

from ulysses_cli.data.prepare import Prepared
from ulysses_cli.data.store import CALL, SAID, TARGET, THOUGHT, TURN, TURN_BITS, open_rows
from ulysses_cli.data.tokenizing import targets
from ulysses_cli.data.tokenizing.encoder import Encoder, EncoderSettings
from ulysses_cli.data.tokenizing.lost_parts import compute_growth
from ulysses_cli.data.tokenizing.renderer import Renderer
from ulysses_cli.data.tokenizing.tokenizer import load_tokenizer
from ulysses_cli.plan.problem import RecipeError
from ulysses_cli.plan.recipe.loader import parse_recipe
from ulysses_cli.readers.columns import read_sample
from ulysses_cli.readers.problems import DataError
from ulysses_cli.report.data_report import format_sample, make_data_page
from ulysses_cli.validate import validate_recipe

Row = dict[str, Any]
IM = ("<|im_start|>", "<|im_end|>", "<think>", "</think>")
ALL_SHOWN = LAST_ROUND.replace("loop.index0 > ns.last and (m.reasoning_content or loop.last)", "m.reasoning_content")
# As gpt-oss's: a final answer takes the thoughts of its round away, and the last turn ends with another mark.
UNTIL_FINAL = """\
{%- set ns = namespace(final=-1) %}{%- for m in messages %}
{%- if m.role == 'assistant' and not m.tool_calls %}{%- set ns.final = loop.index0 %}{%- endif %}{%- endfor %}
{%- for m in messages %}{{- '<|im_start|>' + m.role + '\n' }}
{%- if m.reasoning_content and loop.index0 >= ns.final %}{{- '<think>' + m.reasoning_content + '</think>' }}{%- endif %}
{{- m.content }}{%- for call in m.tool_calls or [] %}{{- (call.function | tojson) }}{%- endfor %}
{{- '<|return|>' if loop.last and m.role == 'assistant' and not m.tool_calls else '<|im_end|>' }}{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\n' }}{%- endif %}"""
USER = {"role": "user", "content": "Why?"}


def call(name: str = "find", **arguments: Any) -> Row:
    return {"id": "c1", "type": "function", "function": {"name": name, "arguments": arguments}}


def turn(content: str = "", thought: str = "", *calls: Row, **more: Any) -> Row:
    more |= {"reasoning_content": thought} if thought else {}
    return {"role": "assistant", "content": content, **more, **({"tool_calls": list(calls)} if calls else {})}


def tool(content: str) -> Row:
    return {"role": "tool", "tool_call_id": "c1", "content": content}


ROUND = [USER, turn("", "Look.", call(path="a\n\"b'")), tool("one"), turn("Done.", "So.")]
CALLED = '{"name": "find", "arguments": {"path": "a\\n\\"b\'"}}'
PLAIN, THOUGHTS = [USER, turn("a"), USER, turn("b")], [USER, turn("a", "x y"), USER, turn("b", "z y")]
TWO = [*ROUND, {"role": "user", "content": "More?"}, turn("Yes.", "Hm.")]


@cache
def make_tokenizer(template: str) -> Any:
    tokenizer = wrap(train("qwen"), chat_template=template)
    tokenizer.add_special_tokens({"additional_special_tokens": [*IM, "<|return|>"]})
    return tokenizer


def make_encoder(template: str, **choice: Any) -> Encoder:
    return Encoder(make_tokenizer(template), EncoderSettings(assistant_only_loss=True, **choice))


def list_runs(encoder: Encoder, messages: list[Row], flag: int = TARGET) -> list[str]:
    """The runs of tokens with a flag, of a chat that is one document."""
    ids, flags = encoder.encode(read_sample("chat", {"messages": [dict(message) for message in messages]}))
    assert flags is not None
    edges = np.flatnonzero(np.diff(np.concatenate([[0], (flags & flag) > 0, [0]]).astype(int)))
    return [encoder.tokenizer.decode(ids[a:b]) for a, b in edges.reshape(-1, 2)]


def test_classes_of_what_is_said(snapshot: SnapshotAssertion) -> None:
    """Turns that are not trained, too."""
    encoder = make_encoder(ALL_SHOWN, train_on_turns="last")
    assert {flag: list_runs(encoder, TWO, flag) for flag in (THOUGHT, CALL, SAID)} == snapshot


# As GLM's: no token ends a turn; the model stops at the one that begins what follows.
ROLES = ("<|user|>", "<|assistant|>", "<|observation|>")
NO_END = """\
{%- for m in messages %}{%- if m.role == 'tool' %}
{%- if loop.index0 and messages[loop.index0 - 1].role != 'tool' %}{{- '<|observation|>' }}{%- endif %}
{{- '<result>' + m.content + '</result>' }}
{%- else %}{{- '<|' + m.role + '|>\n' + m.content }}
{%- for call in m.tool_calls or [] %}{{- '<call>' + (call.function | tojson) + '</call>' }}{%- endfor %}{%- endif %}
{%- endfor %}{%- if add_generation_prompt %}{{- '<|assistant|>\n' }}{%- endif %}"""


@pytest.mark.parametrize("only_last", [False, True])
def test_a_turn_ends_with_the_token_at_which_the_model_stops(only_last: bool) -> None:
    tokenizer = wrap(train("qwen"), chat_template=NO_END)
    tokenizer.add_special_tokens({"additional_special_tokens": list(ROLES)})
    tokenizer.add_tokens(["</call>"])  # a token, and no end
    choice = EncoderSettings(assistant_only_loss=True, train_on_turns="last" if only_last else "all")
    encoder = Encoder(tokenizer, choice, ("<|observation|>", "<|user|>"))
    chat = [USER, turn("", "", call(path="a\n\"b'")), tool("one"), turn("Done."), USER, turn("Yes.")]
    called = f"<call>{CALLED}</call><|observation|>"
    expected = [called, "Done.<|user|>", "Yes.<|user|>"]
    assert list_runs(encoder, chat) == (expected[-1:] if only_last else expected)
    assert list_runs(encoder, chat[:2]) == [called], "the chat ends with a call"
    assert list_runs(encoder, chat[:2], TURN) == [], "a document is not cut before its last token"


CHATS: dict[str, tuple[str, list[list[Row]]]] = {
    "chatml": (CHATML, [PLAIN, PLAIN]),
    "call": (UNTIL_FINAL, [ROUND[:2]]),
    # this one also ends a thought: a model that stops there says nothing
    "ends a thought": (UNTIL_FINAL.replace("</think>", "<|im_end|>"), [ROUND[:2], ROUND]),
    "foreign": (UNTIL_FINAL, [PLAIN]),  # the first turn has another mark than where it is the last
    "none": ("{%- for m in messages %}{{- m.role ~ ': ' ~ m.content ~ '\n' }}{%- endfor %}", [PLAIN]),
}


def test_ends_of_turns_are_known(snapshot: SnapshotAssertion) -> None:
    """The same whether all tokens are targets or what is said alone."""
    ends: dict[str, dict[str, int]] = {}
    for (name, (template, chats)), only_said in product(CHATS.items(), (True, False)):
        encoder = Encoder(make_tokenizer(template), EncoderSettings(only_said, on_rewritten_turns="keep"))
        counts = Counter[str]()
        for chat in chats:
            encoder.encode_documents(read_sample("chat", {"messages": [dict(message) for message in chat]}))
            counts.update(encoder.counts)
        found = {end: counts[targets.ENDS + end] for end in targets.list_turn_ends([counts, {}])}
        assert ends.setdefault(name, found) == found
    assert ends == snapshot


@pytest.mark.parametrize("mode", ["keep", "split"])
@pytest.mark.parametrize("template", [LAST_ROUND, UNTIL_FINAL, ALL_SHOWN], ids=["last round", "until final", "all"])
def test_turns_are_numbered_within_their_whole_chat(tmp_path: Path, template: str, mode: str) -> None:
    """Of a text of a split chat, too: evaluations tell the loss of each turn of the assistant."""
    chat = [USER, turn("t0."), USER, turn("t1.", "Look.", call(path="a")), tool("one"), turn("t2.", "So.")]
    chat += [USER, turn("t3.", "Hm."), USER, turn("t4.")]
    words = (f"data.on_rewritten_turns={mode}", "data.added_tokens=[<|im_end|>, <|return|>]")
    rows = open_rows(prepare(tmp_path, [chat], template, *words).path, "train")
    found = {}
    for row in range(len(rows)):
        part = rows.read(row, 0, rows.max_length)
        letters = ["" if token > 255 else chr(token) for token in part.labels.clip(0)]
        for number in set(part.classes >> TURN_BITS):
            here = [at for at in np.flatnonzero(part.classes >> TURN_BITS == number) if part.classes[at] & TARGET]
            for word in re.findall(r"t\d", "".join(letters[at] for at in here)):
                found.setdefault(word, []).append(int(number))
    assert found == {f"t{number}": [number] for number in range(5)}


def test_turns_that_follow_each_other_are_two(tmp_path: Path) -> None:
    template = "{%- for m in messages %}{{- m.content }}{%- endfor %}"
    rows = open_rows(prepare(tmp_path, [[USER, turn("aa"), turn("bb")]], template).path, "train")
    part = rows.read(0, 0, rows.max_length)
    assert [int(code) >> TURN_BITS for code in part.classes[3:7]] == [0, 0, 1, 1]


CHOICES = ("all", "last_round", "last")
WORDS = st.text("abc \n", min_size=1, max_size=6).filter(str.strip).map(str.strip)


@st.composite
def draw_chats(draw: st.DrawFn) -> list[Row]:
    messages: list[Row] = []
    for number in range(draw(st.integers(1, 3))):
        messages.append({"role": "user", "content": f"u{number} {draw(WORDS)}"})
        for _ in range(draw(st.integers(0, 2))):
            thought = draw(st.sampled_from(["", "thinking"]))
            messages.append(turn(draw(st.just("") | WORDS), thought, call(path=draw(WORDS), n=draw(st.integers(0, 3)))))
            messages.append(tool("t " + draw(WORDS)))
        flag = draw(st.sampled_from([None, 0, 1]))
        messages.append(turn(f"f{number} {draw(WORDS)}", draw(st.sampled_from(["", "thinking"])), train=flag))
    return messages


@pytest.mark.parametrize("template", [LAST_ROUND, UNTIL_FINAL, ALL_SHOWN], ids=["last round", "until final", "all"])
def test_each_chosen_turn_is_a_target_once_behind_its_own_prompt(template: str) -> None:
    """Against renderings of each turn alone: what stands before a target is what the model gets."""
    tokenizer = make_tokenizer(template)
    # one for all chats: each starts a process
    encoders = {which: make_encoder(template, on_rewritten_turns="split", train_on_turns=which) for which in CHOICES}

    @settings(max_examples=count_examples(30))
    @given(draw_chats(), st.sampled_from(CHOICES))
    def check(messages: list[Row], which: str) -> None:
        encoder = encoders[which]
        sample: Any = read_sample("chat", {"messages": [dict(message) for message in messages]})
        expected = []
        turns = [at for at, message in enumerate(messages) if message["role"] == "assistant"]
        users = [at for at, message in enumerate(messages) if message["role"] == "user"]
        for at in turns:
            is_chosen = {"all": True, "last": at == turns[-1], "last_round": at > users[-1]}[which]
            flag = messages[at].get("train")
            if is_chosen if flag is None else flag:
                prompts = [
                    tokenizer.apply_chat_template(
                        sample.messages[:at], tokenize=False, add_generation_prompt=True, **more
                    )
                    for more in ({}, {"enable_thinking": False})
                ]
                whole = tokenizer.apply_chat_template(sample.messages[: at + 1], tokenize=False)
                prompt = max((prompt for prompt in prompts if whole.startswith(prompt)), key=len, default=prompts[0])
                answer = whole[len(prompt) :]
                if not whole.startswith(prompt):  # the last turn takes away what the prompt shows
                    answer = whole[whole.rindex("<|im_start|>assistant\n") + len("<|im_start|>assistant\n") :]
                expected.append((prompt, answer.rstrip("\n")))
        found = []
        if not expected:
            return
        for ids, flags in encoder.encode_documents(sample):
            edges = np.flatnonzero(np.diff(np.concatenate([[0], (flags & TARGET) > 0, [0]]).astype(int)))
            found += [(tokenizer.decode(ids[:a]), tokenizer.decode(ids[a:b])) for a, b in edges.reshape(-1, 2)]
        assert sorted(found) == sorted(expected)
        assert not encoder.lost

    check()


def test_a_template_in_use_writes_the_date_of_training() -> None:
    """On every day. `date -d` says which day that was."""
    said = "data.chat_template_kwargs={strftime_now: 2026-11-27}"
    tokenizer = load_tokenizer(parse_recipe(PREPARING, "r.yaml", [said]).recipe.model)
    tokenizer.chat_template = "{{- strftime_now('%A, %d %B %Y') ~ ';' }}" + CHATML
    for variables, day in (({}, "Friday, 26 July 2024"), ({"strftime_now": "2026-11-27"}, "Friday, 27 November 2026")):
        with closing(Renderer(tokenizer, variables=variables)) as renderer:
            assert renderer.render_text([USER]).startswith(f"{day};")


def prepare(folder: Path, rows: list[Any], template: str, *overrides: str, **options: Any) -> Prepared:
    (folder / "t.jinja").write_text(template)
    rows = [row if isinstance(row, str | dict) else {"messages": row} for row in rows]
    words = ("data.max_length=4096", "data.assistant_only_loss=true", f"data.chat_template={folder}/t.jinja")
    return prepare_rows(folder, rows, *words, *overrides, **options)


SWITCHED = LAST_ROUND.replace("loop.index0 > ns.last and (", "(preserve_thinking or loop.index0 > ns.last) and (")
GOOD = [USER, turn("Yes.")]
UNCLEAR = "{%- for m in messages | reverse %}{{- m.role + ': ' + m.content }}{%- endfor %}"
ONE_ANSWER = "{%- if messages | length > 2 %}{{- raise_exception('one answer') }}{%- endif %}" + CHATML
UNTHINKING = {"messages": ROUND, "chat_template_kwargs": {"enable_thinking": False}}
# Chats that are refused, and the lines of the recipe that the hint names: each alone must help.
HINTS: dict[str, tuple[list[Any], str, list[str]]] = {
    "calls": ([TWO], CHATML, []),
    "thoughts": ([THOUGHTS], CHATML, []),
    "rewritten": ([TWO], LAST_ROUND, []),
    "switch": ([TWO], SWITCHED, []),
    "tools": ([{"messages": TWO[-2:], "tools": [{"name": "find"}]}], LAST_ROUND, []),
    "variable": ([PLAIN], LAST_ROUND, ["data.chat_template_kwargs={enable_thinkin: true}"]),
    "variable of a source": ([PLAIN], LAST_ROUND, ["data.datasets.0.chat_template_kwargs={enable_thinkin: true}"]),
    "variable of a row": ([GOOD, {"messages": GOOD, "chat_template_kwargs": {"messages": 1}}], CHATML, []),
    "field": ([[USER, turn("a", weight=1)]], CHATML, ["data.datasets.0.train_field=learn"]),
    "mask": ([[USER, turn("a", mask=True), USER, turn("b", mask=False)]], CHATML, []),
    "no mask": ([[USER, turn("a", weight=1)]], CHATML, ["data.assistant_only_loss=false"]),
    "thinks": ([UNTHINKING], LAST_ROUND, []),
    "text": ([{"messages": GOOD, "text": "words"}], CHATML, []),
    "unclear": ([PLAIN], UNCLEAR, []),
    "no chats": ([{"text": "words"}], CHATML, []),
    "template": ([GOOD, PLAIN], ONE_ANSWER, []),
    "no row": ([GOOD, "{"], CHATML, []),
    "role": ([GOOD, [{"role": "narrator", "content": "a"}]], CHATML, []),
    "image": ([GOOD, [{"role": "user", "content": [{"type": "image"}]}, turn("a")]], CHATML, []),
    "end mark": ([GOOD, [USER, turn("a", "", call(path="<|end|>"))]], ALL_SHOWN, []),
    "untrainable": ([GOOD, [USER, turn("a", weight=0)]], CHATML, []),
    "long": ([GOOD, [USER, turn("long " * 50), USER, turn("b")]], CHATML, ["data.max_length=128"]),
}
LINE = re.compile(r"(data(?:\.\w+)+): (\{.*?\}|\[.*?\]|not \w+|[\w-]+)")


@pytest.mark.parametrize("name", HINTS)
def test_the_lines_that_hints_name_help(tmp_path: Path, name: str, snapshot: SnapshotAssertion) -> None:
    rows, template, wrong = HINTS[name]
    with pytest.raises((DataError, RecipeError)) as caught:
        prepare(tmp_path, rows, template, *wrong)
    hints = " ".join(problem.hint for problem in caught.value.problems)
    lines = [f"{key}={value}" for key, value in LINE.findall(hints)]
    assert lines == snapshot
    for line in lines:
        key = line.partition("=")[0]
        kept = [each for each in wrong if not each.startswith(key)]
        more = ["data.assistant_only_loss=false"] if line.endswith("type=text") else []
        assert len(open_rows(prepare(tmp_path, rows, template, *kept, *more, line).path, "train")) > 0


def test_the_lines_about_templates_help(tmp_path: Path, snapshot: SnapshotAssertion) -> None:
    """A tokenizer without a template: first a template is named, then the tokens that it writes."""
    wrap(train("qwen")).save_pretrained(tmp_path / "bare")
    bare, said = f"model.tokenizer={tmp_path / 'bare'}", []
    for taken in ([bare], [bare, "data.chat_template=llama-3"]):
        said.append(explain(prepare_rows, tmp_path, [{"messages": GOOD}], *taken))
    assert said == snapshot
    ((key, value),) = LINE.findall(said[-1].partition("hint: ")[2])
    prepared = prepare_rows(tmp_path, [{"messages": GOOD}], *taken, f"{key}={value}")
    assert len(open_rows(prepared.path, "train")) == 1


def test_the_lines_that_rules_name_help() -> None:
    def find(*overrides: str) -> list[tuple[str, str]]:
        chat = ("data.datasets.0.type=chat", "data.datasets.0.path=hub/set")
        problems = validate_recipe("r.yaml", (*chat, *overrides), text=VALID).problems
        return [(each.key, each.hint) for each in problems if each.key.startswith("data.") and "templ" not in each.key]

    only = "data.assistant_only_loss=true"
    for wrong in (
        ["data.train_on_turns=last"],
        ["data.thoughts=drop"],
        ["data.on_rewritten_turns=mask"],
        ["data.train_on_turns=last", "data.excess_length_strategy=truncate", only],
        ["data.on_rewritten_turns=split", "data.attend_across_documents=true", only],
        ["data.datasets.0.type=text", only],
    ):
        ((_, hint),) = find(*wrong)
        ((key, value),) = LINE.findall(hint)
        assert not find(*(each for each in wrong if not each.startswith(key)), f"{key}={value}")


@pytest.mark.full
@pytest.mark.parametrize("template", [LAST_ROUND, UNTIL_FINAL], ids=["last round", "until final"])
def test_the_cost_of_split_is_that_of_its_tokens(template: str) -> None:
    @settings(max_examples=count_examples(25))
    @given(st.lists(draw_chats(), min_size=1, max_size=3))
    def check(chats: list[list[Row]]) -> None:
        total, split, whole = Counter[str](), 0, 0
        for chat in chats:
            sample = read_sample("chat", {"messages": [dict(message, train=None) for message in chat]})
            asked, kept, divided = (
                make_encoder(template, on_rewritten_turns=mode) for mode in ("raise", "keep", "split")
            )
            asked.encode_documents(sample)
            total.update(asked.counts)
            before = sum(len(ids) for ids, _ in kept.encode_documents(sample))
            after = sum(len(ids) for ids, _ in divided.encode_documents(sample))
            whole += before
            split += after if asked.lost else before
            assert asked.lost or after == before or asked.counts["would split"], "the error says: at least"
        assert (compute_growth(total) or 1.0) == split / whole

    check()


def test_a_row_is_shown_as_it_is_trained(tmp_path: Path, snapshot: SnapshotAssertion) -> None:
    words = (tmp_path, [[USER, turn("a")], TWO], LAST_ROUND, "data.on_rewritten_turns=split")
    report = prepare(*words, show=(0, 2)).report
    assert [format_sample(shown) for shown in report["samples"]] == snapshot(name="texts")
    page = make_data_page({**prepare(*words).report, "samples": report["samples"][1:]})
    for kind, text in (("target", "[[&lt;think&gt;"), ("answer", "((&lt;call&gt;"), ("context", "&lt;|im_start|&gt;")):
        assert f"<span class={kind}>{text}" in page
    refused = [explain(prepare, *words, show=row) for row in ((0, 9), (3, 1))]
    assert refused == snapshot(name="no such row")
