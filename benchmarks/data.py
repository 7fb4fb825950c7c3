"""Measures how fast text becomes rows and how fast rows are read.

The peers are the bare tokenizer and a CPU training step in the same run. Bars: preparing text reaches 80 % of the bare
`tokenizers` batch rate per worker; a 50 MB document takes linear time; rows are read 50x faster than a CPU training
step takes them; a chat of an agent, 60 calls and 125,000 characters, takes at most 10 renderings in 0.1 s. The bars of
packing.py, which runs too, also count. `--chats-only` measures chats alone, and leaves the file's other figures.

    python benchmarks/data.py [--megabytes 64] [--workers 2] [--json FILE]
"""

import argparse
import json
import os
import random
import subprocess
import sys
import sysconfig
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from statistics import median
from typing import Any

from paths import ROOT

VOCABULARY = 16_000
BATCH_BYTES = 4 << 20
NUM_RUNS = 5
LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
RECIPE = """\
model:
  config: {{model_type: llama}}
  tokenizer: {folder}/tokenizer
data:
  datasets: [{{path: {file}}}]
  max_length: 32Ki
  num_workers: {workers}
  store_dir: {folder}/{store}
"""


def walk_texts(num_bytes: int) -> Iterator[str]:
    """Yields the texts of Python's own library and of the installed packages, file by file, again from the start at the
    end."""
    folders = [sysconfig.get_paths()["stdlib"], sysconfig.get_paths()["purelib"]]
    files = sorted(file for folder in folders for file in Path(folder).rglob("*.py"))
    done = 0
    while True:
        for file in files:
            try:
                text = file.read_text(encoding="utf-8")
            except (OSError, UnicodeDecodeError):
                continue
            if text.strip():
                yield text
                done += len(text.encode())
                if done >= num_bytes:
                    return


def train_tokenizer(folder: Path) -> Any:
    """Returns a byte-level BPE with the pattern of Llama 3, trained on the first megabytes."""
    from tokenizers import Regex, Tokenizer, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    made = Tokenizer(models.BPE())
    split = pre_tokenizers.Split(Regex(LLAMA3), "isolated")
    made.pre_tokenizer = pre_tokenizers.Sequence([split, pre_tokenizers.ByteLevel(False, use_regex=False)])
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY, initial_alphabet=alphabet, special_tokens=["</s>"], show_progress=False
    )
    made.train_from_iterator(walk_texts(4_000_000), trainer)
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=made, eos_token="</s>")
    tokenizer.save_pretrained(folder / "tokenizer")
    return made


def make_batches(texts: list[str]) -> Iterator[list[str]]:
    batch: list[str] = []
    size = 0
    for text in texts:
        batch.append(text)
        size += len(text)
        if size >= BATCH_BYTES:
            yield batch
            batch, size = [], 0
    yield batch


class Clock:
    """Measures the seconds that passed and those that this process computed, which differ on a busy machine."""

    def __init__(self) -> None:
        self.wall = self.cpu = 0.0

    def __enter__(self) -> "Clock":
        self._start = time.perf_counter(), time.process_time()
        return self

    def __exit__(self, *_: object) -> None:
        self.wall += time.perf_counter() - self._start[0]
        self.cpu += time.process_time() - self._start[1]


def measure_bare(made: Any, texts: list[str]) -> Clock:
    """Times the batch call alone, on one thread, in batches as large as prepare uses."""
    from tokenizers import Tokenizer

    fresh = Tokenizer.from_str(made.to_str())  # without the cache of words from the training
    clock = Clock()
    for batch in make_batches(texts):
        with clock:
            fresh.encode_batch_fast(batch, add_special_tokens=False)
    return clock


