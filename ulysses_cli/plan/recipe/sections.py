"""Declares a setting with its doc line, unit, bounds and other spellings, and with it the recipe's sections `data`,
`lora` and `preference`. recipe.py declares the other sections. No rule across settings stands here."""

from __future__ import annotations

import unicodedata
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BaseModel, ConfigDict, Field, field_validator

from ulysses_cli.plan.files import name_local_copy

MAX_TOKENS = 2**40  # far more than any run has; keeps products of a few settings inside 64 bits
Place = Literal["auto", "none", "cpu", "nvme"]
UNMOVED: dict[Any, Any] = {None: "none", False: "none"}
LINES = "lines"  # marks the type of a text that may have several lines
Lines = Annotated[str, LINES]
CONTROLS = ("Cc", "Cs", "Zl", "Zp")  # control characters, halves of characters, and what Unicode calls a line's end
ON_GPU = {"gpu": "write none, which keeps them on the GPU"}  # where the place is the GPU itself


def setting(
    default: Any,
    doc: str,
    *,
    unit: str = "",
    aliases: tuple[str, ...] = (),
    spellings: dict[Any, Any] | None = None,
    spellings_by_alias: dict[str, dict[Any, Any]] | None = None,
    refused: dict[str, str] | None = None,
    **bounds: Any,
) -> Any:
    """One field. `aliases`: other names of the key. `spellings`: other ways to write a value, each with the value it
    means. `spellings_by_alias`: those that hold only where the key is written by that alias. `refused`: values that
    people try, each with the reason why it is not offered."""
    extra: dict[str, Any] = {
        "unit": unit,
        "aliases": list(aliases),
        "spellings": spellings or {},
        "spellings_by_alias": spellings_by_alias or {},
        "refused": refused or {},
    }
    return Field(default, description=doc, json_schema_extra=extra, **bounds)


def text(default: str | None, doc: str, *, unit: str = "name", **more: Any) -> Any:
    return setting(default, doc, unit=unit, min_length=1, max_length=4096, **more)


def find_control(text: str) -> str:
    """The first character of a text that ends a line or is none that people write; '' where all are fine. In a comment
    of another file it would begin a line of that file."""
    return next((letter for letter in text if unicodedata.category(letter) in CONTROLS), "")


class Section(BaseModel):
    """`SHORT`: the setting that a plain value in place of the section stands for."""

    SHORT: ClassVar[str] = ""
    model_config = ConfigDict(frozen=True, strict=True, extra="forbid", protected_namespaces=(), defer_build=True)


DatasetType = Literal[
    "auto",
    "text",
    "chat",
    "completion",
    "answers",
    "conversations",
    "instruction",
    "tokens",
    "preference",
    "unpaired",
    "folder",
    "synthetic",
]
RowType = Literal[
    "text", "chat", "conversations", "completion", "answers", "instruction", "tokens", "preference", "unpaired"
]
COLUMNS: dict[RowType, tuple[str, ...]] = {
    "chat": ("messages",),
    "conversations": ("conversations",),
    "completion": ("prompt", "completion"),
    "answers": ("prompt", "completions"),
    "instruction": ("instruction", "output"),
    "tokens": ("input_ids",),
    "text": ("text",),
    # last: rows with these and others are chats or completions, but for a section `preference`
    "preference": ("chosen", "rejected"),
    "unpaired": ("prompt", "completion", "label"),
}
OPTIONAL: dict[RowType, tuple[str, ...]] = {
    "chat": ("tools", "system", "chat_template_kwargs", "weight"),
    "conversations": ("tools", "system", "chat_template_kwargs", "weight"),
    "completion": ("tools", "chat_template_kwargs", "weight"),
    "answers": ("tools", "chat_template_kwargs", "weights"),
    "instruction": ("input", "weight"),
    "tokens": ("labels", "weight", "weights"),
    "text": ("weight",),
    "preference": ("prompt", "messages", "rejected_response", "tools", "chat_template_kwargs"),
    "unpaired": ("tools", "chat_template_kwargs"),
}


