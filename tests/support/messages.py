"""Snapshots: files of `tests/unit` that hold a question in each line `$ ...`, and below it, indented, what is said.
`make snapshots` writes the answers anew.

- messages.txt: changes of a small valid recipe, and its problems. The words of a question are settings,
  `--num-processes`, `--model` (keys of config.json, or a name below), `--append` (text behind the recipe) and `--text`
  (another recipe), as in a shell, with escapes as in Python.
- rows.txt: `KIND [NAME=VALUE ...] ROW`, a row of a data set, as JSON, with fields of Reading; what is read of it, or
  why it is refused. The kind `any` is found by the row's columns. `FILE CONTENT`: what is wrong with a file.
- prepared.txt: `ROWS [SETTINGS]`: a list of rows as JSON, where a text stands for a line of the file, or a file's name;
  the documents that are made of them by a small recipe, with targets in « », or what is wrong. `... | grep PATTERN`:
  lines of the report.
- commands.txt: `[NAME=VALUE ...] ulysses WORDS`: what a command says on stderr, its exit code unless it is 2, and
  whether it writes to stdout. `... | grep [-o] PATTERN`: the lines of its stdout with that pattern, or what matches,
  and its exit code unless it is 0.

`# heading` starts a block, `> note` gives a reason. Lines `@ FILE CONTENT` before the first block are files that are
there; a name that ends with `/` is a folder, and `< PATH` stands for the content of a file of the repository. No answer
below a question: nothing is wrong.
"""

import argparse
import json
import re
import shlex
import tempfile
from collections.abc import Callable, Iterable
from contextlib import chdir
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any

import yaml

from support.commands import run
from support.paths import ROOT
from support.prepared import prepare_words, show_documents
from support.recipes import VALID, check
from ulysses_cli.data.sources import open_source
from ulysses_cli.data.transaction import FileHashes
from ulysses_cli.plan.problem import Problem, RecipeError
from ulysses_cli.plan.recipe.sections import Dataset
from ulysses_cli.readers.blocks import walk_rows
from ulysses_cli.readers.columns import Reading, detect_kind
from ulysses_cli.readers.pairs import read_row
from ulysses_cli.readers.problems import BadRow, DataError
from ulysses_cli.report.data_report import format_report

FOLDER = "{folder}"  # stands for the folder of the files
MODELS: dict[str, dict[str, Any]] = {
    "hybrid": {
        **{"model_type": "qwen3_5_text", "num_hidden_layers": 4, "linear_num_key_heads": 16},
        **{"linear_num_value_heads": 48, "num_attention_heads": 24, "num_key_value_heads": 4, "head_dim": 256},
    },
    "shared-block": {"model_type": "zamba2", "layers_block_type": ["mamba", "hybrid"] * 8, "num_hidden_layers": 16},
}


class Snapshot:
    """One file. `blocks`: each block's text by its heading."""

    def __init__(self, name: str, ask: Callable[[str, Path], Iterable[str]]) -> None:
        self.file, self.ask = ROOT / "tests" / "unit" / name, ask
        text = self.file.read_text(encoding="utf-8")
        self.header, *parts = re.split(r"^(?=# )", text, flags=re.MULTILINE)
        self.blocks = {part[2:].partition("\n")[0]: part for part in parts}
        assert len(self.blocks) == len(parts), "two blocks have one heading"

    def __str__(self) -> str:
        return self.file.stem

    def list_questions(self) -> list[str]:
        """Returns each question with its answer."""
        parts = re.split(r"^(?=[$#>] ?)", "".join(self.blocks.values()), flags=re.MULTILINE)
        return [part for part in parts if part.startswith("$ ")]

    def make_folder(self, folder: Path) -> Path:
        for name, content in re.findall(r"^@ (\S+) ?(.*)", self.header, flags=re.MULTILINE):
            file = folder / unescape(name).decode()
            (file if name.endswith("/") else file.parent).mkdir(parents=True, exist_ok=True)
            if not name.endswith("/"):
                source = content.removeprefix("< ")
                file.write_bytes((ROOT / source).read_bytes() if source != content else unescape(content))
        return folder

    def answer(self, block: str, folder: Path) -> str:
        """Returns the block with the answers that are given now."""
        lines: list[str] = []
        for line in block.rstrip("\n").splitlines():
            if not line.startswith("  "):
                lines.append(line)
            if line.startswith("$ "):
                lines += [f"  {text}" for text in self.ask(line[2:], folder)]
        return "\n".join(lines) + "\n"

    def write_anew(self) -> None:
        with tempfile.TemporaryDirectory() as made:
            folder = self.make_folder(Path(made))
            answers = [self.answer(block, folder) for block in self.blocks.values()]
        self.file.write_text(self.header + "\n".join(answers), encoding="utf-8")


