"""Rows of two answers to one prompt, in the columns that data sets have, and the tokens that both answers share."""

from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.prepared import prepare_rows, walk_alone
from support.refusals import explain
from support.templates import CHATML, LAST_ROUND
from support.tiers import count_examples
from support.tokenizers_trained import train, wrap
from syrupy.assertion import SnapshotAssertion

from ulysses_cli.data.prepare import Prepared
from ulysses_cli.data.store import WANTED
from ulysses_cli.data.tokenizing.encoder import Encoder, EncoderSettings
from ulysses_cli.data.tokenizing.tokenizer import make_bytes_tokenizer
from ulysses_cli.data.tokenizing.workers import TokenPair, encode_pair
from ulysses_cli.readers.columns import read_sample
from ulysses_cli.readers.pairs import Pair, read_pair
from ulysses_cli.readers.problems import BadRow, DataError

ASK, YES, NO = "Is it?", "Yes, it is.", "No."
USER = {"role": "user", "content": ASK}


def say(text: str) -> list[dict[str, Any]]:
    return [{"role": "assistant", "content": text}]


@cache
def make_encoder() -> Encoder:
    tokenizer = wrap(train("qwen"), chat_template=CHATML)
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|im_start|>", "<|im_end|>"]})
    return Encoder(tokenizer, EncoderSettings())


def show(pair: TokenPair) -> list[str]:
    """The targets of each branch, as text."""
    decode = make_encoder().tokenizer.decode
    return [decode(branch.ids[branch.is_target]) for branch in (pair.chosen, pair.rejected)]


def check_shared(pair: TokenPair) -> None:
    """By the definition: shared tokens are the same in both, none is a target or predicts one, and one more would not
    do."""
    branches, num_shared = (pair.chosen, pair.rejected), pair.num_shared

    def can_share(number: int) -> bool:
        is_same = list(pair.chosen.ids[:number]) == list(pair.rejected.ids[:number])
        return is_same and not any(branch.is_target[1 : number + 1].any() for branch in branches)

    assert can_share(num_shared)
    assert num_shared == min(len(branch.ids) for branch in branches) - 1 or not can_share(num_shared + 1)


CHATS: list[dict[str, Any]] = [
    {"prompt": [USER], "chosen": say(YES), "rejected": say(NO)},
    {"prompt": [USER], "chosen": YES, "rejected": NO},
    {"chosen": [USER, *say(YES)], "rejected": [USER, *say(NO)]},
    {"prompt": ASK, "chosen": [USER, *say(YES)], "rejected": [USER, *say(NO)]},  # UltraFeedback
    {"prompt": ASK, "chosen": say(YES), "rejected": say(NO)},
    {"messages": [USER, *say(YES)], "rejected_response": NO},
    {"messages": [USER, *say(YES)], "rejected_response": say(NO)},
    {"chosen": [USER, *say(YES)], "rejected": [USER, *say(NO)], "messages": [USER, *say(YES)]},
]


@pytest.mark.parametrize("row", CHATS, ids=lambda row: "+".join(row))
def test_chats_in_any_columns_are_the_same_pair(row: dict[str, Any]) -> None:
    first = read_pair(CHATS[0])
    assert read_pair(row) == first
    pair = encode_pair(make_encoder(), read_pair(row))
    chosen, rejected = show(pair)
    assert (chosen.replace("<|im_end|>", "").strip(), rejected.replace("<|im_end|>", "").strip()) == (YES, NO)
    check_shared(pair)
    assert make_encoder().tokenizer.decode(pair.chosen.ids[: pair.num_shared]).endswith("assistant")


WORDS = st.sampled_from(["token", "tokens", " token", "2", "20", "0", "ing", " the", "the", ".", " ", "\n", "ab", "é"])
TEXTS = st.lists(WORDS, min_size=1, max_size=6).map("".join)


