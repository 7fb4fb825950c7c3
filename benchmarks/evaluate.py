"""Measures what `ulysses evaluate` costs: reading a prompt and decoding against transformers' `generate` on one rank,
bytes of cache and activations on one rank and on four beside the ledger's prediction, and the making of tasks.

Times are CPU seconds of one thread, so that other programs on the machine count less. The two sides run in turn.

    python benchmarks/evaluate.py [cost] [memory] [tasks] [--tokens 4096] [--runs 5] [--json FILE]
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from random import Random
from typing import Any

import torch
from metering import list_open_ops
from support.byte_counter import ByteCounter
from support.prompters import make_prompter
from torch import Tensor

from ulysses_cli.commands.children.evaluating import FoundModel, ModelQuestion, prepare_model
from ulysses_cli.data.tokenizing.pieces import list_parting_letters
from ulysses_cli.evaluate.suites import Amount, Sources, make_prompts, plan_suites
from ulysses_cli.plan.models.shape import read_model_shape
from ulysses_cli.plan.planner.generation import predict
from ulysses_cli.plan.planner.lever_choice import choose_levers
from ulysses_cli.plan.recipe.loader import parse_recipe
from ulysses_cli.plan.resolved import make_layout, settle
from ulysses_cli.prove.ranks import run_on_ranks
from ulysses_cli.train.engine import Engine
from ulysses_cli.train.generation.decoding import generating
from ulysses_cli.train.model.build import build_for_answers
from ulysses_cli.train.processes.groups import make_groups

CONFIG: dict[str, Any] = {
    "model_type": "llama",
    "hidden_size": 512,
    "intermediate_size": 1024,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "vocab_size": 260,
    "max_position_embeddings": 1 << 17,
}
NUM_NEW = 32
BARS = {"prefill": 1.05, "decode": 1.2, "memory": 0.35, "prediction": 0.05, "tasks": 60.0}
TASK_LENGTH, NUM_SAMPLES = 1 << 17, 20


def save_model(folder: Path, **changes: Any) -> str:
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(AutoConfig.for_model(**{**CONFIG, **changes})).save_pretrained(folder)
    return str(folder)


def describe_model(folder: str, tokens: int, num_ranks: int) -> str:
    question = ModelQuestion(num_ranks, num_ranks, tokens + NUM_NEW + 1, "float32", "bytes", "cpu", False)
    return prepare_model(FoundModel(folder), None, question, online=False)[0]


def load(text: str) -> Engine:
    """Collective over all ranks: the engine with which `evaluate` answers."""
    recipe = parse_recipe(text, "evaluate", []).recipe
    shape = read_model_shape(json.loads((Path(recipe.model.name_or_path or "") / "config.json").read_text()), "model")
    plan = settle(recipe, shape, choose_levers(recipe, shape, None).levers)
    return build_for_answers(plan, make_groups(make_layout(recipe), timedelta(minutes=10)), torch.device("cpu"))


class Stamps:
    """Notes the CPU time after each forward."""

    def __init__(self) -> None:
        self.times: list[float] = []

    def start(self) -> None:
        self.times = [time.process_time()]

    def note(self, *_: object) -> None:
        self.times.append(time.process_time())


def measure_costs(_: object, text: str, folder: str, tokens: int, runs: int) -> dict[str, Any]:
    """One rank: CPU seconds until the first token, and the median of those of each later one. A prompt's first token
    is known after two forwards of ours, and after one of transformers'."""
    from transformers import AutoModelForCausalLM

    torch.set_num_threads(1)
    engine = load(text)
    plain: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="sdpa").eval()
    prompt = torch.randint(3, 250, (tokens,), generator=torch.Generator().manual_seed(1)).tolist()
    ids, stamps = torch.tensor([prompt]), Stamps()
    plain.register_forward_hook(stamps.note)
    answers: dict[str, list[int]] = {}
    with generating(engine) as generator:
        forward = generator.forward

        def run_and_note(*args: Any) -> Tensor:
            logits = forward(*args)
            stamps.note()
            return logits

        generator.forward = run_and_note  # type: ignore[assignment]

        def ask_ours() -> None:
            generator.read([prompt])
            (answers["ours"],) = generator.generate(NUM_NEW)
            del stamps.times[1]

        def ask_plain() -> None:
            out = plain.generate(
                ids, attention_mask=torch.ones_like(ids), max_new_tokens=NUM_NEW, do_sample=False, eos_token_id=None,
                pad_token_id=0,
            )  # fmt: skip
            answers["transformers"] = out[0, tokens:].tolist()

        sides: dict[str, Callable[[], None]] = {"ours": ask_ours, "transformers": ask_plain}
        prefill: dict[str, list[float]] = {name: [] for name in sides}
        steps: dict[str, list[list[float]]] = {name: [] for name in sides}
        for _ in range(1 + runs):
            for name, ask in sides.items():
                stamps.start()
                ask()
                took = [after - before for before, after in zip(stamps.times, stamps.times[1:], strict=False)]
                prefill[name].append(took[0])
                steps[name].append(took[1:])
    assert answers["ours"] == answers["transformers"], "the two sides gave different tokens"
    decode = {name: [statistics.fmean(each) for each in own] for name, own in steps.items()}

    def compare(times: dict[str, list[float]]) -> float:
        pairs = zip(times["ours"][1:], times["transformers"][1:], strict=True)
        return round(statistics.median(ours / theirs for ours, theirs in pairs), 3)

    return {
        "prompt_tokens": tokens,
        "prefill_ratio": compare(prefill),
        "decode_ratio": compare(decode),
        "prefill_seconds": {name: round(statistics.median(own[1:]), 4) for name, own in prefill.items()},
        "decode_seconds": {name: round(statistics.median(own[1:]), 5) for name, own in decode.items()},
        # of the median run's tokens: the first, and those after the first eight
        "first_steps_ms": {name: [round(1e3 * each, 2) for each in own[-1][:4]] for name, own in steps.items()},
        "later_steps_ms": {name: round(1e3 * statistics.median(own[-1][8:]), 2) for name, own in steps.items()},
    }


