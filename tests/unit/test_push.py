"""Tests publishing against a stand-in of the hub's HTTP interface, by the hub's own client."""

import hashlib
import json
import math
import os
import re
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import huggingface_hub.constants
import huggingface_hub.repocard_data
import pytest
import yaml
from support.commands import run, succeed
from support.hub_server import TOKEN, Hub, use_hub
from support.json_page import find_undocumented
from support.paths import ROOT
from support.run_directory import write_run
from support.tiers import sample, sample_every
from syrupy.assertion import SnapshotAssertion

from ulysses_cli.commands.children import training
from ulysses_cli.commands.children.evaluating import keep_in_run
from ulysses_cli.commands.children.publishing import OF_A_MODEL, HubModels
from ulysses_cli.evaluate.summary import summarize
from ulysses_cli.plan.models.model_files import fingerprint_weights
from ulysses_cli.plan.problem import DONE
from ulysses_cli.report.page.run_page import make_run_page
from ulysses_cli.report.run_summary import load_run, summarize_run
from ulysses_cli.run.checkpoints import MODEL_FACTS
from ulysses_cli.run.launcher import Outcome

CARD = (
    "---\nlibrary_name: transformers\nbase_model: owner/base\n---\n\n# mine\n\nA model.\n\n## Recipe\n\nAll defaults.\n"
)

HEADER = json.dumps({"norm": {"dtype": "F32", "shape": [1750], "data_offsets": [0, 7000]}}).encode()
WEIGHTS = len(HEADER).to_bytes(8, "little") + HEADER + b"weights" * 1000


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    with use_hub(monkeypatch) as hub:
        yield hub


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    folder = tmp_path / "mine"
    write_run(folder)
    facts = json.loads((folder / "run.json").read_text())
    facts["recipe"]["model"] |= {"name_or_path": "owner/base", "rope_scaling": {"type": "yarn"}}
    facts["recipe"]["data"]["datasets"] = [{"path": "owner/texts"}, {"path": str(tmp_path / "private.jsonl")}]
    facts["run_name"] = "mine"
    (folder / "run.json").write_text(json.dumps(facts))
    model = folder / "model"
    model.mkdir()
    rope = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}
    (model / "config.json").write_text(json.dumps({"max_position_embeddings": 131072, "rope_parameters": rope}))
    (model / "model.safetensors").write_bytes(WEIGHTS)
    (model / "README.md").write_text(CARD)
    return folder


def refuse(*words: str) -> str:
    """What `push` says, which writes nothing to stdout."""
    shown = run("push", *words)
    assert (shown.returncode, shown.stdout) == (2, "")
    return shown.stderr


def test_a_model_is_published_with_a_card(hub: Hub, run_dir: Path, tmp_path: Path) -> None:
    """Its text is that of a dry run; see commands.txt."""
    hub.licences["owner/base"] = "apache-2.0"
    assert succeed("push", str(run_dir), "--private").stdout.strip() == f"{hub.address}/me/mine"
    files = hub.repos["me/mine"]
    assert files["model.safetensors"] == WEIGHTS
    assert "me/mine" in hub.private
    head, _, body = files["README.md"].decode().removeprefix("---\n").partition("\n---\n")
    keys = yaml.safe_load(head)
    assert (keys["license"], keys["base_model"], keys["datasets"]) == ("apache-2.0", "owner/base", ["owner/texts"])
    assert ": apache-2.0" in body
    assert str(tmp_path) not in body
    assert "POST /me/mine.git/info/lfs/objects/batch" in hub.requests
    assert not any("xet" in request for request in hub.requests), "files travel over plain HTTP"
    (told,) = load_run(run_dir).told
    assert (told["kind"], told["name"]) == ("hub", "me/mine")
    assert told["text"].endswith(f"bytes: {hub.address}/me/mine")
    page = make_run_page(load_run(run_dir), summarize_run(load_run(run_dir)))
    assert "hub me/mine" in page
    assert TOKEN not in page


