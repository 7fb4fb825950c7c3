"""Chat templates come with models and are programs: one that never ends or writes gigabytes must not take this process
along. They run in a child, forked once, with bounds of time and memory; what it answers is plain JSON.
"""

from __future__ import annotations

import ctypes
import json
import os
import resource
import signal
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import astuple, dataclass
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from typing import Any

from ulysses_cli.data.tokenizing.chat import Messages, ShownChat, make_render, show_chat

SECONDS = 30.0  # a chat of a million tokens takes one
MEMORY_BYTES = 3 << 30  # beside what this process has
MAX_CHARS = 1 << 28  # ten times the longest row that anyone trains on
MAX_ANSWER_BYTES = 8 * MAX_CHARS  # as JSON spells it at worst
MAX_SENT, MAX_SENT_CHARS = 64, 1 << 20  # in one message
TOO_LARGE = f"takes more than {MEMORY_BYTES >> 30} GiB of memory"
GONE = f"the chat template {TOO_LARGE}"
PR_SET_PDEATHSIG = 1  # linux/prctl.h


class TemplateRefusal(Exception):
    """What the template raised, in its words."""


class EndlessTemplate(Exception):
    """It broke a bound, and would again with the next chat."""


@dataclass(frozen=True, eq=False)
class Question:
    """A chat. `is_marked`: as in show_chat."""

    messages: list[dict[str, Any]]
    tools: Any = None
    is_marked: bool = False


class Renderer:
    """A tokenizer's template in a process of its own, which starts with the first chat and ends with this one. Chats
    that are announced travel together, and are shown while this process is at work on those before."""

    def __init__(self, tokenizer: Any, specials: Sequence[str] = ()) -> None:
        self.tokenizer, self.specials, self.broken = tokenizer, tuple(specials), ""
        self.wire: Connection | None = None
        self.end: Callable[[], object] = lambda: None
        self.ahead: deque[Question] = deque()
        self.sent: deque[Question] = deque()

    def announce(self, questions: Sequence[Question]) -> None:
        """What `show` will be asked next, in this order; some may be left out."""
        self.ahead = deque(questions)

    def show(self, question: Question) -> ShownChat:
        """Raises TemplateRefusal for this chat, EndlessTemplate for good."""
        answer: dict[str, Any] = {}
        is_answered = False
        while not is_answered and not self.broken:
            if not self.sent:
                self._send(question)
            answer = self._receive()
            is_answered = self.sent.popleft() is question
        if "broken" in answer:
            self.broken = f"the chat template {answer['broken']}"
        if self.broken:
            self.end()
            raise EndlessTemplate(self.broken)
        if "error" in answer:
            raise TemplateRefusal(answer["error"])
        text, said, ends, odd, (marked_text, marked) = answer["found"]
        return ShownChat(text, list(map(_pair, said)), ends, odd, (marked_text, list(map(_pair, marked))))

    def _send(self, question: Question) -> None:
        """With those that follow it. The child has taken all of them before it answers one: no side waits for ever."""
        while self.ahead and self.ahead.popleft() is not question:
            pass
        size = _count_chars(question)
        self.sent.append(question)
        while self.ahead and len(self.sent) < MAX_SENT and size + _count_chars(self.ahead[0]) <= MAX_SENT_CHARS:
            size += _count_chars(self.ahead[0])
            self.sent.append(self.ahead.popleft())
        wire = self._start() if self.wire is None else self.wire
        try:
            wire.send([(each.messages, each.tools, each.is_marked) for each in self.sent])
        except OSError:
            self.broken = GONE

    def _receive(self) -> dict[str, Any]:
        try:
            if self.wire is not None and self.wire.poll(SECONDS):
                found: dict[str, Any] = json.loads(
                    self.wire.recv_bytes(MAX_ANSWER_BYTES).decode("utf-8", "surrogatepass")
                )
                return found
            self.broken = self.broken or f"the chat template does not come to an end in {SECONDS:.0f} s"
        except (OSError, EOFError, MemoryError):  # too long an answer, or the child is no more
            self.broken = GONE
        return {}

    def _start(self) -> Connection:
        self.wire, theirs = Pipe()
        pid = os.fork()
        if pid == 0:
            _serve(theirs, self.tokenizer, self.specials)
        theirs.close()
        self.end = weakref.finalize(self, _end, self.wire, pid)
        return self.wire


def _end(wire: Connection, pid: int) -> None:
    wire.close()
    try:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
    except (ProcessLookupError, ChildProcessError):
        pass


def _serve(wire: Connection, tokenizer: Any, specials: Sequence[str]) -> None:
    """The child's whole life. Nothing of the parent's is held: neither its locks nor its pipes."""
    try:
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        for name in os.listdir("/proc/self/fd"):
            if int(name) > 2 and int(name) != wire.fileno() and os.path.exists(f"/proc/self/fd/{name}"):
                os.close(int(name))
        with open("/proc/self/statm", encoding="ascii") as stream:
            own = int(stream.read().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (own + MEMORY_BYTES, own + MEMORY_BYTES))
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        while True:
            for messages, tools, is_marked in wire.recv():
                wire.send_bytes(_answer(tokenizer, messages, tools, specials, is_marked))
    except BaseException:  # noqa: BLE001 - the parent has gone, or sees that this process has
        pass
    finally:
        os._exit(0)


def _answer(tokenizer: Any, messages: Messages, tools: Any, specials: Sequence[str], is_marked: bool) -> bytes:
    broken = ""
    plain = make_render(tokenizer, tools)

    def render(messages: Messages, *, prompt: bool = False) -> str:
        """A bound that it breaks counts, though it may be a rendering that a chat can do without."""
        nonlocal broken
        text = ""
        try:
            text = plain(messages, prompt=prompt)
        except MemoryError:
            broken = TOO_LARGE
        if len(text) > MAX_CHARS:
            text, broken = "", f"writes more than {MAX_CHARS:,} characters"
        return text

    answer: dict[str, Any] = {}
    try:
        answer["found"] = astuple(show_chat(tokenizer, render, messages, tools, specials, is_marked=is_marked))
    except MemoryError:
        broken = TOO_LARGE
    except Exception as error:  # noqa: BLE001 - a template may raise what it likes
        answer["error"] = str(error)
    try:
        return json.dumps({"broken": broken} if broken else answer, ensure_ascii=False).encode("utf-8", "surrogatepass")
    except MemoryError:
        answer.clear()  # makes room
        return json.dumps({"broken": TOO_LARGE}).encode()


def _count_chars(question: Question) -> int:
    return sum(len(str(message.get("content") or "")) for message in question.messages)


def _pair(span: Sequence[int]) -> tuple[int, int]:
    start, stop = span
    return start, stop
