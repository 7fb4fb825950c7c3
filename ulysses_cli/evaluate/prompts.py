"""Turns samples into tokens, with the model's chat template or without, and makes drafts exactly as long as asked.

Tokens are remembered word by word where that gives the same tokens as the whole text. Models that think are asked to
answer at once, or get tokens of their own for the thought; then only what follows it counts."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, chain, pairwise
from typing import Any

from ulysses_cli.evaluate.sample import Draft, Sample, fill_up
from ulysses_cli.plan.models.model_files import THINKING_SWITCHES, THOUGHT_MARKS
from ulysses_cli.plan.problem import Problem, RecipeError
from ulysses_cli.plan.units import format_count

# gpt-oss: a turn begins with the name of its channel, and answers stand in the last one.
TURN, ANSWER_CHANNEL = "<|start|>assistant", "<|channel|>final<|message|>"
THOUGHTS = (*THOUGHT_MARKS, ("<|channel|>analysis", ANSWER_CHANNEL))
# Takes messages and settings of tokenizer.apply_chat_template, returns the text: data/tokenizing/renderer.py, within
# bounds. A template is a program that comes with the model.
RenderText = Callable[..., str]


def render_question(render: RenderText, messages: Sequence[Mapping[str, str]], *, thinks: bool = False) -> str:
    """The conversation in the model's chat template, up to where the answer begins, or the thought before it."""
    text = _render(render, messages, **dict.fromkeys(THINKING_SWITCHES, thinks))
    if thinks:
        return text
    if text.endswith(TURN):
        return text + ANSWER_CHANNEL
    begun = text.rstrip()
    for opening, closing in THOUGHT_MARKS:
        if begun.endswith(opening):  # the template begins a thought whatever it is told
            return f"{begun}\n\n{closing}\n\n"
    return text


QUESTION = ({"role": "user", "content": "?"},)


def thinks_by_itself(render: RenderText) -> bool:
    """Whether the model would begin with a thought if it were not asked to answer at once."""
    return render_question(render, QUESTION) != _render(render, QUESTION)


def can_think(render: RenderText) -> bool:
    """Whether the chat template knows of thoughts."""
    return render_question(render, QUESTION) != render_question(render, QUESTION, thinks=True)


def write_plain(sample: Sample, prefix: str) -> str:
    """The question without a template. `prefix`: of the answer."""
    text = f"{sample.content}{prefix}"
    # a base model goes on after a word; a prompt in a template of its file ends as the template does
    return text.rstrip() if sample.with_template else text


def find_answer(prompt: str, text: str) -> str | None:
    """What follows the last thought in a model's text. None where a thought has begun and not ended. `prompt`: a
    template may begin the thought there."""
    ends = [closing for _, closing in THOUGHTS if closing in text]
    if ends:
        return text.rpartition(ends[0])[2]
    is_open = any(opening in text or prompt.rstrip().endswith(opening) for opening, _ in THOUGHTS)
    return None if is_open else text


def _render(render: RenderText, messages: Sequence[Mapping[str, str]], **settings: bool) -> str:
    return render(messages, add_generation_prompt=True, **settings)


MAX_REMEMBERED = 300_000  # parts of texts
CHARACTERS_PER_NEW = 40  # of a text, for each new part: with fewer, the whole is tokenized as quickly