def test_the_hub_shows_what_was_found_on_these_weights_alone(run_dir: Path) -> None:
    """The reference is the hub's own reader of cards."""
    checkpoint = run_dir / "checkpoints" / "step-3"
    checkpoint.mkdir(parents=True)
    (checkpoint / "manifest.json").write_text("{}")
    (run_dir / "model" / MODEL_FACTS).write_text('{"step": 3}')
    digest = hashlib.sha256(b"{}").hexdigest()[:12]
    answer = {"is_greedy": None, "answer": "so", "seconds": 1.0, "depths": []}

    def keep(name: str, task: str, settings: dict[str, Any], **more: Any) -> None:
        scores = summarize([{**answer, "task": task, "length": 4096, "score": score} for score in (1.0, 0.5)])
        facts = {"subject": name, "seconds": 1.0, "num_ranks": 1, "settings": settings}
        keep_in_run(str(run_dir / name), [task], {**scores, **facts, **more})

    keep("model", "vt", {"weights": fingerprint_weights(run_dir / "model")})
    losses = [{"length": 512, "from": start, "to": 512, "loss": 2.0 + start} for start in (0, 256)]
    harness = [{"task": "arc", "metric": "acc", "value": 0.25}, {"task": "arc", "metric": "odd", "value": math.nan}]
    exported = {"model": {"name_or_path": f"runs/evaluations/step-3-{digest}"}, "weights": "elsewhere"}
    keep("checkpoints/step-3", "cwe: a", exported, losses=losses, lm_eval=harness)
    keep("checkpoints/step-2", "fwe", {"model": {"name_or_path": "runs/evaluations/step-3-0123456789ab"}})
    shown = run("push", str(run_dir), "--dry-run", "--repo", "team/x")
    data = huggingface_hub.ModelCard(shown.stdout[shown.stdout.index("---\n") :]).data
    assert data.model_name == "x"
    assert data.eval_results is not None
    assert {(each.dataset_name, each.metric_type): each.metric_value for each in data.eval_results} == {
        ("vt, 4,096 tokens", "score"): 0.75, ("cwe: a, 4,096 tokens", "score"): 0.75, ("arc", "acc"): 0.25,
        ("held-out documents, 512 tokens", "loss"): 2.0,
    }  # fmt: skip
    index = huggingface_hub.repocard_data.eval_results_to_model_index("x", data.eval_results)
    assert index == data.to_dict()["model-index"]
    os.utime(run_dir / "model" / "model.safetensors", (1, 1))  # written again
    (checkpoint / "manifest.json").write_text('{"later": 1}')
    assert "model-index" not in run("push", str(run_dir), "--dry-run").stdout