class Dataset(Section):
    """One source of documents."""

    SHORT: ClassVar[str] = "path"

    path: str | None = text(
        None,
        "file, folder, glob, hub data set, or s3://, gs:// or hf:// address that is downloaded once",
        unit="path",
        aliases=("dataset_name",),
    )
    name: str | None = text(None, "configuration of a hub data set")
    split: str = text("train", "split of a hub data set")
    type: DatasetType = setting(
        "auto",
        "columns to expect; auto = by the first row; answers = several to a prompt; "
        "preference = pairs of answers; folder = a tree of files; "
        "synthetic = generated",
        spellings={"chat_template": "chat", "sharegpt": "conversations", "alpaca": "instruction"},
    )
    columns: dict[str, Annotated[str, Field(min_length=1, max_length=4096)]] = setting(
        {},
        "the file's own name of a column, by the name that is expected: {prompt: question, completion: answer}",
        unit="columns",
        max_length=16,
    )
    data_files: tuple[str, ...] | None = setting(
        None, "files below path", unit="paths", min_length=1, max_length=100_000
    )
    weight: float = setting(
        1.0,
        "copies of each document in an epoch; the fraction adds one for that share of them, chosen by the seed",
        unit="copies",
        gt=0,
        le=1000,
    )
    share: float | None = setting(
        None,
        "share of an epoch's tokens, instead of weight; an epoch has as many tokens as all sources together, and no "
        "source is repeated more than 4 times",
        unit="share of 1",
        gt=0,
        le=1,
    )
    min_tokens: int | None = setting(None, "shorter documents are left out", unit="tokens", ge=1, le=MAX_TOKENS)
    max_tokens: int | None = setting(None, "longer documents are left out", unit="tokens", ge=1, le=MAX_TOKENS)
    train_field: Annotated[str, Field(min_length=1, max_length=256)] = setting(
        "auto",
        "the field of a message that says whether it is a target, true or false, 1 or 0; it beats train_on_turns; "
        "auto = weight, train, training, loss or trainable; not NAME = a field whose true is no target, such as not "
        "mask; none = no field is read",
        unit="field",
        aliases=("message_field_training",),
    )
    chat_template_kwargs: dict[str, Any] = setting(
        {}, "as data.chat_template_kwargs, for the chats of this source", unit="variables", max_length=100
    )
    join_files: bool = setting(True, "folder: the whole tree is one document; false = each file is one")
    streaming: bool = setting(False, "read without a local copy, for what does not fit on disk")

    @field_validator("path")
    @classmethod
    def name_copy(cls, path: str | None) -> str | None:
        """An address becomes the path of its copy, which train and prepare download."""
        return None if path is None else name_local_copy(path)


