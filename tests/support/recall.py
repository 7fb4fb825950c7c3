"""A recall task for a tiny model: needles of `ulysses evaluate` from other seeds, with their answers as targets."""

import json
import re
from pathlib import Path
from random import Random
from typing import Any

from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from support.prompters import make_prompter
from ulysses_cli.evaluate.made_tasks import list_needle_tasks
from ulysses_cli.evaluate.sample import fill_up

TASK = "niah_single_1"
PIECES = r" ?[A-Za-z]+|[^\w\s]|\s|\w"
NUM_DIGITS = 7
# A letter for each digit at each place of a number. So the next digit of an answer is found by its letter alone. With
# plain digits a tiny model must first learn which one stands after which, and that takes several times as long.
LETTERS = {(place, digit): chr(0x100 + 10 * place + digit) for place in range(NUM_DIGITS) for digit in range(10)}
NUM_DRAFTS = 400  # from which the tokenizer takes its words
MAX_UNITS = 25  # of haystack: about 900 tokens
# Of the documents. They are a number and its copy, and hold most of the targets: attention over few tokens is learned
# in tens of steps, and then serves for many.
SHORT_SHARE = 0.9
SIZES = {
    "model_type": "llama",  # without norms of queries and keys, which limit how sharp attention can be
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 4096,
    "tie_word_embeddings": True,
    "initializer_range": 0.1,  # with the usual 0.02 so narrow a model begins on a long plateau
}


class RecallTask:
    """A tokenizer of whole words, and documents: prompts with one needle, or a number alone, and the answer."""

    def __init__(self, seed: int = 0) -> None:
        self.random = Random(f"recall {seed}")
        (self.task,) = (task for task in list_needle_tasks() if task.name == TASK)
        self.tokenizer = self._make_tokenizer()
        self.prompter = make_prompter(self.tokenizer)

    def _make_tokenizer(self) -> Any:
        found = dict.fromkeys(LETTERS.values())
        for _ in range(NUM_DRAFTS):
            sample = self.task.make(self.random, 0)(1)
            text = re.sub(r"\d+", "", f"{sample.content}\n{sample.answer_prefix}")
            found.update(dict.fromkeys(re.findall(PIECES, text)))
        words = ["<unk>", "<eos>", *found]
        made = Tokenizer(models.WordLevel({word: at for at, word in enumerate(words)}, unk_token="<unk>"))
        forth = [
            normalizers.Replace(Regex(rf"{digit}(?=\w{{{NUM_DIGITS - 1 - place}}}\b)"), letter)
            for (place, digit), letter in LETTERS.items()
        ]
        back = [decoders.Replace(letter, str(digit)) for (_, digit), letter in LETTERS.items()]
        made.normalizer, made.decoder = normalizers.Sequence(forth), decoders.Sequence([*back, decoders.Fuse()])
        made.pre_tokenizer = pre_tokenizers.Split(Regex(PIECES), "isolated")
        return PreTrainedTokenizerFast(tokenizer_object=made, eos_token="<eos>", unk_token="<unk>")

    def make_document(self) -> dict[str, list[int]]:
        num_units = int((MAX_UNITS + 1) ** self.random.random()) - 1
        sample = fill_up(self.task.make(self.random, 0)(num_units), self.prompter.fill * self.random.randrange(4))
        (number,) = sample.references
        is_short = self.random.random() < SHORT_SHARE
        prompt = self._encode(f" is: {number}.\n is") if is_short else self.prompter.encode(sample)
        answer = self._encode(f" {number}.<eos>")
        return {"input_ids": [*prompt, *answer], "labels": [-100] * len(prompt) + answer}

    def _encode(self, text: str) -> list[int]:
        tokens: list[int] = self.tokenizer(text, add_special_tokens=False)["input_ids"]
        return tokens

    def write(self, folder: Path, num_documents: int) -> dict[str, Any]:
        """Writes tokenizer and documents. Returns the recipe's sections about model and data."""
        self.tokenizer.save_pretrained(folder / "tokenizer")
        with open(folder / "recall.jsonl", "w", encoding="utf-8") as stream:
            for _ in range(num_documents):
                stream.write(json.dumps(self.make_document()) + "\n")
        ends = {"eos_token_id": self.tokenizer.eos_token_id, "bos_token_id": None, "pad_token_id": None}
        config = {**SIZES, **ends, "vocab_size": len(self.tokenizer)}
        return {
            "model": {"config": config, "tokenizer": str(folder / "tokenizer"), "dtype": "float32"},
            "data": {"datasets": [{"path": str(folder / "recall.jsonl")}], "max_length": 2048},
        }
