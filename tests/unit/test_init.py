"""Tests `ulysses init`: what it asks, what it finds out, and that what it writes validates."""

import gzip
import io
import json
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from support.commands import run
from support.refusals import explain
from syrupy.assertion import SnapshotAssertion

from ulysses_cli.commands import init as command
from ulysses_cli.data.prepare import prepare_data
from ulysses_cli.plan.planner.first_recipe import suggest_length
from ulysses_cli.plan.recipe.loader import load_recipe, parse_recipe
from ulysses_cli.readers.problems import DataError
from ulysses_cli.run.data_survey import survey_data
from ulysses_cli.run.host import FoundGpu, read_gpus
from ulysses_cli.validate import validate_recipe


@pytest.fixture
def texts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("ulysses_cli.run.host.list_gpus", lambda: [])
    folder = tmp_path / "texts"
    folder.mkdir()
    for number in range(30):
        (folder / f"{number}.txt").write_text("a fox ran over the hill. " * (number + 1))
    return folder


def invoke(*words: str, answers: str = "") -> subprocess.CompletedProcess[str]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("sys.stdin", io.StringIO(answers))
        return run("init", *words)


def write_tiny(data: str) -> subprocess.CompletedProcess[str]:
    return invoke("--data", data, "--model", "tiny", "--gpus", "cpu", "--yes")


def test_six_empty_answers_make_a_recipe_that_validates(texts: Path, snapshot: SnapshotAssertion) -> None:
    shown = invoke(answers="texts\n\n\n\n\n\n")
    assert (shown.returncode, shown.stderr) == (0, snapshot)
    assert shown.stdout.splitlines()[-1] == "my.yaml"
    assert Path("my.yaml").read_text() == snapshot(name="my.yaml")
    assert validate_recipe("my.yaml").problems == ()
    assert Path("ulysses.schema.json").is_file()


@pytest.mark.check
def test_the_planner_takes_adapters_and_then_a_base_in_4_bits_where_all_weights_do_not_fit(texts: Path) -> None:
    words = ["--data", "texts", "--yes"]
    middle, large = ([*words, "--model", f"Qwen/Qwen3-{size}"] for size in ("8B", "32B"))
    middle += ["--max-length", "16Ki", "--gpus", "l40s:1"]
    assert invoke("auto.yaml", *middle).returncode == 0
    assert yaml.safe_load(Path("auto.yaml").read_text())["lora"]["r"] == 16
    assert invoke("full.yaml", *middle, "--method", "full").returncode == 2
    assert not Path("full.yaml").exists()
    large += ["--max-length", "8Ki"]
    assert invoke("auto4.yaml", *large, "--gpus", "l40s:1").returncode == 0
    auto = yaml.safe_load(Path("auto4.yaml").read_text())
    assert (auto["lora"]["quantize_base"], auto["parallel"]["zero_stage"]) == ("nf4", 2)
    assert invoke("asked.yaml", *large, "--gpus", "h200:1", "--method", "qlora").returncode == 0
    assert yaml.safe_load(Path("asked.yaml").read_text())["lora"]["quantize_base"] == "nf4"
    assert invoke("cpu.yaml", *words, "--model", "tiny", "--gpus", "cpu", "--method", "qlora").returncode == 0
    assert validate_recipe("asked.yaml").problems == validate_recipe("cpu.yaml").problems == ()


def test_every_answer_is_an_option_and_the_planner_chooses(texts: Path) -> None:
    words = ["--data", "texts", "--model", "Qwen/Qwen3-8B", "--gpus", "h100-80gb:8", "--max-length", "128Ki"]
    shown = invoke("far.yaml", *words, "--method", "full", "--budget", "USD 500")
    assert shown.returncode == 0, shown.stderr
    text = Path("far.yaml").read_text()
    assert "predicted" in text
    recipe = yaml.safe_load(text)
    assert recipe["model"]["rope_scaling"] == {"type": "yarn"}
    assert recipe["run"]["max_cost"] == 500
    assert recipe["memory"]["tiled_loss"] is True
    valid = validate_recipe("far.yaml")
    assert valid.problems == ()
    assert f"# hardware   {valid.resolved.layout.world_size} x NVIDIA H100 SXM" in text


