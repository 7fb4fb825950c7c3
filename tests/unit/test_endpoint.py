"""Tests `evaluate --endpoint` against a server on loopback that speaks as vLLM, SGLang and llama.cpp do: what is asked
and scored, what is tried again, what is refused, what is kept, and that the key is nowhere."""

import json
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from support.json_page import find_undocumented
from support.tokenizers_trained import train
from syrupy.assertion import SnapshotAssertion
from typer.testing import CliRunner, Result

from ulysses_cli.cli import app
from ulysses_cli.evaluate import endpoint

KEY = "plain-word-in-no-known-form"
KEY_NAME = "SERVED_BY"  # a name that does not tell that its value is a secret
TEMPLATE_TOKENS = 7
LENGTH = 400
TOKENIZER = train("qwen")


class Served:
    """A server whose model finds needles. `faults`: what is done instead of the next answers; `limit`: its context."""

    def __init__(self) -> None:
        self.bodies: list[tuple[str, dict[str, Any]]] = []
        self.faults: list[Callable[[BaseHTTPRequestHandler], None]] = []
        self.limit, self.takes_settings, self.lists, self.suffix = 100_000, True, True, ""
        self.lock = threading.Lock()
        self.hold = threading.Event()  # from the answer with number hold_from on, requests wait for it
        self.hold_from = 1 << 30
        self.address = ""

    @property
    def questions(self) -> list[str]:
        texts = [body["prompt"] if "prompt" in body else body["messages"][-1]["content"] for _, body in self.bodies]
        return [text for text in texts if text != "?"]

    def answer(self, handler: BaseHTTPRequestHandler, path: str, body: dict[str, Any]) -> None:
        if not self.takes_settings and "chat_template_kwargs" in body:
            return send(handler, 400, {"error": {"message": "Unrecognized request argument: chat_template_kwargs"}})
        if body["model"] != "served/model":
            return send(handler, 404, {"error": {"message": "The model does not exist", "code": "model_not_found"}})
        is_chat = path == "/v1/chat/completions"
        text = body["messages"][-1]["content"] if is_chat else body["prompt"]
        tokens = len(TOKENIZER.encode(text, add_special_tokens=False).ids) + (TEMPLATE_TOKENS if is_chat else 1)
        if tokens + body["max_tokens"] > self.limit:
            message = f"This model's maximum context length is {self.limit} tokens."
            return send(handler, 400, {"object": "error", "message": message, "type": "BadRequestError", "code": 400})
        found = find_needle(text) + self.suffix
        choice = {"message": {"role": "assistant", "content": found}} if is_chat else {"text": found}
        usage = {"prompt_tokens": tokens, "completion_tokens": 5}
        return send(handler, 200, {"choices": [{**choice, "finish_reason": "stop"}], "usage": usage})


def find_needle(text: str) -> str:
    asked = re.search(r"What is the special magic \w+ for (\S+) in the text\?", text)
    found = re.search(rf"special magic \w+ for {asked[1]} is: (\S+)\.", text) if asked else None
    return f"It is {found[1]}." if found else "I do not know."


def send(handler: BaseHTTPRequestHandler, status: int, content: Any, **headers: str) -> None:
    data = json.dumps(content).encode()
    handler.send_response(status)
    for name, value in {"Content-Length": str(len(data)), **headers}.items():
        handler.send_header(name.replace("_", "-"), value)
    handler.end_headers()
    handler.wfile.write(data)


@pytest.fixture
def served() -> Iterator[Served]:
    own = Served()

    class Handler(BaseHTTPRequestHandler):
        def log_message(self, *_: Any) -> None:
            pass

        def do_GET(self) -> None:
            names = [{"id": "served/model", "object": "model"}]
            send(self, *((200, {"data": names}) if own.lists else (404, {"detail": "Not Found"})))

        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            with own.lock:
                own.bodies.append((self.path, body))
                is_question = body["max_tokens"] > 1
                fault = own.faults.pop(0) if own.faults and is_question else None
                is_held = len(own.questions) > own.hold_from
            if is_held:
                own.hold.wait(60)
            with suppress(OSError):
                if fault is not None:
                    fault(self)
                else:
                    own.answer(self, self.path, body)

    class Server(ThreadingHTTPServer):
        daemon_threads = True

        def handle_error(self, *_: Any) -> None:
            pass

    server = Server(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
    own.address = f"http://127.0.0.1:{server.server_port}/v1"
    yield own
    own.hold.set()
    server.shutdown()
    server.server_close()


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "own").mkdir()
    TOKENIZER.save(str(tmp_path / "own" / "tokenizer.json"))
    monkeypatch.setattr(endpoint, "PAUSES", (0.01,) * 3)
    monkeypatch.setenv(KEY_NAME, KEY)
    return tmp_path


