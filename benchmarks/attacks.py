"""Runs named attacks on the product and counts those tried, held and open.

The attacks come from what is not trusted: data, models, checkpoints, run folders. An attack is held when the tool
refuses it with a message, or when it has no effect, within bounds of time and memory. The program exits with 1 when one
is open. A word on the command line selects attacks by name and renews only their lines; --results names the file.
"""

from __future__ import annotations

import argparse
import errno
import fcntl
import gzip
import json
import os
import re
import resource
import select
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

os.environ |= {"DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
from paths import RESULTS, ROOT
from support.checkpoints import make_checkpoint, make_state, write_contents
from support.networks import open_networks
from support.run_directory import write_run
from support.small_run import make_settings

from ulysses_cli.run.checkpoints import find_newest_valid
from ulysses_cli.run.host import get_builds_folder

SECONDS, MAX_RSS_BYTES = 300, 2 << 30
SECRET = "correct-horse-battery-staple"
Attack = Callable[[Path], str]  # takes a folder of its own; returns what got through, or ''
ATTACKS: dict[str, dict[str, Attack]] = {}


def attack(group: str, name: str) -> Callable[[Attack], Attack]:
    def add(function: Attack) -> Attack:
        ATTACKS.setdefault(group, {})[name] = function
        return function

    return add


@dataclass(frozen=True)
class Ended:
    code: int
    out: str
    err: str
    rss_bytes: int

    def judge(self, *patterns: str, codes: tuple[int, ...] = (1, 2)) -> str:
        """Returns '' where the process ended with a message that holds all `patterns`, without a trace and
        within bounds."""
        output = self.out + self.err
        if self.code not in codes:
            return f"exit code {self.code}: {output[-300:]}"
        if "Traceback" in output:
            return f"a trace: {output[-300:]}"
        if self.rss_bytes > MAX_RSS_BYTES:
            return f"{self.rss_bytes / 2**30:.1f} GiB of memory"
        lost = [words for words in patterns if not re.search(words, output)]
        return f"nothing of `{lost[0]}` in: {output[-300:]}" if lost else ""


def ulysses(
    folder: Path,
    *words: str,
    limit: Callable[[], None] | None = None,
    start: Sequence[str] = (),
    here: Path | None = None,
    **environ: str,
) -> Ended:
    """Runs the command as a person does and kills it after SECONDS. `start` are the words before it; without `words`,
    `start` is the whole command line."""
    out, err = folder / "out", folder / "err"
    with open(out, "wb") as stdout, open(err, "wb") as stderr:
        process = subprocess.Popen(
            [*start, *([sys.executable, "-m", "ulysses_cli", *words] if words else [])],
            cwd=here or folder, stdout=stdout, stderr=stderr, preexec_fn=limit,
            stdin=subprocess.DEVNULL, env={**os.environ, "PYTHONPATH": str(ROOT), **environ},
        )  # fmt: skip
        signal.signal(signal.SIGALRM, lambda *_: process.kill())
        signal.alarm(SECONDS)
        _, status, usage = os.wait4(process.pid, 0)
        signal.alarm(0)
        process.returncode = os.waitstatus_to_exitcode(status)
    texts = [file.read_text(errors="replace") for file in (out, err)]
    return Ended(process.returncode, texts[0], texts[1], usage.ru_maxrss << 10)


def write_recipe(folder: Path, **sections: Any) -> str:
    settings = make_settings(**sections)
    settings["data"].setdefault("store_dir", str(folder / "store"))
    settings["run"]["output_dir"] = str(folder / "run")
    (folder / "r.yaml").write_text(json.dumps(settings))
    return "r.yaml"


def prepare(folder: Path, **data: Any) -> Ended:
    return ulysses(folder, "prepare", write_recipe(folder, data=data))


def write_chat(folder: Path) -> str:
    turns = [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}]
    (folder / "c.jsonl").write_text(json.dumps({"messages": turns}) + "\n")
    return str(folder / "c.jsonl")


# Checkpoints


def spoil_manifest(old: str, new: str) -> Attack:
    def spoil(folder: Path) -> str:
        good, bad = make_checkpoint(folder, 3), make_checkpoint(folder, 6)
        text = (bad / "manifest.json").read_text()
        (bad / "manifest.json").write_text(text.replace(old, new, 1) if old else new)
        match = find_newest_valid(folder, lambda _: None)
        return "" if match == good else f"{match} is taken"

    return spoil


for name, old, new in (
    ("infinite bytes", '"bytes": 700', '"bytes": 2e80992'),
    ("negative bytes", '"bytes": 700', '"bytes": -700'),
    ("deep nesting", "", "[" * 500_000),
    ("a NUL in a name", "rank-00000", "rank\\u0000"),
    ("a name outside", "rank-00000.safetensors", "../../run.json"),
    ("no JSON", "", "\x00\xff"),
):
    attack("checkpoints", f"a manifest with {name}")(spoil_manifest(old, new))


def forge_state(**changes: Any) -> Attack:
    def forge(folder: Path) -> str:
        good, bad = make_checkpoint(folder, 3), make_checkpoint(folder, 6)
        contents = {file.name: file.read_bytes() for file in bad.iterdir() if file.name != "manifest.json"}
        write_contents(bad, contents | {"state.json": json.dumps(make_state(6) | changes).encode()})
        match = find_newest_valid(folder, lambda _: None)
        return "" if match == good else f"{match} is taken"

    return forge


for key, value in (("world_size", -1), ("world_size", 1e400), ("step", "6"), ("hours", 1e400), ("recipe", {})):
    attack("checkpoints", f"a forged state, {key}: {value}")(forge_state(**{key: value}))


@attack("checkpoints", "a manifest that is a link or a FIFO")
def link_manifest(folder: Path) -> str:
    good, linked, piped = (make_checkpoint(folder, step) for step in (3, 6, 9))
    (linked / "manifest.json").rename(folder / "elsewhere")
    (linked / "manifest.json").symlink_to(folder / "elsewhere")
    (piped / "manifest.json").unlink()
    os.mkfifo(piped / "manifest.json")
    match = find_newest_valid(folder, lambda _: None)
    return "" if match == good else f"{match} is taken"


@attack("checkpoints", "a recipe of a checkpoint that runs code when it is exported")
def export_code(folder: Path) -> str:
    model = write_code(folder)
    recipe = {**make_state(1)["recipe"], "model": {"name_or_path": str(model), "trust_remote_code": True}}
    path = make_checkpoint(folder / "run", 1, recipe=recipe)
    ended = ulysses(folder, "export", str(path), "--to", "model-out")
    return "the code ran" if (folder / "ran").exists() else ended.judge()


# Models


def write_code(folder: Path) -> Path:
    model = folder / "model"
    model.mkdir()
    (model / "config.json").write_text(json.dumps({"model_type": "x", "auto_map": {"AutoConfig": "code.C"}}))
    (model / "tokenizer_config.json").write_text(json.dumps({"auto_map": {"AutoTokenizer": ["code.C", None]}}))
    (model / "code.py").write_text(f"open({str(folder / 'ran')!r}, 'w')\nclass C: pass")
    return model


@attack("models", "code that comes with a model")
def run_code(folder: Path) -> str:
    model, chat = write_code(folder), write_chat(folder)
    for words in ({"model": {"config": None, "name_or_path": str(model)}}, {"model": {"tokenizer": str(model)}}):
        ended = ulysses(folder, "prepare", write_recipe(folder, data={"datasets": [{"path": chat}]}, **words))
        if (folder / "ran").exists() or ended.judge():
            return ended.judge() or "the code ran"
    return ""


@attack("models", "weights that are a pickle")
def load_pickle(folder: Path) -> str:
    return run_test("tests/one_process/test_finiteness.py::test_a_pickle_that_would_run_code_is_refused")


