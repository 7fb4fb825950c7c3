"""Asks a served model, behind an OpenAI-compatible API, what `ulysses evaluate` asks a model of its own: the client,
which tries again what may pass, and the questions, several at once. Fields are those that the servers of vLLM, SGLang
and llama.cpp share. Imports no torch; what needs logits is not asked."""

from __future__ import annotations

import hashlib
import json
import re
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from http.client import HTTPException
from pathlib import Path
from queue import SimpleQueue
from typing import Any
from urllib.error import HTTPError
from urllib.parse import urlsplit
from urllib.request import HTTPRedirectHandler, Request, build_opener

from ulysses_cli.evaluate.prompts import Prompter, TaskPrompt, find_answer, write_plain
from ulysses_cli.evaluate.results import (
    REPORT_SECONDS,
    SPENT,
    ResultsFile,
    TimeLeft,
    describe_answer,
    list_asked,
)
from ulysses_cli.evaluate.sample import Sample
from ulysses_cli.evaluate.suites import (
    Amount,
    Plan,
    Sources,
    check_lengths,
    check_samples,
    count_prompts,
    make_prompts,
    order_alike,
)
from ulysses_cli.evaluate.summary import summarize
from ulysses_cli.plan.models.model_files import THINKING_SWITCHES
from ulysses_cli.plan.problem import Problem, RecipeError
from ulysses_cli.plan.secrets import MASK, mask_text
from ulysses_cli.plan.units import format_count

KEY = "--endpoint"
PAUSES = (1.0, 2.0, 4.0, 8.0, 16.0)  # seconds before each further try
MAX_PAUSE = 60.0  # that a server may ask for
MAX_ANSWER_BYTES = 1 << 26
MAX_COMPLAINT = 300  # letters
MAX_NAMED = 20  # models
PASSING = {0, 408, 425, 429}  # 0: no answer, or a part of one; also all from 500 on
TOO_LONG = re.compile(
    r"exceed_context_size|context_length_exceeded|context (?:length|size|window)|(?:prompt|input).{0,60}too long"
    r"|(?:prompt|input).{0,60}(?:longer than|exceeds).{0,60}(?:length|tokens)",
    re.I | re.S,
)


class PromptTooLong(Exception):
    """What the server says of a prompt that it does not take."""


class EndpointLost(Exception):
    """The server did not answer, after all tries."""


class _NoRedirect(HTTPRedirectHandler):
    def redirect_request(self, *_: Any) -> None:
        """A redirect would hand the key to another address."""


@dataclass(frozen=True)
class Reply:
    """`content`: the JSON object, None where there is none; `pause`: seconds that the server asks to wait."""

    status: int
    content: Mapping[str, Any] | None
    text: str
    pause: float = 0.0

    @property
    def is_answer(self) -> bool:
        return self.status == 200 and self.content is not None

    @property
    def may_pass(self) -> bool:
        return self.status in PASSING or self.status >= 500 or (self.status == 200 and self.content is None)

    @property
    def complaint(self) -> str:
        """vLLM and llama.cpp write {"error": {"message": ...}}, SGLang {"message": ...}, proxies {"detail": ...}."""
        content = self.content or {}
        error = content.get("error", content)
        found = error if isinstance(error, str) else ""
        if isinstance(error, Mapping):
            found = next((str(error[name]) for name in ("message", "detail") if error.get(name)), "")
        words = " ".join((found or self.text).split())[:MAX_COMPLAINT]
        if self.status == 200:
            return f"an answer that is no JSON object, or not all of one: {words[:80]}"
        return f"HTTP {self.status}: {words}" if self.status else words


@dataclass(frozen=True)
class ServedAnswer:
    """`text` is what counts; `is_reached`: whether a thought before it has ended. Tokens as the server counts them."""

    text: str
    is_reached: bool
    prompt_tokens: int | None
    answer_tokens: int | None


def read_address(address: str) -> str:
    """The address before /models. Raises RecipeError; no message repeats a password that was written there."""
    try:
        parts = urlsplit(address)
        is_web = parts.scheme in ("http", "https") and bool(parts.hostname) and (parts.port or 1) > 0
    except ValueError:
        is_web = False
    if not is_web or parts.query or parts.fragment:
        raise RecipeError([Problem(KEY, "is not a web address", "write it such as http://127.0.0.1:8000/v1")])
    if "@" in parts.netloc:
        message = "holds a user or a password, which results would keep"
        raise RecipeError([Problem(KEY, message, "put the key into an environment variable: --endpoint-key-env NAME")])
    path = parts.path.rstrip("/").removesuffix("/chat/completions").removesuffix("/completions")
    return f"{parts.scheme}://{parts.netloc}{path or '/v1'}"


