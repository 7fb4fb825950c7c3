"""lm-eval's own tasks on the sharded model: lm-eval runs on rank 0 and asks, all ranks answer together.

Importing this file needs lm_eval, an extra.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from lm_eval.api.model import TemplateLM
from lm_eval.models.utils import handle_stop_sequences, normalize_gen_kwargs, postprocess_generated_text
from lm_eval.utils import get_rolling_token_windows, make_disjoint_window

from ulysses_cli.data.tokenizing.renderer import Renderer, TemplateProblem
from ulysses_cli.data.tokenizing.tokenizer import get_variables
from ulysses_cli.plan.problem import Problem, RecipeError
from ulysses_cli.plan.rows.packing import IGNORE_INDEX
from ulysses_cli.plan.units import format_count
from ulysses_cli.prove.quality.documents import EvaluatedModel
from ulysses_cli.train.document_losses import CutDocument, measure_documents
from ulysses_cli.train.generation.questions import Answer, Question, answer_questions
from ulysses_cli.train.processes.consistency import scatter_values

DEFAULT_NEW_TOKENS = 256  # lm-eval's
SUITE = "--suite"
ANSWER, MEASURE, END = "answer", "measure", "end"
Numbers = Sequence[int]


class ShardedLM(TemplateLM):
    """The model as lm-eval sees it. Lives on rank 0, while the other ranks run `serve`; `close` ends them."""

    def __init__(self, model: EvaluatedModel, report: Callable[[str], None] = lambda _: None) -> None:
        super().__init__()
        self.model, self.report, self.tokenizer = model, report, model.tokenizer
        self.renderer = Renderer(self.tokenizer, variables=get_variables(self.tokenizer))
        self.is_asking = False

    @property
    def eot_token_id(self) -> int:
        return int(self.tokenizer.eos_token_id)

    @property
    def prefix_token_id(self) -> int:
        begin = self.tokenizer.bos_token_id
        return self.eot_token_id if begin is None else int(begin)

    @property
    def max_length(self) -> int:
        return self.model.max_length

    @property
    def tokenizer_name(self) -> str:
        return str(self.tokenizer.name_or_path).replace("/", "__")

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **_: Any) -> list[int]:
        adds = add_special_tokens
        if adds is None:
            begin = self.tokenizer.bos_token
            adds = not (begin and string.startswith(begin))
        tokens: list[int] = list(self.tokenizer(string, add_special_tokens=adds)["input_ids"])
        if adds and len(tokens) > 1 and tokens[-1] == self.tokenizer.eos_token_id:
            tokens.pop()  # an end of the text would end the context
        return tokens

    def apply_chat_template(self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True) -> str:
        settings = {
            "add_generation_prompt": add_generation_prompt,
            "continue_final_message": not add_generation_prompt,
        }
        try:
            return self.renderer.render_text(chat_history, **settings)
        except TemplateProblem as error:
            message = f"the model's template cannot be used: {error}"
            raise RecipeError([Problem("--chat-template", message, "add --no-chat-template")]) from None

    def _loglikelihood_tokens(
        self, requests: list[tuple[tuple[str, str], list[int], list[int]]], **_: Any
    ) -> list[tuple[float, bool]]:
        # neighbours with one context, such as the choices of a question, are read together
        order = sorted(range(len(requests)), key=lambda at: requests[at][1])
        self._check([len(context) + len(given) for _, context, given in requests])
        self.report(f"lm-eval: {len(requests):,} log-likelihoods")
        questions = [Question(tuple(requests[at][1]), 0, tuple(requests[at][2])) for at in order]
        scores: dict[int, tuple[float, bool]] = {}

        def keep(answer: Answer) -> None:
            at = order[len(scores)]
            scores[at] = float(answer.log_probability or 0.0), bool(answer.is_greedy)
            self.cache_hook.add_partial("loglikelihood", requests[at][0], scores[at])

        self._send(ANSWER, questions, keep)
        return [scores[at] for at in range(len(requests))]

    def loglikelihood_rolling(self, requests: Iterable[Any], disable_tqdm: bool = False) -> list[float]:
        """Whole documents by training's forward, which makes logits of one tile at a time. Those that are longer than
        the model reads are cut into lm-eval's windows."""
        windows: list[CutDocument] = []
        owners: list[int] = []
        texts: list[str] = []
        for owner, request in enumerate(requests):
            (text,) = request.args
            texts.append(text)
            parts = get_rolling_token_windows(
                token_list=self.tok_encode(text),
                prefix_token=self.prefix_token_id,
                max_seq_len=self.max_length,
                context_len=1,
            )
            for context, given in map(make_disjoint_window, parts):
                windows.append(_make_row(len(windows), context, given))
                owners.append(owner)
        self.report(f"lm-eval: {format_count(len(texts), 'document')}")
        sums, num_left = [0.0] * len(texts), Counter(owners)

        def keep(line: dict[str, Any]) -> None:
            owner = owners[line["index"]]
            sums[owner] -= line["loss"] * line["tokens"]
            num_left[owner] -= 1
            if not num_left[owner]:
                self.cache_hook.add_partial("loglikelihood_rolling", (texts[owner],), sums[owner])

        self._send(MEASURE, windows, keep)
        return sums

    def generate_until(self, requests: Iterable[Any], disable_tqdm: bool = False) -> list[str]:
        end = self.tokenizer.decode([self.eot_token_id])
        questions: list[Question] = []
        keys: list[tuple[str, Any]] = []
        for request in requests:
            context, settings = request.args
            keys.append((context, settings))
            wanted = normalize_gen_kwargs(settings, DEFAULT_NEW_TOKENS)
            if wanted.get("do_sample") and wanted.get("temperature"):
                message = f"{request.task_name} draws its answers at random; answers are greedy here"
                raise RecipeError([Problem(SUITE, message, "leave it out, or change its generation_kwargs")])
            until = tuple(handle_stop_sequences(wanted.get("until"), end))
            questions.append(Question(tuple(self.tok_encode(context)), wanted["max_gen_toks"], (), until))
        self._check([len(each.tokens) + each.max_new_tokens for each in questions])
        self.report(f"lm-eval: {len(questions):,} answers")
        texts: list[str] = []

        def keep(answer: Answer) -> None:
            at = len(texts)
            texts.append(postprocess_generated_text(self._decode(answer.tokens), list(questions[at].until), None))
            self.cache_hook.add_partial("generate_until", keys[at], texts[at])

        self._send(ANSWER, questions, keep)
        return texts

    def close(self) -> None:
        """Ends the other ranks' `serve`. Nothing where they are in the midst of a request: they have failed."""
        self.renderer.close()
        if not self.is_asking:
            _tell(self.model, (END, None))

    def _decode(self, tokens: Numbers) -> str:
        return str(self.tokenizer.decode(tokens, skip_special_tokens=True))

    def _check(self, lengths: Sequence[int]) -> None:
        """A request is never cut."""
        too_long = [length for length in lengths if length > self.max_length]
        if too_long:
            message = f"{len(too_long):,} of {len(lengths):,} requests are longer than {self.max_length:,} tokens"
            raise RecipeError([Problem("--max-length", message, f"use {max(too_long):,} or more")])

    def _send(self, action: str, content: list[Any], keep: Callable[[Any], None]) -> None:
        """`keep` gets each result as soon as it is there, in the order of `content` for questions, and hands it to
        lm-eval's cache."""
        self.is_asking = True
        # ranks need no questions: answer_questions sends each its own
        _tell(self.model, (action, content if action == MEASURE else None))
        _act(self.model, action, content, keep)
        self.is_asking = False