class Data(Section):
    """From documents to rows of tokens."""

    datasets: tuple[Dataset, ...] = setting(..., "training sources", unit="sources", min_length=1, max_length=1000)
    eval_datasets: tuple[Dataset, ...] = setting((), "evaluation sources", unit="sources", max_length=1000)
    eval_split: float = setting(
        0.0, "share of the training documents held out for evaluation", unit="share", ge=0, le=0.5
    )
    max_length: int = setting(
        ...,
        "tokens per row",
        unit="tokens",
        aliases=("seq_length", "sequence_len", "cutoff_len", "max_seq_len", "max_seq_length"),
        ge=2,
        le=MAX_TOKENS,
    )
    pad_to_multiple_of: Annotated[int, Field(ge=1, le=1 << 20)] | Literal["auto"] = setting(
        "auto",
        "rows are padded to a multiple of this; auto = the right number for sp_size",
        unit="tokens",
        aliases=("div_length",),
    )
    excess_length_strategy: Literal["auto", "split", "truncate", "drop", "raise"] = setting(
        "auto",
        "what happens to a document longer than max_length; auto = split text, raise for chats and completions",
        aliases=("truncation_strategy",),
    )
    packing: Literal["documents", "stream", "off"] = setting(
        "documents",
        "whole documents per row, one endless stream cut at max_length, or one document per row",
        aliases=("sample_packing", "pack_samples"),
        spellings={True: "documents", False: "off"},
    )
    attend_across_documents: bool = setting(False, "attention may look into earlier documents of the row")
    assistant_only_loss: bool = setting(False, "chat: only what the assistant says is a target")
    train_on_turns: Literal["all", "last_round", "last"] = setting(
        "all",
        "assistant_only_loss: the turns of the assistant that are targets; last_round = those after the last message "
        "of the user",
        spellings_by_alias={
            "train_on_last_turn_only": {True: "last", False: "all"},
            "mask_history": {True: "last", False: "all"},
        },
        aliases=("assistant_turns", "train_on_last_turn_only", "mask_history"),
    )
    thoughts: Literal["train", "mask", "drop"] = setting(
        "train",
        "what happens to what the assistant thinks; mask = the words of a thought are no targets, its tags are; drop = "
        "the template never sees it",
        spellings_by_alias={"mask_reasoning_content": {True: "mask", False: "train"}},
        aliases=("mask_reasoning_content",),
    )
    on_rewritten_turns: Literal["raise", "split", "mask", "keep"] = setting(
        "raise",
        "what happens to turns that the template shows otherwise than when the model writes them; raise = those that "
        "lose text, thoughts or tool calls are an error; split = each turn is a target in a text that shows it as the "
        "model writes it; mask = such turns are no targets; keep = they are counted, and trained on as they are shown",
        aliases=("split_thinking",),
        spellings_by_alias={"split_thinking": {True: "split", False: "raise"}},
    )
    chat_template_kwargs: dict[str, Any] = setting(
        {},
        "variables that the chat template reads, such as {enable_thinking: false}; those of a source and of a row's "
        "column chat_template_kwargs win",
        unit="variables",
        aliases=("template_kwargs",),
        max_length=100,
    )
    chat_template: Lines | None = setting(
        None,
        "how chats become text: chatml, llama-3, mistral, gemma, phi or qwen, a Jinja file, or a template; left out: "
        "the tokenizer's own",
        unit="name, path or template",
        aliases=("chat_template_path", "chat_template_jinja", "template"),
        spellings={"llama3": "llama-3", "phi-3": "phi", "phi3": "phi", "qwen2": "qwen", "qwen2.5": "qwen"},
        min_length=1,
        max_length=1 << 17,
    )
    added_tokens: tuple[Annotated[str, Field(min_length=1, max_length=256), LINES], ...] = setting(
        (),
        "tokens that the vocabulary lacks, such as a template's markers; the embedding grows where it has no room",
        unit="tokens",
        aliases=("add_tokens", "add_special_tokens", "additional_special_tokens"),
        max_length=10_000,
    )
    completion_only_loss: bool = setting(True, "prompt + completion: only the completion is a target")
    store_dir: str = text("runs/store", "where token stores are kept", unit="path")
    num_workers: Annotated[int, Field(ge=1, le=1024)] | Literal["auto"] = setting(
        "auto", "processes that tokenize; auto = one per core", unit="processes"
    )
    on_bad_row: Literal["raise", "skip"] = setting("raise", "what happens to a row that cannot be read")
    skip_untrainable: bool = setting(False, "count and skip rows without a single target, instead of stopping")


