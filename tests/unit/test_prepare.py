"""Tests how a recipe's data is prepared: what is written, what is reused, what changes are noticed, kills, and two
processes at once."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from support.paths import ROOT
from support.prepared import PREPARING
from support.recipes import make_plan
from support.refusals import explain
from support.served import ServedPopen
from support.tokenizers_trained import train, wrap
from syrupy.assertion import SnapshotAssertion

from ulysses_cli.data.prepare import Prepared, prepare_data
from ulysses_cli.data.store import open_rows
from ulysses_cli.data.tokenizing import tokenizer
from ulysses_cli.data.tokenizing.tokenizer import load_tokenizer, make_bytes_tokenizer
from ulysses_cli.data.transaction import lock
from ulysses_cli.plan.recipe.loader import Loaded, parse_recipe
from ulysses_cli.plan.recipe.recipe import Model
from ulysses_cli.report.data_report import format_sample


def load(tmp_path: Path, *overrides: str) -> Loaded:
    return parse_recipe(PREPARING.replace("FOLDER", str(tmp_path)), "r.yaml", overrides)


def prepare(tmp_path: Path, *overrides: str, events: list[Any] | None = None) -> Prepared:
    seen: list[Any] = [] if events is None else events
    return prepare_data(load(tmp_path, *overrides).recipe, 8, seen.append)


def write_rows(tmp_path: Path, *rows: Any, name: str = "d.jsonl") -> Path:
    (tmp_path / name).write_text("".join(json.dumps(row) + "\n" for row in rows))
    return tmp_path / name


def write_texts(tmp_path: Path, count: int = 12, name: str = "d.jsonl") -> Path:
    return write_rows(tmp_path, *({"text": f"document {n} " * (n + 1)} for n in range(count)), name=name)


def read_documents(prepared: Prepared, split: Any = "train") -> list[str]:
    """Yields every document, joined again from the rows that hold its pieces."""
    rows, tokenizer = open_rows(prepared.path, split), make_bytes_tokenizer()
    parts: dict[int, list[tuple[int, list[int]]]] = {}
    for row in range(len(rows)):
        at = 0
        for number, start, stop in rows.pieces(row):
            parts.setdefault(number, []).append((start, rows.read(row, at, at + stop - start).input_ids.tolist()))
            at += stop - start
    return [tokenizer.decode([i for _, ids in sorted(parts[number]) for i in ids]) for number in sorted(parts)]


def test_what_is_prepared_again_after_a_setting_changes(tmp_path: Path) -> None:
    wrap(train("gpt2")).save_pretrained(tmp_path / "tokenizer")
    write_texts(tmp_path)

    def list_made(*overrides: str) -> tuple[str, int]:
        return prepare(tmp_path, *overrides).path.name, len(list((tmp_path / "store" / "tokens").glob("[!.]*")))

    rows, _ = first = list_made()
    for word in ("data.num_workers=1", "run.seed=7"):  # neither packing nor splitting is random
        assert list_made(word) == first
    words = ("data.max_length=128", "data.packing=off", "data.attend_across_documents=true", "data.eval_split=0.2")
    for word in (*words, "data.datasets.0.weight=2", "data.excess_length_strategy=truncate"):
        others, num_stores = list_made(word)
        assert (others != rows, num_stores) == (True, 1), word
    assert list_made(f"model.tokenizer={tmp_path / 'tokenizer'}")[1] == 2


def test_a_second_prepare_reuses_all_until_files_or_settings_change(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, loaded, events = tmp_path / "tokenizer", list[Any](), list[Any]()

    def load(*words: Any) -> Any:
        loaded.append(load_tokenizer(*words))
        return loaded[-1]

    monkeypatch.setattr(tokenizer, "load_tokenizer", load)
    wrap(train("gpt2")).save_pretrained(folder)
    write_texts(tmp_path)
    words = f"model.tokenizer={folder}"
    first = prepare(tmp_path, words)
    assert len(loaded) == 1
    stamps = {file: file.stat().st_mtime_ns for file in (tmp_path / "store").rglob("*.*") if file.suffix != ".lock"}
    assert prepare(tmp_path, words, events=events) == first  # with the same samples
    assert len(loaded) == 1
    assert all(file.stat().st_mtime_ns == stamp for file, stamp in stamps.items())
    assert not [event for event in events if event["event"] == "progress"]
    (tmp_path / "store" / "tokenizers.json").write_text('{"a": 1}')
    assert prepare(tmp_path, words) == first
    assert len(loaded) == 2
    assert prepare(tmp_path, words, "data.added_tokens=[<new>]").path != first.path
    assert len(loaded) == 3
    spec = json.loads((folder / "tokenizer.json").read_text())
    (folder / "tokenizer.json").write_text(json.dumps({**spec, "normalizer": {"type": "Lowercase"}}))
    assert prepare(tmp_path, words).path != first.path
    assert len(loaded) == 4
    assert prepare(tmp_path, words, "model.trust_remote_code=true")  # its code may decide
    assert len(loaded) == 5
    write_texts(tmp_path, 13)
    assert prepare(tmp_path, words).report["sources"][0]["num_documents"] == 13


def test_a_second_prepare_imports_no_library_of_models(tmp_path: Path) -> None:
    write_texts(tmp_path)
    prepare(tmp_path)
    plan = make_plan(load(tmp_path)).dump()
    code = (
        "import sys; from ulysses_cli.data.__main__ import main; assert main(['--format', 'json']) == 0\n"
        "heavy = {'torch', 'transformers', 'datasets'} & sys.modules.keys(); assert not heavy, heavy"
    )
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    words = [sys.executable, "-c", code]
    done = subprocess.run(words, cwd=tmp_path, input=plan, capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr


@pytest.mark.check
def test_workers_make_the_same_store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from ulysses_cli.readers import files

    monkeypatch.setattr(files, "BLOCK_BYTES", 300)
    write_texts(tmp_path, 40)
    alone = prepare(tmp_path, "data.num_workers=1")
    together = prepare(tmp_path, "data.num_workers=2", f"data.store_dir={tmp_path / 'other'}")
    assert alone.path.name == together.path.name
    for name in ("tokens.bin", "hashes.npy", "lines.npy", "offsets.npy"):
        (one,), (other,) = ((tmp_path / d / "tokens").glob(f"*/{name}") for d in ("store", "other"))
        assert one.read_bytes() == other.read_bytes()


def test_a_cut_chat_is_reported(tmp_path: Path, snapshot: SnapshotAssertion) -> None:
    turns = [{"role": role, "content": "x" * 20} for role in ("user", "assistant") * 2]
    write_rows(tmp_path, {"messages": turns}, {"messages": turns[:2]})
    split = prepare(tmp_path, "data.max_length=120", "data.excess_length_strategy=split")
    counts = split.report["splits"]["train"]["sources"][0]
    assert (counts["split_documents"], counts["torn_turns"]) == (1, 0)
    rows = open_rows(split.path, "train")
    cuts = [piece.start for row in range(len(rows)) for piece in rows.pieces(row) if piece.start]
    assert make_bytes_tokenizer().decode(rows.stores[0].read(0, cuts[0], cuts[0] + 6)[0]) == "<|begin|>user\n"
    masked = ("data.assistant_only_loss=true", "data.excess_length_strategy=split")
    torn = prepare(tmp_path, "data.max_length=24", *masked)
    counts = torn.report["splits"]["train"]["sources"][0]
    assert counts["cut_off_pieces"] == counts["untrainable_pieces"] > 0
    assert counts["kept_tokens"] + counts["untrainable_tokens"] == counts["tokens"]
    assert (counts["cut_off_pieces"], counts["torn_turns"], torn.report["notes"]) == snapshot


def test_a_number_of_samples_of_each_source(tmp_path: Path) -> None:
    files = [write_texts(tmp_path, 5), write_texts(tmp_path, 2, "e.jsonl")]
    sources = f"data.datasets=[{', '.join(f'{{path: {file}}}' for file in files)}]"
    recipe = load(tmp_path, sources).recipe
    for count, result in ((0, 0), (1, 2), (3, 5)):
        samples = prepare_data(recipe, 8, lambda _: None, count).report["samples"]
        assert len({sample["where"] for sample in samples}) == len(samples) == result


def test_a_sample_shows_both_ends_of_each_turn(tmp_path: Path, snapshot: SnapshotAssertion) -> None:
    """A long answer is cut in its middle, and what is left out is counted: no bracket closes where no target ends."""
    turns = [
        {"role": ("user", "assistant")[at % 2], "content": f"{at}first{'x' * size}last{at}"}
        for at, size in enumerate([500, 3, 900, 2, 700, 800])
    ]
    write_rows(tmp_path, {"messages": turns})
    (sample,) = prepare(tmp_path, "data.assistant_only_loss=true", "data.max_length=4096").report["samples"]
    assert format_sample(sample).replace("x" * 40, "X") == snapshot
    cut = sum(run["num_left_out"] for run in sample["runs"])
    shown = "".join(run["text"] + run["end"] for run in sample["runs"])
    assert len(re.sub(r"<.\w+.>", "#", shown)) + cut == sample["num_tokens"], "a token is a letter or a mark"


def test_a_sample_of_very_many_turns_leaves_out_those_in_the_middle(tmp_path: Path) -> None:
    turns = [{"role": ("user", "assistant")[at % 2], "content": f"turn {at}."} for at in range(300)]
    write_rows(tmp_path, {"messages": turns})
    report = prepare(tmp_path, "data.assistant_only_loss=true", "data.max_length=65536").report
    text = format_sample(report["samples"][0])
    assert all(f"turn {at}." in text for at in (0, 1, 30, 270, 298, 299))
    assert "turn 150." not in text
    assert text.count("[[") == text.count("]]") == 1 + 40
    assert len(re.findall(r"[\d,]+ tokens", text)) == 2, "all and those that are left out"


@pytest.mark.check
def test_chats_without_a_template_are_one_problem(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, snapshot: SnapshotAssertion
) -> None:
    """It stays one problem for any number of workers and rows, and when bad rows are skipped too."""
    from ulysses_cli.readers import files

    monkeypatch.setattr(files, "BLOCK_BYTES", 300)
    wrap(train("gpt2")).save_pretrained(tmp_path / "t")
    turns = [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}]
    row = {"messages": turns}, {"prompt": turns[:1], "completion": turns[1:]}
    words = f"model.tokenizer={tmp_path / 't'}"
    for each, more in zip(row, (("data.num_workers=2",), ("data.num_workers=1", "data.on_bad_row=skip")), strict=True):
        write_rows(tmp_path, *[each] * 40)
        assert explain(prepare, tmp_path, words, *more) == snapshot(name="no template")
    more = ("data.chat_template=phi", "data.num_workers=1", 'data.added_tokens=["<|system|>", "<|assistant|>"]')
    assert explain(prepare, tmp_path, words, *more) == snapshot(name="no tokens")


def test_equal_tokens_are_one_document_whatever_their_targets(tmp_path: Path) -> None:
    texts = [f"document {number}" for number in range(40)]
    write_rows(tmp_path, *({"text": text} for text in texts))
    ids = [[*text.encode(), 257] for text in texts]
    same = write_rows(tmp_path, *({"input_ids": result, "labels": result} for result in ids), name="t.jsonl")
    both = f"data.datasets=[{{path: {tmp_path / 'd.jsonl'}}}, {{path: {same}}}]"
    prepared = prepare(tmp_path, both, "data.eval_split=0.2")
    train_side, eval_side = set(read_documents(prepared)), set(read_documents(prepared, "eval"))
    assert eval_side
    assert not train_side & eval_side
    assert train_side | eval_side == {f"{text}<|end|>" for text in texts}
    prepared = prepare(tmp_path, f"data.eval_datasets=[{{path: {same}}}]")
    assert prepared.report["leaked_documents"] == 40


def test_data_sets_of_the_library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, snapshot: SnapshotAssertion) -> None:
    import datasets

    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", str(tmp_path / "cache"))
    datasets.disable_progress_bars()
    file = write_texts(tmp_path)
    expected = read_documents(prepare(tmp_path))
    by_name = f"data.datasets=[{{path: json, data_files: [{file}], streaming: STREAMING}}]"
    for streaming in ("false", "true"):
        prepared = prepare(tmp_path, by_name.replace("STREAMING", streaming))
        assert read_documents(prepared) == expected
        assert prepared.report["sources"][0]["name"] == "json [train]"
    datasets.Dataset.from_json(str(file), cache_dir=str(tmp_path / "cache")).save_to_disk(tmp_path / "saved")
    assert read_documents(prepare(tmp_path, f"data.datasets=[{{path: {tmp_path / 'saved'}}}]")) == expected
    said = explain(prepare, tmp_path, by_name.replace("streaming: STREAMING", "split: nonsense"))
    assert said.partition(": Unknown")[0] == snapshot


def start(tmp_path: Path, *overrides: str) -> "subprocess.Popen[str]":
    plan = tmp_path / "plan.json"
    plan.write_text(make_plan(load(tmp_path, *overrides)).dump())
    command = [sys.executable, "-m", "ulysses_cli.data", "--format", "json"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1"}
    with plan.open() as file:
        return ServedPopen(
            command, stdin=file, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment
        )


@pytest.mark.check
def test_two_at_once_and_one_that_is_killed(tmp_path: Path) -> None:
    write_texts(tmp_path, 700)
    killed = start(tmp_path)
    deadline = time.monotonic() + 60
    while not list((tmp_path / "store").glob("tokens/.*.partial")) and time.monotonic() < deadline:
        time.sleep(0.005)
    killed.send_signal(signal.SIGKILL)
    killed.communicate()
    assert not list((tmp_path / "store").glob("tokens/[!.]*"))
    both = [start(tmp_path) for _ in range(2)]
    messages = [process.communicate(timeout=120) for process in both]
    assert [process.returncode for process in both] == [0, 0], messages
    reports = [json.loads(out) for out, _ in messages]
    assert reports[0] == reports[1]
    assert reports[0]["sources"][0]["num_documents"] == 700
    assert len(list((tmp_path / "store").glob("tokens/[!.]*"))) == 1
    assert not list((tmp_path / "store").glob("*/.*.partial"))


def test_a_damaged_store_is_made_again(tmp_path: Path) -> None:
    write_texts(tmp_path)
    expected = read_documents(prepare(tmp_path))
    (tokens,) = (tmp_path / "store" / "tokens").glob("*/tokens.bin")
    tokens.write_bytes(tokens.read_bytes()[:-1])
    assert read_documents(prepare(tmp_path)) == expected


def test_leftovers_of_killed_processes_are_deleted_unless_locked(tmp_path: Path) -> None:
    tokens = tmp_path / "store" / "tokens"
    for name in (".dead.1.partial", ".held.2.partial"):
        (tokens / name).mkdir(parents=True)
    for name in (".dead.lock", ".held.lock", ".alone.lock"):
        (tokens / name).touch()
    write_texts(tmp_path)
    with lock(tokens / ".held.lock", lambda: None):
        prepare(tmp_path)
        assert {file.name for file in tokens.glob(".*")} == {".held.lock", ".held.2.partial"}


@pytest.mark.check
def test_the_messages_of_the_process(tmp_path: Path, snapshot: SnapshotAssertion) -> None:
    write_rows(tmp_path, {"text": "a"}, {"text": None})
    process = start(tmp_path)
    out, err = process.communicate(timeout=120)
    assert (process.returncode, err) == (1, snapshot)
    assert json.loads(out)["problems"][0]["line"] == 2
    process = start(tmp_path, "model.tokenizer=owner/missing")
    _, err = process.communicate(timeout=120)
    assert (process.returncode, err.partition(", and https://")[0]) == (2, snapshot)


def test_the_embedded_tokenizer(tmp_path: Path) -> None:
    load_tokenizer(Model(tokenizer="bytes")).save_pretrained(tmp_path)
    text = "ä\n<x> 你\0\x7f"
    chat = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    for made in (load_tokenizer(Model(tokenizer="bytes")), load_tokenizer(Model(tokenizer=str(tmp_path)))):
        assert made(text)["input_ids"] == list(text.encode())
        assert made.decode(list(text.encode())) == text
        assert (len(made), made.bos_token_id, made.eos_token_id, made.pad_token_id) == (259, 256, 257, 258)
        assert made("a<|end|>")["input_ids"] == [97, 257]
        shown = made.apply_chat_template(chat, tokenize=False)
        assert shown == "<|begin|>user\na<|end|>\n<|begin|>assistant\nb<|end|>\n"
