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
from collections.abc import Callable
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from typing import Any

from ulysses_cli.data.chat import Messages, Render, make_render, read_marked_spans

SECONDS = 30.0  # a chat of a million tokens takes one
MEMORY_BYTES = 3 << 30  # beside what this process has
MAX_CHARS = 1 << 28  # ten times the longest row that anyone trains on
MAX_ANSWER_BYTES = 8 * MAX_CHARS  # as JSON spells it at worst
PR_SET_PDEATHSIG = 1  # linux/prctl.h


class TemplateRefusal(Exception):
    """What the template raised, in its words."""


class EndlessTemplate(Exception):
    """It broke a bound, and would again with the next chat."""


class Renderer:
    """A tokenizer's template in a process of its own, which starts with the first chat and ends with this one."""

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer, self.broken = tokenizer, ""
        self.wire: Connection | None = None
        self.end: Callable[[], object] = lambda: None

    def make_render(self, tools: Any) -> Render:
        def render(messages: Messages, *, prompt: bool = False) -> str:
            return str(self._ask("render", list(messages), tools, prompt))

        return render

    def read_marked_spans(self, messages: Messages, tools: Any) -> tuple[str, list[tuple[int, int]]]:
        text, spans = self._ask("spans", list(messages), tools, False)
        return text, [(start, stop) for start, stop in spans]

    def _ask(self, *question: Any) -> Any:
        if self.broken:
            raise EndlessTemplate(self.broken)
        wire = self._start() if self.wire is None else self.wire
        answer: dict[str, Any] = {}
        try:
            wire.send(question)
            if wire.poll(SECONDS):
                answer = json.loads(wire.recv_bytes(MAX_ANSWER_BYTES).decode("utf-8", "surrogatepass"))
            else:
                self.broken = f"the chat template does not come to an end in {SECONDS:.0f} s"
        except (OSError, EOFError, MemoryError):  # too long an answer, or the child is no more
            self.broken = f"the chat template takes more than {MEMORY_BYTES >> 30} GiB of memory"
        if "broken" in answer:
            self.broken = f"the chat template {answer['broken']}"
        if self.broken:
            self.end()
            raise EndlessTemplate(self.broken)
        if "error" in answer:
            raise TemplateRefusal(answer["error"])
        return answer["found"]

    def _start(self) -> Connection:
        self.wire, theirs = Pipe()
        pid = os.fork()
        if pid == 0:
            _serve(theirs, self.tokenizer)
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


def _serve(wire: Connection, tokenizer: Any) -> None:
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
            kind, messages, tools, prompt = wire.recv()
            try:
                spans: list[tuple[int, int]] = []
                if kind == "render":
                    text = make_render(tokenizer, tools)(messages, prompt=prompt)
                else:
                    text, spans = read_marked_spans(tokenizer, messages, tools)
                answer: dict[str, Any] = {"found": text if kind == "render" else [text, spans]}
                if len(text) > MAX_CHARS:
                    answer = {"broken": f"writes more than {MAX_CHARS:,} characters"}
                content = json.dumps(answer, ensure_ascii=False).encode("utf-8", "surrogatepass")
            except MemoryError:
                text, answer = "", {}  # makes room
                content = json.dumps({"broken": f"takes more than {MEMORY_BYTES >> 30} GiB of memory"}).encode()
            except Exception as error:  # noqa: BLE001 - a template may raise what it likes
                content = json.dumps({"error": str(error)}).encode()
            wire.send_bytes(content)
    except BaseException:  # noqa: BLE001 - the parent has gone, or sees that this process has
        pass
    finally:
        os._exit(0)
