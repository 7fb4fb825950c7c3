"""Tests where shapes come from, and the messages when they are missing. The hub is a server of the test's own."""

import json
import math
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from threading import Thread

import pytest
from support.recipes import LLAMA, load
from support.tiers import sample_every
from typer.testing import CliRunner

from ulysses_cli import hub
from ulysses_cli.cli import app
from ulysses_cli.data import sources
from ulysses_cli.data.sources import load_hub_set
from ulysses_cli.data.tokenizing.tokenizer import load_tokenizer, make_bytes_tokenizer
from ulysses_cli.plan.ledger.weights import read_weights
from ulysses_cli.plan.problem import Problem, RecipeError
from ulysses_cli.plan.recipe.recipe import Model
from ulysses_cli.plan.recipe.sections import Dataset


@pytest.fixture(autouse=True)
def _own_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hf"))
    monkeypatch.delenv("HF_HUB_CACHE", raising=False)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))


def find(name: str, *overrides: str) -> hub.ModelSource:
    return hub.find_model_shape(load(f"model.name_or_path={name}", *overrides).recipe)


def complain(name: str, *overrides: str) -> str:
    with pytest.raises(RecipeError) as caught:
        find(name, *overrides)
    return str(caught.value.problems[0]).strip()


def put(folder: Path, **changes: object) -> None:
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps({**LLAMA, **changes}))


def test_a_local_folder_comes_first(tmp_path: Path) -> None:
    put(tmp_path / "m", num_attention_heads=16)
    result = find(str(tmp_path / "m"))
    assert (result.shape.num_heads, result.source) == (16, f"{tmp_path}/m/config.json")
    (tmp_path / "m" / "config.json").write_text("{nope")
    assert "is not valid JSON" in complain(str(tmp_path / "m"))
    (tmp_path / "m" / "config.json").unlink()
    assert "does not exist" in complain(str(tmp_path / "m"))
    assert "is not a folder" in complain("./no/such/model")


def test_an_infinite_number_as_transformers_writes_it(tmp_path: Path) -> None:
    put(tmp_path / "m", time_step_limit=[0.0, {"__float__": "Infinity"}])
    config, _ = hub.find_model_config(load(f"model.name_or_path={tmp_path}/m").recipe)
    assert config["time_step_limit"] == [0.0, math.inf]


def test_the_cache_by_branch_tag_and_commit(tmp_path: Path) -> None:
    repo = tmp_path / "hf" / "hub" / "models--owner--own"
    put(repo / "snapshots" / "abc123")
    (repo / "refs").mkdir()
    (repo / "refs" / "main").write_text("abc123")
    assert find("owner/own").source == "the Hugging Face cache"
    assert find("owner/own", "model.revision=abc123").source == "the Hugging Face cache"
    assert "at revision v2 is not on this machine" in complain("owner/own", "model.revision=v2")


def test_the_table_by_any_of_its_names_and_the_users_own() -> None:
    assert read_weights(find("meta-llama/Llama-3.1-8B").shape, None).num_elements == 8030261248
    assert find("meta-llama/llama-3.1-8b-instruct").source == "the table of well-known models"
    assert "at revision x is not on this machine" in complain("meta-llama/Llama-3.1-8B", "model.revision=x")
    own = hub.get_user_folder() / "models"
    own.mkdir(parents=True)
    (own / "a.json").write_text(json.dumps({"repo": "meta-llama/Llama-3.1-8B", "config": LLAMA}))
    assert find("meta-llama/Llama-3.1-8B").shape.num_layers == 2
    (own / "b.json").write_text("{}")
    assert "has no `repo` and `config`" in complain("owner/x")