def serve(model: EvaluatedModel) -> None:
    """What the other ranks do while rank 0 runs lm-eval: what it tells all of them, until it ends."""
    while True:
        action, content = _tell(model, None)
        if action == END:
            return
        _act(model, action, content, _ignore)


def _ignore(_: object) -> None:
    return None


def _tell(model: EvaluatedModel, message: tuple[str, Any] | None) -> tuple[str, Any]:
    """Collective over all ranks, on the host: rank 0's message is every rank's."""
    groups = model.groups
    messages = None if message is None else [message] * groups.layout.world_size
    told: tuple[str, Any] = scatter_values(messages, groups.host_group)
    return told


def _act(model: EvaluatedModel, action: str, content: list[Any] | None, keep: Callable[[Any], None]) -> None:
    """Collective over all ranks, which were told the action."""
    if action == MEASURE:
        measure_documents(model.engine, model.batching, content or [], (), keep)
    else:
        answer_questions(
            model.engine,
            content,
            model.stop_tokens,
            keep,
            lambda tokens: str(model.tokenizer.decode(tokens, skip_special_tokens=True)),
        )


def _make_row(index: int, context: Numbers, given: Numbers) -> CutDocument:
    tokens = np.asarray([*context, *given], np.int64)
    targets = np.where(np.arange(len(tokens)) < len(context), IGNORE_INDEX, tokens)
    return CutDocument(len(tokens), index, "", tokens, targets)