@attack("models", "pickles in a model's, an adapter's and a checkpoint's folder, by every command that loads them")
def load_pickles(folder: Path) -> str:
    """Each file's content makes `ran`. What a command reads of them is an error; what it does not need, no part."""
    evil = b"cposix\nsystem\n(Vtouch " + os.fsencode(folder / "ran") + b"\ntR."
    result = ulysses(folder, "train", write_recipe(folder, **SHORT)).judge(codes=(0,))
    model, adapter = folder / "model", folder / "adapter"
    shutil.copytree(folder / "run" / "model", model)
    (model / "model.safetensors").unlink(missing_ok=True)
    shutil.copytree(model, folder / "both")
    shutil.copyfile(folder / "run" / "model" / "model.safetensors", folder / "both" / "model.safetensors")
    adapter.mkdir()
    config = {
        "peft_type": "LORA",
        "r": 4,
        "target_modules": ["q_proj"],
        "base_model_name_or_path": str(folder / "both"),
    }
    (adapter / "adapter_config.json").write_text(json.dumps({**config, "task_type": "CAUSAL_LM"}))
    names = ("pytorch_model.bin", "optimizer.pt", "scheduler.pt", "rng_state.pth", "training_args.bin", "vocab.pkl")
    for place in (model, folder / "both", adapter):
        for name in (*names, "adapter_model.bin"):
            (place / name).write_bytes(evil)
    checkpoint = folder / "run" / "checkpoints" / "step-4"
    forged = {file.name: file.read_bytes() for file in checkpoint.iterdir() if file.name != "manifest.json"}
    forged |= {name: evil for name in forged if name.endswith(".safetensors")} | {"optimizer.pt": evil}
    write_contents(checkpoint, forged)
    recipe = write_recipe(folder, **SHORT, model={"config": None, "name_or_path": str(model), "tokenizer": "bytes"})
    lora = {"model": {"config": None, "name_or_path": str(folder / "both"), "tokenizer": "bytes"}, "lora": {"r": 4}}
    tries: tuple[tuple[tuple[int, ...], tuple[str, ...]], ...] = (
        ((1, 2), ("train", recipe, "run.output_dir=a")),
        ((1, 2), ("sample", str(model), "a")),
        ((1, 2), ("evaluate", str(model), "--suite", "niah", "--max-length", "512", "--samples", "1", "--device=cpu")),
        ((1, 2), ("sample", str(adapter), "a")),
        ((0,), ("sample", str(folder / "both"), "a")),
        ((1, 2), ("export", str(checkpoint), "--to", "out")),
    )
    for codes, words in () if result else tries:
        ended = ulysses(folder, *words)
        if (folder / "ran").exists() or (result := ended.judge(codes=codes)):
            return f"{words[:2]}: {result or 'the code ran'}"
    (folder / "r.yaml").write_text(json.dumps({**json.loads((folder / recipe).read_text()), **lora}))
    ended = ulysses(folder, "train", "r.yaml", "run.output_dir=b")
    result = result or ended.judge("done model_dir", codes=(0,))
    return "the code ran" if (folder / "ran").exists() else result


@attack("models", "a FIFO and a device as config.json")
def block_config(folder: Path) -> str:
    (folder / "model").mkdir()
    recipe = write_recipe(folder, model={"config": None, "name_or_path": str(folder / "model")})
    os.mkfifo(folder / "model" / "config.json")
    result = ulysses(folder, "validate-config", recipe).judge("config.json is a FIFO")
    (folder / "model" / "config.json").unlink()
    (folder / "model" / "config.json").symlink_to("/dev/zero")
    return result or ulysses(folder, "validate-config", recipe).judge("config.json is a device")