def test_the_hub_is_not_asked_offline(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(RecipeError) as caught:
        hub.find_model_shape(load("model.name_or_path=owner/real").recipe, online=True)
    assert "owner/real is not on disk, and HF_HUB_OFFLINE forbids downloads" in str(caught.value)


@pytest.mark.parametrize("command", ["prepare", "train"])
def test_commands_that_need_the_hub_ask_it(command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []

    def fetch(name: str, revision: str | None) -> None:
        asked.append(name)
        raise RecipeError([Problem(hub.KEY, "the hub has its own reasons")])

    monkeypatch.setattr(hub, "_fetch_config", fetch)
    (tmp_path / "d.jsonl").write_text('{"text": "a"}\n')
    recipe = tmp_path / "r.yaml"
    recipe.write_text(
        f"model: {{name_or_path: owner/real}}\ndata: {{max_length: 8, datasets: [{{path: {tmp_path}/d.jsonl}}]}}\n"
    )
    done = CliRunner().invoke(app, [command, str(recipe), f"run.output_dir={tmp_path / 'out'}"])
    assert done.exit_code == 2
    assert asked == ["owner/real"]
    assert "the hub has its own reasons" in done.stderr


@pytest.mark.parametrize("files", [(), ("config.json",), ("config.json", "model.safetensors")])
def test_weights_that_ranks_cannot_download_stop_a_run_before_its_data_is_read(
    files: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fetch(name: str, revision: str | None) -> None:
        raise RecipeError([Problem(hub.KEY, f"{name} is out of reach")])

    monkeypatch.setattr(hub, "_fetch_config", fetch)

    def read(*_: object, **__: object) -> None:
        raise AssertionError("data were read")

    monkeypatch.setattr("ulysses_cli.commands.prepare.prepare_recipe", read)
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "cache"))
    snapshot = tmp_path / "cache/models--Qwen--Qwen3-0.6B/snapshots/main"
    snapshot.mkdir(parents=True)
    for name in files:
        (snapshot / name).write_text(json.dumps(hub.load_table()["qwen/qwen3-0.6b"]["config"]))
    recipe = tmp_path / "r.yaml"
    recipe.write_text(
        "model: {name_or_path: Qwen/Qwen3-0.6B, tokenizer: bytes}\nparallel: {sp_size: 1}\n"
        f"data: {{max_length: 64, datasets: [{{type: synthetic}}]}}\ntrain: {{max_steps: 1}}\n"
        f"run: {{device: cpu, output_dir: {tmp_path}/out}}\n"
    )
    done = CliRunner().invoke(app, ["train", str(recipe)])
    if len(files) == 2:
        assert "data were read" in str(done.exception)
        return
    assert done.exit_code == 2
    assert f"{recipe}:1:23: model.name_or_path: Qwen/Qwen3-0.6B is out of reach" in done.stderr


class FakeHub(BaseHTTPRequestHandler):
    """Answers as the hub does for four kinds of model."""

    def do_GET(self) -> None:
        self.answer(with_body=True)

    def do_HEAD(self) -> None:
        self.answer(with_body=False)

    def answer(self, *, with_body: bool) -> None:
        body = json.dumps({**LLAMA, "num_attention_heads": 64}).encode()
        status, error = 200, ""
        if "gated" in self.path:
            status, error = 403, "GatedRepo"
        elif "missing" in self.path:
            status, error = 401, "RepoNotFound"
        elif "empty" in self.path:
            status, error = 404, "EntryNotFound"
        self.send_response(status)
        if error:
            self.send_header("X-Error-Code", error)
            body = b""
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
    return subprocess.run(
        [sys.executable, "-m", "ulysses_cli", "validate-config", str(recipe), "--online"],
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
        env={**os.environ, "HF_ENDPOINT": address, "HF_TOKEN": "hf_planted_secret", "HF_HUB_OFFLINE": "0"},
    )


@pytest.mark.parametrize(
    ("name", "code", "words"),
    sample_every(
        4,
        [
            ("owner/fine", 0, "shape from the hub"),
            ("owner/gated", 2, "owner/gated is gated: the hub requires an account that accepted its licence"),
            ("owner/missing", 2, "the hub has no model owner/missing"),
            ("owner/empty", 2, "owner/empty has no config.json"),
        ],
    ),
)
def test_the_hub_is_asked_on_request(hub_address: str, tmp_path: Path, name: str, code: int, words: str) -> None:
    done = validate_online(hub_address, name, tmp_path)
    assert words in done.stdout + done.stderr
    assert done.returncode == code
    assert "Traceback" not in done.stderr
    assert "hf_planted_secret" not in done.stdout + done.stderr


@pytest.mark.check
def test_a_hub_that_cannot_be_reached(tmp_path: Path) -> None:
    done = validate_online("http://127.0.0.1:9", "owner/fine", tmp_path)
    assert "owner/fine is not on disk, and the hub cannot be reached" in done.stderr
    assert "run `hf download owner/fine --local-dir DIR` elsewhere" in done.stderr
    assert done.returncode == 2


NOWHERE = "http://127.0.0.1:9"  # nothing listens there


@pytest.fixture(params=[False, True], ids=["no network", "HF_HUB_OFFLINE"])
def obstacle(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[str]:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", request.param)
    monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", NOWHERE)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    sources.find_obstacle.cache_clear()
    yield "HF_HUB_OFFLINE forbids downloads" if request.param else f"{NOWHERE} cannot be reached ("
    sources.find_obstacle.cache_clear()


def test_a_data_set_that_cannot_be_downloaded(obstacle: str, capfd: pytest.CaptureFixture[str]) -> None:
    start = time.monotonic()
    for _ in range(2):  # the second is told the same
        with pytest.raises(RecipeError) as error:
            load_hub_set(Dataset(path="owner/chats"), "data.datasets.0")
        (problem,) = error.value.problems
        assert problem.key == "data.datasets.0.path"
        assert problem.message.startswith(f"owner/chats is not on this machine, and {obstacle}")
        assert "run `hf download owner/chats --repo-type dataset --local-dir DIR` elsewhere" in problem.hint
    assert time.monotonic() - start < 20, "the library alone tries for half a minute"
    assert capfd.readouterr().err == ""


def test_a_tokenizer_that_cannot_be_downloaded(obstacle: str, capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(RecipeError) as error:
        load_tokenizer(Model(name_or_path="owner/model"))
    (problem,) = error.value.problems
    assert problem.key == "model.name_or_path"
    assert problem.message.startswith(f"the tokenizer of owner/model is not on this machine, and {obstacle}")
    assert "run `hf download owner/model --local-dir DIR` elsewhere" in problem.hint
    assert capfd.readouterr().err == ""


def test_a_config_that_transformers_refuses_is_not_blamed_on_the_tokenizer(tmp_path: Path) -> None:
    make_bytes_tokenizer().save_pretrained(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama", "rms_norm_eps": "tiny"}))
    (tmp_path / "tokenizer_config.json").unlink()  # which names the class, so that the config is not read
    with pytest.raises(RecipeError, match=r"config.json cannot be used: .*rms_norm_eps"):
        load_tokenizer(Model(name_or_path=str(tmp_path)))


def test_a_broken_tokenizer_on_this_machine_is_not_blamed_on_the_hub(obstacle: str, tmp_path: Path) -> None:
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken" / "tokenizer.json").write_text("{")
    with pytest.raises(RecipeError, match=r"broken/tokenizer.json is not valid JSON: Expecting property name"):
        load_tokenizer(Model(name_or_path=str(tmp_path / "broken")))
    (tmp_path / "empty").mkdir()
    with pytest.raises(RecipeError, match=r"empty holds no tokenizer.json"):
        load_tokenizer(Model(name_or_path=str(tmp_path / "empty")))
