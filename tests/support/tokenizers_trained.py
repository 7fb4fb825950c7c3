"""Trains small tokenizers of every kind that behaves differently."""

from functools import cache
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers

LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
QWEN = LLAMA3.replace(r"\p{N}{1,3}", r"\p{N}")
O200K = "|".join(
    [
        r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?",
        r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?",
        r"\p{N}{1,3}",
        r" ?[^\s\p{L}\p{N}]+[\r\n/]*",
        r"\s*[\r\n]+",
        r"\s+(?!\S)",
        r"\s+",
    ]
)
SPECIALS = ["<s>", "</s>", "<unk>", "<|im_start|>", "<|im_end|>"]
CORPUS = [
    "The quick brown fox jumps over the lazy dog. It's 12,345 o'clock!\n\n  Indented   text\twith tabs\r\n",
    "def main(argv: list[str]) -> int:\n    for name in argv:\n        print(name, end='')\n    return 0\n",
    "Grüße aus Köln, naïve café; Ελληνικά; Привет, мир. 你好，世界。\nこんにちは 世界\n한국어 텍스트\n",
    "   leading, trailing   \n\n\n- a list\n- of things\n\n```\ncode `x` == y_z\n```\n",
] * 20
KINDS = (
    "gpt2", "gpt2-prefix", "llama3", "qwen", "o200k", "llama2", "gemma", "metaspace-unigram", "metaspace-first",
    "wordpiece", "t5-strip",
)  # fmt: skip


@cache
def train(kind: str) -> Tokenizer:
    """Trains a tokenizer of one kind with about 600 tokens."""
    size: dict[str, Any] = {"vocab_size": 600, "special_tokens": SPECIALS, "show_progress": False}
    bpe = trainers.BpeTrainer(**size, initial_alphabet=pre_tokenizers.ByteLevel.alphabet())
    sentences = CORPUS
    if kind.startswith("gpt2"):
        made = Tokenizer(models.BPE())
        made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=kind == "gpt2-prefix")
        made.post_processor = processors.ByteLevel(trim_offsets=True)
        made.decoder = decoders.ByteLevel()
        trainer: Any = bpe
    elif kind in ("llama3", "qwen", "o200k"):
        made = Tokenizer(models.BPE(ignore_merges=kind == "llama3"))
        pattern = {"llama3": LLAMA3, "qwen": QWEN, "o200k": O200K}[kind]
        made.normalizer = normalizers.NFC() if kind == "qwen" else None
        split = pre_tokenizers.Split(Regex(pattern), "isolated")
        byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        made.pre_tokenizer = pre_tokenizers.Sequence([split, byte_level])
        made.decoder = decoders.ByteLevel()
        if kind == "llama3":
            made.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
        trainer = bpe
    elif kind in ("llama2", "gemma"):  # no pre-tokenizer cuts the text: the vocabulary alone separates words
        made = Tokenizer(models.BPE(unk_token="<unk>", fuse_unk=True, byte_fallback=True))
        spaces = normalizers.Replace(" ", "▁")
        made.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), spaces]) if kind == "llama2" else spaces
        made.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
        made.pre_tokenizer = pre_tokenizers.Split("▁", "merged_with_next")  # for training only; removed below
        trainer = trainers.BpeTrainer(**size)
        trainer.special_tokens = [
            AddedToken(t, special=True) for t in [*SPECIALS, *(f"<0x{b:02X}>" for b in range(256))]
        ]
        trainer.vocab_size = 800
    elif kind in ("metaspace-unigram", "t5-strip"):
        made = Tokenizer(models.Unigram())
        if kind == "t5-strip":
            parts = [
                normalizers.NFKC(),
                normalizers.Strip(left=True, right=True),
                normalizers.Replace(Regex(" {2,}"), " "),
            ]
            made.normalizer = normalizers.Sequence(parts)
        made.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="always", split=True)
        made.decoder = decoders.Metaspace()
        trainer = trainers.UnigramTrainer(**size, unk_token="<unk>")
    elif kind == "metaspace-first":
        made = Tokenizer(models.BPE(unk_token="<unk>"))
        made.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=True)
        trainer = trainers.BpeTrainer(**size)
    else:
        made = Tokenizer(models.WordPiece(unk_token="<unk>"))
        made.normalizer = normalizers.BertNormalizer(lowercase=True)
        made.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
        trainer = trainers.WordPieceTrainer(**size)
    made.train_from_iterator(sentences, trainer)
    if kind in ("llama2", "gemma"):
        made.pre_tokenizer = pre_tokenizers.Split(" ", "merged_with_previous") if kind == "gemma" else None
        made = Tokenizer.from_str(made.to_str().replace('"pre_tokenizer":{}', '"pre_tokenizer":null'))
    return made


def wrap(backend: Tokenizer, **more: Any) -> Any:
    """Wraps a tokenizer as transformers would return it."""
    from transformers import PreTrainedTokenizerFast

    own = Tokenizer.from_str(backend.to_str())
    return PreTrainedTokenizerFast(tokenizer_object=own, eos_token="</s>", unk_token="<unk>", **more)