def unescape(text: str) -> bytes:
    return text.encode("utf-8").decode("unicode_escape").encode("latin-1")


def _ask_rules(words: str, folder: Path) -> Iterable[str]:
    parser = argparse.ArgumentParser()
    parser.add_argument("--num-processes", type=int)
    parser.add_argument("--model", default="{}")
    parser.add_argument("--append", type=_decode, default="")
    parser.add_argument("--text", type=_decode, default=VALID)
    parser.add_argument("settings", nargs="*")
    asked = parser.parse_args(shlex.split(words.replace(FOLDER, str(folder))))
    config = MODELS.get(asked.model) or yaml.safe_load(asked.model)
    text = asked.text + asked.append
    try:
        problems: Iterable[Problem] = check(*asked.settings, num_processes=asked.num_processes, text=text, **config)
    except RecipeError as error:
        problems = error.problems
    for problem in problems:
        yield from _cut(str(problem), folder)


def _decode(text: str) -> str:
    return text.encode("latin-1", "backslashreplace").decode("unicode_escape")


def _ask_reader(words: str, folder: Path) -> Iterable[str]:
    kind, _, rest = words.partition(" ")
    if "." in kind:
        yield from _ask_file(folder / kind, unescape(rest))
        return
    at = re.search(r"(?:^| )(?=[\[{])", rest)
    assert at, words
    values = dict(word.partition("=")[::2] for word in shlex.split(rest[: at.start()]))
    reading = Reading(**{name: json.loads(value) if value[0] == "{" else value for name, value in values.items()})
    row = json.loads(rest[at.end() :])
    try:
        sample = read_row(detect_kind(row, reading.names) if kind == "any" else kind, row, reading=reading)  # type: ignore
    except BadRow as error:
        yield str(error)
    else:
        yield from [type(sample).__name__] * (kind == "any")
        yield from _show(sample)


def _show(sample: Any) -> Iterable[str]:
    """Each field that says something in a line of its own, a list of messages in as many."""
    for field in fields(sample):
        value = getattr(sample, field.name)
        if is_dataclass(value):
            yield from (f"{field.name}.{line}" for line in _show(value))
        elif field.name == "messages":
            yield from (json.dumps(message) for message in value)
        elif value not in (None, (), {}, 0):
            yield f"{field.name}: {json.dumps(value, default=vars)}"


def _ask_file(file: Path, content: bytes) -> Iterable[str]:
    file.write_bytes(content)
    try:
        source = open_source(Dataset(path=str(file)), "data.datasets.0", 0, FileHashes(file.parent / "hashes.json"))
        rows = [pair for block in source.walk_blocks() for pair in walk_rows(block)]
        yield from (f"{number}: {row}" for number, row in rows if isinstance(row, BadRow))
        source.find_kind()
    except DataError as error:
        yield from _cut(str(error), file.parent)


def _ask_prepare(text: str, folder: Path) -> Iterable[str]:
    given, *pattern = text.split(" | grep ")
    try:
        with chdir(folder):
            recipe, prepared = prepare_words(given)
            documents = show_documents(recipe, prepared)
    except (DataError, RecipeError) as error:
        yield from _cut(str(error), folder)
        return
    lines = format_report(prepared.report).splitlines() if pattern else documents
    yield from (line for line in lines if not pattern or re.search(pattern[0], line))


def _ask_command(text: str, folder: Path) -> Iterable[str]:
    given, *pattern = text.split(" | grep ")
    words = shlex.split(given)
    at = words.index("ulysses")
    done = run(*words[at + 1 :], cwd=folder, **dict(word.split("=", 1) for word in words[:at]))
    unasked = r"^Usage: .*?(?=^Error: )|^[\d,]+ problems?$"
    yield from _cut(re.sub(unasked, "", done.stderr, flags=re.DOTALL | re.MULTILINE), folder)
    for line in _cut(done.stdout, folder) if pattern else ():
        matches = [match[0] for match in re.finditer(pattern[0].removeprefix("-o "), line)]
        yield from matches if pattern[0].startswith("-o ") else [line] * bool(matches)
    if done.returncode != 2 * (not pattern) or (done.stdout and not pattern):
        yield f"exit code {done.returncode}" + ", with output" * bool(done.stdout)


def _cut(text: str, folder: Path) -> Iterable[str]:
    return (line.rstrip() for line in text.replace(str(folder), FOLDER).splitlines() if line.strip())


RULES = Snapshot("messages.txt", _ask_rules)
ROWS = Snapshot("rows.txt", _ask_reader)
PREPARED = Snapshot("prepared.txt", _ask_prepare)
COMMANDS = Snapshot("commands.txt", _ask_command)

if __name__ == "__main__":
    for snapshot in (RULES, ROWS, PREPARED, COMMANDS):
        snapshot.write_anew()
