"""Tests that long documents in pieces give the same tokens as whole, for every kind of tokenizer, or stay whole."""

import random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.tiers import count_examples, sample
from support.tokenizers_trained import CORPUS, KINDS, train, wrap
from syrupy.assertion import SnapshotAssertion
from tokenizers import Regex, Tokenizer, models, normalizers, pre_tokenizers

from ulysses_cli.data.tokenizing.encoder import Encoder
from ulysses_cli.data.tokenizing.pieces import find_cut_rule
from ulysses_cli.data.tokenizing.tokenizer import make_bytes_tokenizer

ALPHABET = "abzZéÄßñ '.,:!?\n\t\r  12(){}_-/你好せ한сПΣ\u0301\u00a0\u3000😀<|>"
PIECES = [
    "<|im_end|>", "</s>", "<unk>", "it's ", "  \n\n", "word word ", "\r\n", "don't\n", "a 你好 b\n", " \n x", "``",
]  # fmt: skip
TEXT = st.lists(st.text(ALPHABET, max_size=6) | st.sampled_from(PIECES), max_size=60).map("".join)


class ShortPieces(Encoder):
    """Cuts small texts many times, by the rule alone."""

    piece_chars = 12

    def _is_exact(self, text: str, at: int) -> bool:
        return True


@pytest.mark.parametrize("kind", sample(KINDS, quick=["qwen", "gemma"]))
def test_pieces_give_the_tokens_of_the_whole(kind: str) -> None:
    encoder = ShortPieces(wrap(train(kind)))
    assert encoder.rule.before, encoder.rule.reason
    num_cut = 0

    @settings(max_examples=count_examples(250))
    @given(TEXT)
    def check(text: str) -> None:
        nonlocal num_cut
        encoder.num_in_pieces = 0
        ids, bounds = encoder.encode_long(text, with_bounds=True)
        whole = encoder.backend.encode(text, add_special_tokens=False)
        assert ids.tolist() == whole.ids == encoder.encode_long(text)[0].tolist()
        num_cut += encoder.num_in_pieces
        assert bounds.tolist() == [list(bound) for bound in whole.offsets]

    check()
    assert num_cut > 5


@pytest.mark.parametrize("with_bounds", [False, True])
def test_the_library_gets_few_pieces_at_a_time(with_bounds: bool) -> None:
    """What it returns takes about 150 bytes per token: 64 pieces of a row of bytes took 2.4 GB."""
    encoder, sizes = ShortPieces(make_bytes_tokenizer()), list[int]()
    text = "a row of many words " * 100

    class Counted:
        def __getattr__(self, name: str) -> Any:
            def call(texts: list[str], **more: Any) -> Any:
                sizes.append(sum(map(len, texts)))
                return getattr(real, name)(texts, **more)

            return call

    real = encoder.backend
    encoder.backend = encoder.continuation = Counted()
    ids, bounds = encoder.encode_long(text, with_bounds=with_bounds)
    assert bytes(ids.tolist()) == text.encode()
    assert bounds.itemsize == 4
    assert sum(sizes) == len(text) > 8 * max(sizes)
    assert max(sizes) <= 8 * 2 * 12


@pytest.mark.parametrize("kind", sample(KINDS, quick=["qwen", "gemma"]))
def test_documents_have_the_tokens_of_transformers(kind: str) -> None:
    tokenizer = wrap(train(kind))
    encoder = Encoder(tokenizer)
    texts = [*CORPUS[:4], "x", "".join(CORPUS)]
    for text, ids in zip(texts, encoder.encode_texts(texts), strict=True):
        assert ids.tolist() == [*tokenizer(text)["input_ids"], tokenizer.eos_token_id]


@pytest.mark.parametrize("kind", sample(KINDS, quick=[], checked=["gpt2"]))
def test_a_long_document_is_cut_and_keeps_its_tokens(kind: str) -> None:
    draw = random.Random(0)
    text = " ".join(draw.choice(CORPUS)[draw.randrange(20) :] for _ in range(20_000))
    encoder = Encoder(wrap(train(kind)))
    ids, _ = encoder.encode_long(text)
    assert (encoder.num_in_pieces, encoder.num_whole) == (1, 0)
    assert ids.tolist() == encoder.backend.encode(text, add_special_tokens=False).ids


def make_odd(name: str) -> Tokenizer:
    made = Tokenizer(models.BPE(vocab={"a": 0, " ": 1, "a b": 2, "</s>": 3, "<unk>": 4}, merges=[]))
    if name == "pattern":
        made.pre_tokenizer = pre_tokenizers.Split(Regex(r"\w+ \w+"), "isolated")
    elif name == "normalizer":
        made.normalizer = normalizers.Replace(Regex(r"a b"), "c")
    elif name == "unigram":
        made = Tokenizer(models.Unigram([("<unk>", 0.0), ("a", -1.0), ("aa", -2.0)], unk_id=0))
    elif name == "added":
        made.add_tokens(["new york"])
    return made


def test_an_unknown_tokenizer_keeps_documents_whole_and_says_why(snapshot: SnapshotAssertion) -> None:
    rules = {name: find_cut_rule(make_odd(name).to_str()) for name in ("pattern", "normalizer", "unigram", "added")}
    assert {name: rule.reason for name, rule in rules.items()} == snapshot
    for rule in rules.values():
        assert not rule.before
        assert rule.find_cuts("a b " * 1_000_000) == []


def test_no_cut_before_letters_that_a_token_joins_to_a_space() -> None:
    text = "a b " * 100
    cuts = find_cut_rule(make_odd("").to_str()).find_cuts(text, 20)
    assert {text[at - 1] for at in cuts} == {"b"}


@pytest.mark.check
def test_a_cut_that_changes_tokens_around_it_is_not_made() -> None:
    class NeverExact(Encoder):
        def _is_exact(self, text: str, at: int) -> bool:
            return False

    encoder = NeverExact(wrap(train("gpt2")))
    text = "word " * 200_000
    ids, _ = encoder.encode_long(text)
    assert (encoder.num_in_pieces, encoder.num_whole) == (0, 1)
    assert ids.tolist() == encoder.backend.encode(text, add_special_tokens=False).ids