def test_a_wrong_answer_is_asked_for_again(texts: Path, snapshot: SnapshotAssertion) -> None:
    shown = invoke(answers="textes\ntexts\ntiny\ncpu\n512\nsome\nlora\nfree\nnone\n")
    assert (shown.returncode, shown.stderr) == (0, snapshot)
    recipe = yaml.safe_load(Path("my.yaml").read_text())
    assert (recipe["data"]["max_length"], recipe["lora"]["r"]) == (512, 16)


def test_no_answer_is_an_error(texts: Path, snapshot: SnapshotAssertion) -> None:
    shown = invoke(answers="texts\n")
    assert (shown.returncode, shown.stderr) == (2, snapshot)


def test_what_a_look_at_the_data_finds(texts: Path, tmp_path: Path) -> None:
    lines = [json.dumps({"text": "word " * count}) for count in (10, 1000, 20)]
    rows = tmp_path / "rows"
    rows.mkdir()
    (rows / "a.jsonl").write_text("\n".join(lines))
    found = survey_data(str(rows))
    assert (found.num_bytes, found.longest_bytes) == (len("\n".join(lines)), len(lines[1]) + 1)
    (rows / "b.jsonl.gz").write_bytes(gzip.compress(b"{}"))
    assert survey_data(str(rows)).longest_bytes is None
    code = tmp_path / "code"
    code.mkdir()
    for name in ("a.py", "b.c", "README.md"):
        (code / name).write_text("x = 1\n")
    found = survey_data(str(code))
    assert (found.is_tree, found.num_bytes, found.num_documents) == (True, 18, 1)
    assert survey_data("owner/texts").num_bytes is None


def write_chats(file: Path) -> None:
    """Chats of two questions."""
    write_rows(file, [{"messages": talk(f"{n}: 2+2?", "Four.", "Sure?", "Yes, it is.")} for n in range(30)])


def write_rows(file: Path, rows: list[dict[str, Any]]) -> None:
    """In the format that the file's name says."""
    if file.suffix == ".parquet":
        from pyarrow import Table, parquet

        parquet.write_table(Table.from_pylist(rows), file)
    else:
        file.write_text("".join(json.dumps(row) + "\n" for row in rows))


@pytest.mark.parametrize("name", ["chats.jsonl", "chats.parquet", "folder/chats.jsonl"])
def test_of_chats_only_the_answers_are_trained_and_the_recipe_says_so(
    texts: Path, name: str, snapshot: SnapshotAssertion
) -> None:
    Path("folder").mkdir()
    write_chats(Path(name))
    source = "folder" if "/" in name else name
    shown = write_tiny(source)
    assert shown.returncode == 0, shown.stderr
    assert ": chats" in shown.stderr
    text = Path("my.yaml").read_text()
    assert yaml.safe_load(text)["data"]["assistant_only_loss"] is True
    assert yaml.safe_load(text)["data"]["datasets"] == [{"path": source, "type": "chat"}]
    notes = [line for line in text.splitlines() if "assistant_only_loss" in line or "max_length:" in line]
    assert notes == snapshot(name="notes")


JUDGED: dict[str, tuple[Callable[[str], dict[str, Any]], str]] = {
    "text": (lambda asked: {"prompt": asked, "chosen": "yes", "rejected": "no"}, "preference"),
    "UltraFeedback": (
        lambda asked: {"messages": talk(asked, "yes"), "chosen": talk(asked, "yes"), "rejected": talk(asked, "no")},
        "preference",
    ),
    "messages": (lambda asked: {"messages": talk(asked, "yes"), "rejected_response": "no"}, "preference"),
    "labels": (lambda asked: {"prompt": asked, "completion": "yes", "label": True}, "unpaired"),
}


