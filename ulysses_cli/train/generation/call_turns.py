"""Questions from held-out chats: the prompt of a turn in which the assistant calls tools, and the calls that it makes
there. Both are read from the tokens and flags that `prepare` makes: a prompt is what training shows before the turn.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np

from ulysses_cli.data.store import CALL, SAID, TARGET, Flags, Ids
from ulysses_cli.evaluate.prompts import TaskPrompt
from ulysses_cli.evaluate.sample import Sample
from ulysses_cli.evaluate.scoring.calls import read_calls, write_calls
from ulysses_cli.evaluate.suites import CALLS, make_source
from ulysses_cli.plan.nouns import format_count
from ulysses_cli.plan.problem import Problem, RecipeError

Document = tuple[Ids, Flags | None]
MAX_READ = 2000  # turns with calls, of which those to ask are drawn
ROOM = 16  # tokens of an answer, beside twice those of the right one
SHOWN_CHARS = 200  # of a prompt's end


def make_call_prompts(
    documents: Iterable[Document], tokenizer: Any, number: int, *, seed: int, limit: int, thinking: int = 0
) -> tuple[list[TaskPrompt], list[str]]:
    """`number` turns of those that are targets, drawn by the seed; and notes. `limit`: the most tokens of a prompt with
    its answer. `thinking`: further tokens for an answer. Raises RecipeError where there is no such turn."""
    found, num_unread, num_long = list[TaskPrompt](), 0, 0
    for tokens, flags in documents:
        for turn, (start, stop) in enumerate(_find_answers(flags)):
            bits = np.bitwise_or.reduce(flags[start:stop]) if flags is not None else 0
            if not (bits & CALL and bits & TARGET):
                continue
            calls = read_calls(tokenizer.decode(tokens[start:stop].tolist(), skip_special_tokens=False))
            # few sizes, since questions of one size can share a prefill
            room = (1 << (2 * (stop - start) + ROOM).bit_length()) + thinking
            if not calls:
                num_unread += 1
            elif limit and start + room > limit:
                num_long += 1
            else:
                found.append(_make_prompt(tokens[:start], tokenizer.decode, calls, turn, room, len(found)))
        if len(found) >= max(MAX_READ, number):
            break
    if not found:
        raise RecipeError([_explain_nothing(num_unread, num_long, limit)])
    order = list(range(len(found)))
    make_source(seed, CALLS, 0, 0).shuffle(order)
    chosen = [found[at] for at in sorted(order[:number])]
    notes = [f"calls are asked at {len(chosen):,} of {format_count(len(found), 'turn')} with calls"]
    if num_long:
        notes.append(f"{format_count(num_long, 'turn')} with calls left out: longer than {limit:,} tokens")
    if num_unread:
        notes.append(f"{format_count(num_unread, 'turn')} with calls left out: their form is not known here")
    return chosen, notes


def _find_answers(flags: Flags | None) -> list[tuple[int, int]]:
    """The spans of tokens that the assistant says."""
    if flags is None:
        return []
    edges = np.flatnonzero(np.diff(((flags & SAID) > 0).astype(np.int8), prepend=0, append=0))
    return list(zip(edges[::2].tolist(), edges[1::2].tolist(), strict=True))


def _make_prompt(
    tokens: Ids, decode: Callable[..., str], calls: Sequence[Any], turn: int, room: int, index: int
) -> TaskPrompt:
    names = ", ".join(dict.fromkeys(name for name, _ in calls))
    sample = Sample(
        CALLS, decode(tokens[-SHOWN_CHARS:].tolist()), (write_calls(calls),), "calls", room, with_template=False,
        facts={"turn": turn + 1}, groups={"tool": names}, number=index,
    )  # fmt: skip
    return TaskPrompt(sample, tuple(map(int, tokens)), (), index)


def _explain_nothing(num_unread: int, num_long: int, limit: int) -> Problem:
    if num_unread:
        message = f"the {format_count(num_unread, 'turn')} with calls have them in a form that is not known here"
        return Problem("--suite", message, f"leave {CALLS} out")
    if num_long:
        message = f"each of {format_count(num_long, 'turn')} with calls is longer than {limit:,} tokens with its answer"
        return Problem("--max-length", message, "use a larger one")
    hint = "name chats in which the assistant calls tools, with a chat template that shows calls"
    return Problem("--path", "no turn of the chats has a call that is a target", hint)
