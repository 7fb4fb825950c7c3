"""Compiles and renders chat templates in a child process with bounds of time and memory: every template, every use.

A chat template is a program that comes with a model. One that never ends or writes gigabytes must not take this process
with it. The child is forked once and answers in plain JSON.
"""

from __future__ import annotations

import ctypes
import gc
import json
import os
import resource
import signal
import weakref
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import astuple, dataclass
from datetime import datetime
from functools import partial
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from typing import Any

from ulysses_cli.data.tokenizing.chat import cut_message, make_render
from ulysses_cli.data.tokenizing.lost_parts import LostPart
from ulysses_cli.data.tokenizing.targets import ChatText, RenderedChat, TargetChoice, count_ends, render_chat
from ulysses_cli.plan.models.model_files import CLOCK, read_date

SECONDS = 30.0  # for one chat; a chat of a million tokens takes about one second
MEMORY_BYTES = 3 << 30  # on top of what this process has
MAX_CHARS = 1 << 28  # ten times the longest row that people train on
MAX_ANSWER_BYTES = 8 * MAX_CHARS  # the largest JSON of so many characters
MAX_SENT, MAX_SENT_CHARS = 64, 1 << 20  # chats, and their characters, sent in one message
TOO_LARGE = f"takes more than {MEMORY_BYTES >> 30} GiB of memory"
GONE = f"the chat template {TOO_LARGE}"
PR_SET_PDEATHSIG = 1  # linux/prctl.h


class TemplateProblem(Exception):
    """A chat was not rendered. Holds one line."""


class TemplateRefusal(TemplateProblem):
    """The template raised an error for this chat. Holds its message."""


class TemplateOutOfBounds(TemplateProblem):
    """The template exceeded a bound of time, memory or length. It would exceed it again with the next chat."""


@dataclass(frozen=True, eq=False)
class RenderRequest:
    """A chat to render, with the arguments of render_chat. `settings`: variables that the template gets. `choice` None:
    only the text is wanted, and `settings` are those of apply_chat_template."""

    messages: list[dict[str, Any]]
    tools: Any = None
    choice: TargetChoice | None = TargetChoice()  # noqa: RUF009 - it is frozen
    flags: Sequence[bool | None] = ()
    first: int = 0
    settings: dict[str, Any] | None = None


class Renderer:
    """Renders chats with a tokenizer's template in a child process, which starts with the first chat and ends with this
    process. Announced chats are sent together, and the child renders them while this process works on earlier ones."""

    def __init__(
        self, tokenizer: Any, specials: Sequence[str] = (), variables: Mapping[str, Any] | None = None
    ) -> None:
        """`variables`: data.chat_template_kwargs, for texts alone; a request's own settings win."""
        self.variables = variables or {}
        self.tokenizer, self.specials, self.failure = tokenizer, tuple(specials), ""
        self.connection: Connection | None = None
        self.end: Callable[[], object] = lambda: None
        self.announced: deque[RenderRequest] = deque()
        self.sent: deque[RenderRequest] = deque()

    def announce(self, requests: Sequence[RenderRequest]) -> None:
        """The next requests for `render`, in this order. Some of them may never be made."""
        self.announced = deque(requests)

    def render(self, request: RenderRequest) -> RenderedChat:
        """Raises TemplateRefusal for this chat alone, TemplateOutOfBounds for this and every later chat."""
        texts, reason, lost, counts, whole, unsplit = self._ask(request)["chat"]
        chats = [ChatText(text, [(a, b, bits) for a, b, bits in classes], ends) for text, classes, ends in texts]
        parts = [(int(cut), str(rest)) for cut, rest in unsplit]
        return RenderedChat(chats, reason, [LostPart(*part) for part in lost], counts, whole, parts)

    def render_text(self, messages: Sequence[Mapping[str, Any]], **settings: Any) -> str:
        """The text alone. `settings`: what tokenizer.apply_chat_template takes. Raises as `render` does."""
        chat, settings = [dict(message) for message in messages], {**self.variables, **settings}
        return str(self._ask(RenderRequest(chat, choice=None, settings=settings))["text"])

    def close(self) -> None:
        """Ends the child. The next chat starts another. A child keeps the memory that its parent had when it began, so
        a process whose memory changes has none for long."""
        self.end()
        self.connection = None
        self.sent.clear()

    def _ask(self, request: RenderRequest) -> dict[str, Any]:
        answer: dict[str, Any] = {}
        is_answered = False
        while not is_answered and not self.failure:
            if not self.sent:
                self._send(request)
            answer = self._receive()
            is_answered = self.sent.popleft() is request
        if "failure" in answer:
            self.failure = f"the chat template {answer['failure']}"
        if self.failure:
            self.end()
            raise TemplateOutOfBounds(self.failure)
        if "error" in answer:
            raise TemplateRefusal(answer["error"])
        return answer

    def _send(self, request: RenderRequest) -> None:
        """Sends a request with those announced after it. The child receives all of them before it answers the first, so
        that parent and child never wait for each other."""
        while self.announced and self.announced.popleft() is not request:
            pass
        size = _count_chars(request)
        self.sent.append(request)
        while self.announced and len(self.sent) < MAX_SENT:
            size += _count_chars(self.announced[0])
            if size > MAX_SENT_CHARS:
                break
            self.sent.append(self.announced.popleft())
        connection = self._start() if self.connection is None else self.connection
        try:
            connection.send(list(self.sent))
        except OSError:
            self.failure = GONE

    def _receive(self) -> dict[str, Any]:
        try:
            if self.connection is not None and self.connection.poll(SECONDS):
                encoded = self.connection.recv_bytes(MAX_ANSWER_BYTES)
                answer: dict[str, Any] = json.loads(encoded.decode("utf-8", "surrogatepass"))
                return answer
            self.failure = self.failure or f"the chat template does not come to an end in {SECONDS:.0f} s"
        except (OSError, EOFError, MemoryError):  # the answer is too long, or the child has ended
            self.failure = GONE
        return {}

    def _start(self) -> Connection:
        self.connection, child_end = Pipe()
        pid = os.fork()
        if pid == 0:
            _serve(child_end, self.tokenizer, self.specials)
        child_end.close()
        self.end = weakref.finalize(self, _end, self.connection, pid)
        return self.connection