def prepare(folder: Path, file: Path, workers: int, store: str) -> tuple[Clock, Any]:
    """Prepares a file anew, from reading it to rows on disk."""
    from ulysses_cli.data.prepare import prepare_data
    from ulysses_cli.plan.recipe.loader import parse_recipe

    text = RECIPE.format(folder=folder, file=file, workers=workers, store=store)
    with Clock() as clock:
        prepared = prepare_data(parse_recipe(text).recipe, 128, lambda _: None)
    return clock, prepared


def write_texts(file: Path, texts: list[str]) -> Path:
    with open(file, "w") as stream:
        stream.writelines(json.dumps({"text": text}) + "\n" for text in texts)
    return file


def measure_preparing(folder: Path, made: Any, num_bytes: int, workers: int) -> dict[str, float]:
    texts = list(walk_texts(num_bytes))
    file = write_texts(folder / "texts.jsonl", texts)
    size = sum(len(text.encode()) for text in texts)
    measure_bare(made, texts[:1])
    prepare(folder, write_texts(folder / "few.jsonl", texts[:1]), 1, "few")  # the first call pays for imports
    shares, cpu_shares, rates = [], [], []
    for run in range(NUM_RUNS):  # in turns, so that other work on the machine slows both
        part = texts[run::NUM_RUNS]
        part_file = write_texts(folder / f"part-{run}.jsonl", part)
        bare = measure_bare(made, part)
        one, prepared = prepare(folder, part_file, 1, f"one-{run}")
        shares.append(bare.wall / one.wall)
        cpu_shares.append(bare.cpu / one.cpu)
        rates.append(size / 1e6 / NUM_RUNS / bare.wall)
    again, _ = prepare(folder, part_file, 1, f"one-{run}")
    many, _ = prepare(folder, file, workers, "many")
    start = time.perf_counter()
    num_tokens = read_all(prepared.path)
    read_seconds = time.perf_counter() - start
    return {
        "text_megabytes": size / 1e6,
        "bare_megabytes_per_second": median(rates),
        "share_of_bare_rate_1_worker": median(shares),
        "share_of_bare_rate_1_worker_by_cpu_time": median(cpu_shares),
        f"share_of_bare_rate_per_worker_of_{workers}": size / 1e6 / median(rates) / many.wall / workers,
        "second_run_seconds": again.wall,
        "read_million_tokens_per_second": num_tokens / 1e6 / read_seconds,
    }


def read_all(path: Path) -> int:
    from ulysses_cli.data.store import open_rows

    rows = open_rows(path, "train")
    for row in range(len(rows)):
        rows.read(row, 0, rows.max_length)
    return len(rows) * rows.max_length


def measure_long_documents(folder: Path, num_bytes: int) -> dict[str, float]:
    """Returns CPU seconds per megabyte of one document, at a tenth of the size and at the whole."""
    values = {}
    for share in (0.1, 1.0):
        file = folder / f"one-{share}.txt"
        file.write_text("".join(walk_texts(int(num_bytes * share))))
        clock, _ = prepare(folder, file, 1, f"long-{share}")
        values[share] = clock.cpu / (file.stat().st_size / 1e6)
    return {
        "one_document_megabytes": num_bytes / 1e6,
        "one_document_seconds_per_megabyte": values[1.0],
        "one_document_time_per_byte_against_a_tenth": values[1.0] / values[0.1],
    }