class PromptTokenizer:
    """`tokenizer`: one of transformers'. `letters`: those between which and a space it always parts the text; without
    any, words are remembered for a count alone, and each prompt's tokens are those of its whole text."""

    def __init__(self, tokenizer: Any, letters: str = "") -> None:
        self.tokenizer = tokenizer
        self._fast: Any = getattr(tokenizer, "_tokenizer", None)  # of the tokenizers library
        # begins with the space, which is found quickly
        self._cut = re.compile(f" (?<=[{letters}] )") if letters else None
        # tokens of a space and these characters: of the text's own parts, and of its words for an estimate
        self._known: dict[str, list[int]] = {}
        self._counted: dict[str, list[int]] = {}
        self._specials: tuple[list[int], list[int]] | None = None
        if self._cut is not None:
            bare, whole = (self.tokenize(["a"], adds)[0] for adds in (False, True))
            at = next((at for at in range(len(whole)) if whole[at : at + len(bare)] == bare), None)
            if at is None:
                self.read_whole()
            else:
                self._specials = whole[:at], whole[at + len(bare) :]

    @property
    def is_exact(self) -> bool:
        """Whether words have the tokens of the whole text."""
        return self._cut is not None

    def read_whole(self) -> None:
        """From now on each prompt's tokens are those of its whole text."""
        self._cut = None
        self._known.clear()

    def tokenize(self, texts: Sequence[str], adds_special: bool) -> list[list[int]]:
        """The tokens of each text, as a whole."""
        if self._fast is None:
            return [list(self.tokenizer(text, add_special_tokens=adds_special)["input_ids"]) for text in texts]
        # without offsets, which take as long as the tokens
        found = self._fast.encode_batch_fast(list(texts), add_special_tokens=adds_special)
        return [each.ids for each in found]

    def encode(self, text: str, adds_special: bool) -> list[int]:
        """The tokens of a long text."""
        words = self._cut_words(text)
        if words is None or self._specials is None:
            return self.tokenize([text], adds_special)[0]
        before, after = self._specials if adds_special else ([], [])
        first = self.tokenize(words[:1], False)[0]
        return [*before, *first, *chain.from_iterable(map(self._known.__getitem__, words[1:])), *after]

    def has_words(self, text: str) -> bool:
        """Whether `encode` joins the text's tokens from those of its words."""
        return self._cut_words(text) is not None

    def count(self, text: str) -> int:
        """Counts a text's tokens, without special ones. An estimate where it counts word by word: not every tokenizer
        parts the text before each space."""
        words, sizes = self._cut_words(text), self._known
        if words is None:
            words, sizes = text.split(" "), self._remember(text.split(" ")[1:], self._counted)
        return len(self.tokenize(words[:1], False)[0]) + sum(map(len, map(sizes.__getitem__, words[1:])))

    def _cut_words(self, text: str) -> list[str] | None:
        """Cuts a text where its tokens part, and remembers the parts' tokens. None where they are not known to part, or
        where so many parts are new that the whole text is read as quickly."""
        if self._cut is None:
            return None
        words = self._cut.split(text)
        num_new = len(set(words[1:]).difference(self._known))
        if num_new * CHARACTERS_PER_NEW > len(text):
            return None
        self._remember(words[1:], self._known)
        return words

    def _remember(self, words: Sequence[str], known: dict[str, list[int]]) -> dict[str, list[int]]:
        """Adds the tokens of each word, with a space before it, to what is known."""
        if len(known) > MAX_REMEMBERED:
            known.clear()
        if new := list(set(words).difference(known)):
            known.update(zip(new, self.tokenize([f" {word}" for word in new], False), strict=True))
        return known


# Texts that may add one token each time. Marks come first: words of a fill would be counted by cwe and fwe.
FILLS = (" .", " ,", ".", ",", " so", " and", " the", " it", " a", "a", "x")
MAX_TRIES = 30
FAR = 64  # units between two tries that tell what a unit has at this length: later ones may have more tokens
MAX_ESTIMATES = 10  # tries that count words; later ones tokenize the whole text
PLACEHOLDER = "\u2983content\u2984"


def name_prompt(task: str, length: int, index: int) -> str:
    """The name of a question, the same in each evaluation with the same seed and files."""
    return f"{task}/{length}/{index}"


@dataclass(frozen=True)
class TaskPrompt:
    """A sample's tokens. `depths`: where each piece of evidence begins, as a share of the tokens. `way`: how its
    context came about, where it is not the whole one."""

    sample: Sample
    tokens: tuple[int, ...]
    depths: tuple[float, ...]
    index: int = 0
    length: int = 0  # what was asked for, with the answer's tokens
    way: str = ""

    @property
    def name(self) -> str:
        return name_prompt(self.sample.task, self.length, self.index) + (f"/{self.way}" if self.way else "")

    @property
    def digest(self) -> str:
        return hashlib.sha256(",".join(map(str, self.tokens)).encode()).hexdigest()[:16]