def list_words(served: Served, folder: Path, *more: str, model: str = "served/model") -> list[str]:
    words = ["evaluate", model, "--endpoint", served.address, "--endpoint-key-env", KEY_NAME]
    words += ["--tokenizer", str(folder / "own"), "--output", str(folder / "found"), "--format", "json"]
    return [*words, "--suite", "niah_single_1", "--max-length", str(LENGTH), "--samples", "6", *more]


def ask(served: Served, folder: Path, *more: str, model: str = "served/model") -> Result:
    result = CliRunner().invoke(app, list_words(served, folder, *more, model=model))
    texts = [result.stdout, result.stderr, *(file.read_text() for file in folder.rglob("*") if file.is_file())]
    assert not [text for text in texts if KEY in text]
    return result


def complain(served: Served, folder: Path, *more: str, model: str = "served/model") -> list[str]:
    result = ask(served, folder, *more, model=model)
    problems = json.loads(result.stdout)["problems"]
    texts = [f"{each['key']}: {each['message']}\nhint: {each['hint']}" for each in problems]
    return [f"exit code {result.exit_code}", *(text.replace(served.address, "{server}") for text in texts)]


def find_score(result: Result) -> float:
    return json.loads(result.stdout)["scores"][0]["score"]


def wait_for(served: Served, num_questions: int) -> None:
    end = time.monotonic() + 60
    while len(served.questions) < num_questions and time.monotonic() < end:
        time.sleep(0.02)


def read_results(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "found" / "results.jsonl").read_text().splitlines()[1:]]


def test_right_answers_are_scored_at_the_lengths_that_the_server_counts(served: Served, folder: Path) -> None:
    result = ask(served, folder, "--suite", "niah_single_1,niah_single_2,loss", "--endpoint-requests", "2")
    assert result.exit_code == 0, result.output
    findings = json.loads(result.stdout)
    assert not find_undocumented("ulysses evaluate", findings)
    assert [(row["task"], row["n"], row["score"]) for row in findings["scores"]] == [
        ("niah_single_1", 6, 1.0), ("niah_single_2", 6, 1.0)
    ]  # fmt: skip
    lines = read_results(folder)
    # 128 tokens are the answer's
    assert {line["prompt_tokens"] for line in lines} == {LENGTH - 128}
    assert len({line["prompt_hash"] for line in lines}) == 12
    assert findings["endpoint"] == {"address": served.address, "num_requests": 2}
    assert [note for note in findings["notes"] if note.startswith("loss: left out")]
    assert "question 12 of 12" in result.stderr
    path, body = served.bodies[-1]
    assert path == "/v1/chat/completions"
    assert (body["temperature"], body["max_tokens"]) == (0, 128)
    assert body["chat_template_kwargs"] == {"enable_thinking": False, "thinking": False}


def test_so_many_questions_are_asked_at_once(served: Served, folder: Path) -> None:
    served.hold_from = 0
    thread = threading.Thread(target=ask, args=(served, folder, "--endpoint-requests", "3"))
    thread.start()
    wait_for(served, 3)
    time.sleep(0.3)  # for one too many
    assert len(served.questions) == 3
    served.hold.set()
    thread.join(60)
    assert len(served.questions) == 6


def cut(handler: BaseHTTPRequestHandler) -> None:
    """Half of an answer."""
    handler.send_response(200)
    handler.send_header("Content-Length", "1000")
    handler.end_headers()
    handler.wfile.write(b'{"choices": [{"mess')
    handler.connection.shutdown(2)


# What a server does, and a word by which its line is known.
FAULTS: dict[str, Callable[[BaseHTTPRequestHandler], None]] = {
    "HTTP 429: slow down": lambda handler: send(handler, 429, {"error": {"message": "slow down"}}, Retry_After="0"),
    "HTTP 503: Loading model": lambda handler: send(handler, 503, {"error": {"message": "Loading model"}}),
    "no JSON object": cut,
    "closed connection": lambda handler: handler.connection.shutdown(2),
}