@settings(max_examples=count_examples(200), deadline=None)
@given(TEXTS, TEXTS, TEXTS, st.booleans())
def test_branches_are_tokens_of_whole_texts(prompt: str, chosen: str, rejected: str, has_prompt: bool) -> None:
    """A tokenizer may merge the end of the prompt with an answer's beginning, and not with the other's."""
    row = {"prompt": prompt, "chosen": chosen, "rejected": rejected}
    if not has_prompt:
        row = {"chosen": prompt + chosen, "rejected": prompt + rejected}
    encoder = make_encoder()
    try:
        pair = encode_pair(encoder, read_pair(row))
    except BadRow as error:
        assert chosen == rejected or not chosen.strip() or not rejected.strip(), error
        return
    for branch, answer in ((pair.chosen, chosen), (pair.rejected, rejected)):
        assert list(branch.ids) == list(encoder.encode_texts([prompt + answer])[0])
    check_shared(pair)


def test_answers_with_the_same_tokens_or_without_a_target_are_refused(snapshot: SnapshotAssertion) -> None:
    sample = read_pair({"prompt": ASK, "chosen": YES, "rejected": NO})
    nothing = read_sample("tokens", {"input_ids": [5, 6, 7], "labels": [-100, -100, -100]})
    chosen = read_sample("tokens", {"input_ids": [5, 6, 8], "labels": [-100, 6, 8]})
    pairs = (Pair(sample.chosen, sample.chosen), Pair(chosen, nothing))
    assert [explain(encode_pair, make_encoder(), pair, error=BadRow) for pair in pairs] == snapshot


def test_the_end_mark_is_what_an_answer_says_after_the_other_ones_beginning() -> None:
    pair = encode_pair(make_encoder(), read_pair({"chosen": "It is.", "rejected": "It is. No."}))
    assert show(pair) == ["</s>", " No.</s>"]
    check_shared(pair)


CHATML_TOKENS = "data.added_tokens=['<|im_start|>', '<|im_end|>']"


def prepare(folder: Path, rows: list[dict[str, Any]], *overrides: str, can_share: bool = False) -> Prepared:
    return prepare_rows(folder, rows, "preference={loss: sigmoid}", *overrides, can_share=can_share)


def read_pairs(prepared: Prepared, split: Any = "train") -> list[tuple[str, str, str]]:
    """Of each two documents: what stands in both without being a target, and the targets of each."""
    documents, decode = [], make_bytes_tokenizer().decode
    for tokens, part, shared in walk_alone(prepared, split):
        is_target = part.labels >= 0
        prompt = tokens[: shared + int(np.argmax(is_target)) + 1]
        documents.append((decode(prompt), decode(part.labels[is_target])))
    pairs = list(zip(documents[0::2], documents[1::2], strict=True))
    assert all(prompt == same for (prompt, _), (same, _) in pairs)
    return [(prompt, chosen, rejected) for (prompt, chosen), (_, rejected) in pairs]


ROWS = [
    {"prompt": f"Q{n}? ", "chosen": f"yes {n}" * (1 + n % 3), "rejected": f"no {n}" * (1 + n % 2)} for n in range(9)
]


@pytest.mark.parametrize("shares", [False, True])
@pytest.mark.parametrize("packing", ["documents", "off"])
def test_both_answers_of_a_pair_stand_in_one_row(
    tmp_path: Path, packing: str, shares: bool, snapshot: SnapshotAssertion
) -> None:
    prepared = prepare(tmp_path, ROWS, f"data.packing={packing}", can_share=shares)
    expected = [(row["prompt"], row["chosen"] + "<|end|>", row["rejected"] + "<|end|>") for row in ROWS]
    assert sorted(read_pairs(prepared)) == sorted(expected)
    train = prepared.report["splits"]["train"]
    assert train["num_rows"] == 9 if packing == "off" else train["num_rows"] < 9
    assert train["num_targets"] == sum(len(row["chosen"]) + len(row["rejected"]) + 2 for row in ROWS)
    whole = sum(2 * len(row["prompt"]) + len(row["chosen"]) + len(row["rejected"]) + 2 for row in ROWS)
    repeated = sum(len(row["prompt"]) - 1 for row in ROWS)  # the last token predicts another one in each
    assert train["num_tokens"] == whole - repeated * shares
    assert prepared.report["notes"] == snapshot(name=f"shares {shares}")