def test_a_dry_run_asks_nothing(hub: Hub, run_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("HF_TOKEN")
    shown = json.loads(succeed("push", str(run_dir), "--dry-run", "--repo", "team/x", "--format", "json").stdout)
    assert shown["repo"] == "team/x"
    assert not find_undocumented("ulysses push", shown)
    assert {file["path"] for file in shown["files"]} == {"README.md", "config.json", "model.safetensors"}
    assert shown["bytes"] == sum(file["bytes"] for file in shown["files"])
    assert (hub.requests, load_run(run_dir).told) == ([], [])


def test_a_public_repository_gets_nothing_that_should_be_private(
    hub: Hub, run_dir: Path, snapshot: SnapshotAssertion
) -> None:
    hub.repos["me/mine"] = {}
    assert refuse(str(run_dir), "--private") == snapshot
    assert hub.repos["me/mine"] == {}


@pytest.mark.parametrize(
    "path", sample(["/api/repos/create", "/preupload/", "objects/batch", "/storage/", "/commit/"], quick=["/commit/"])
)
def test_a_failure_that_passes_is_tried_again(hub: Hub, run_dir: Path, path: str) -> None:
    hub.faults.append([path, 2, 503])
    succeed("push", str(run_dir))
    assert set(hub.repos["me/mine"]) == {"README.md", "config.json", "model.safetensors"}


def test_a_second_call_sends_only_what_is_missing(hub: Hub, run_dir: Path, snapshot: SnapshotAssertion) -> None:
    hub.faults.append(["/commit/", 99, 503])
    assert re.sub(r"in [\d.]+ s|Server error '.*?' for url '.*?'", "#", refuse(str(run_dir))) == snapshot
    hub.faults.clear()
    hub.requests.clear()
    succeed("push", str(run_dir))
    assert not any("/storage/" in request for request in hub.requests)
    succeed("push", str(run_dir))  # nothing has changed


def push_until(number: int, hub: Hub, folder: Path) -> bool:
    """Publishes in a process that is killed at the `number`-th moment: a request has come, or has had its effect.
    Returns whether it was killed."""
    left, pid = number, 0

    def watch(moment: str) -> None:
        nonlocal left
        left -= 1
        if left < 0 and pid:
            os.kill(pid, signal.SIGKILL)
            time.sleep(0.01)  # the answer must not overtake the signal

    started, start = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.read(started, 1)
        try:
            HubModels(print).publish(folder, "me/mine", CARD, is_private=True, message="a model")
        finally:
            os._exit(0)
    hub.watch = watch
    os.write(start, b"x")
    was_killed = os.WIFSIGNALED(os.waitpid(pid, 0)[1])
    hub.watch = lambda moment: None
    os.close(started)
    os.close(start)
    return was_killed


@pytest.mark.check
def test_a_push_can_be_killed_at_any_moment(hub: Hub, run_dir: Path) -> None:
    """The repository holds nothing or everything, and the next call completes it."""
    names = {"README.md", "config.json", "model.safetensors"}
    for number in range(60):
        hub.repos.clear()
        hub.objects.clear()
        was_killed = push_until(number, hub, run_dir / "model")
        assert set(hub.repos.get("me/mine", ())) in (set(), names)
        HubModels(print).publish(run_dir / "model", "me/mine", CARD, is_private=True, message="a model")
        assert set(hub.repos["me/mine"]) == names
        assert hub.repos["me/mine"]["model.safetensors"] == (run_dir / "model" / "model.safetensors").read_bytes()
        if not was_killed:
            break
    assert 6 < number < 59


WRONG_TOKEN = "hf_aWrongTokenThatNobodyMaySee12345"


def test_a_token_that_does_not_serve_is_told_at_once_and_never_shown(
    hub: Hub, run_dir: Path, monkeypatch: pytest.MonkeyPatch, snapshot: SnapshotAssertion
) -> None:
    said = {}
    monkeypatch.setenv("HF_TOKEN", WRONG_TOKEN)
    said["wrong"], _, reason = refuse(str(run_dir)).partition(": Invalid")
    assert WRONG_TOKEN not in reason
    assert len(hub.requests) == 1
    monkeypatch.delenv("HF_TOKEN")
    monkeypatch.setattr(huggingface_hub.constants, "HF_TOKEN_PATH", "no such file")
    said["none"] = refuse(str(run_dir))
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    said["offline"] = refuse(str(run_dir))
    assert said == snapshot
    assert hub.repos == {}


@pytest.fixture
def finished(run_dir: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A recipe whose run is complete as soon as it starts."""
    recipe = yaml.safe_load((ROOT / "recipes/tiny-cpu.yaml").read_text())
    notify = f"{sys.executable} -c \"import sys; open('told.json', 'w').write(sys.stdin.read())\""
    recipe["run"] |= {"output_dir": str(run_dir), "push_to_hub": True, "notify_command": notify}
    (run_dir / "run.json").rename(run_dir / "facts.json")
    file = run_dir.parent / "my.yaml"
    file.write_text(yaml.safe_dump(recipe))

    def launch(*_: Any) -> tuple[Outcome, Path]:
        (run_dir / "facts.json").rename(run_dir / "run.json")
        return Outcome(DONE, {}), run_dir / "model"

    monkeypatch.setattr(training, "_prepare_rows", lambda valid: Path("rows"))
    monkeypatch.setattr(training, "_launch", launch)
    monkeypatch.chdir(run_dir.parent)
    return file


def test_a_complete_run_is_published_and_told(hub: Hub, finished: Path) -> None:
    shown = succeed("train", str(finished), "--overwrite")
    assert f"published {hub.address}/me/mine" in shown.stderr
    assert "model.safetensors" in hub.repos["me/mine"]
    told = json.loads(Path("told.json").read_text())
    assert (told["event"], told["run_name"], told["exit_code"]) == ("done", "mine", 0)


def test_a_run_that_cannot_be_published_keeps_its_model(hub: Hub, finished: Path, snapshot: SnapshotAssertion) -> None:
    hub.faults.append(["/commit/", 99, 500])
    shown = run("train", str(finished), "--overwrite")
    assert (shown.returncode, shown.stderr.strip().splitlines()[-1]) == (1, snapshot(name="stderr"))
    told = json.loads(Path("told.json").read_text())
    assert (told["event"], told["exit_code"], told["message"]) == ("failed", 1, snapshot(name="told"))


def test_a_wrong_token_is_told_before_training(
    hub: Hub, finished: Path, monkeypatch: pytest.MonkeyPatch, snapshot: SnapshotAssertion
) -> None:
    monkeypatch.setenv("HF_TOKEN", WRONG_TOKEN)
    shown = run("train", str(finished), "--overwrite")
    assert (shown.returncode, shown.stderr.partition(": Invalid")[0]) == (2, snapshot)
    assert not (finished.parent / "mine/run.json").exists()


SECRET_KEY = "-----BEGIN OPENSSH PRIVATE KEY-----"


@pytest.mark.parametrize("name", sample_every(2, ["merges.txt", "README.md", "config.json", "base_config/config.json"]))
def test_a_link_in_a_model_is_published_by_nobody(hub: Hub, run_dir: Path, tmp_path: Path, name: str) -> None:
    key = tmp_path / "id_ed25519"
    key.write_text(SECRET_KEY)
    file = run_dir / "model" / name
    file.parent.mkdir(exist_ok=True)
    file.unlink(missing_ok=True)
    file.symlink_to(key)
    for words in (["--dry-run"], ["--dry-run", "--format", "json"], []):
        shown = run("push", str(run_dir), *words)
        assert shown.returncode == 2, shown.stdout
        assert f" {name} (a link);" in shown.stdout + shown.stderr
        assert SECRET_KEY not in shown.stdout + shown.stderr
    assert (hub.repos, hub.requests) == ({}, [])


def test_only_whole_files_of_a_model_are_published(
    hub: Hub, run_dir: Path, tmp_path: Path, snapshot: SnapshotAssertion
) -> None:
    model = run_dir / "model"
    (model / "model.safetensors").write_bytes(WEIGHTS[:-1])
    assert refuse(str(run_dir)) == refuse(str(run_dir), "--dry-run") == snapshot(name="cut")
    others = [
        ".env", "notes.txt", ".git/config", "sub/model.safetensors", "model.safetensors.bak", "run.py",
        "optimizer.pt",
    ]  # fmt: skip
    for name in others:
        (model / name).parent.mkdir(exist_ok=True)
        (model / name).write_text("x")
    os.mkfifo(model / "vocab.json")
    (model / "more").symlink_to(tmp_path)
    assert refuse(str(run_dir)) == refuse(str(run_dir), "--dry-run") == snapshot(name="others")
    (run_dir / "model").rename(tmp_path / "elsewhere")
    (run_dir / "model").symlink_to(tmp_path / "elsewhere")
    assert refuse(str(run_dir), "--dry-run") == snapshot(name="a link")
    assert hub.repos == {}


def test_what_an_export_writes_is_published(run_dir: Path) -> None:
    import transformers

    model = run_dir / "model"
    names = [
        *("model-00001-of-00002.safetensors", "model.safetensors.index.json", "adapter_model.safetensors"),
        *("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "vocab.json", "merges.txt"),
        *("tokenizer.model", "chat_template.jinja", "additional_chat_templates/tool_use.jinja", MODEL_FACTS),
        *("generation_config.json", "preprocessor_config.json", "qwen.tiktoken", "LICENSE", "modeling_mine.py"),
    ]
    for name in names:
        (model / name).parent.mkdir(exist_ok=True)
        (model / name).write_bytes(WEIGHTS if name.endswith(".safetensors") else b"{}")
    (model / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"norm": names[0]}}))
    (model / "config.json").write_text(json.dumps({"auto_map": {"AutoModel": "modeling_mine.M"}}))
    shown = succeed("push", str(run_dir), "--dry-run", "--format", "json")
    paths = {file["path"] for file in json.loads(shown.stdout)["files"]}
    assert paths == {*names, "config.json", "model.safetensors", "README.md"}
    # those of language models that this tool has recipes for
    tokenizers = (
        "LlamaTokenizer Qwen2Tokenizer GemmaTokenizer GPT2Tokenizer GPTNeoXTokenizer CohereTokenizer T5Tokenizer"
    )
    for kind in tokenizers.split():
        for name in getattr(getattr(transformers, kind, None), "vocab_files_names", {}).values():
            assert OF_A_MODEL.fullmatch(name), name
