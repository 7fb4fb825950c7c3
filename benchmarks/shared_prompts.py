"""Measures what one copy of a prompt saves of a step that learns from a pair of answers, on one rank of a CPU in
float32: products, bytes of activations and time, against two copies in the same row; and the time of a pair against
TRL's own trainer. A Llama of two layers; both learn by sigmoid, from random tokens.

TRL is no dependency. Give its folder, such as `pip install trl==1.16.0 --no-deps --target FOLDER` leaves it:

    PYTHONPATH=FOLDER:$PYTHONPATH python benchmarks/shared_prompts.py [--rounds 3]
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import tempfile
import time
from copy import deepcopy
from itertools import pairwise
from pathlib import Path
from typing import Any

os.environ["DS_ACCELERATOR"] = "cpu"
os.environ.setdefault("OMP_NUM_THREADS", "1")
import torch
from paired_steps import take_step
from paths import RESULTS
from torch.utils.flop_counter import FlopCounterMode
from train_cpu import CONFIG, connect

PROMPT, ANSWER = 8192, 500
SHORT_PROMPT, SHORT_ANSWER = 2048, 250
VOCABULARY = 4096
MODEL = {**CONFIG, "num_hidden_layers": 2, "vocab_size": VOCABULARY}
LEARNING = ("train.lr_scheduler_type=constant", "preference.loss=sigmoid")
EIGHT_BILLION = {
    "model_type": "llama", "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32,
    "num_attention_heads": 32, "num_key_value_heads": 8, "vocab_size": 128256, "max_position_embeddings": 131072,
}  # fmt: skip


def make_harness(prompt: int, answer: int, *, is_shared: bool) -> Any:
    """A run on pairs of one length, whose first reference is known."""
    from support.run_harness import RunHarness
    from support.training import MemoryRows, make_recipe

    from ulysses_cli.train.reference import ReferencedRows

    num_tokens, config = 2 * (prompt + answer), {**MODEL, "max_position_embeddings": prompt + answer}
    pair = [(prompt + answer, prompt)] * 2
    rows = MemoryRows([pair] * 4, VOCABULARY, [[0, (prompt - 1) * is_shared]] * 4)
    for documents in rows.documents:  # the same pairs, whether a prompt stands in the row once or twice
        documents[1][0][:prompt] = documents[0][0][:prompt]
    recipe = make_recipe(*LEARNING, f"data.max_length={num_tokens}", config=config)
    harness = RunHarness(recipe, rows, 10**6)
    harness.train_state.rows = ReferencedRows(rows)
    return harness


def count_products(harness: Any) -> int:
    with FlopCounterMode(display=False) as counter:
        take_step(harness)
    return int(counter.get_total_flops())


def count_activations(config: dict[str, Any]) -> dict[str, float]:
    """The most bytes of activations at once, counted on tensors without data: three layers, with the default levers and
    a tiled loss, in bfloat16, and with frozen weights, so that none of them is a gradient of a weight."""
    whole = PROMPT + ANSWER
    rows = {"one copy": ((whole, ANSWER + 1), (0, PROMPT - 1)), "two copies": ((whole, whole), ())}
    counted = {side: _count_bytes(config, lengths, shared) for side, (lengths, shared) in rows.items()}
    return {**counted, "ratio": counted["one copy"] / counted["two copies"]}


def _count_bytes(config: dict[str, Any], lengths: tuple[int, ...], shared: tuple[int, ...]) -> int:
    import torch
    from support.byte_counter import ByteCounter
    from torch._subclasses.fake_tensor import FakeTensorMode
    from transformers import AutoConfig, AutoModelForCausalLM

    from ulysses_cli.plan.levers import compute_loss_tile_tokens
    from ulysses_cli.train.attention.documents import make_documents
    from ulysses_cli.train.attention.interface import register_attention
    from ulysses_cli.train.loss import HeadRule
    from ulysses_cli.train.memory.checkpointing import checkpoint_layers
    from ulysses_cli.train.memory.tiled_loss import make_tiled_loss
    from ulysses_cli.train.processes.groups import NO_AXIS

    documents, num_tokens = make_documents(lengths, shared=shared), sum(lengths)
    values = {**config, "num_hidden_layers": 3, "attn_implementation": register_attention(NO_AXIS, "sdpa", 1)}
    with FakeTensorMode(allow_non_fake_inputs=True):
        made = AutoConfig.for_model(values.pop("model_type"), **values)
        model = AutoModelForCausalLM.from_config(made, dtype=torch.bfloat16)
        model.train().requires_grad_(False)
        model.enable_input_require_grads()
        checkpoint_layers(model, "save_attention")
        tile = compute_loss_tile_tokens(num_tokens, made.vocab_size, made.hidden_size, is_large=False)
        loss = make_tiled_loss(model.lm_head, HeadRule(), tile, implementation="torch")
        ids, counter = torch.empty((1, num_tokens), dtype=torch.long), ByteCounter()
        for parameter in model.parameters():
            counter.track(parameter)
        weights_bytes = counter.now
        with counter:
            positions = torch.arange(num_tokens)[None]
            inputs = {"position_ids": positions, "use_cache": False, "documents": documents}
            loss(model.model(ids, **inputs).last_hidden_state, ids).backward()
    return int(counter.peak - weights_bytes)


def compute_ratio(config: dict[str, Any]) -> float:
    """By formula, as runs count their FLOPs."""
    from ulysses_cli.plan.flops import compute_model_flops
    from ulysses_cli.plan.models.shape import read_model_shape

    shape, targets = read_model_shape(config, "a model"), 2 * ANSWER
    once = compute_model_flops(shape, [PROMPT + ANSWER, ANSWER + 1], targets, [0, PROMPT - 1])
    return once / compute_model_flops(shape, [PROMPT + ANSWER] * 2, targets)


def compare_copies(num_rounds: int) -> dict[str, Any]:
    """Steps of both sides in turns, by the CPU time of this process."""
    sides, seconds = {"one copy": True, "two copies": False}, list[list[float]]()
    harnesses = {side: make_harness(PROMPT, ANSWER, is_shared=is_shared) for side, is_shared in sides.items()}
    products = [count_products(harness) for harness in harnesses.values()]
    for _ in range(num_rounds):
        ends = [time.process_time()]
        for harness in harnesses.values():
            take_step(harness)
            ends.append(time.process_time())
        seconds.append([stop - start for start, stop in pairwise(ends)])
    ratios = [one / two for one, two in seconds]
    result = {
        "prompt": PROMPT,
        "answer": ANSWER,
        "products": {**dict(zip(sides, products, strict=True)), "ratio": products[0] / products[1]},
        "products_by_formula": {"this model": compute_ratio(MODEL), "8B": compute_ratio(EIGHT_BILLION)},
        "peak_activation_bytes_8B": count_activations(EIGHT_BILLION),
        "cpu_seconds": {"steps": seconds, "ratios": ratios, "ratio": statistics.median(ratios)},
        "losses": {side: harness.losses[0] for side, harness in harnesses.items()},
    }
    print(json.dumps(result, indent=1))
    return result


def time_ours(num_pairs: int) -> list[float]:
    """Seconds of each step on one pair, with the forward of its reference, which is computed once before."""
    from ulysses_cli.train.reference import ComputedReferences, ReferenceFile

    harness = make_harness(SHORT_PROMPT, SHORT_ANSWER, is_shared=True)
    state, seconds = harness.train_state, list[float]()
    with tempfile.TemporaryDirectory() as folder:
        references = ComputedReferences(None, state.batching, state, [ReferenceFile(Path(folder) / "a.npz", {}, {})])
        before = time.process_time()
        state.end = len(state.rows)
        references.fill(state, lambda _: None, is_fresh=True)
        reference = (time.process_time() - before) / len(state.rows)
    state.end = 10**6
    for _ in range(num_pairs):
        before = time.process_time()
        take_step(harness)
        seconds.append(time.process_time() - before + reference)
    return seconds[1:]


def time_trl(num_pairs: int) -> list[float]:
    """Of its trainer with its defaults, in float32 and one pair at a time: it computes the reference in each step."""
    from datasets import Dataset
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedTokenizerFast, TrainerCallback
    from trl import DPOConfig, DPOTrainer

    words = {f"w{number}": number for number in range(VOCABULARY)}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="w0"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="w1", pad_token="w2", unk_token="w0")
    generator = torch.Generator().manual_seed(5)

    def write(number: int) -> str:
        return "".join(f"w{word} " for word in torch.randint(3, len(words), (number,), generator=generator).tolist())

    sizes = {"prompt": SHORT_PROMPT, "chosen": SHORT_ANSWER - 1, "rejected": SHORT_ANSWER - 1}  # it adds an end
    pairs = Dataset.from_list([{name: write(number) for name, number in sizes.items()} for _ in range(4)])
    torch.manual_seed(3)
    config = AutoConfig.for_model(**{**MODEL, "max_position_embeddings": SHORT_PROMPT + SHORT_ANSWER})
    model = AutoModelForCausalLM.from_config(config, attn_implementation="sdpa")
    ends = [time.process_time()]

    class Clock(TrainerCallback):  # type: ignore[misc]
        def on_step_end(self, *_: Any, **__: Any) -> None:
            ends.append(time.process_time())

    with tempfile.TemporaryDirectory() as folder:
        settings = DPOConfig(
            folder, use_cpu=True, bf16=False, per_device_train_batch_size=1, max_steps=num_pairs, max_length=None,
            report_to="none", save_strategy="no", logging_steps=10**6, disable_tqdm=True,
        )  # fmt: skip
        own = {"args": settings, "train_dataset": pairs, "processing_class": fast, "callbacks": [Clock()]}
        DPOTrainer(model, deepcopy(model), **own).train()
    return [stop - start for start, stop in pairwise(ends)][1:]


def compare_with_trl(num_rounds: int) -> dict[str, Any]:
    """TRL's trainer goes first, as a process that no launcher has started."""
    import trl

    rank = {name: os.environ.pop(name) for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK")}
    seconds = {"trl": time_trl(1 + num_rounds)}
    os.environ.update(rank)
    connect()
    seconds["ours"] = time_ours(1 + num_rounds)
    medians = {side: statistics.median(values) for side, values in seconds.items()}
    result = {
        "prompt": SHORT_PROMPT,
        "answer": SHORT_ANSWER,
        "trl": trl.__version__,
        "cpu_seconds_of_a_pair": {**medians, "ratio": medians["ours"] / medians["trl"]},
        "least": {side: min(values) for side, values in seconds.items()},
        "most": {side: max(values) for side, values in seconds.items()},
    }
    print(json.dumps(result, indent=1))
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=3)
    num_rounds = parser.parse_args().rounds
    result = {"model": MODEL, "rounds": num_rounds, "against_trl": compare_with_trl(num_rounds)}
    result["against_two_copies"] = compare_copies(num_rounds)
    (RESULTS / "shared-prompts-cpu.json").write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