def test_a_pair_fits_into_a_row_that_holds_its_prompt_once(tmp_path: Path, snapshot: SnapshotAssertion) -> None:
    rows = [*ROWS, {"prompt": "p" * 40, "chosen": "yes", "rejected": "no"}]
    assert explain(prepare, tmp_path, rows, error=DataError) == snapshot(name="two prompts")
    assert len(read_pairs(prepare(tmp_path, rows, can_share=True))) == 10
    rows[-1]["prompt"] += "p" * 20
    assert explain(prepare, tmp_path, rows, can_share=True, error=DataError) == snapshot(name="one prompt")


def test_all_pairs_of_a_prompt_are_evaluated_or_trained_on(tmp_path: Path) -> None:
    rows = [{**row, "prompt": f"Question {at % 5}? "} for at, row in enumerate(ROWS)]
    prepared = prepare(tmp_path, rows, "data.eval_split=0.3", "data.datasets.0.weight=2")
    trained, held_out = read_pairs(prepared), read_pairs(prepared, "eval")
    assert {prompt for prompt, *_ in trained}.isdisjoint(prompt for prompt, *_ in held_out)
    assert len(held_out) + len(trained) / 2 == 9
    assert sorted(trained)[0::2] == sorted(trained)[1::2]


def think(thought: str, text: str) -> dict[str, Any]:
    return {"role": "assistant", "content": text, "reasoning_content": thought}


THINKING = {"prompt": [USER], "chosen": [think("why", "yes")], "rejected": [think("hm", "no")]}
WAITING = {
    name: [USER, {"role": "assistant", "content": "wait", "weight": 0}, USER, *say(text)]
    for name, text in (("chosen", YES), ("rejected", NO))
}
TARGETS = {
    "data.thoughts=train": (THINKING, ["<think>\nwhy\n</think>\n\nyes", "<think>\nhm\n</think>\n\nno"]),
    "data.thoughts=mask": (THINKING, ["<think>\n\n</think>\n\nyes", "<think>\n\n</think>\n\nno"]),
    "data.thoughts=drop": (THINKING, ["yes", "no"]),
    "data.train_on_turns=all": (WAITING, [YES, NO]),  # of turns that a field leaves out
}


@pytest.mark.parametrize("shares", [False, True])
@pytest.mark.parametrize("word", TARGETS)
def test_thoughts_and_turns_are_left_out_of_both_answers(tmp_path: Path, word: str, shares: bool) -> None:
    (tmp_path / "t.jinja").write_text(LAST_ROUND)
    row, expected = TARGETS[word]
    words = (word, f"data.chat_template={tmp_path / 't.jinja'}", CHATML_TOKENS, "data.max_length=512")
    labels = [part.labels for _, part, _ in walk_alone(prepare(tmp_path, [row], *words, can_share=shares))]
    # markers have ids of their own
    assert [bytes(each[(each >= 0) & (each < 256)].tolist()).decode() for each in labels] == expected


@pytest.mark.parametrize("is_chat", [False, True])
def test_answers_with_labels_stand_before_the_same_prompt_with_another_answer(tmp_path: Path, is_chat: bool) -> None:
    texts = [(f"Q{n}? ", f"answer {n}", bool(n % 3)) for n in range(8)]
    rows: list[dict[str, Any]] = [{"prompt": p, "completion": c, "label": label} for p, c, label in texts]
    words = ["preference.loss=kto", "data.max_length=192"]
    if is_chat:
        words += ["data.chat_template=chatml", CHATML_TOKENS]
        rows = [{**row, "prompt": [{"role": "user", "content": row["prompt"]}], "completion": say(row["completion"])}
                for row in rows]  # fmt: skip
    found, decode = [], make_bytes_tokenizer().decode
    for tokens, part, _ in walk_alone(prepare(tmp_path, rows, *words)):
        (wanted,) = {*((part.classes[(part.labels >= 0)] & WANTED) > 0).tolist()}
        found.append((decode(tokens), wanted))
    for (own, wanted), (other, never) in zip(found[0::2], found[1::2], strict=True):
        at = next(at for at, (prompt, *_) in enumerate(texts) if prompt.strip() in own)
        assert texts[at][1] in own
        assert wanted == texts[at][2]
        assert texts[at][0].strip() in other
        assert texts[at - 1][1] in other
        assert not never
    assert len(found) == 16