@attack("models", "a safetensors header without sense, and an index that leads outside")
def forge_header(folder: Path) -> str:
    from ulysses_cli.plan.models.model_files import find_weight_problem

    for header in (b"[" * 500_000, b'{"a": {"dtype": "F32", "shape": [1], "data_offsets": [0, 1e999]}}', b"\xff" * 99):
        (folder / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header)
        if "is damaged" not in find_weight_problem(folder):
            return repr(header[:20])
    index = {"weight_map": {"a": "../../../../etc/passwd"}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return "" if "outside the folder" in find_weight_problem(folder) else "the index leads outside"


LOOPS = "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"
GLOBALS = "{{ messages.append.__init__.__globals__ }}{{ cycler.__init__.__globals__.os }}"
TEMPLATES = {
    "loops": (LOOPS, "does not come to an end"),
    "makes gigabytes": ("{{ 'x' * 10 ** 11 }}", "GiB of memory"),
    "folds gigabytes when it is compiled": (
        "{{ ('a' * 10 ** 10) | length }}",
        "more than 3 GiB of memory",
    ),
    "folds a number of 10^8 digits": ("{{ (10 ** (10 ** 8)) % 7 }}", "does not come to an end in 30 s"),
    "nests brackets": ("{{ " + "(" * 9000 + "1" + ")" * 9000 + " }}", "is nested too deeply"),
    "raises megabytes": ("{{ raise_exception('x' * 10 ** 7) }}", "chat template refuses"),
    "reaches for Python": ("{{ ''.__class__.__mro__[1].__subclasses__() }}", "chat template refuses"),
    "reaches for globals": (GLOBALS, "chat template refuses"),
}
for name, (template, words) in TEMPLATES.items():

    @attack("models", f"a chat template that {name}")
    def render(folder: Path, template: str = template, words: str = words) -> str:
        chat = write_chat(folder)
        return prepare(folder, datasets=[{"path": chat}], chat_template="{{ messages }}" + template).judge(words)


# Data


@attack("data", "links that lead in circles under **")
def circle(folder: Path) -> str:
    (folder / "d").mkdir()
    for name in ("one", "two"):
        (folder / "d" / name).symlink_to(folder / "d", target_is_directory=True)
    (folder / "d" / "x.jsonl").write_text('{"text": "a"}\n' * 40)
    return prepare(folder, datasets=[{"path": str(folder / "d"), "data_files": ["**/*.jsonl"]}]).judge(codes=(0,))


@attack("data", "a file of 2 MB that expands to 2 GiB")
def bomb(folder: Path) -> str:
    (folder / "d.jsonl.gz").write_bytes(gzip.compress(bytes(64 << 20)) * 32)
    return prepare(folder, datasets=[{"path": str(folder / "d.jsonl.gz")}]).judge(r"d\.jsonl\.gz: expands to more than")


@attack("data", "a line of 600 MB, and 500 MB of text in .gz and .zip")
def never_end_line(folder: Path) -> str:
    words = b"word " * (100 << 20)
    with open(folder / "d.jsonl", "wb") as file:
        file.write(b'{"text": "' + words + words[: 100 << 20] + b'"}\n')
    result = prepare(folder, datasets=[{"path": str(folder / "d.jsonl")}]).judge(r"d\.jsonl:1:1: this line is longer")
    (folder / "d.txt.gz").write_bytes(gzip.compress(words))
    (folder / "d.zip").write_bytes(b"PK")
    result = result or prepare(folder, datasets=[{"path": str(folder / "d.txt.gz")}]).judge("expands to more than")
    return result or prepare(folder, datasets=[{"path": str(folder / "d.zip")}]).judge("names no data format: .zip")


@attack("data", "a table of 60,000 columns")
def widen_header(folder: Path) -> str:
    names = [f"c{number}" for number in range(60_000)]
    (folder / "d.csv").write_text(",".join(names) + "\n" + ",".join("x" * len(names)) + "\n")
    started = time.monotonic()
    result = prepare(folder, datasets=[{"path": str(folder / "d.csv")}]).judge("is not understood")
    seconds = time.monotonic() - started
    return result or ("" if seconds < 60 else f"{seconds:.0f} s")


@attack("data", "pickles as data: in a folder, as a text, by the library's own reader")
def pickle_data(folder: Path) -> str:
    (folder / "d.pkl").write_bytes(b"cposix\nsystem\n(Vtouch ran\ntR.")
    sets: tuple[dict[str, Any], ...] = (
        {"path": str(folder / "d.pkl")},
        {"path": str(folder / "d.pkl"), "type": "text"},
        {"path": "pandas", "data_files": [str(folder / "d.pkl")]},
    )
    for dataset in sets:
        ended = prepare(folder, datasets=[dataset])
        if (folder / "ran").exists() or "Traceback" in ended.err:
            return f"{dataset}: {ended.err[-300:]}"
    return ""


@attack("data", "benchmarks that hold a FIFO, nested JSON, a fifth option or a table that expands")
def spoil_benchmark(folder: Path) -> str:
    model = folder / "model"
    model.mkdir()
    (model / "config.json").write_text(json.dumps(make_settings()["model"]["config"]))
    rows = folder / "rows"
    rows.mkdir()

    def evaluate(suite: str, *words: str) -> str:
        ended = ulysses(folder, "evaluate", str(model), "--suite", suite, "--path", str(rows))
        for file in rows.iterdir():
            file.unlink()
        return ended.judge(*words)

    os.mkfifo(rows / "a.jsonl")
    result = evaluate("ruler-files", "is a FIFO, not a file")
    (rows / "a.json").write_text("[" * 500_000)
    result = result or evaluate("ruler-files", "a.json:1:1: malformed JSON")
    options = {"context": "c", "input": "q", "answer": "e", "options": list("abcde")}
    (rows / "longbook_choice_eng.jsonl").write_text(json.dumps(options))
    result = result or evaluate("infinitebench", "longbook_choice_eng.jsonl:1:1: ")
    write_wide_parquet(rows / "a.parquet")
    return result or evaluate("ruler-files", "expands to more than")


def write_wide_parquet(file: Path) -> None:
    """Small on disk: a gigabyte of the same letters."""
    import pyarrow
    from pyarrow import parquet

    text = pyarrow.array(["z" * (1 << 20)] * 1024)
    parquet.write_table(pyarrow.table({"input": text, "outputs": text}), file, compression="zstd")


@attack("models", "a tokenizer that makes gigabytes of 61 characters, and one whose pattern gives up")
def grow_tokenizer(folder: Path) -> str:
    tests = (
        "test_a_normalizer_that_multiplies_is_refused_by_name",
        "test_a_tokenizer_that_fails_is_named_with_the_row",
    )
    return run_test(*(f"tests/unit/test_bounds.py::{test}" for test in tests))


PAIRS = (  # rows, and what prepare says of them
    ({"prompt": "q", "chosen": "a\ud800", "rejected": "b"}, "half a surrogate"),
    ({"prompt": "q", "chosen": "a", "rejected": "a"}, "nothing to prefer"),
    ({"prompt": {"q": 1}, "chosen": "a", "rejected": "b"}, "holds a mapping, not text"),
    ({"context": "c", "query": ["q"], "win_response": "a", "lose_response": "b"}, "`query` holds a list"),
    ({"messages": [1], "rejected_response": "b"}, "turn 1 is a number"),
    ({"chosen": [[["a"]] * 9] * 9, "rejected": [["b"]]}, "turn 1 is a list"),
    ({"prompt": "q", "chosen": "", "rejected": "b"}, "is empty"),
)


@attack("preferences", "rows that are no pairs, labels that are no numbers")
def write_odd_pairs(folder: Path) -> str:
    data = {"datasets": [{"path": "d.jsonl"}]}
    recipe = write_recipe(folder, data=data, preference={"loss": "sigmoid"})
    for row, message in PAIRS:
        (folder / "d.jsonl").write_text(json.dumps(row) + "\n")
        if result := ulysses(folder, "prepare", recipe).judge(r"d\.jsonl:1:1: ", message):
            return f"{row}: {result}"
    (folder / "d.jsonl").write_text('{"prompt": "q", "completion": "a", "label": NaN}\n')
    return ulysses(folder, "prepare", recipe, "preference.loss=kto").judge(r"d\.jsonl:1:1: ")


@attack("preferences", "a row of 300 kB whose answers repeat its prompt to 2 GB, and a pair of 20,000 turns")
def repeat_prompt(folder: Path) -> str:
    (folder / "d.jsonl").write_text(json.dumps({"prompt": "p" * 100_000, "completions": ["a"] * 20_000}) + "\n")
    if result := prepare(folder, datasets=[{"path": "d.jsonl"}]).judge(r"d\.jsonl:1:1: 20,000 answers repeat a prompt"):
        return result
    turns = [{"role": role, "content": "w"} for role in ("user", "assistant")] * 10_000
    answers = {name: [*turns, *write_turns(name)] for name in ("chosen", "rejected")}
    (folder / "d.jsonl").write_text(json.dumps(answers) + "\n")
    data = {"datasets": [{"path": "d.jsonl"}], "chat_template": "chatml", "max_length": 1 << 20}
    data["added_tokens"] = ["<|im_start|>", "<|im_end|>"]
    config = {**make_settings()["model"]["config"], "max_position_embeddings": 1 << 21}
    recipe = write_recipe(folder, data=data, preference={"loss": "sigmoid"}, model={"config": config})
    return ulysses(folder, "prepare", recipe).judge("1 pair of answers", codes=(0,))


def write_turns(answer: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": "q"}, {"role": "assistant", "content": answer}]


@attack("preferences", "a file of references that is cut, a link, a pickle, NaN, of other shapes, or expands to 1 GB")
def spoil_references(folder: Path) -> str:
    return run_test("tests/ranks/test_preference_training.py", "-k", "spoilt or another_reference")


@attack("data", "texts full of NULs, and keys that stand twice in a row")
def write_nuls(folder: Path) -> str:
    (folder / "d.txt").write_bytes("UTF-16 without a mark\n".encode("utf-16-le"))
    (folder / "d.jsonl").write_text('{"text": "first", "text": "second"}\n')
    for name, message in (
        ("d.txt", r"d\.txt:1:1: byte 2 of the line is NUL"),
        ("d.jsonl", "the key 'text' stands twice"),
    ):
        if result := prepare(folder, datasets=[{"path": str(folder / name)}]).judge(message):
            return f"{name}: {result}"
    return ""


@attack("models", "a chat template that is no Jinja, and a config that transformers refuses")
def blame_others(folder: Path) -> str:
    return run_test(
        "tests/unit/test_renderer.py::test_a_template_that_never_ends_or_begins_is_one_problem[no Jinja]",
        "tests/unit/test_hub.py::test_a_config_that_transformers_refuses_is_not_blamed_on_the_tokenizer",
    )


@attack("data", "an end mark of turns within a call, a tool or a variable of a chat")
def forge_end(folder: Path) -> str:
    return run_test("tests/unit/test_snapshots.py", "-k", "marks and inside")


@attack("recipes", "shell variables in the folders that a run makes")
def name_variable(folder: Path) -> str:
    write_recipe(folder)
    ended = ulysses(folder, "prepare", "r.yaml", "run.output_dir=${HOME}/x", "data.store_dir=$SCRATCH/y")
    return ended.judge(r"\$\{HOME\} is not replaced", r"\$SCRATCH is not replaced")


@attack("publishing", "weights that are not whole, and metrics that are no numbers")
def publish_damage(folder: Path) -> str:
    run = write_run(folder / "run", 3)
    (run / "metrics.jsonl").write_text('{"step": 1, "tokens": "many", "loss": "low", "step_seconds": -3}\n')
    (run / "model").mkdir()
    (run / "model" / "config.json").write_text("{}")
    if result := ulysses(folder, "push", "run", "--dry-run").judge("trained on 0 tokens", codes=(0,)):
        return result
    (run / "model" / "model.safetensors").write_bytes(b"")
    return ulysses(folder, "push", "run", "--dry-run").judge("model.safetensors is damaged: .*nothing was uploaded")


@attack("pages", "a FIFO among a run's evaluations")
def hold_report(folder: Path) -> str:
    write_run(folder / "run")
    (folder / "run" / "evaluations").mkdir(exist_ok=True)
    os.mkfifo(folder / "run" / "evaluations" / "a.json")
    return ulysses(folder, "report", "run").judge("evaluations/a.json is damaged", codes=(0,))


@attack("data", "a FIFO and a device as data")
def block_data(folder: Path) -> str:
    os.mkfifo(folder / "d.jsonl")
    result = prepare(folder, datasets=[{"path": str(folder / "d.jsonl")}]).judge("is a FIFO, not a file")
    return result or prepare(folder, datasets=[{"path": "/dev/zero"}]).judge("is a device, not a file")


@attack("data", "tables that are damaged")
def damage_tables(folder: Path) -> str:
    for content in (b"PAR1" + bytes(99) + b"\xff\xff\xff\x7fPAR1", b"ARROW1\0\0" + b"\xff" * 400, b"PAR1"):
        for suffix in ("parquet", "arrow"):
            (folder / f"d.{suffix}").write_bytes(content)
            if result := prepare(folder, datasets=[{"path": str(folder / f"d.{suffix}")}]).judge("cannot be read"):
                return result
    return ""


@attack("data", "an Arrow file that is cut while it is read")
def cut_arrow(folder: Path) -> str:
    return run_test("tests/unit/test_odd_files.py::test_an_arrow_file_that_is_truncated_while_it_is_read")


@attack("data", "names and columns that write to the terminal")
def escape(folder: Path) -> str:
    evil = "\x1b]0;owned\x07\x1b[2J\nr.yaml:1:1: forged"
    (folder / "d").mkdir()
    file = folder / "d" / f"{evil.replace('/', '')}.jsonl"
    file.write_text(json.dumps({evil: 1, "x\x9b31m": 2}) + "\n")
    ended = prepare(folder, datasets=[{"path": str(folder / "d" / "*.jsonl")}])
    output = ended.out + ended.err
    if any((ord(letter) < 32 and letter not in "\n\t") or 127 <= ord(letter) < 160 for letter in output):
        return f"raw controls: {output!r}"
    return "a forged line" if "\nr.yaml:1:1: forged" in output else ended.judge("columns")


# Recipes, secrets, limits, processes


@attack("recipes", "YAML that runs code, repeats itself or never ends")
def spoil_recipe(folder: Path) -> str:
    laughs = "a: &a [x,x,x,x,x,x,x,x,x]\n" + "".join(
        f"{b}: &{b} [{','.join(f'*{a}' for _ in range(9))}]\n" for a, b in zip("abcdefgh", "bcdefghi", strict=True)
    )
    code = f"model: !!python/object/apply:os.system ['touch {folder}/ran']\n"
    for text in (laughs, code, "[" * 100_000, "a: " * 50_000, "\0", "- " * 100_000):
        (folder / "r.yaml").write_text(text)
        if result := ulysses(folder, "validate-config", "r.yaml").judge():
            return result
    return "the code ran" if (folder / "ran").exists() else ""


DISK = """
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

/* Whether a path holds the text of DISK_NAME and, where DISK_FLAG names a file, that file exists. */
static int is_odd(const char *path) {
    char *name = getenv("DISK_NAME"), *flag = getenv("DISK_FLAG");
    return name && path && strstr(path, name) && (!flag || access(flag, F_OK) == 0);
}
static int is_odd_file(int file) {
    char link[64], path[4096];
    snprintf(link, sizeof link, "/proc/self/fd/%d", file);
    ssize_t length = readlink(link, path, sizeof path - 1);
    if (length < 0) return 0;
    path[length] = 0;
    return is_odd(path);
}
#define REAL(TYPE, NAME, ...) static TYPE (*real)(__VA_ARGS__); if (!real) real = dlsym(RTLD_NEXT, NAME)
#define FAIL(CONDITION) if (getenv("DISK_CODE") && (CONDITION)) { errno = atoi(getenv("DISK_CODE")); return -1; }
#define OPEN(NAME) int NAME(const char *path, int flags, ...) { REAL(int, #NAME, const char *, int, ...); \
    va_list rest; va_start(rest, flags); int mode = va_arg(rest, int); va_end(rest); \
    FAIL((flags & (O_CREAT | O_WRONLY | O_RDWR)) && is_odd(path)) return real(path, flags, mode); }
OPEN(open)
OPEN(open64)
ssize_t write(int file, const void *bytes, size_t size) {
    REAL(ssize_t, "write", int, const void *, size_t);
    FAIL(is_odd_file(file))
    return real(file, bytes, size);
}
int mkdir(const char *path, mode_t mode) {
    REAL(int, "mkdir", const char *, mode_t);
    FAIL(is_odd(path))
    return real(path, mode);
}
int rename(const char *from, const char *to) {
    REAL(int, "rename", const char *, const char *);
    FAIL(is_odd(from))
    return real(from, to);
}
int unlink(const char *path) {
    REAL(int, "unlink", const char *);
    FAIL(is_odd(path))
    return real(path);
}
int flock(int file, int what) {
    REAL(int, "flock", int, int);
    if (getenv("DISK_LOCKS") && is_odd_file(file)) { errno = atoi(getenv("DISK_LOCKS")); return -1; }
    return real(file, what);
}
"""  # a disk that refuses what DISK_CODE says, or has no locks


@attack("disks", "without locks, full at a manifest or a log, read-only in the middle of a run")
def spoil_disk(folder: Path) -> str:
    (folder / "disk.c").write_text(DISK)
    subprocess.run(["cc", "-shared", "-fPIC", "-o", "disk.so", "disk.c", "-ldl"], cwd=folder, check=True)
    recipe = write_recipe(folder, **SHORT, parallel={"sp_size": 2})
    disk, place, full = {"LD_PRELOAD": str(folder / "disk.so")}, str(folder / "run"), str(errno.ENOSPC)
    for locks in (errno.ENOSYS, errno.EINVAL):
        ended = ulysses(folder, "train", recipe, "--overwrite", **disk, DISK_NAME=place, DISK_LOCKS=str(locks))
        if result := ended.judge("without file locks", "done model_dir", codes=(0,)):
            return f"flock answers {errno.errorcode[locks]}: {result}"
    for name, pattern in (
        ("step-2.writing/manifest.json", "checkpoint step-2 was not written: No space left on device"),
        ("rank-1.log", "rank 1 failed .*the log of this rank cannot be written: No space left on device"),
        ("run.json", "No space left on device"),
    ):
        ended = ulysses(folder, "train", recipe, "--overwrite", **disk, DISK_NAME=name, DISK_CODE=full)
        if result := ended.judge(pattern, codes=(1,)):
            return f"full at {name}: {result}"
    flag = folder / "flag"
    frozen = {**disk, "DISK_NAME": place, "DISK_FLAG": str(flag), "DISK_CODE": str(errno.EROFS)}
    process = start(
        folder, "output", "train", recipe, "--overwrite", "train.max_steps=400", "run.save_steps=5", **frozen
    )
    wait_for(process, (folder / "run" / "checkpoints" / "step-5").exists)
    flag.touch()
    pattern = r"was not written: .*Read-only file system[^$]*the newest checkpoint is \S+step-"
    result = judge(process, folder / "output", pattern, codes=(1,))
    again = ("train", recipe, "train.max_steps=12", "--resume", "auto")
    return result or ulysses(folder, *again).judge("resumed from .*step-", "done model_dir", codes=(0,))


@attack("run folders", "links in the place of a run's files, checkpoints, model and swap folder, and of another user")
def link_files(folder: Path) -> str:
    recipe, victim = write_recipe(folder), folder / "victim"
    (folder / "run" / "logs").mkdir(parents=True)
    victim.write_text(SECRET)
    for name in ("lock-0", "logs/rank-0.log", "logs/agent.log", "logs/launch.json"):
        (folder / "run" / name).symlink_to(victim)
        ended = ulysses(folder, "train", recipe)
        if victim.read_text() != SECRET:
            return f"{name}: its target is written"
        if result := ended.judge("is a link, not a file", codes=(2,)):
            return f"{name}: {result}"
        (folder / "run" / name).unlink()
    return run_test("tests/unit/test_own_files.py") or run_test("tests/one_process/test_export.py", "-k", "no_link")


@attack("pages", "report --live: another user of the machine, and one who opens connections without end")
def read_live(folder: Path) -> str:
    tests = ("only_this_machine", "connections_are_bounded", "different_tokens")
    return run_test("tests/unit/test_live_page.py", "-k", " or ".join(tests))


@attack("publishing", "a link to a key, and files that are no part of a model, in a model's folder")
def publish_key(folder: Path) -> str:
    run = write_run(folder / "run", 3)
    (run / "model").mkdir()
    (run / "model" / "config.json").write_text("{}")
    (folder / "id_ed25519").write_text(SECRET)
    for name in ("merges.txt", "README.md", "base_config/config.json"):
        (run / "model" / name).parent.mkdir(exist_ok=True)
        (run / "model" / name).symlink_to(folder / "id_ed25519")
        ended = ulysses(folder, "push", "run", "--dry-run")
        if result := "it is shown" if SECRET in ended.out else ended.judge(rf"{name} \(a link\)"):
            return f"{name}: {result}"
        (run / "model" / name).unlink()
    (run / "model" / ".env").write_text(SECRET)
    return ulysses(folder, "push", "run", "--dry-run").judge(r"no file of a model: \.env")


POD = "\n---\napiVersion: v1\nkind: Pod\nmetadata: {name: owned}\n#"
JOBS = (["slurm"], ["k8s", "--image", "i"], ["sky", "--image", "i"])


@attack("recipes", "values and names with lines of their own, in files of SLURM, Kubernetes and SkyPilot")
def inject_job(folder: Path) -> str:
    model, run = {"config": None, "name_or_path": "Qwen/Qwen3-8B"}, {"device": "cuda"}
    clean = json.loads((folder / write_recipe(folder, model=model, run=run)).read_text())
    clean["run"] |= {"output_dir": "runs/x", "checkpoint_uri": "s3://mine/run"}
    clean["data"]["datasets"] = [{"path": "me/texts"}]
    tries = [
        ({}, "r.yaml", [f"{key}=x{end}"]) for key in ("run.output_dir", "model.revision") for end in (POD, "\x85a: b")
    ]
    tries += [({key: f"s3://x{POD}"}, "r.yaml", []) for key in ("output_dir", "checkpoint_uri", "run_name")]
    tries += [({}, f"r{POD.replace('/', '')}.yaml", []), ({}, "r.yaml", ["--out", f"o{POD.replace('/', '')}"])]
    for words in JOBS:
        for changes, name, more in ({}, "r.yaml", []), *tries:
            (folder / name).write_text(json.dumps(clean | {"run": clean["run"] | changes}))
            ended = ulysses(folder, "launch", *words, name, "--gpu", "h100", "--gpus-per-node", "1", "--dry-run", *more)
            is_odd = bool(changes or more or name != "r.yaml")
            if result := ended.judge(codes=(2,) if is_odd else (0,)):
                return f"{words[0]} {changes} {name!r} {more}: {result}"
    return ""


@attack("recipes", "a secret address in a file of a cluster")
def write_webhook(folder: Path) -> str:
    return run_test("tests/unit/test_job_files.py::test_no_secret_of_a_recipe_enters_a_file")


for name, test in (
    ("an address that is none, in a recipe", "tests/unit/test_snapshots.py -k check_notice"),
    ("an address that is none", "tests/unit/test_notification.py -k refuses"),
    (
        "a redirect, bytes that drip, a look-up without end",
        "tests/unit/test_notification.py -k refuses or holds_no_end",
    ),
    ("a program that leaves a process behind", "tests/unit/test_notification.py -k leaves_a_process_behind"),
):

    @attack("notifications", name)
    def run_notice_test(folder: Path, test: str = test) -> str:
        return run_test(*test.split(maxsplit=2))


@attack("secrets", "values of the environment in what is printed")
def print_secret(folder: Path) -> str:
    for name in ("HF_TOKEN_2", "MY_DB_PASS", "STORAGE_CONNECTION_STRING", "GPG_PASSPHRASE", "X_PAT"):
        recipe = write_recipe(folder, run={"device": "cpu", "run_name": f"a-{SECRET}"})
        (folder / recipe).rename(folder / f"{SECRET}.yaml")
        for words in ([], ["--format", "json"]):
            ended = ulysses(folder, "validate-config", f"{SECRET}.yaml", *words, **{name: SECRET})
            if SECRET in ended.out + ended.err or ended.code:
                return f"{name}: {ended.out}"
    return ""


@attack("secrets", "keys in documents that prepare shows")
def show_key(folder: Path) -> str:
    key = "hf_QwErTyUiOpAsDfGhJkLzXcVb"
    (folder / "d.jsonl").write_text(json.dumps({"text": f"use {key} or password = {SECRET} " * 9}) + "\n")
    ended = prepare(folder, datasets=[{"path": str(folder / "d.jsonl")}])
    return "it is shown" if key in ended.out or SECRET in ended.out else ended.judge("looks like a key", codes=(0,))


@attack("pages", "HTML in a run's folder")
def inject(folder: Path) -> str:
    evil = "</script><script>alert(1)</script><img src=x onerror=alert(1)>"
    run = write_run(folder / "run", 20, model={"name": evil, "model_type": evil}, run_name=evil, recipe_file=evil)
    ended = ulysses(folder, "report", str(run), "--output", "page.html")
    if ended.code:
        return ended.err
    page = (folder / "page.html").read_text()
    return "raw HTML" if "<script>alert" in page or "<img src=x" in page else ""


@attack("limits", "20 open files")
def limit_files(folder: Path) -> str:
    def limit() -> None:
        resource.setrlimit(resource.RLIMIT_NOFILE, (20, 20))

    ended = ulysses(folder, "train", write_recipe(folder, train={"max_steps": 3}), limit=limit)
    return ended.judge("may open 20 files here, and [0-9]+ are needed")


@attack("limits", "a full disk behind stdout")
def fill_stdout(folder: Path) -> str:
    recipe = write_recipe(folder)
    command = f"{sys.executable} -m ulysses_cli validate-config {recipe} > /dev/full"
    done = subprocess.run(
        ["bash", "-c", command], cwd=folder, capture_output=True, text=True, timeout=SECONDS, check=False,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )  # fmt: skip
    return Ended(done.returncode, "", done.stderr, 0).judge("cannot be written", codes=(1,))


@attack("processes", "an export whose libraries say much")
def export_noise(folder: Path) -> str:
    return run_test("tests/unit/test_children.py::test_an_export_with_much_output_ends")


@attack("processes", "kill -9 of prepare")
def kill_prepare(folder: Path) -> str:
    (folder / "d.jsonl").write_text((json.dumps({"text": "some words " * 2000}) + "\n") * 20_000)
    recipe = write_recipe(folder, data={"datasets": [{"path": str(folder / "d.jsonl")}]})
    process = subprocess.Popen(
        [sys.executable, "-m", "ulysses_cli", "prepare", recipe], cwd=folder, stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL, env={**os.environ, "PYTHONPATH": str(ROOT)},
    )  # fmt: skip
    children, end = [], time.monotonic() + SECONDS
    while not children and process.poll() is None and time.monotonic() < end:
        children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
    handles = [os.pidfd_open(int(pid)) for pid in children]
    process.kill()
    process.wait()
    alive = [handle for handle in handles if not select.select([handle], [], [], 30)[0]]
    return "" if handles and not alive else f"{len(alive)} of {len(handles)} children live on"


MASKED = """
import os, signal, sys
from ulysses_cli.train.processes.masked_log import open_masked
log = open_masked(os.open("log", os.O_WRONLY | os.O_CREAT, 0o600), {sys.argv[1]})
masking = int(open(f"/proc/self/task/{os.getpid()}/children").read().split()[0])
os.kill(masking, signal.SIGKILL)
os.waitpid(masking, 0)
os.write(log, sys.argv[1].encode() * 100_000)
"""


@attack("processes", "kill -9 of the process that masks a log")
def kill_masking(folder: Path) -> str:
    command = [sys.executable, "-c", MASKED, SECRET]
    environ = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, cwd=folder, capture_output=True, timeout=SECONDS, check=False, env=environ)
    return "it goes on unmasked" if done.returncode == 0 or SECRET in (folder / "log").read_text() else ""


@attack("processes", "kill -9 of ranks and of the agent, then resume")
def kill_ranks(folder: Path) -> str:
    return run_test("tests/ranks/test_faults.py::test_a_run_killed_twice_gives_the_bytes_of_an_uninterrupted_run")


@attack("processes", "kill -9 of the agent: ranks end, and hold the run's folder as long as they live")
def kill_agent(folder: Path) -> str:
    recipe = write_recipe(folder, train={"max_steps": 100_000})
    process, metrics = start(folder, "output", "train", recipe), folder / "run" / "metrics.jsonl"
    wait_for(process, lambda: metrics.exists() and bool(metrics.read_text()))
    agents = list_children(process.pid)
    ranks = [rank for agent in agents for rank in list_children(agent) if is_rank(rank)]
    handles = [os.pidfd_open(rank) for rank in ranks]
    for agent in agents:
        os.kill(agent, signal.SIGKILL)
    free = [rank for rank in ranks if is_alive(rank) and is_free(folder / "run" / "lock-0") and is_alive(rank)]
    process.wait(SECONDS)
    alive = [handle for handle in handles if not select.select([handle], [], [], 60)[0]]
    if not ranks or alive or free:
        return f"{len(alive)} of {len(ranks)} ranks live on, {len(free)} without the lock"
    return "" if is_free(folder / "run" / "lock-0") else "the lock outlives them"


def list_children(process: int) -> list[int]:
    return [
        int(child)
        for task in Path(f"/proc/{process}/task").iterdir()
        for child in (task / "children").read_text().split()
    ]


def is_rank(process: int) -> bool:
    return b"ulysses_cli.train\0" in Path(f"/proc/{process}/cmdline").read_bytes()


def is_alive(process: int) -> bool:
    return Path(f"/proc/{process}").exists()


def is_free(lock: Path) -> bool:
    with open(lock, "rb") as handle:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
    return True


# The network


for name, test in {
    "who reaches a port of one machine": "test_a_run_on_one_machine_listens_on_the_loopback_alone",
    "payloads in both stores of two machines, and a machine with another key": (
        "test_two_machines_train_and_execute_nothing_from_a_third"
    ),
    "a stranger in a rank's place sends a payload": "test_a_process_in_a_ranks_place_runs_no_code",
}.items():

    @attack("network", name)
    def reach(folder: Path, test: str = test) -> str:
        return run_test(f"tests/ranks/test_listening.py::{test}")


@attack("network", "a key's file: eight machines at once, a killed writer, zeros after a crash, a full disk")
def spoil_key(folder: Path) -> str:
    tests = ("key_is_read_once", "left_in_the_place_of_a_key", "disk_has_no_room", "share_one_key", "bad_key")
    return run_test("tests/unit/test_launch.py", "-k", " or ".join(tests))


@attack("network", "a rank's message sent again, in another rank's place, cut, changed, or from an earlier run")
def replay_message(folder: Path) -> str:
    return run_test("tests/ranks/test_sent_values.py")


@attack("network", "a payload in the agents' state")
def write_state(folder: Path) -> str:
    return run_test("tests/one_process/test_rendezvous.py::test_a_state_without_the_runs_seal_is_not_unpickled")


@attack("limits", "a full disk on one rank")
def fill_disk(folder: Path) -> str:
    return run_test("tests/ranks/test_faults.py::test_a_disk_that_is_full_on_one_rank_fails_the_save_on_all")


# Clocks, memory of others, users, signals, two at once, what a crash leaves


CLOCK = """
#define _GNU_SOURCE
#include <dlfcn.h>
#include <stdlib.h>
#include <sys/time.h>
#include <time.h>

static int read_real(clockid_t clock, struct timespec *seconds) {
    static int (*real)(clockid_t, struct timespec *);
    if (!real) real = dlsym(RTLD_NEXT, "clock_gettime");
    return real(clock, seconds);
}

int clock_gettime(clockid_t clock, struct timespec *seconds) {
    static const long hours[] = {0, 26, -30, 1, 87600, -5};
    struct timespec now;
    int code = read_real(clock, seconds);
    read_real(CLOCK_MONOTONIC, &now);
    if (clock == CLOCK_REALTIME || clock == CLOCK_REALTIME_COARSE) seconds->tv_sec += 3600 * hours[now.tv_sec % 6];
    return code;
}

int gettimeofday(struct timeval *seconds, void *zone) {
    struct timespec now;
    clock_gettime(CLOCK_REALTIME, &now);
    seconds->tv_sec = now.tv_sec;
    seconds->tv_usec = now.tv_nsec / 1000;
    return 0;
}

time_t time(time_t *seconds) {
    struct timespec now;
    clock_gettime(CLOCK_REALTIME, &now);
    if (seconds) *seconds = now.tv_sec;
    return now.tv_sec;
}
"""  # the time of day jumps each second by hours to ten years, forwards and back; files keep the true time
CONSTANT_CLOCK = CLOCK.replace("3600 * hours[now.tv_sec % 6]", 'atol(getenv("CLOCK_SECONDS"))')
SHORT = {"train": {"max_steps": 4}, "run": {"device": "cpu", "save_steps": 2}}


@attack("clocks", "a time of day that jumps: prepare, train, saves, max_hours, --resume auto, export")
def jump(folder: Path) -> str:
    (folder / "clock.c").write_text(CLOCK)
    subprocess.run(["cc", "-shared", "-fPIC", "-o", "clock.so", "clock.c", "-ldl"], cwd=folder, check=True)
    run = {**SHORT["run"], "max_hours": 1.0, "step_timeout": 60}
    recipe = write_recipe(folder, train=SHORT["train"], run=run, parallel={"sp_size": 2})
    clock = {"LD_PRELOAD": str(folder / "clock.so")}
    result = ulysses(folder, "train", recipe, **clock).judge("done model_dir", codes=(0,))
    more = ("train", recipe, "--resume", "auto", "train.max_steps=6")
    result = result or ulysses(folder, *more, **clock).judge("resumed from .*step-4", "step=6/6", codes=(0,))
    return result or ulysses(folder, "export", "run", "--to", "model", **clock).judge("step-6", codes=(0,))


@attack("clocks", "two machines whose clocks are 90 s, and a day, apart")
def differ(folder: Path) -> str:
    (folder / "clock.c").write_text(CONSTANT_CLOCK)
    subprocess.run(["cc", "-shared", "-fPIC", "-o", "clock.so", "clock.c", "-ldl"], cwd=folder, check=True)
    recipe = write_recipe(folder, **SHORT, parallel={"sp_size": 2})
    for seconds in (90, -86_400):
        with open_networks(2) as names:
            processes = []
            for number, network in enumerate(names):
                clock = {"LD_PRELOAD": str(folder / "clock.so"), "CLOCK_SECONDS": str(seconds * number)}
                words = ("train", recipe, "--overwrite", "--nnodes=2", "--master-addr=10.231.7.1")
                processes.append(start(folder, str(number), *words, f"--node-rank={number}", network=network, **clock))
            results = [judge(process, folder / str(number)) for number, process in enumerate(processes)]
        if result := next(filter(None, results), ""):
            return f"{seconds} s: {result}"
    return ""


for name, test in (
    (
        "ranks' failures in the order of a clock that was set back",
        "launch.py::test_the_first_failure_is_the_one_that_is_shown",
    ),
    (
        "locks of builds that look old and are held",
        "operator_builds.py::test_dead_locks_are_removed_and_live_ones_are_reported",
    ),
):

    @attack("clocks", name)
    def run_clock_test(folder: Path, test: str = test) -> str:
        return run_test(f"tests/unit/test_{test}")


@attack("limits", "1 MiB of /dev/shm")
def shrink_shm(folder: Path) -> str:
    (folder / "d.jsonl").write_text('{"text": "some words of a document"}\n' * 200_000)
    data = {"datasets": [{"path": str(folder / "d.jsonl")}], "num_workers": 2}
    recipe = write_recipe(folder, **SHORT, data=data, parallel={"sp_size": 2})
    mount = "mount -t tmpfs -o size=1m tmpfs /dev/shm && [ $(df -k --output=size /dev/shm | tail -1) = 1024 ]"
    tool = f"{sys.executable} -m ulysses_cli"
    for words, pattern in ((f"train {recipe}", "done model_dir"), (f"verify {recipe}", "PASS")):
        command = f"{mount} && exec {tool} {words}"
        space = ["unshare", "-m" if os.getuid() == 0 else "-rm", "bash", "-c", command]
        if result := ulysses(folder, start=space).judge(pattern, codes=(0,)):
            return f"{words}: {result}"
    return ""


def drop_rights() -> list[str]:
    """Returns the beginning of a command line under which root may write only what the modes of folders allow."""
    return ["setpriv", "--bounding-set=-all", "--inh-caps=-all"] if os.getuid() == 0 else []


@attack("users", "a home, a current folder, data and a model that cannot be written")
def write_nothing(folder: Path) -> str:
    """Checks that each command works, or says what it cannot write and how to go on."""
    here, out, home = folder / "here", folder / "out", folder / "home"
    for made in (here, out, home):
        made.mkdir()
    (here / "d.jsonl").write_text('{"text": "some words of a document"}\n' * 400)
    data = {"datasets": [{"path": str(here / "d.jsonl")}], "store_dir": str(out / "store")}
    recipe = here / write_recipe(folder, **SHORT, data=data, parallel={"sp_size": 2})
    (folder / "r.yaml").rename(recipe)
    run, built = f"run.output_dir={out / 'run'}", get_builds_folder(os.environ).rglob("deepspeed_shm_comm*")
    kept = {"TORCH_EXTENSIONS_DIR": str(next((result.parent for result in built if result.is_dir()), out / "builds"))}
    unwritable = {"HOME": str(home), "HF_HOME": str(home / "hf"), "XDG_CACHE_HOME": "", "TORCH_EXTENSIONS_DIR": ""}
    where = r"home/\.cache/ulysses/operators/\S+, where .* cannot be made in .*home\b[^$]*TORCH_EXTENSIONS_DIR="
    denied = r"cannot be written: Permission denied"
    for made in (here, home):
        made.chmod(0o555)
    tries: tuple[tuple[dict[str, str], tuple[int, ...], tuple[str, ...], list[str]], ...] = (
        ({}, (0,), (), ["validate-config", "r.yaml"]),
        ({}, (0,), (), ["prepare", "r.yaml"]),
        ({}, (0,), (), ["estimate-memory", "r.yaml"]),
        ({}, (0,), (), ["plan", "--model", "Qwen/Qwen3-8B", "--max-length", "32Ki", "--gpus", "h100:8"]),
        ({}, (2,), (where,), ["train", "r.yaml", run]),
        ({}, (2,), (where,), ["verify", "r.yaml"]),
        (kept, (0,), (), ["train", "r.yaml", run]),
        (kept, (0,), (), ["report", str(out / "run"), "--output", str(out / "page.html")]),
        (kept, (0,), (), ["export", str(out / "run"), "--to", str(out / "model")]),
        (kept, (1, 2), (denied,), ["report", str(out / "run"), "--output", "page.html"]),
        (kept, (1, 2), ("[Pp]ermission denied",), ["export", str(out / "run"), "--to", "model"]),
        (kept, (2,), ("run.output_dir.*" + denied,), ["train", "r.yaml", "run.output_dir=run"]),
        (kept, (1,), ("data.store_dir.*" + denied,), ["prepare", "r.yaml", "data.store_dir=store"]),
        (kept, (1, 2), (denied,), ["recipes", "copy", "tiny-cpu"]),
    )
    try:
        for environ, codes, patterns, words in tries:
            ended = ulysses(out, *words, start=drop_rights(), here=here, **{**unwritable, **environ})
            if result := ended.judge(*patterns, codes=codes):
                return f"{' '.join(words)}: {result}"
    finally:
        for made in (here, home):
            made.chmod(0o755)
    return ""


def wait_for(process: subprocess.Popen[bytes], is_there: Callable[[], bool]) -> None:
    end = time.monotonic() + SECONDS
    while not is_there() and process.poll() is None and time.monotonic() < end:
        time.sleep(0.01)


def start(folder: Path, name: str, *words: str, network: str = "", **environ: str) -> subprocess.Popen[bytes]:
    """Starts a command whose output goes to the file `name`, perhaps on a machine of open_networks."""
    place = ["ip", "netns", "exec", network] if network else []
    with open(folder / name, "wb") as output:
        return subprocess.Popen(
            [*place, sys.executable, "-m", "ulysses_cli", *words], cwd=folder, stdout=output, stderr=output,
            stdin=subprocess.DEVNULL, env={**os.environ, "PYTHONPATH": str(ROOT), **environ},
        )  # fmt: skip


def judge(process: subprocess.Popen[bytes], output: Path, *patterns: str, codes: tuple[int, ...] = (0,)) -> str:
    code = process.wait(SECONDS)
    return Ended(code, output.read_text(errors="replace"), "", 0).judge(*patterns, codes=codes)


@attack("losses", "a learning rate of 10: the run says that its loss diverged")
def diverge(folder: Path) -> str:
    train = {"max_steps": 6, "learning_rate": 10, "warmup_steps": 0}
    ended = ulysses(folder, "train", write_recipe(folder, train=train))
    result = ended.judge("warning: .*far above its past", "done, but the loss diverged: ", codes=(0,))
    return result or ulysses(folder, "report", "run", "--output", "page.html").judge("The loss diverged", codes=(0,))


@attack("signals", "SIGTERM in an evaluation, then --resume auto")
def end_evaluation(folder: Path) -> str:
    data = {"eval_split": 0.08, "store_dir": str(folder / "store")}
    recipe = write_recipe(folder, train=SHORT["train"], data=data, run={"device": "cpu", "eval_steps": 2})
    process = start(folder, "output", "train", recipe)
    wait_for(process, lambda: b"step=2/4" in (folder / "output").read_bytes())
    process.terminate()
    result = judge(process, folder / "output", "saved run/checkpoints/step-2|saved .*step-2", "stopped")
    if result or (folder / "run" / "model").exists():
        return result or "a model stands"
    return ulysses(folder, "train", recipe, "--resume", "auto").judge("resumed from .*step-2", "done", codes=(0,))


@attack("signals", "SIGTERM and kill -9 in an export, then the same export")
def end_export(folder: Path) -> str:
    result = ulysses(folder, "train", write_recipe(folder, **SHORT)).judge(codes=(0,))
    for number in () if result else (signal.SIGTERM, signal.SIGKILL):
        process = start(folder, "output", "export", "run", "--to", "model")
        wait_for(process, (folder / "model.writing").exists)
        is_made = (folder / "model.writing").exists()
        process.send_signal(number)
        process.wait(SECONDS)
        left: list[str] = []
        for _ in range(1000):  # the child of a process killed by SIGKILL needs a moment to end
            left = [path.name for path in folder.glob("model*")]
            if not left:
                break
            time.sleep(0.01)
        if not is_made or left or (folder / "model").exists():
            return f"{number.name}: {'' if is_made else 'it came too late; '}{left} left"
    return result or ulysses(folder, "export", "run", "--to", "model").judge("equal the trained model's", codes=(0,))


@attack("signals", "kill -9 at every file that an export opens or renames, and at every request of a push")
def end_at_each(folder: Path) -> str:
    names = "tests/one_process/test_export.py", "tests/unit/test_push.py"
    return run_test(*names, "-k", "can_be_killed_at_any_moment")


@attack("signals", "SIGSTOP of a rank on the second of two machines, shorter and longer than run.step_timeout")
def stop_rank(folder: Path) -> str:
    run = {"device": "cpu", "save_steps": 3, "step_timeout": 30}
    recipe = write_recipe(folder, train={"max_steps": 100_000}, run=run, parallel={"sp_size": 2})
    metrics = folder / "run" / "metrics.jsonl"

    def wait_for_steps(number: int) -> None:
        before = count_lines(metrics)
        wait_for(processes[0], lambda: count_lines(metrics) >= before + number)

    with open_networks(2) as names:
        words = ("train", recipe, "--nnodes=2", "--master-addr=10.231.7.1")
        processes = [
            start(folder, str(number), *words, f"--node-rank={number}", network=network)
            for number, network in enumerate(names)
        ]
        wait_for_steps(3)
        agents = {child for child in list_descendants(processes[1].pid) if names_agent(child)}
        ranks = {child for child in list_descendants(processes[1].pid) if is_rank(child)} - agents
        (rank,) = ranks.difference(*map(list_children, ranks))  # one of them writes the other's log
        os.kill(rank, signal.SIGSTOP)
        time.sleep(10)
        os.kill(rank, signal.SIGCONT)
        wait_for_steps(3)
        has_gone_on = processes[0].poll() is None
        os.kill(rank, signal.SIGSTOP)
        pattern = r"run.step_timeout \(30 s\): rank 1 does not answer[^$]*the newest checkpoint is"
        results = [judge(process, folder / str(at), pattern, codes=(1,)) for at, process in enumerate(processes)]
    return next(filter(None, results), "") if has_gone_on else (folder / "0").read_text()[-300:]


def names_agent(process: int) -> bool:
    return b"ulysses_cli.train.agent" in Path(f"/proc/{process}/cmdline").read_bytes()


def count_lines(file: Path) -> int:
    return file.read_bytes().count(b"\n") if file.exists() else 0


@attack("signals", "kill -9 in a merge, then the same merge")
def end_merge(folder: Path) -> str:
    result = ulysses(folder, "train", write_recipe(folder, **SHORT)).judge(codes=(0,))
    (folder / "run").rename(folder / "base")
    model = {"config": None, "name_or_path": str(folder / "base" / "model"), "tokenizer": "bytes"}
    result = result or ulysses(folder, "train", write_recipe(folder, **SHORT, model=model, lora={"r": 4})).judge(
        codes=(0,)
    )
    words = ("export", "run", "--to", "model", "--merge-lora")
    for seconds in () if result else (0.0, 0.2):
        process = start(folder, "output", *words)
        wait_for(process, (folder / "model.writing").exists)
        time.sleep(seconds)
        process.kill()
        process.wait(SECONDS)
        end = time.monotonic() + 10
        while (left := [path.name for path in folder.glob("model*")]) and time.monotonic() < end:
            time.sleep(0.01)
        if left:
            return f"{left} left"
    return result or ulysses(folder, *words).judge("equal base plus adapters", codes=(0,))


@attack("two at once", "two runs and one store; a third in the folder of the first")
def share_store(folder: Path) -> str:
    (folder / "d.jsonl").write_text('{"text": "some words of a document"}\n' * 4000)
    data = {"datasets": [{"path": str(folder / "d.jsonl")}]}
    recipe = write_recipe(folder, data=data, train={"max_steps": 12}, run={"device": "cpu"}, parallel={"sp_size": 2})
    ports = {"MASTER_PORT": "29777"}
    runs = [start(folder, name, "train", recipe, f"run.output_dir={name}-run", **ports) for name in ("a", "b")]
    wait_for(runs[0], (folder / "a-run" / "lock-0").exists)
    third = ulysses(folder, "train", recipe, "run.output_dir=a-run").judge("is in use by a run that", codes=(2,))
    result = third or judge(runs[0], folder / "a", "done") or judge(runs[1], folder / "b", "done")
    for each in runs:
        each.kill()
        each.wait()
    lines = {(folder / f"{name}-run" / "metrics.jsonl").read_text().count("\n") for name in ("a", "b")}
    return result or ("" if lines == {12} else f"{lines} steps")


@attack("two at once", "two exports into one folder")
def share_export(folder: Path) -> str:
    result = ulysses(folder, "train", write_recipe(folder, **SHORT)).judge(codes=(0,))
    if result:
        return result
    both = [start(folder, name, "export", "run", "--to", "model") for name in ("a", "b")]
    codes = sorted(process.wait(SECONDS) for process in both)
    output = (folder / "a").read_text() + (folder / "b").read_text()
    is_told = (
        "another process writes model right now" in output
        or "model is there already" in output
        or "model already exists" in output
    )
    return "" if codes[0] == 0 and codes[1] in (1, 2) and is_told else f"{codes}: {output[-300:]}"


@attack("two at once", "a run whose folder is removed, and a second one there")
def remove_folder(folder: Path) -> str:
    return run_test("tests/unit/test_launch.py::test_a_lock_that_was_removed_with_its_folder_is_put_back")


TABLES = """
import numpy, pyarrow
from pyarrow import parquet
index, length = numpy.zeros(100_000, numpy.int32), 50_000_000
often = pyarrow.DictionaryArray.from_arrays(index, pyarrow.array(["x y " * (1 << 18)]))
one = pyarrow.ListArray.from_arrays(pyarrow.array([0, length], pyarrow.int32()), numpy.zeros(length, numpy.int8))
columns = {"dictionary": {"text": often}, "list": {"input_ids": one}, "nulls": {"text": pyarrow.nulls(1 << 26)}}
columns["page"] = {"text": ["x" * (1 << 29)]}
tables = {name: pyarrow.table(content) for name, content in columns.items()}
options = pyarrow.ipc.IpcWriteOptions(compression="zstd")
for name, table in tables.items():
    parquet.write_table(table, f"{name}.parquet", compression="zstd", use_dictionary=name != "page")
    with pyarrow.ipc.new_file(f"{name}.arrow", table.schema, options=options) as writer:
        writer.write_table(table)
"""  # 100 GiB of text, 50 million tokens, 64 million rows and half a GiB of text, each in a few bytes


@attack("data", "Parquet and Arrow that say much and hold little")
def bomb_tables(folder: Path) -> str:
    subprocess.run([sys.executable, "-c", TABLES], cwd=folder, check=True)
    files = sorted(file for file in folder.iterdir() if file.suffix in (".parquet", ".arrow"))
    for file in files:
        if result := prepare(folder, datasets=[{"path": str(file)}]).judge(rf"{file.name}: .*expands to more than"):
            return f"{file.name}, {file.stat().st_size} bytes: {result}"
    return "" if len(files) == 8 else f"{files}"


for name, test in (
    ("in a model that is tuned", "tests/ranks/test_loading.py -k spoilt"),
    ("in a checkpoint that is resumed or exported", "tests/one_process/test_finiteness.py"),
):

    @attack("weights", f"NaN and infinity {name}")
    def run_weights_test(folder: Path, test: str = test) -> str:
        return run_test(*test.split())


@attack("secrets", "in all that a run leaves: model, card, checkpoints, logs, metrics, page")
def leave_secret(folder: Path) -> str:
    # this one has no known look: its place in an address alone gives it away
    key, looks = "hf_QwErTyUiOpAsDfGhJkLzXcVb", "tr0ub4dor-and-3"
    signed, file = f"https://user:{looks}@host/d?X-Amz-Signature={looks}&x=1", folder / f"d?sig={looks}&as=d.jsonl"
    file.write_text('{"text": "some words of a document"}\n' * 400)
    data = {"datasets": [{"path": str(file)}]}
    run = {**SHORT["run"], "run_name": f"mine {key} {SECRET} {signed}"}
    recipe = write_recipe(folder, data=data, train=SHORT["train"], run=run)
    (folder / recipe).rename(folder / f"{SECRET}.yaml")
    ended = ulysses(folder, "train", f"{SECRET}.yaml", MY_PASSPHRASE=SECRET)
    page = ulysses(folder, "report", "run", "--output", "page.html", MY_PASSPHRASE=SECRET)
    out = ulysses(folder, "export", "run", "--to", "model", MY_PASSPHRASE=SECRET)
    for each in (ended, page, out):
        if result := each.judge(codes=(0,)):
            return result
    messages = [each.out + each.err for each in (ended, page, out)]
    files = [file for name in ("run", "model") for file in (folder / name).rglob("*") if file.is_file()]
    contents = {str(file): file.read_bytes() for file in (*files, folder / "page.html")} | {
        f"output {at}": text.encode() for at, text in enumerate(messages)
    }
    secrets = [word.encode() for word in (key, looks, SECRET)]
    leaks = [name for name, content in contents.items() if any(word in content for word in secrets)]
    return f"in {leaks}" if leaks else "" if len(files) > 12 else f"{files}"


@attack("secrets", "a core file of a rank that crashes")
def dump_core(folder: Path) -> str:
    """Makes a command crash where the user's limit allows core files. Where the system collects them elsewhere, this
    proves nothing."""
    resource.setrlimit(resource.RLIMIT_CORE, (resource.getrlimit(resource.RLIMIT_CORE)[1],) * 2)
    process = start(folder, "output", "train", write_recipe(folder, train={"max_steps": 4000}), MY_PASSPHRASE=SECRET)
    wait_for(process, lambda: b"step=2/" in (folder / "output").read_bytes())
    for pid in list_descendants(process.pid):
        os.kill(pid, signal.SIGSEGV)
    process.wait(SECONDS)
    cores = [file.name for file in folder.rglob("core*") if file.is_file()]
    return f"{cores} written" if cores else ""


def list_descendants(process: int) -> list[int]:
    return [each for child in list_children(process) for each in (*list_descendants(child), child)]


def run_test(*words: str) -> str:
    """Runs a test of the suite that is an attack."""
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-x", "-rs", *words], cwd=ROOT, capture_output=True, text=True,
        check=False, env={**os.environ, "ULYSSES_FULL": "1"},
    )  # fmt: skip
    return "" if done.returncode == 0 and "SKIPPED" not in done.stdout else done.stdout[-300:]