@dataclass
class Endpoint:
    """A server and one of its models. `key`: '' where it needs none; `key_name`: the variable it is read from;
    `deadline_seconds`: of a question, with all its tries. `thinking`: tokens for a thought before each answer."""

    address: str
    model: str
    key: str = ""
    key_name: str = ""
    deadline_seconds: float = 600.0
    thinking: int = 0
    is_chat: bool = True
    report: Callable[[str], None] = lambda _: None
    template_settings: dict[str, Any] = field(default_factory=dict)  # what the server hands to the chat template

    def __post_init__(self) -> None:
        if not (self.key.isascii() and self.key.isprintable()):
            message = f"{self.key_name} holds letters that no key has"
            raise RecipeError([Problem("--endpoint-key-env", message, "set it again")])
        self._opener = build_opener(_NoRedirect)

    def check_model(self) -> None:
        """Raises RecipeError where the server cannot be reached, refuses the key, or lacks the model."""
        reply = self._send("/models", None, pauses=())
        if reply.may_pass:
            hint = "start the server, or correct the address; it ends in /v1 as a rule"
            raise RecipeError([Problem(KEY, f"{self.address} cannot be used: {reply.complaint}", hint)])
        if reply.status in (401, 403):
            raise self._refuse(reply)
        listed = (reply.content or {}).get("data") if reply.is_answer else None  # not all servers list their models
        names = [str(each.get("id")) for each in listed or () if isinstance(each, Mapping)]
        if names and self.model not in names:
            shown = ", ".join(names[:MAX_NAMED]) + (f" and {len(names) - MAX_NAMED} more" if names[MAX_NAMED:] else "")
            message = f"the server at {self.address} has no model {self.model}"
            raise RecipeError([Problem("MODEL", message, f"it serves {shown}")])

    def probe(self) -> int | None:
        """Asks for one token, to learn whether the server hands settings to the chat template, which not all take.
        Returns the tokens of the question `?` as the server counts them."""
        self.template_settings = dict.fromkeys(THINKING_SWITCHES, self.thinking > 0) if self.is_chat else {}
        body = self._write(Sample("probe", "?", (), "none", 1), 1)
        reply = self._send(*body)
        if self.template_settings and reply.status in (400, 422) and not TOO_LONG.search(reply.text):
            self.template_settings = {}
            reply = self._send(*self._write(Sample("probe", "?", (), "none", 1), 1))
        return self._read(reply).prompt_tokens

    def ask(self, sample: Sample) -> ServedAnswer:
        """Raises PromptTooLong, EndpointLost, or RecipeError for what asking again does not mend."""
        return self._read(self._send(*self._write(sample, sample.max_new_tokens + self._count_thought(sample))))

    def asks_in_chat(self, sample: Sample) -> bool:
        """A prompt that holds a template, or examples that go on, is completed as it stands."""
        return self.is_chat and sample.with_template

    def _count_thought(self, sample: Sample) -> int:
        return self.thinking if self.asks_in_chat(sample) else 0

    def digest(self, sample: Sample) -> str:
        path, body = self._write(sample, sample.max_new_tokens)
        return hashlib.sha256(f"{path} {json.dumps(body, sort_keys=True)}".encode()).hexdigest()[:16]

    def _write(self, sample: Sample, max_tokens: int) -> tuple[str, dict[str, Any]]:
        """A path and what is sent there. As in RULER's calls of APIs, the start of the answer ends the user's message:
        servers differ in how they go on with an assistant's."""
        body: dict[str, Any] = {"model": self.model, "max_tokens": max_tokens, "temperature": 0}
        text = write_plain(sample, sample.answer_prefix)
        if not self.asks_in_chat(sample):
            return "/completions", {**body, "prompt": text}
        messages = sample.messages or (("user", text),)
        body["messages"] = [{"role": role, "content": content} for role, content in messages]
        settings = {"chat_template_kwargs": self.template_settings} if self.template_settings else {}
        return "/chat/completions", {**body, **settings}

    def _read(self, reply: Reply) -> ServedAnswer:
        if not reply.is_answer or reply.content is None:
            raise self._refuse(reply)
        try:
            choice = reply.content["choices"][0]
            message = choice.get("message") or {"content": choice.get("text")}
            text = str(message.get("content") or "")
            usage = reply.content.get("usage") or {}
            counts = [usage.get(name) for name in ("prompt_tokens", "completion_tokens")]
        except (LookupError, TypeError, AttributeError):
            hint = "name the address of an OpenAI-compatible API"
            raise RecipeError([Problem(KEY, f"{self.address} answers without choices", hint)]) from None
        answer = find_answer("", text)
        thought = message.get("reasoning_content") or message.get("reasoning")  # where the server parts it
        is_reached = answer is not None and bool(answer or not thought or choice.get("finish_reason") != "length")
        prompt_tokens, answer_tokens = (count if isinstance(count, int) else None for count in counts)
        return ServedAnswer(answer or "", is_reached, prompt_tokens, answer_tokens)

    def _refuse(self, reply: Reply) -> Exception:
        complaint = reply.complaint
        if reply.may_pass:
            return EndpointLost(f"{self.address} does not answer: {complaint}")
        if reply.status in (400, 413, 422) and TOO_LONG.search(reply.text):
            return PromptTooLong(complaint)
        if reply.status in (401, 403):
            state = "refuses the key of" if self.key else "needs a key, and none is set in"
            hint = f"set {self.key_name}, or name another variable with --endpoint-key-env"
            message = f"the server {state} {self.key_name}: {complaint}"
            return RecipeError([Problem(KEY, message, hint)])
        if reply.status == 404 and "model" in complaint.lower():
            return RecipeError([Problem("MODEL", complaint, f"name a model that {self.address} serves")])
        return RecipeError([Problem(KEY, f"the server refuses a question: {complaint}", "read the server's log")])

    def _send(self, path: str, body: Mapping[str, Any] | None, pauses: tuple[float, ...] | None = None) -> Reply:
        """Sends until there is an answer or a refusal, the tries are over, or the deadline would pass."""
        end = time.monotonic() + self.deadline_seconds
        for pause in (*(PAUSES if pauses is None else pauses), None):
            reply = self._try(path, body, end)
            if not reply.may_pass or pause is None:
                break
            wait = max(pause, min(reply.pause, MAX_PAUSE))
            if time.monotonic() + wait >= end:
                break
            self.report(f"{reply.complaint}; asked again in {wait:.0f} s")
            time.sleep(wait)
        return reply

    def _try(self, path: str, body: Mapping[str, Any] | None, end: float) -> Reply:
        headers = {"Content-Type": "application/json", "User-Agent": "ulysses"}
        headers |= {"Authorization": f"Bearer {self.key}"} if self.key else {}
        data = None if body is None else json.dumps(body).encode()
        request = Request(self.address + path, data, headers, method="GET" if data is None else "POST")
        try:
            try:
                response = self._opener.open(request, timeout=max(0.001, end - time.monotonic()))
            except HTTPError as error:
                response = error
            with response:
                status, pause, text = response.status, response.headers.get("Retry-After") or "", _read(response, end)
        except (OSError, HTTPException) as error:
            return Reply(0, None, self._hide(str(getattr(error, "reason", "") or error) or type(error).__name__))
        text = self._hide(text)
        try:
            content = json.loads(text)
        except (ValueError, RecursionError):
            content = None
        seconds = float(pause) if pause.isdigit() else 0.0  # a date is not read
        return Reply(status, content if isinstance(content, dict) else None, text, seconds)

    def _hide(self, text: str) -> str:
        """A server may repeat the key, in an error or in an answer."""
        return text.replace(self.key, MASK) if self.key else text