class _Clock:
    """Stands for the class by which transformers tells templates the time: a chat has the same tokens on every day, and
    in use those of training."""

    def __init__(self, variables: Mapping[str, Any]) -> None:
        self.date, self.is_read = read_date(variables), False

    def now(self) -> datetime:
        self.is_read = True
        return self.date


def _end(connection: Connection, pid: int) -> None:
    connection.close()
    try:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
    except (ProcessLookupError, ChildProcessError):
        pass


def _serve(connection: Connection, tokenizer: Any, specials: Sequence[str]) -> None:
    """Runs the child process until the parent ends. Closes the files and pipes that it inherited from the parent."""
    try:
        gc.freeze()  # no object of the parent is collected here: it may own a GPU's memory or a connection
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        for name in os.listdir("/proc/self/fd"):
            if int(name) > 2 and int(name) != connection.fileno() and os.path.exists(f"/proc/self/fd/{name}"):
                os.close(int(name))
        with open("/proc/self/statm", encoding="ascii") as stream:
            limit = int(stream.read().split()[0]) * resource.getpagesize() + MEMORY_BYTES
        resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        while True:
            for request in connection.recv():
                connection.send_bytes(_answer(tokenizer, request, specials))
    except BaseException:  # noqa: BLE001 - the parent has ended, or will see that this process has
        pass
    finally:
        os._exit(0)


def _answer(tokenizer: Any, request: RenderRequest, specials: Sequence[str]) -> bytes:
    from transformers.utils import chat_template_utils

    failure, clock = "", _Clock(request.settings or {})
    setattr(chat_template_utils, "datetime", clock)  # noqa: B010 - of this process alone, and functions are no variables
    messages, tools = request.messages, request.tools
    settings = {name: value for name, value in (request.settings or {}).items() if name != CLOCK}

    def bound(render: Callable[..., str], *words: Any, **options: Any) -> str:
        """Records an exceeded bound even if the caller catches the error and can do without this rendering."""
        nonlocal failure
        text = ""
        try:
            text = render(*words, **options)
        except MemoryError:
            failure = TOO_LARGE
        if len(text) > MAX_CHARS:
            text, failure = "", f"writes more than {MAX_CHARS:,} characters"
        return text

    answer: dict[str, Any] = {}
    try:
        if request.choice is None:
            answer["text"] = bound(tokenizer.apply_chat_template, messages, tokenize=False, **settings)
        else:
            render = partial(bound, make_render(tokenizer, tools, settings))
            more = (tools, specials, request.choice, request.flags, request.first, settings)
            chat = render_chat(tokenizer, render, messages, *more)
            chat.counts.update({"dated": 1} if clock.is_read else {}, **count_ends(chat.texts, request.choice.ends))
            answer["chat"] = astuple(chat)
    except MemoryError:
        failure = TOO_LARGE
    except Exception as error:  # noqa: BLE001 - a template may raise any exception
        if type(error).__name__ == "TemplateSyntaxError":  # jinja2's: it says the same of every chat
            failure = f"is not valid Jinja: line {getattr(error, 'lineno', 1)}: {cut_message(error)}"
        answer["error"] = cut_message(error)
    try:
        encoded = json.dumps({"failure": failure} if failure else answer, ensure_ascii=False)
        return encoded.encode("utf-8", "surrogatepass")
    except MemoryError:
        answer.clear()  # frees memory for the answer below
        return json.dumps({"failure": TOO_LARGE}).encode()


def _count_chars(request: RenderRequest) -> int:
    return sum(len(str(message.get("content") or "")) for message in request.messages)