def load_tasks(names: Sequence[str], folder: Path | None, metadata: Mapping[str, Any]) -> dict[str, Any]:
    """The tasks with their data. `folder`: of task files that lm-eval does not bring. Raises RecipeError."""
    from lm_eval.tasks import TaskManager

    manager = TaskManager(include_path=str(folder) if folder else None, metadata=dict(metadata))
    unknown = [name for name in names if not manager.match_tasks([name])]
    if unknown:
        hint = "see lm-eval's list of tasks, or name a folder of task files with --path"
        raise RecipeError([Problem(SUITE, f"lm-eval has no task called {', '.join(unknown)}", hint)])
    try:
        manager.load(list(names))
    except Exception as error:  # noqa: BLE001 - tasks run code and load data sets of their own
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        hint = "check the connection and HF_HUB_OFFLINE, or the task's file"
        raise RecipeError([Problem(SUITE, f"lm-eval cannot load {', '.join(names)}: {reason}", hint)]) from None
    return {"task_manager": manager, "tasks": list(names), "metadata": dict(metadata)}


def run_harness(
    model: EvaluatedModel,
    tasks: Mapping[str, Any],
    cache: Path,
    limit: int | None,
    with_template: bool,
    report: Callable[[str], None],
) -> list[dict[str, Any]]:
    """On rank 0, while the other ranks serve. Returns the metrics of each task. `cache`: the beginning of a file's
    name; lm-eval keeps its requests' results there, so that a killed evaluation does not ask them again. The name holds
    the longest length: the windows of a long document depend on it, and lm-eval's key does not."""
    from lm_eval import simple_evaluate

    lm = ShardedLM(model, report)
    try:
        found = simple_evaluate(
            model=lm,
            **tasks,
            limit=limit,
            apply_chat_template=with_template,
            use_cache=f"{cache}-{model.max_length}",
            log_samples=False,
            bootstrap_iters=1000,
        )
    finally:
        lm.close()
    return describe_harness(found or {})


def describe_harness(found: Mapping[str, Any]) -> list[dict[str, Any]]:
    """A line for each task and metric: value, standard error and number of samples."""
    rows = []
    for task, metrics in found.get("results", {}).items():
        number = found.get("n-samples", {}).get(task, {}).get("effective")
        for key, value in metrics.items():
            metric, _, kind = key.partition(",")
            if not kind or metric.endswith("_stderr") or not isinstance(value, int | float):
                continue
            error = metrics.get(f"{metric}_stderr,{kind}")
            rows.append(
                {
                    "task": task, "metric": metric, "filter": kind, "n": number, "value": float(value),
                    "stderr": float(error) if isinstance(error, int | float) else None,
                    "version": found.get("versions", {}).get(task),
                    "few_shot": found.get("n-shot", {}).get(task),
                }
            )  # fmt: skip
    return rows