def _read(response: Any, end: float) -> str:
    parts, size = list[bytes](), 0
    while part := response.read1(1 << 16):
        parts.append(part)
        size += len(part)
        if time.monotonic() >= end:
            raise TimeoutError("the deadline has passed")
        if size > MAX_ANSWER_BYTES:
            raise OSError("the answer is too large")
    return b"".join(parts).decode(errors="replace")


class ServedTokenizer:
    """Counts a prompt as the server does: its own tokens, by tokenizer.json, and `num_added` that the server adds, of
    the chat template as a rule."""

    chat_template = None

    def __init__(self, file: Path) -> None:
        from tokenizers import Tokenizer

        try:
            content = file.read_bytes()
            self._own = Tokenizer.from_buffer(content)
        except Exception as error:  # noqa: BLE001 - the library raises plain Exceptions
            raise RecipeError([Problem("--tokenizer", f"{file} cannot be read: {error}", "name another one")]) from None
        self.digest = hashlib.sha256(content).hexdigest()[:16]
        self.num_added = 0

    def __call__(self, text: str, add_special_tokens: bool = True) -> dict[str, list[int]]:
        ids = self._own.encode(text, add_special_tokens=False).ids
        return {"input_ids": [0] * self.num_added + ids if add_special_tokens else ids}

    def make_prompter(self, served_tokens: int | None) -> Prompter:
        """`served_tokens`: of the question `?`, as the server counts them."""
        if served_tokens is not None:
            self.num_added = max(0, served_tokens - len(self("?", add_special_tokens=False)["input_ids"]))
        return Prompter(self, _render_nothing, with_template=False)