@pytest.mark.parametrize("said", FAULTS)
def test_what_may_pass_is_asked_again(said: str, served: Served, folder: Path) -> None:
    served.faults = [FAULTS[said]] * 2
    result = ask(served, folder, "--endpoint-requests", "1")
    assert result.exit_code == 0, result.output
    assert result.stderr.count(said) == 2
    assert find_score(result) == 1
    assert len(served.questions) == 6 + 2
    assert len(set(served.questions)) == 6


def test_a_server_that_fails_for_good_ends_it_and_what_was_answered_is_kept(
    served: Served, folder: Path, snapshot: SnapshotAssertion
) -> None:
    def fail(handler: BaseHTTPRequestHandler) -> None:
        send(handler, 500, {"error": {"message": f"out of memory, {handler.headers['Authorization']}"}})

    served.faults = [*[lambda handler: served.answer(handler, *served.bodies[-1])] * 2, *[fail] * 4]
    assert complain(served, folder, "--endpoint-requests", "1") == snapshot
    assert len(read_results(folder)) == 2
    assert len(served.questions) == 2 + 4  # tries of the third
    again = ask(served, folder)
    assert again.exit_code == 0
    assert "going on: 2 questions" in again.stderr
    assert len(served.questions) == 2 + 4 + 4
    assert json.loads(again.stdout)["scores"][0]["n"] == 6


def test_a_deadline_holds_for_all_tries(served: Served, folder: Path, snapshot: SnapshotAssertion) -> None:
    served.hold_from = 0
    started = time.monotonic()
    assert complain(served, folder, "--endpoint-timeout", "1", "--endpoint-requests", "6") == snapshot
    assert time.monotonic() - started < 20


def test_a_killed_evaluation_goes_on(served: Served, folder: Path) -> None:
    """Each question that was answered is asked once."""
    served.hold_from = 3
    words = [sys.executable, "-m", "ulysses_cli", *list_words(served, folder, "--endpoint-requests", "1")]
    process = subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    wait_for(served, 4)
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=60)
    assert process.returncode == 130, err
    assert KEY not in out + err
    assert len(read_results(folder)) == 3
    served.hold.set()
    result = ask(served, folder)
    assert json.loads(result.stdout)["scores"][0]["n"] == 6
    assert [served.questions.count(each) for each in dict.fromkeys(served.questions)] == [1, 1, 1, 2, 1, 1]