def measure_against_training(folder: Path) -> dict[str, float]:
    """Returns seconds of a step on one core, with the embedded recipe's model and rows, and seconds to read its row."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    from ulysses_cli.data.prepare import prepare_data
    from ulysses_cli.data.store import open_rows
    from ulysses_cli.plan.recipe.loader import load_recipe

    torch.set_num_threads(1)
    recipe = load_recipe(ROOT / "recipes" / "tiny-cpu.yaml", [f"data.store_dir={folder}/tiny"]).recipe
    rows = open_rows(prepare_data(recipe, 128, lambda _: None).path, "train")
    settings = dict(recipe.model.config or {})
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(settings.pop("model_type"), **settings))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    step_seconds = read_seconds = float("inf")
    for row in range(10):
        start = time.perf_counter()
        part = rows.read(row, 0, rows.max_length)
        lengths = rows.get_lengths(row)
        read_seconds = min(read_seconds, time.perf_counter() - start)
        assert sum(lengths) <= rows.max_length
        start = time.perf_counter()
        logits = model(input_ids=torch.from_numpy(part.input_ids)[None]).logits[0]
        torch.nn.functional.cross_entropy(logits, torch.from_numpy(part.labels)).backward()
        optimizer.step()
        optimizer.zero_grad()
        step_seconds = min(step_seconds, time.perf_counter() - start)
    return {
        "cpu_step_milliseconds": step_seconds * 1e3,
        "read_row_milliseconds": read_seconds * 1e3,
        "reading_faster_than_training": step_seconds / read_seconds,
    }


def make_chat(seed: int) -> list[dict[str, Any]]:
    """60 rounds of thoughts, calls of three tools and results, in one round of the user."""
    draw = random.Random(seed)
    words = ("the", "quick", "brown", "fox", "jumps", "over", "a", "lazy", "dog", "while", "nobody", "looks")

    def say(num_chars: int) -> str:
        return " ".join(draw.choice(words) for _ in range(num_chars // 5))

    messages: list[dict[str, Any]] = [{"role": "system", "content": "You are an agent."}]
    messages.append({"role": "user", "content": say(2000)})
    for at in range(60):
        name = ("bash", "edit", "find")[at % 3]
        arguments = {"bash": {"command": say(200)}, "edit": {"path": "a/b", "line": at, "new": say(200)}}
        function = {"name": name, "arguments": arguments.get(name, {"path": say(20), "number": at})}
        call = {"id": f"c{at}", "type": "function", "function": function}
        content = say(40) if at % 3 else ""
        messages.append({"role": "assistant", "content": content, "reasoning_content": say(300), "tool_calls": [call]})
        messages.append({"role": "tool", "tool_call_id": f"c{at}", "name": name, "content": say(1400)})
    return [*messages, {"role": "assistant", "content": "All done.", "reasoning_content": say(200)}]


AGENT_TEMPLATE = """\
{%- set ns = namespace(last=0) %}{%- for m in messages %}{%- if m.role == 'user' %}{%- set ns.last = loop.index0 %}
{%- endif %}{%- endfor %}{%- for m in messages %}{{- '<|im_start|>' + m.role + '\n' }}
{%- if m.reasoning_content and loop.index0 > ns.last %}{{- '<think>\n' + m.reasoning_content + '\n</think>\n\n' }}
{%- endif %}{{- m.content }}{%- for call in m.tool_calls or [] %}
{{- '<tool_call>\n' + (call.function | tojson) + '\n</tool_call>' }}{%- endfor %}{{- '<|im_end|>\n' }}{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\n' }}{%- endif %}"""


def measure_chats(folder: Path, num_chats: int) -> dict[str, float]:
    """Returns the chats that one core prepares in a second, and how often one is rendered."""
    from ulysses_cli.data.prepare import prepare_data
    from ulysses_cli.data.tokenizing.chat import make_render
    from ulysses_cli.data.tokenizing.targets import TargetChoice, render_chat
    from ulysses_cli.plan.recipe.loader import parse_recipe

    chats = [make_chat(seed) for seed in range(num_chats)]
    file, template = folder / "chats.jsonl", folder / "agent.jinja"
    file.write_text("".join(json.dumps({"messages": chat}) + "\n" for chat in chats))
    template.write_text(AGENT_TEMPLATE)
    text = RECIPE.format(folder=folder, file=file, workers=1, store="chats").replace("32Ki", "128Ki")
    extra = ["data.assistant_only_loss=true", f"data.chat_template={template}"]
    start = os.times()
    with Clock() as clock:
        recipe = parse_recipe(text, "r.yaml", extra).recipe
        report = prepare_data(recipe, 128, lambda _: None).report
    end = os.times()
    assert report["sources"][0]["turns"]["trained"] == 61 * num_chats
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder / "tokenizer")
    tokenizer.chat_template = AGENT_TEMPLATE
    plain, num_renderings = make_render(tokenizer, None), 0

    def render(*words: Any, **more: Any) -> str:
        nonlocal num_renderings
        num_renderings += 1
        return plain(*words, **more)

    seconds = []
    for chat in chats[:NUM_RUNS]:
        num_renderings = 0
        with Clock() as alone:
            render_chat(tokenizer, render, chat, None, ["<|im_end|>"], TargetChoice(answers_only=True))
        seconds.append(alone.cpu)
    children = end.children_user + end.children_system - start.children_user - start.children_system
    return {
        "agent_chat_characters": sum(len(json.dumps(message)) for message in chats[0]),
        "agent_chat_renderings": num_renderings,
        "agent_chat_rendering_seconds": median(seconds),
        "agent_chats_per_cpu_second": num_chats / (clock.cpu + children),
        "agent_chats_per_second": num_chats / clock.wall,
        "agent_chats_prepared": num_chats,
    }