class Prompter:
    """Renders samples for one model. `tokenizer` and `letters`: as PromptTokenizer takes them. `render`: the chat
    template. `thinking`: tokens for a thought before each answer, in a chat template; 0: the model answers at once."""

    def __init__(
        self,
        tokenizer: Any,
        render: RenderText,
        *,
        with_template: bool | None = None,
        letters: str = "",
        thinking: int = 0,
    ) -> None:
        self.tokenizer, self.tokens = tokenizer, PromptTokenizer(tokenizer, letters)
        self.render_text = render
        has_template = bool(getattr(tokenizer, "chat_template", None))
        if with_template and not has_template:
            hint = "leave out --chat-template, or name an instruct model"
            raise RecipeError([Problem("--chat-template", "the model's tokenizer has no chat template", hint)])
        self.with_template = has_template if with_template is None else with_template
        self.thinking = thinking
        self.head = ""
        self.tail = ""
        self.thinks_by_itself = False
        if thinking and not self.with_template:
            message = "the model's chat template is not used, or there is none"
            raise RecipeError([Problem("--thinking", message, "leave it out")])
        if self.with_template:
            self._read_template()
        self.fill = self._find_fill()

    def _read_template(self) -> None:
        try:
            self.head, found, self.tail = self._apply([("user", PLACEHOLDER)]).partition(PLACEHOLDER)
            self.thinks_by_itself = thinks_by_itself(self.render_text)
            knows_thoughts = not self.thinking or can_think(self.render_text)
        except Exception as error:  # noqa: BLE001 - a template raises what it likes, and may exceed its bounds
            message = f"the model's template cannot be used: {error}"
            raise RecipeError([Problem("--chat-template", message, "add --no-chat-template")]) from None
        if not knows_thoughts:
            message = "the model's chat template knows of no thoughts"
            raise RecipeError([Problem("--thinking", message, "leave it out")])
        if not found:
            message = "the chat template does not show a user's message as it is"
            raise RecipeError([Problem("--chat-template", message, "add --no-chat-template")])

    def _apply(self, messages: Sequence[tuple[str, str]]) -> str:
        asked = [{"role": role, "content": text} for role, text in messages]
        return render_question(self.render_text, asked, thinks=self.thinking > 0)

    def thinks_about(self, sample: Sample) -> bool:
        """Questions that are asked without the model's template are answered at once."""
        return self.thinking > 0 and sample.with_template

    def count_new_tokens(self, sample: Sample) -> int:
        """The most tokens of an answer, with those of the thought before it."""
        return sample.max_new_tokens + (self.thinking if self.thinks_about(sample) else 0)

    def read_answer(self, sample: Sample, tokens: Sequence[int]) -> tuple[str, bool]:
        """Returns the text that counts, and whether it was reached: a thought may use up its tokens."""
        if not self.thinks_about(sample):
            # marks of calls are special tokens
            return self.tokenizer.decode(tokens, skip_special_tokens=sample.metric != "calls"), True
        answer = find_answer(self.render(sample)[0], self.tokenizer.decode(tokens, skip_special_tokens=False))
        text = answer or ""
        for special in self.tokenizer.all_special_tokens:
            text = text.replace(special, "")
        return text, answer is not None

    def list_notes(self) -> list[str]:
        if self.thinking:
            return [f"the model may think, for {format_count(self.thinking, 'token')} before each answer"]
        if self.thinks_by_itself:
            return ["the model is asked to answer at once: thinking is turned off in its chat template"]
        return []

    def render(self, sample: Sample) -> tuple[str, int | None]:
        """Returns the prompt's text, and the character at which the content begins; None where the content is not in
        it as it is. As in RULER, the start of the answer follows the content or the assistant's header at
        once; where the model thinks first, it begins the answer itself."""
        prefix = "" if self.thinks_about(sample) else sample.answer_prefix
        if not (self.with_template and sample.with_template):
            return write_plain(sample, prefix), 0
        if not sample.messages:
            return f"{self.head}{sample.content}{self.tail}{prefix}", len(self.head)
        try:
            return self._apply(sample.messages) + prefix, None
        except Exception as error:  # noqa: BLE001 - a template raises what it likes, such as for roles in another order
            message = f"the chat template does not take the conversations of {sample.task}: {error}"
            raise RecipeError([Problem("--chat-template", message, "add --no-chat-template")]) from None

    def encode(self, sample: Sample, *, in_one: bool = False) -> list[int]:
        """Returns the prompt's tokens, with `in_one` by one tokenization of the whole text. Special tokens are added
        where no template writes them."""
        text, _ = self.render(sample)
        begin = getattr(self.tokenizer, "bos_token", None)
        adds = not (self.with_template and sample.with_template) and not (begin and text.startswith(begin))
        tokens = self.tokens.tokenize([text], adds)[0] if in_one else self.tokens.encode(text, adds)
        end = getattr(self.tokenizer, "eos_token_id", None)
        if adds and len(tokens) > 1 and tokens[-1] == end:
            tokens.pop()  # an end of the text would end the prompt
        return tokens

    def make(
        self,
        sample: Sample,
        index: int = 0,
        length: int = 0,
        way: str = "",
        tokens: Sequence[int] | None = None,
        counted: int = 0,
    ) -> TaskPrompt:
        """`tokens`: the prompt's, where they are known; `counted`: what is counted of its text."""
        tokens = self.encode(sample) if tokens is None else tokens
        text, begin = self.render(sample)
        marks = [begin + mark for mark, _ in sample.evidence] if begin is not None else []
        depths = self._measure_depths(text, marks, counted)
        return TaskPrompt(sample, tuple(tokens), depths, index, length, way)

    def _measure_depths(self, text: str, marks: Sequence[int], counted: int) -> tuple[float, ...]:
        """Takes marks in characters, and the count of the whole text, 0 where it is not known. Each part between two
        marks is counted once. Numerator and denominator are estimates by the same count, so its error cancels in the
        share."""
        if not marks:
            return ()
        places = sorted({0, *marks})
        sizes = [self.tokens.count(text[start:stop]) for start, stop in pairwise(places)]
        before = dict(zip(places, accumulate(sizes, initial=0), strict=True))
        whole = counted or before[places[-1]] + self.tokens.count(text[places[-1] :])
        return tuple(round(before[mark] / whole, 4) for mark in marks)

    def encode_answer(self, prompt: TaskPrompt, answer: str) -> list[int]:
        """Returns the answer's tokens as they follow the prompt's, or [] where the two do not part at the same place.
        A space before the answer belongs to its first token."""
        text, _ = self.render(prompt.sample)
        last = text[-256:]
        joined = last if last.endswith((" ", "\n")) or not last else last + " "
        adds = {"add_special_tokens": False}
        before = self.tokenizer(last, **adds)["input_ids"]
        whole = self.tokenizer(joined + answer, **adds)["input_ids"]
        return list(whole[len(before) :]) if whole[: len(before)] == before else []

    def _find_fill(self) -> str:
        for fill in FILLS:
            sizes = [
                len(self.tokenizer("x." + fill * number, add_special_tokens=False)["input_ids"]) for number in (4, 12)
            ]
            if sizes[1] - sizes[0] == 8:
                return fill
        message = "no short text adds one token at a time, so no sample can be made exactly as long as asked"
        raise RecipeError([Problem("model.tokenizer", message)])