def talk(*texts: str) -> list[dict[str, str]]:
    return [{"role": ("user", "assistant")[at % 2], "content": text} for at, text in enumerate(texts)]


@pytest.mark.parametrize("case", JUDGED)
def test_judged_answers_become_a_recipe_of_preferences(texts: Path, case: str, snapshot: SnapshotAssertion) -> None:
    make, kind = JUDGED[case]
    write_rows(Path("pairs.jsonl"), [make(f"{number}? ") for number in range(30)])
    shown = write_tiny("pairs.jsonl")
    assert shown.returncode == 0, shown.stderr
    assert (": answers with labels" if kind == "unpaired" else ": pairs of answers") in shown.stderr
    text = Path("my.yaml").read_text()
    written = yaml.safe_load(text)
    assert written["data"]["datasets"] == [{"path": "pairs.jsonl", "type": kind}]
    assert written["preference"] == {"loss": "kto" if kind == "unpaired" else "sigmoid", "beta": 0.1}
    assert float(written["train"]["learning_rate"]) == 3e-4
    assert [line for line in text.splitlines() if "max_length:" in line] == snapshot(name="length")
    if case in ("text", "labels"):  # the tiny model has no chat template
        report = prepare_data(load_recipe("my.yaml", ["data.store_dir=store"]).recipe, 1, lambda _: None).report
        assert report["splits"]["train"]["num_rows"]


def test_rows_that_prepare_refuses_are_said_and_not_called_valid(texts: Path, snapshot: SnapshotAssertion) -> None:
    write_rows(Path("rows.jsonl"), [{"messages": talk("q")}, {"messages": []}])
    shown = write_tiny("rows.jsonl")
    assert (shown.returncode, shown.stderr) == (1, snapshot)
    assert Path("my.yaml").exists()  # its data can be named or described differently
    recipe = load_recipe("my.yaml", ["data.store_dir=store"]).recipe
    refused = explain(prepare_data, recipe, 1, lambda _: None, error=DataError)
    assert refused.partition(" column")[0] in shown.stderr


def test_chats_without_a_choice_of_turns_get_a_note_with_both(texts: Path, snapshot: SnapshotAssertion) -> None:
    write_chats(Path("chats.jsonl"))
    write_tiny("chats.jsonl")
    text = "\n".join(line for line in Path("my.yaml").read_text().splitlines() if "assistant_only" not in line)

    def list_notes(*overrides: str) -> list[str]:
        recipe = parse_recipe(text, "r.yaml", ["data.store_dir=store", *overrides]).recipe
        notes = prepare_data(recipe, 1, lambda _: None).report["notes"]
        return [note for note in notes if "assistant_only_loss" in note]

    assert list_notes() == snapshot
    assert list_notes("data.assistant_only_loss=false") == list_notes("data.assistant_only_loss=true") == []


def test_gpus_are_read_from_the_driver(monkeypatch: pytest.MonkeyPatch) -> None:
    table = "NVIDIA H100 80GB HBM3, 81559\nNVIDIA H100 80GB HBM3, 81559\n"
    assert read_gpus(table) == [FoundGpu("NVIDIA H100 80GB HBM3", 81559 << 20)] * 2
    monkeypatch.setattr("ulysses_cli.run.host.list_gpus", lambda: read_gpus(table))
    assert command._find_gpus() == "h100-80gb:2"
    assert read_gpus("No devices were found\n") == []


@pytest.mark.parametrize(
    ("longest", "positions", "is_cpu", "length"),
    [(100, 4096, False, 512), (5000, 40960, False, 8192), (10**7, 40960, False, 32768), (None, 10**6, False, 131072),
     (10**7, 40960, True, 1024)],
)  # fmt: skip
def test_a_length_holds_the_longest_document_if_the_model_can(
    longest: int | None, positions: int, is_cpu: bool, length: int
) -> None:
    assert suggest_length(longest, positions, is_cpu=is_cpu) == length
