"""Turns samples into tokens, with the model's chat template or without, and makes drafts exactly as long as asked."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, pairwise
from typing import Any

from ulysses_cli.evaluate.sample import Draft, Sample
from ulysses_cli.plan.problem import Problem, RecipeError

FILLS = (" so", " and", " the", " it", " a", ".", ",", "a", "x")  # texts that may add one token each time
MAX_TRIES = 30
MAX_REMEMBERED = 200_000  # words whose number of tokens is remembered
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
    """Renders samples for one model. `tokenizer`: one of transformers'."""

    def __init__(self, tokenizer: Any, *, with_template: bool | None = None) -> None:
        self.tokenizer = tokenizer
        has_template = bool(getattr(tokenizer, "chat_template", None))
        if with_template and not has_template:
            hint = "leave out --chat-template, or name an instruct model"
            raise RecipeError([Problem("--chat-template", "the model's tokenizer has no chat template", hint)])
        self.with_template = has_template if with_template is None else with_template
        self.head = self.tail = ""
        if self.with_template:
            messages = [{"role": "user", "content": PLACEHOLDER}]
            text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
            self.head, found, self.tail = text.partition(PLACEHOLDER)
            if not found:
                message = "the chat template does not show a user's message as it is"
                raise RecipeError([Problem("--chat-template", message, "add --no-chat-template")])
        self._fast: Any = getattr(tokenizer, "_tokenizer", None)  # of the tokenizers library
        self._counts: dict[str, int] = {}
        self.fill = self._find_fill()

    def render(self, sample: Sample) -> tuple[str, int]:
        """Returns the prompt's text, and the character at which the content begins."""
        if self.with_template and sample.with_template:
            return f"{self.head}{sample.content}{self.tail}{sample.answer_prefix.lstrip()}", len(self.head)
        return f"{sample.content}\n{sample.answer_prefix.strip()}".rstrip(), 0

    def encode(self, sample: Sample) -> list[int]:
        """Returns the prompt's tokens. Special tokens are added where no template writes them."""
        text, _ = self.render(sample)
        adds = not (self.with_template and sample.with_template)
        tokens = self.tokenize([text], adds)[0]
        end = getattr(self.tokenizer, "eos_token_id", None)
        if adds and len(tokens) > 1 and tokens[-1] == end:
            tokens.pop()  # an end of the text would end the prompt
        return tokens

    def tokenize(self, texts: Sequence[str], adds_special: bool) -> list[list[int]]:
        """The tokens of each text."""
        if self._fast is None:
            return [list(self.tokenizer(text, add_special_tokens=adds_special)["input_ids"]) for text in texts]
        # without offsets, which take as long as the tokens
        found = self._fast.encode_batch_fast(list(texts), add_special_tokens=adds_special)
        return [each.ids for each in found]

    def count_tokens(self, text: str) -> int:
        """Counts a text's tokens word by word, each with the space before it. That is quick, since words come again and
        again, but an estimate: not every tokenizer cuts before each space."""
        first, *words = text.split(" ")
        fragments = Counter(words)
        if len(self._counts) > MAX_REMEMBERED:
            self._counts.clear()
        new = [word for word in fragments if word not in self._counts]
        self._counts.update(zip(new, map(len, self.tokenize([f" {word}" for word in new], False)), strict=True))
        own = len(self.tokenize([first], False)[0])
        return own + sum(self._counts[word] * number for word, number in fragments.items())

    def make(
        self,
        sample: Sample,
        index: int = 0,
        length: int = 0,
        way: str = "",
        tokens: Sequence[int] | None = None,
        counted: int = 0,
    ) -> TaskPrompt:
        """`tokens`: the prompt's, where they are known; `counted`: what count_tokens says of its text."""
        tokens = self.encode(sample) if tokens is None else tokens
        text, begin = self.render(sample)
        depths = self._measure_depths(text, [begin + mark for mark, _ in sample.evidence], counted)
        return TaskPrompt(sample, tuple(tokens), depths, index, length, way)

    def _measure_depths(self, text: str, marks: Sequence[int], counted: int) -> tuple[float, ...]:
        """Takes marks in characters, and the count of the whole text, 0 where it is not known. Each part between two
        marks is counted once. Numerator and denominator are estimates by the same count, so its error cancels in the
        share."""
        if not marks:
            return ()
        places = sorted({0, *marks})
        sizes = [self.count_tokens(text[start:stop]) for start, stop in pairwise(places)]
        before = dict(zip(places, accumulate(sizes, initial=0), strict=True))
        whole = counted or before[places[-1]] + self.count_tokens(text[places[-1] :])
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

    def fit(self, name: str, draft: Draft, length: int, index: int) -> TaskPrompt:
        """`length` includes the tokens of the answer. The search counts words; what it finds is proven by one
        tokenization of the whole prompt, which also says by how much the count is off."""
        key = name, length
        num_units, num_fill, slope, excess = self.fitted.get(key) or self._estimate(draft, length)
        fill = self.prompter.fill
        bare_units, bare, bare_tokens = -1, draft(0, ""), 0  # without a fill
        for number in range(MAX_TRIES):
            if num_units != bare_units:
                bare_units, bare = num_units, draft(num_units, "")
                bare_tokens = self.prompter.count_tokens(self.prompter.render(bare)[0])
            wanted = length - bare.max_new_tokens
            # each fill is one token, whatever a tokenizer makes of it as a word by itself
            counted = bare_tokens + num_fill
            missing = wanted - counted - excess
            if not missing:
                sample = draft(num_units, fill * num_fill) if num_fill else bare
                tokens = self.prompter.encode(sample)
                if len(tokens) == wanted:
                    self.fitted.setdefault(key, (num_units, num_fill, slope, excess))
                    return self.prompter.make(sample, index, length, tokens=tokens, counted=counted)
                excess, missing = len(tokens) - counted, wanted - len(tokens)
            most = slope + 4 if number < MAX_TRIES // 2 else 4 * slope + 64  # units may not all have one length
            if 0 <= num_fill + missing <= most:
                num_fill += missing
                continue
            change = int((missing + num_fill) // slope)  # rounds down: the rest is filled up
            if num_units + change < 0:
                if not num_units:
                    break
                change = -num_units
            num_units, num_fill = num_units + (change or (1 if missing > 0 else -1)), 0
        raise RecipeError([_describe_misfit(name, length, draft, self.prompter)])

    def _estimate(self, draft: Draft, length: int) -> tuple[int, int, float, int]:
        """Returns units, fill, tokens of a unit, and what the count of words misses, from two drafts."""
        sizes = []
        few = max(4, length // 400)
        for number in (few, 2 * few):
            sample = draft(number, "")
            sizes.append(len(self.prompter.encode(sample)))
        excess = sizes[1] - self.prompter.count_tokens(self.prompter.render(sample)[0])
        slope = max(0.01, (sizes[1] - sizes[0]) / few)
        num_units = max(0, few + int((length - sizes[0] - sample.max_new_tokens) // slope))
        return num_units, 0, max(1.0, slope), excess


def _describe_misfit(name: str, length: int, draft: Draft, prompter: Prompter) -> Problem:
    sample = draft(0, "")
    least = len(prompter.encode(sample)) + sample.max_new_tokens
    if least > length:
        message = f"{name} needs at least {least:,} tokens, {sample.max_new_tokens} of them for the answer"
        return Problem(
            "--max-length", f"{length:,} is too short: {message}", f"use {least:,} or more, or leave out {name}"
        )
    return Problem("--max-length", f"{name} cannot be made exactly {length:,} tokens long", "use another length")


Progress = Callable[[str], None]