def try_attack(function: Attack) -> str:
    with tempfile.TemporaryDirectory(prefix="ulysses-attack-") as folder:
        try:
            return function(Path(folder))
        except Exception as error:  # noqa: BLE001 - an attack may raise anything
            return f"{type(error).__name__}: {error}"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("word", nargs="?", default="")
    parser.add_argument("--results", type=Path, default=RESULTS / "attacks-cpu.json")
    options = parser.parse_args()
    values: dict[str, dict[str, str]] = {}
    for group, attacks in ATTACKS.items():
        for name, function in attacks.items():
            if options.word in f"{group}: {name}":
                why = try_attack(function)
                values.setdefault(group, {})[name] = why or "held"
                print(f"{group}: {name}: {'OPEN: ' + why if why else 'held'}", flush=True)
    counts = count_ends(values)
    print(", ".join(f"{name} {count}" for name, count in counts.items()))
    known = json.loads(options.results.read_text())["attacks"] if options.word and options.results.exists() else {}
    values = {group: {**known.get(group, {}), **values.get(group, {})} for group in {**known, **values}}
    results = {**count_ends(values), "attacks": values}
    options.results.write_text(json.dumps(results, indent=1, ensure_ascii=False) + "\n")
    return 1 if counts["open"] else 0


def count_ends(groups: dict[str, dict[str, str]]) -> dict[str, int]:
    ends = [end for group in groups.values() for end in group.values()]
    return {"tried": len(ends), "held": ends.count("held"), "open": len(ends) - ends.count("held")}


if __name__ == "__main__":
    sys.exit(main())