def is_chat_fast(result: dict[str, float]) -> bool:
    return result["agent_chat_renderings"] <= 10 and result["agent_chat_rendering_seconds"] <= 0.1


def run_packing(folder: Path) -> dict[str, float]:
    file = folder / "packing.json"
    subprocess.run([sys.executable, str(ROOT / "benchmarks" / "packing.py"), "--json", str(file)], check=False)
    return {f"packing_{name}": value for name, value in json.loads(file.read_text()).items()}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--megabytes", type=float, default=64)
    parser.add_argument("--document-megabytes", type=float, default=50)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--chats", type=int, default=2000)
    parser.add_argument("--chats-only", action="store_true")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        if options.chats_only:
            train_tokenizer(folder)
            chats = measure_chats(folder, options.chats)
            for key, value in chats.items():
                print(f"{key:<48} {value:.6g}")
            if options.json:
                known = json.loads(options.json.read_text()) if options.json.exists() else {}
                options.json.write_text(json.dumps({**known, **chats}, indent=1) + "\n")
            return int(not is_chat_fast(chats))
        packing = run_packing(folder)  # first, because a process is charged with the memory of the one that starts it
        result = measure_preparing(folder, train_tokenizer(folder), int(options.megabytes * 1e6), options.workers)
        result |= measure_long_documents(folder, int(options.document_megabytes * 1e6))
        result |= measure_against_training(folder)
        result |= measure_chats(folder, options.chats)
        result |= packing
    for key, value in result.items():
        print(f"{key:<48} {value:.6g}")
    if options.json:
        options.json.write_text(json.dumps(result, indent=1) + "\n")
    bars = {
        "prepare at 80 % of the bare rate, one worker": result["share_of_bare_rate_1_worker"] >= 0.8,
        "one document in linear time (within 15 %)": result["one_document_time_per_byte_against_a_tenth"] <= 1.15,
        "rows read 50x faster than a CPU step": result["reading_faster_than_training"] >= 50,
        "a chat of 60 calls in 10 renderings and 0.1 s": is_chat_fast(result),
        "rows 99 % full": result["packing_efficiency"] >= 0.99,
        "work per rank within 3 %": result["packing_work_per_rank_above_mean"] <= 0.03,
        "a million lengths in 20 s": result["packing_pack_seconds"] < 20,
        "and in 1 GB": result["packing_max_rss_gb"] < 1,
        "the cursor in a second": result["packing_locate_seconds"] < 1,
    }
    for bar, is_met in bars.items():
        print(f"{'met   ' if is_met else 'MISSED'} {bar}")
    return int(not all(bars.values()))


if __name__ == "__main__":
    sys.exit(main())