def _render_nothing(*_: Any, **__: Any) -> str:
    raise AssertionError("the server applies the chat template")


@dataclass(frozen=True)
class ServedEvaluation:
    """`limit`: the most tokens of a question from files, 0: as many as the server takes. `num_requests`: at once."""

    endpoint: Endpoint
    plan: Plan
    amount: Amount
    sources: Sources
    output: Path
    tokenizer: ServedTokenizer | None = None
    limit: int = 0
    num_requests: int = 4


def run_served(evaluation: ServedEvaluation, report: Callable[[str], None]) -> dict[str, Any]:
    """Returns the findings that report/proofs.py shows. Raises RecipeError, or EndpointLost; what was answered is kept
    in any case."""
    started, endpoint, plan = time.monotonic(), evaluation.endpoint, evaluation.plan
    amount, tokenizer, prompter = evaluation.amount, evaluation.tokenizer, None
    served = endpoint.probe()
    if tokenizer is not None:
        prompter = tokenizer.make_prompter(served)
        check_lengths(plan, prompter, amount)
        if evaluation.limit:
            check_samples(plan, prompter, evaluation.limit)
    settings = {
        "model": endpoint.model,
        "seed": amount.seed,
        "tokenizer": tokenizer.digest if tokenizer is not None else None,
        "template_tokens": tokenizer.num_added if tokenizer is not None else None,
        "template_settings": endpoint.template_settings,
        "with_template": endpoint.is_chat,
        "thinking": endpoint.thinking,
        "sources": evaluation.sources.as_json(),
        "content": evaluation.sources.hash_content(),
    }
    file = ResultsFile(evaluation.output / "results.jsonl", settings)
    known = list_asked(file.results, plan, amount)
    time_left = TimeLeft(count_prompts(plan, amount), float)
    for result in known:
        time_left.drop(result["length"])
    if known:
        report(f"going on: {format_count(len(known), 'question')} answered already")
    total, number, told, before = count_prompts(plan, amount).total(), len(known), 0.0, time.monotonic()
    too_long: list[dict[str, Any]] = []
    for prompt, answer, seconds in _ask_all(evaluation, _walk(evaluation, prompter, file.done)):
        if isinstance(answer, PromptTooLong):
            own = {"id": prompt.name, "task": prompt.sample.task, "file_id": prompt.sample.facts.get("id")}
            needed = _count_needed(prompt) if prompt.tokens else None
            too_long.append({**own, "tokens": needed, "reason": str(answer)})
            time_left.drop(prompt.length)
            continue
        now = time.monotonic()
        file.add({**_describe(prompt, answer, seconds, endpoint), SPENT: round(now - before, 3)})
        time_left.note(prompt.length, now - before)
        before, number = now, number + 1
        if now - told >= REPORT_SECONDS or number == total:
            told = now
            place = f"question {number} of {total - len(too_long)}, {prompt.sample.task}"
            report(f"{place} at {file.results[-1]['prompt_tokens']:,} tokens; {time_left.estimate():.0f} s left")
    results = list_asked(file.results, plan, amount)
    return {
        **summarize(results, too_long),
        "losses": [],
        "lm_eval": [],
        "results": results,
        "notes": [*plan.notes, *_list_notes(evaluation, results)],
        "settings": settings,
        "command": "evaluate",
        "subject": endpoint.model,
        "passed": True,
        "seconds": round(time.monotonic() - started, 2),
        "earlier_seconds": round(sum(result[SPENT] for result in known), 2),
        "endpoint": {"address": mask_text(endpoint.address), "num_requests": evaluation.num_requests},
    }


