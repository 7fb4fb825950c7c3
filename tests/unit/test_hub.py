"""Tests where shapes come from, and the messages when they are missing. The hub is a server of the test's own."""

import json
import math
import re
import subprocess
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from threading import Thread

import pytest
from support.commands import run_process
from support.recipes import LLAMA, load
from support.refusals import explain
from support.tiers import sample_every
from syrupy.assertion import SnapshotAssertion
from typer.testing import CliRunner

from ulysses_cli import hub
from ulysses_cli.cli import app
from ulysses_cli.data import sources
from ulysses_cli.data.sources import load_hub_set
from ulysses_cli.data.tokenizing.tokenizer import load_tokenizer, make_bytes_tokenizer
from ulysses_cli.plan.problem import Problem, RecipeError
from ulysses_cli.plan.recipe.recipe import Model
from ulysses_cli.plan.recipe.sections import Dataset


@pytest.fixture(autouse=True)
def _own_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hf"))
    monkeypatch.delenv("HF_HUB_CACHE", raising=False)


def find(name: str, *overrides: str) -> hub.ModelSource:
    return hub.find_model_shape(load(f"model.name_or_path={name}", *overrides).recipe)


def put(folder: Path, **changes: object) -> None:
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps({**LLAMA, **changes}))


def test_an_infinite_number_as_transformers_writes_it(tmp_path: Path) -> None:
    put(tmp_path / "m", time_step_limit=[0.0, {"__float__": "Infinity"}])
    config, _ = hub.find_model_config(load(f"model.name_or_path={tmp_path}/m").recipe)
    assert config["time_step_limit"] == [0.0, math.inf]


def test_the_cache_by_branch_tag_and_commit(tmp_path: Path, snapshot: SnapshotAssertion) -> None:
    repo = tmp_path / "hf" / "hub" / "models--owner--own"
    put(repo / "snapshots" / "abc123")
    (repo / "refs").mkdir()
    (repo / "refs" / "main").write_text("abc123")
    sources = [find("owner/own", *more).source for more in ((), ("model.revision=abc123",))]
    assert [*sources, explain(find, "owner/own", "model.revision=v2")] == snapshot