class Lora(Section):
    """Train small adapters and leave the model as it is."""

    r: int = setting(16, "rank of the adapters", unit="dimensions", aliases=("lora_r",), ge=1, le=65536)
    alpha: float = setting(32.0, "scale of the adapters, times 1 / r", unit="x", aliases=("lora_alpha",), gt=0, le=1e6)
    dropout: float = setting(0.0, "dropout before the adapters", unit="share", aliases=("lora_dropout",), ge=0, lt=1)
    target_modules: Annotated[tuple[str, ...], Field(min_length=1, max_length=1000)] | Literal["all-linear"] = setting(
        "all-linear",
        "linear layers that get an adapter, by the last part of their name",
        unit="names",
        aliases=("lora_target_modules",),
    )
    experts: tuple[Literal["gate_up", "down"], ...] = setting(
        (),
        "matrices of all experts that get adapters, one for each expert; routers get none",
        unit="names",
        max_length=2,
        spellings={None: (), "none": ()},
    )
    expert_r: Annotated[int, Field(ge=1, le=65536)] | Literal["auto"] = setting(
        "auto", "rank of the experts' adapters; auto = r / experts of a token", unit="dimensions"
    )
    use_rslora: bool = setting(False, "scale the adapters by alpha / sqrt(r) instead of alpha / r")
    use_dora: bool = setting(False, "also train the length of each row of the adapted weights (DoRA)")
    modules_to_save: tuple[Literal["embed_tokens", "lm_head", "norm"], ...] = setting(
        (),
        "parts that are trained whole beside the adapters and saved with them: embedding, head, all norms",
        unit="names",
        max_length=3,
        aliases=("lora_modules_to_save",),
        spellings={None: (), "none": ()},
    )
    quantize_base: Literal["nf4", "int8"] | None = setting(
        None,
        "hold the frozen linear layers in 4 or 8 bits, by bitsandbytes; each GPU holds the whole base",
        unit="format",
        spellings={False: None, "none": None, "4bit": "nf4", "8bit": "int8"},
        refused={"fp4": "nf4 takes the same memory and is closer to the weights"},
    )
    adapter_name_or_path: str | None = text(
        None, "adapters to start from: a hub name or local folder that peft has written"
    )


LossName = Literal[
    "sigmoid", "robust", "hinge", "ipo", "sigmoid_norm", "apo_zero", "apo_down", "exo_pair", "nca_pair", "sppo_hard",
    "bco_pair", "discopop", "sft", "cpo", "simpo", "orpo", "kto",
]  # fmt: skip
SMOOTHED: tuple[LossName, ...] = ("robust", "exo_pair", "cpo", "simpo")
WITHOUT_REFERENCE: tuple[LossName, ...] = ("cpo", "simpo", "orpo")
UNPAIRED: tuple[LossName, ...] = ("kto",)


class Preference(Section):
    """Learn from pairs of answers, as DPO and its kin do, against the model as it is before step 1; cpo, simpo and orpo
    against nothing; kto from answers that have a label and no partner."""

    loss: tuple[LossName, ...] = setting(
        ("sigmoid",),
        "loss of a pair, by TRL's name, or a list of losses that are added up; sigmoid is DPO",
        unit="losses",
        aliases=("loss_type", "pref_loss"),
        spellings={"dpo": ("sigmoid",)},
        min_length=1,
        max_length=8,
    )
    loss_weights: tuple[Annotated[float, Field(gt=0, le=1000)], ...] = setting(
        (), "weight of each loss; left out: 1", unit="x", max_length=8
    )
    beta: float = setting(
        0.1, "how much a log-probability over the reference's counts", unit="x", aliases=("pref_beta",), gt=0, le=1000
    )
    label_smoothing: float = setting(
        0.0, "share of labels that are wrong: robust, exo_pair, cpo and simpo", unit="share", ge=0, lt=0.5
    )
    discopop_tau: float = setting(0.05, "temperature of discopop", unit="x", gt=0, le=1000)
    gamma: float = setting(
        0.5, "simpo: the margin that rewards should have", unit="nats", aliases=("simpo_gamma",), ge=0, le=1000
    )
    desirable_weight: float = setting(1.0, "kto: weight of answers that are wanted", unit="x", gt=0, le=1000)
    undesirable_weight: float = setting(1.0, "kto: weight of answers that are not wanted", unit="x", gt=0, le=1000)
    share_prompts: bool | Literal["auto"] = setting(
        "auto",
        "both answers of a pair read one copy of their prompt; auto = unless the model has recurrent or convolution "
        "layers, or rotary frequencies that follow a document's length",
    )
    sft_weight: float | None = setting(
        None,
        "weight of the chosen answer's cross-entropy, a mean over its targets, in a pair's loss; left out: 1 for cpo, "
        "simpo and orpo, else 0",
        unit="x",
        aliases=("rpo_alpha", "cpo_alpha", "pref_ftx"),
        ge=0,
        le=1000,
    )

    @property
    def is_unpaired(self) -> bool:
        """Whether answers have no partner."""
        return not {*self.loss}.isdisjoint(UNPAIRED)

    @property
    def has_reference(self) -> bool:
        return {*self.loss}.isdisjoint(WITHOUT_REFERENCE)