def _walk(evaluation: ServedEvaluation, prompter: Prompter | None, done: set[str]) -> Iterator[TaskPrompt]:
    """The questions that are not answered yet."""
    if prompter is not None:
        yield from make_prompts(evaluation.plan, prompter, evaluation.amount, lambda _: None, done)
        return
    for sample in order_alike(evaluation.plan.samples):
        prompt = TaskPrompt(sample, (), (), sample.number)
        if prompt.name not in done:
            yield prompt


Outcome = tuple[TaskPrompt, ServedAnswer | PromptTooLong, float]  # with the seconds that it took


def _ask_all(evaluation: ServedEvaluation, prompts: Iterator[TaskPrompt]) -> Iterator[Outcome]:
    """Answers as they come, of so many requests at once. The threads are left behind when the command ends. What ends
    the evaluation is raised after the answers of the other requests."""
    replies = SimpleQueue[tuple[TaskPrompt, Any, float]]()
    endpoint, num_open, fatal = evaluation.endpoint, 0, list[Exception]()

    def ask(prompt: TaskPrompt) -> None:
        started = time.monotonic()
        try:
            answer: Any = endpoint.ask(prompt.sample)
        except Exception as error:  # noqa: BLE001 - the main thread raises it
            answer = error
        replies.put((prompt, answer, time.monotonic() - started))

    def take() -> Iterator[Outcome]:
        prompt, answer, seconds = replies.get()
        if isinstance(answer, Exception) and not (isinstance(answer, PromptTooLong) and not prompt.length):
            fatal.append(_explain(prompt, answer) if isinstance(answer, PromptTooLong) else answer)
        else:
            yield prompt, answer, seconds

    for prompt in prompts:
        if evaluation.limit and not prompt.length and _count_needed(prompt) > evaluation.limit:
            yield prompt, PromptTooLong(f"more than --max-length {evaluation.limit:,}"), 0.0
            continue
        while num_open >= evaluation.num_requests:
            num_open -= 1
            yield from take()
        if fatal:
            break
        threading.Thread(target=ask, args=(prompt,), daemon=True).start()
        num_open += 1
    for _ in range(num_open):
        yield from take()
    if fatal:
        raise fatal[0]


def _explain(prompt: TaskPrompt, error: PromptTooLong) -> RecipeError:
    message = f"the server says that a prompt of {len(prompt.tokens):,} tokens is too long: {error}"
    hint = "use a smaller length, or start the server with a longer context"
    return RecipeError([Problem("--max-length", message, hint)])


def _count_needed(prompt: TaskPrompt) -> int:
    return len(prompt.tokens) + prompt.sample.max_new_tokens


def _describe(prompt: TaskPrompt, answer: ServedAnswer, seconds: float, endpoint: Endpoint) -> dict[str, Any]:
    """The line of one answer. `prompt_tokens` are the server's, where it counts them."""
    counted = answer.prompt_tokens
    measured = {
        "prompt_tokens": len(prompt.tokens) if counted is None else counted,
        "own_tokens": len(prompt.tokens) or None,
        "prompt_hash": endpoint.digest(prompt.sample),
        "answer_tokens": answer.answer_tokens,
        "log_probability": None,
        "is_greedy": None,
        "seconds": round(seconds, 4),
        **({} if answer.is_reached and not endpoint.thinking else {"has_answer": answer.is_reached}),
    }
    return describe_answer(prompt, answer.text, measured)


def _list_notes(evaluation: ServedEvaluation, results: list[dict[str, Any]]) -> Iterator[str]:
    endpoint = evaluation.endpoint
    if number := sum(result.get("has_answer") is False for result in results):
        yield f"{format_count(number, 'thought')} used up the tokens of an answer: no answer, scored 0"
    if endpoint.is_chat and not endpoint.thinking and not endpoint.template_settings:
        yield "the server takes no settings of the chat template: a model that thinks may use up an answer's tokens"
    made = [result for result in results if result["length"]]
    worst = max(made, key=_measure_difference, default=None)
    if worst is not None and _measure_difference(worst) > SAME_LENGTH:
        counts = f"{worst['prompt_tokens']:,} tokens at the server and {worst['own_tokens']:,} by --tokenizer"
        yield f"lengths are not the server's: {worst['id']} has {counts}; name the tokenizer of the served model"


SAME_LENGTH = 0.01  # of it: a template's and a question's tokens may join


def _measure_difference(result: Mapping[str, Any]) -> float:
    return float(abs(result["prompt_tokens"] - result["own_tokens"]) / result["length"])