@dataclass
class Fitter:
    """Makes prompts of exact lengths. Remembers what fitted a task's first draft of a length. The others begin there:
    none depends on which others are made."""

    prompter: Prompter
    fitted: dict[tuple[str, int], tuple[int, int, float, int]] = field(default_factory=dict)
    proven: set[tuple[str, int]] = field(default_factory=set)  # tokens of words are those of the whole text

    def fit(self, name: str, draft: Draft, length: int, index: int) -> TaskPrompt:
        """`length` includes the tokens of the answer. The search counts words; what it finds is proven by the
        prompt's tokens, which also say by how much the count is off. Where they are those of its words, one
        tokenization of a whole prompt proves the words of each task and length."""
        key = name, length
        num_units, num_fill, slope, excess = self.fitted.get(key) or self._estimate(draft, length)
        fill = self.prompter.fill
        bare_units = -1  # bare: without a fill
        bare = draft(0)
        bare_tokens = 0
        tried = set[int]()
        before: tuple[int, int] | None = None  # units and tokens of the last try
        for number in range(MAX_TRIES):
            is_precise = number >= MAX_ESTIMATES
            if num_units != bare_units or number == MAX_ESTIMATES:
                bare_units, bare = num_units, draft(num_units)
                if is_precise:
                    bare_tokens, excess = len(self.prompter.encode(bare, in_one=True)), 0
                else:
                    bare_tokens = self.prompter.tokens.count(self.prompter.render(bare)[0])
                    if before and abs(num_units - before[0]) >= FAR:
                        slope = max(1.0, (bare_tokens - before[1]) / (num_units - before[0]))
                    before = num_units, bare_tokens
            wanted = length - bare.max_new_tokens
            # each fill is one token, whatever a tokenizer makes of it as a word by itself
            counted = bare_tokens + num_fill
            missing = wanted - counted - excess
            if not missing:
                sample = fill_up(bare, fill * num_fill)
                tokens = self.prompter.encode(sample)
                if key not in self.proven and self.prompter.tokens.has_words(self.prompter.render(sample)[0]):
                    self.proven.add(key)
                    if tokens != self.prompter.encode(sample, in_one=True):
                        self.prompter.tokens.read_whole()
                        continue
                if len(tokens) == wanted:
                    self.fitted.setdefault(key, (num_units, num_fill, slope, excess))
                    return self.prompter.make(sample, index, length, tokens=tokens, counted=counted)
                excess, missing = len(tokens) - counted, wanted - len(tokens)
            # units may not all have one length: the search would go to and fro between two numbers of them
            most = 4 * slope + 64 if num_units in tried else slope + 4
            if 0 <= num_fill + missing <= most:
                num_fill += missing
                continue
            change = int((missing + num_fill) // slope)  # rounds down: the rest is filled up
            if num_units + change < 0:
                if not num_units:
                    break
                change = -num_units
            tried.add(num_units)
            num_units, num_fill = num_units + (change or (1 if missing > 0 else -1)), 0
        check_draft(name, draft, length, self.prompter)
        message = f"{name} cannot be made exactly {length:,} tokens long"
        raise RecipeError([Problem("--max-length", message, "use another length")])

    def _estimate(self, draft: Draft, length: int) -> tuple[int, int, float, int]:
        """Returns units, fill, tokens of a unit, and what the count of words misses, from two drafts."""
        sizes = []
        few = max(4, length // 400)
        for number in (few, 2 * few):
            sample = draft(number)
            sizes.append(len(self.prompter.encode(sample)))
        excess = sizes[1] - self.prompter.tokens.count(self.prompter.render(sample)[0])
        slope = max(0.01, (sizes[1] - sizes[0]) / few)
        num_units = max(0, few + int((length - sizes[0] - sample.max_new_tokens) // slope))
        return num_units, 0, max(1.0, slope), excess


def check_draft(name: str, draft: Draft, length: int, prompter: Prompter) -> None:
    """Raises RecipeError where the draft is too long without any haystack."""
    sample = draft(0)
    least = len(prompter.encode(sample)) + sample.max_new_tokens
    if least > length:
        message = f"{name} needs at least {least:,} tokens, {sample.max_new_tokens} of them for the answer"
        hint = f"use {least:,} or more, or leave out {name}"
        raise RecipeError([Problem("--max-length", f"{length:,} is too short: {message}", hint)])


Progress = Callable[[str], None]