def write_rows(folder: Path, *rows: dict[str, Any]) -> str:
    (folder / "rows.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    return str(folder / "rows.jsonl")


def test_questions_of_files_that_are_too_long_are_listed(
    served: Served, folder: Path, snapshot: SnapshotAssertion
) -> None:
    """They need no tokenizer, unless --max-length bounds them."""
    served.limit = 1000
    row = {"question": "Which?", "answer": "B", "domain": "d", "difficulty": "easy", "length": "short"}
    row |= {f"choice_{letter}": letter for letter in "ABCD"}
    contexts = {"row-0": "short", "row-1": "very long " * 1000}
    path = write_rows(folder, *({**row, "_id": name, "context": context} for name, context in contexts.items()))
    words = ["evaluate", "served/model", "--endpoint", served.address, "--output", str(folder / "found")]
    words += ["--suite", "longbench-v2", "--path", path]
    served.suffix = " The correct answer is (B)"
    result = CliRunner().invoke(app, [*words, "--format", "json"])
    assert result.exit_code == 0, result.output
    findings = json.loads(result.stdout)
    assert not find_undocumented("ulysses evaluate", findings)
    assert [(row["n"], row["score"]) for row in findings["scores"]] == [(1, 1)]
    (long,) = findings["too_long"]
    assert (long["file_id"], long["tokens"]) == ("row-1", None)
    text = CliRunner().invoke(app, words).stdout
    assert [long["reason"], *(line for line in text.splitlines() if "too long" in line)] == snapshot
    assert f" at {served.address}, 4 requests" in text
    served.bodies.clear()
    more = ("--suite", "longbench-v2", "--path", path, "--max-length", "600", "--output", str(folder / "bounded"))
    (long,) = json.loads(ask(served, folder, *more).stdout)["too_long"]
    assert (long["file_id"], long["tokens"] > 600, len(served.questions)) == ("row-1", True, 1)


def test_examples_that_go_on_are_completed_as_they_are(served: Served, folder: Path) -> None:
    """Beside questions that are asked in a chat; without a template these are completed, too."""
    row = {"input": "Type:", "context": "Examples.", "answers": ["A"], "all_classes": ["A", "B"], "_id": "row"}
    path = write_rows(folder, {**row, "dataset": "trec"}, {**row, "dataset": "qasper"})
    words = ("--suite", "longbench", "--path", path, "--html", str(folder / "page.html"))
    served.suffix = "\nType: A"
    result = ask(served, folder, *words, "--max-length", "1000", "--output", str(folder / "files"))
    assert result.exit_code == 0, result.output
    asked = {body["max_tokens"]: path for path, body in served.bodies}
    assert (asked[64], asked[128]) == ("/v1/completions", "/v1/chat/completions")
    assert "served/model" in (folder / "page.html").read_text()
    served.bodies.clear()
    assert find_score(ask(served, folder, "--no-chat-template")) == 1
    assert {path for path, _ in served.bodies} == {"/v1/completions"}
    assert {line["prompt_tokens"] for line in read_results(folder)} == {LENGTH - 128}


def find_notes(result: Result) -> list[str]:
    return [note for note in json.loads(result.stdout)["notes"] if not note.startswith("scores")]


def test_a_server_that_takes_no_settings_gets_none(served: Served, folder: Path, snapshot: SnapshotAssertion) -> None:
    """And one with another tokenizer than the one that is named is noticed."""
    served.takes_settings = served.lists = False
    train("wordpiece").save(str(folder / "own" / "tokenizer.json"))
    result = ask(served, folder, "--endpoint-requests", "1")
    assert find_score(result) == 1
    assert not [body for _, body in served.bodies[1:] if "chat_template_kwargs" in body]
    assert [re.sub(r"\d+ tokens", "N tokens", note) for note in find_notes(result)] == snapshot


def test_thoughts_are_left_out_of_answers(served: Served, folder: Path, snapshot: SnapshotAssertion) -> None:
    """One is written before the answer, one is parted by the server, and one never ends."""
    texts: list[Any] = [
        {"content": "<think>Is it 7?</think>I do not know."},
        {"content": "", "reasoning_content": "Is it"},
        {"content": "<think>Is it 7?"},
    ]
    served.faults = [
        lambda handler, text=text: send(  # type: ignore[misc]
            handler, 200, {"choices": [{"message": text, "finish_reason": "length"}], "usage": {"prompt_tokens": 272}}
        )
        for text in texts
    ]
    result = ask(served, folder, "--thinking", "100", "--endpoint-requests", "1")
    lines = read_results(folder)
    assert [line["answer"] for line in lines[:3]] == ["I do not know.", "", ""]
    assert [line["has_answer"] for line in lines] == [True, False, False, True, True, True]
    assert find_notes(result) == snapshot
    assert served.bodies[-1][1]["max_tokens"] == 128 + 100
    assert served.bodies[-1][1]["chat_template_kwargs"]["enable_thinking"] is True


def test_the_key_is_sent_and_never_shown(served: Served, folder: Path) -> None:
    """Even where the server repeats it in an answer, a wrong one; `ask` looks for it in all files and in what is
    printed."""
    seen = []

    def repeat(handler: BaseHTTPRequestHandler) -> None:
        seen.append(handler.headers["Authorization"])
        send(handler, 200, {"choices": [{"message": {"content": f"It is {handler.headers['Authorization']}"}}]})

    served.faults = [repeat]
    result = ask(served, folder, "--endpoint-requests", "1")
    assert seen == [f"Bearer {KEY}"]
    assert read_results(folder)[0]["answer"] == "It is Bearer ***"
    assert find_score(result) == pytest.approx(5 / 6)


def test_mistakes_are_said_before_a_question_is_asked(
    served: Served, folder: Path, snapshot: SnapshotAssertion
) -> None:
    said = [
        complain(served, folder, "--endpoint", "http://127.0.0.1:1/v1"),
        complain(served, folder, "--tokenizer", "no/such"),
        complain(served, folder, model="served/modle"),
    ]
    assert served.bodies == []
    served.lists = False
    said.append(complain(served, folder, model="served/modle"))
    assert said == snapshot


def test_what_the_server_refuses_is_explained(served: Served, folder: Path, snapshot: SnapshotAssertion) -> None:
    served.faults = [lambda handler: send(handler, 401, {"error": {"message": f"Incorrect API key provided: {KEY}"}})]
    key = complain(served, folder, "--endpoint-requests", "1")
    served.limit = LENGTH - 1
    assert [key, complain(served, folder)] == snapshot