class OpenCounter(ByteCounter):
    """Counts inside this tool's own operators too."""

    def __init__(self) -> None:
        super().__init__()
        self.open_ops = list_open_ops()

    def run(self, op: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        if op.name() in self.open_ops:
            with self:
                return self.open_ops[op.name()](*args, **kwargs)
        return op(*args, **kwargs)


def count_memory(_: object, text: str, tokens: int) -> dict[str, int]:
    """Bytes of the cache, and the most bytes alive at once that generation made, on rank 0. Weights are gathered
    before."""
    engine = load(text)
    prompt = torch.randint(3, 250, (tokens,), generator=torch.Generator().manual_seed(1)).tolist()
    counter = OpenCounter()
    with generating(engine, gathers_once=True) as generator:
        counter.ignore(*engine.wrapped.module.parameters())
        with counter:
            generator.read([prompt])
            prefill = counter.peak
            generator.generate(NUM_NEW)
        return {"cache": generator.cache.count_bytes(), "prefill": prefill, "peak": counter.peak}


def measure_memory(folder: str, tokens: int) -> dict[str, Any]:
    shape = read_model_shape(json.loads((Path(folder) / "config.json").read_text()), folder)
    found: dict[str, Any] = {"prompt_tokens": tokens}
    for num_ranks in (1, 4):
        counted = run_on_ranks(num_ranks, count_memory, describe_model(folder, tokens, num_ranks), tokens)
        predicted = predict(shape, tokens, num_ranks, num_ranks, 4, NUM_NEW)
        found[f"sp {num_ranks}"] = {
            "counted": counted,
            "predicted": {"cache": predicted["cache_bytes"], "prefill": predicted["prefill_bytes"]},
            "prediction_error": {
                name: round(predicted[f"{name}_bytes"] / counted[name] - 1, 4) for name in ("cache", "prefill")
            },
        }
    found["ratio"] = round(found["sp 4"]["counted"]["peak"] / found["sp 1"]["counted"]["peak"], 3)
    return found


def train_tokenizer(text: str) -> Any:
    """Byte pairs of the tasks' own words: about four characters are a token, as in a large tokenizer."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    made = Tokenizer(models.BPE())
    made.pre_tokenizer, made.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    made.train_from_iterator([text], trainers.BpeTrainer(vocab_size=8000, initial_alphabet=alphabet))
    return PreTrainedTokenizerFast(tokenizer_object=made, eos_token=None)


def write_questions(folder: Path) -> Sources:
    """Files of the form of SQuAD and HotpotQA, with as many words as theirs: made of sentences."""
    from ulysses_cli.evaluate.sample import draw_sentence

    random = Random(0)
    paragraphs = [" ".join(draw_sentence(random) for _ in range(8)) for _ in range(3000)]
    squad = {
        "data": [
            {"paragraphs": [{"context": each, "qas": [{"question": "Who?", "answers": [{"text": each[:9]}]}]}]}
            for each in paragraphs
        ]
    }
    hotpot = [
        {"question": "Which?", "answer": each[:9], "context": [[f"t{at}", [each]]], "supporting_facts": [[f"t{at}", 0]]}
        for at, each in enumerate(paragraphs)
    ]
    for name, content in (("squad", squad), ("hotpot", hotpot)):
        (folder / f"{name}.json").write_text(json.dumps(content))
    return Sources(squad=folder / "squad.json", hotpotqa=folder / "hotpot.json")


def measure_tasks(num_samples: int) -> dict[str, Any]:
    """CPU seconds of making RULER's 13 tasks, on one thread."""
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    with tempfile.TemporaryDirectory() as folder:
        plan = plan_suites(["ruler"], write_questions(Path(folder)))
        samples = [task.make(Random(0), 4096)(300).content for task in plan.tasks]
        tokenizer = train_tokenizer("\n".join(samples))
        prompter = make_prompter(tokenizer, letters=list_parting_letters(tokenizer))
        started, counts, by_task = time.process_time(), list[int](), dict[str, float]()
        for prompt in make_prompts(plan, prompter, Amount((TASK_LENGTH,), num_samples), lambda _: None):
            now = time.process_time()
            counts.append(len(prompt.tokens) + prompt.sample.max_new_tokens)
            by_task[prompt.sample.task] = by_task.get(prompt.sample.task, 0.0) + now - started - sum(by_task.values())
    assert set(counts) == {TASK_LENGTH}
    return {
        "samples": len(counts),
        "tokens": TASK_LENGTH,
        "cpu_seconds": round(sum(by_task.values()), 2),
        "cpu_seconds_of_260": round(sum(by_task.values()) * 13 * NUM_SAMPLES / len(counts), 2),
        "by_task": {name: round(seconds, 2) for name, seconds in by_task.items()},
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parts", nargs="*", help="cost, memory, tasks")
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--samples", type=int, default=NUM_SAMPLES)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    parts = options.parts or ["cost", "memory", "tasks"]
    facts = json.loads(options.json.read_text()) if options.json and options.json.exists() else {}
    passed, load = True, round(os.getloadavg()[0], 1)
    with tempfile.TemporaryDirectory() as folder:
        model = save_model(Path(folder))
        if "cost" in parts:
            text = describe_model(model, options.tokens, 1)
            facts["cost"] = cost = run_on_ranks(1, measure_costs, text, model, options.tokens, options.runs)
            cost["load"] = load
            print(f"prefill {cost['prefill_ratio']} (bar {BARS['prefill']}), decode {cost['decode_ratio']} "
                  f"(bar {BARS['decode']}) of transformers' CPU time: {cost}")  # fmt: skip
            passed &= cost["prefill_ratio"] <= BARS["prefill"] and cost["decode_ratio"] <= BARS["decode"]
        if "memory" in parts:
            facts["memory"] = memory = measure_memory(model, options.tokens)
            print(f"bytes of a rank on sp 4, of those on sp 1: {memory['ratio']} (bar {BARS['memory']}): {memory}")
            errors = [abs(error) for size in (1, 4) for error in memory[f"sp {size}"]["prediction_error"].values()]
            passed &= memory["ratio"] <= BARS["memory"] and max(errors) <= BARS["prediction"]
    if "tasks" in parts:
        facts["tasks"] = tasks = measure_tasks(options.samples)
        tasks["load"] = load
        print(f"{tasks['samples']} samples of {tasks['tokens']:,} tokens: {tasks['cpu_seconds']} CPU s, and "
              f"{tasks['cpu_seconds_of_260']} for 260 (bar {BARS['tasks']:.0f}): {tasks}")  # fmt: skip
        passed &= tasks["cpu_seconds_of_260"] <= BARS["tasks"]
    if options.json:
        options.json.write_text(json.dumps(facts, indent=1) + "\n")
    return 0 if passed else 1


if __name__ == "__main__":
    sys.exit(main())
