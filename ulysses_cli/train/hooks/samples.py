"""Continues a few prompts greedily between steps, on the run's own ranks: what the model says at this point."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from functools import partial
from typing import Any

from ulysses_cli.data.tokenizing.renderer import Renderer
from ulysses_cli.train.generation.on_engine import generating
from ulysses_cli.train.guard.stop_conditions import StopConditions
from ulysses_cli.train.processes.consistency import gather_values
from ulysses_cli.train.train_state import TrainState


@dataclass(frozen=True)
class SamplePrompt:
    text: str
    tokens: tuple[int, ...]


def encode_prompts(
    tokenizer: Any, texts: Sequence[str], *, as_chat: bool, variables: Mapping[str, Any] | None = None
) -> list[SamplePrompt]:
    """With `as_chat` a text is what a user says, in the tokenizer's chat template with its `variables`. Otherwise it is
    the beginning of a document, and an end that the tokenizer appends is taken off. Raises TemplateProblem."""
    prompts = []
    with closing(Renderer(tokenizer, variables=variables)) as renderer:
        for text in texts:
            if as_chat:
                said = renderer.render_text([{"role": "user", "content": text}], add_generation_prompt=True)
                tokens = tokenizer(said, add_special_tokens=False)["input_ids"]
            else:
                tokens = tokenizer(text)["input_ids"]
                tokens = tokens[:-1] if len(tokens) > 1 and tokens[-1] == tokenizer.eos_token_id else tokens
            prompts.append(SamplePrompt(text, tuple(tokens)))
    return prompts


class Samples:
    """A post-step hook. Without prompts it does nothing. `decode` takes tokens, returns text."""

    def __init__(
        self,
        prompts: Sequence[SamplePrompt],
        stop_tokens: Collection[int],
        max_new_tokens: int,
        decode: Callable[[list[int]], str],
        write: Callable[[dict[str, Any]], None],
    ) -> None:
        self.prompts, self.stop_tokens, self.max_new_tokens = prompts, stop_tokens, max_new_tokens
        self.decode, self.write = decode, write

    def run(self, state: TrainState, stop: StopConditions | None = None) -> None:
        """Collective over all ranks. Groups of ranks that share rows each take some of the prompts. `stop`: reasons to
        end it early, without a result; by default the run's own."""
        if not self.prompts or state.last_sample_step == state.step:
            return
        groups, answers = state.groups, dict[int, list[int]]()
        read_flags = (stop or state.stop).read_flags
        with generating(state.engine, should_stop=lambda: any(read_flags())) as generator:
            for at in range(groups.dp_index, len(self.prompts), groups.layout.dp_size):
                title = f"sample {at + 1} of {len(self.prompts)}"
                state.phase = title
                generator.read([self.prompts[at].tokens])
                show = partial(_show_progress, state, title)
                (answers[at],) = generator.generate(self.max_new_tokens, self.stop_tokens, show)
        if generator.is_stopped:
            return
        everything = {at: tokens for part in gather_values(answers, groups.host_group) for at, tokens in part.items()}
        samples = [
            {"prompt": prompt.text, "text": self.decode(everything[at]), "num_tokens": len(everything[at])}
            for at, prompt in enumerate(self.prompts)
        ]
        self.write({"step": state.step, "samples": samples})
        state.last_sample_step = state.step


def _show_progress(state: TrainState, title: str, num_tokens: int) -> None:
    """The watchdog sees that the phase changes: run.step_timeout is for one token, not for a whole sample."""
    state.phase = f"{title}, token {num_tokens}"