def test_the_hub_is_not_asked_offline(monkeypatch: pytest.MonkeyPatch, snapshot: SnapshotAssertion) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    recipe = load("model.name_or_path=owner/real").recipe
    assert explain(hub.find_model_shape, recipe, online=True) == snapshot


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The models that the hub, which is out of reach, was asked for."""
    names: list[str] = []

    def fetch(name: str, revision: str | None) -> None:
        names.append(name)
        raise RecipeError([Problem(hub.KEY, f"{name} is out of reach")])

    monkeypatch.setattr(hub, "_fetch_config", fetch)
    return names


@pytest.mark.parametrize("command", ["prepare", "train"])
def test_commands_that_need_the_hub_ask_it(command: str, asked: list[str], tmp_path: Path) -> None:
    (tmp_path / "d.jsonl").write_text('{"text": "a"}\n')
    recipe = tmp_path / "r.yaml"
    recipe.write_text(
        f"model: {{name_or_path: owner/real}}\ndata: {{max_length: 8, datasets: [{{path: {tmp_path}/d.jsonl}}]}}\n"
    )
    done = CliRunner().invoke(app, [command, str(recipe), f"run.output_dir={tmp_path / 'out'}"])
    assert (done.exit_code, asked) == (2, ["owner/real"])
    assert "owner/real is out of reach" in done.stderr


@pytest.mark.usefixtures("asked")
@pytest.mark.parametrize("files", [(), ("config.json",), ("config.json", "model.safetensors")])
def test_weights_that_ranks_cannot_download_stop_a_run_before_its_data_is_read(
    files: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, snapshot: SnapshotAssertion
) -> None:
    def read(*_: object, **__: object) -> None:
        raise AssertionError("data were read")

    monkeypatch.setattr("ulysses_cli.commands.prepare.prepare_recipe", read)
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "cache"))
    cached = tmp_path / "cache/models--Qwen--Qwen3-0.6B/snapshots/main"
    cached.mkdir(parents=True)
    for name in files:
        (cached / name).write_text(json.dumps(hub.load_table()["qwen/qwen3-0.6b"]["config"]))
    recipe = tmp_path / "r.yaml"
    recipe.write_text(
        "model: {name_or_path: Qwen/Qwen3-0.6B, tokenizer: bytes}\nparallel: {sp_size: 1}\n"
        f"data: {{max_length: 64, datasets: [{{type: synthetic}}]}}\ntrain: {{max_steps: 1}}\n"
        f"run: {{device: cpu, output_dir: {tmp_path}/out}}\n"
    )
    done = CliRunner().invoke(app, ["train", str(recipe)])
    if len(files) == 2:
        assert str(done.exception) == "data were read"
    else:
        said = [line for line in done.stderr.splitlines() if "out of reach" in line]
        assert (done.exit_code, said) == (2, snapshot)


class FakeHub(BaseHTTPRequestHandler):
    """Answers as the hub does for four kinds of model."""

    def do_GET(self) -> None:
        self.answer(with_body=True)

    def do_HEAD(self) -> None:
        self.answer(with_body=False)

    def answer(self, *, with_body: bool) -> None:
        kinds = {"gated": (403, "GatedRepo"), "missing": (401, "RepoNotFound"), "empty": (404, "EntryNotFound")}
        status, error = next((kinds[kind] for kind in kinds if kind in self.path), (200, ""))
        body = b"" if error else json.dumps({**LLAMA, "num_attention_heads": 64}).encode()
        self.send_response(status)
        if error:
            self.send_header("X-Error-Code", error)
        self.send_header("ETag", '"abc"')
        self.send_header("X-Repo-Commit", "c" * 40)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if with_body:
            self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        pass


@pytest.fixture
def hub_address() -> Iterator[str]:
    server = HTTPServer(("127.0.0.1", 0), FakeHub)
    Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()


def validate_online(address: str, name: str, tmp_path: Path) -> subprocess.CompletedProcess[str]:
    recipe = tmp_path / "r.yaml"
    recipe.write_text(f"model: {{name_or_path: {name}}}\ndata: {{max_length: 8, datasets: [{{path: owner/x}}]}}\n")
    environ = {"HF_ENDPOINT": address, "HF_TOKEN": "hf_planted_secret", "HF_HUB_OFFLINE": "0"}
    return run_process("validate-config", str(recipe), "--online", **environ)


@pytest.mark.parametrize(("name", "code"), sample_every(4, [("fine", 0), ("gated", 2), ("missing", 2), ("empty", 2)]))
def test_the_hub_is_asked_on_request(
    hub_address: str, tmp_path: Path, name: str, code: int, snapshot: SnapshotAssertion
) -> None:
    done = validate_online(hub_address, f"owner/{name}", tmp_path)
    said = [line for line in (done.stdout + done.stderr).splitlines() if "hub" in line]
    assert (done.returncode, said) == (code, snapshot)
    assert "hf_planted_secret" not in done.stdout + done.stderr


@pytest.mark.check
def test_a_hub_that_cannot_be_reached(tmp_path: Path, snapshot: SnapshotAssertion) -> None:
    done = validate_online(NOWHERE, "owner/fine", tmp_path)
    assert (done.returncode, done.stderr) == (2, snapshot)


NOWHERE = "http://127.0.0.1:9"  # nothing listens there


@pytest.fixture(params=[False, True], ids=["no network", "HF_HUB_OFFLINE"])
def obstacle(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> Iterator[None]:
    """The library says nothing of its own, and does not try for half a minute, as it does alone."""
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", request.param)
    monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", NOWHERE)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    sources.find_obstacle.cache_clear()
    start = time.monotonic()
    yield
    sources.find_obstacle.cache_clear()
    assert time.monotonic() - start < 20
    assert capfd.readouterr().err == ""


@pytest.mark.usefixtures("obstacle")
def test_what_cannot_be_downloaded_is_not_blamed_on_anything_else(tmp_path: Path, snapshot: SnapshotAssertion) -> None:
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken" / "tokenizer.json").write_text("{")
    (tmp_path / "empty").mkdir()
    assert [
        *(explain(load_hub_set, Dataset(path="owner/chats"), "data.datasets.0") for _ in range(2)),
        explain(load_tokenizer, Model(name_or_path="owner/model")),
        *(explain(load_tokenizer, Model(name_or_path=str(tmp_path / name))) for name in ("broken", "empty")),
    ] == snapshot


def test_a_config_that_transformers_refuses_is_not_blamed_on_the_tokenizer(tmp_path: Path) -> None:
    make_bytes_tokenizer().save_pretrained(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama", "rms_norm_eps": "tiny"}))
    (tmp_path / "tokenizer_config.json").unlink()  # which names the class, so that the config is not read
    assert re.search(r"config.json cannot .*rms_norm_eps", explain(load_tokenizer, Model(name_or_path=str(tmp_path))))
