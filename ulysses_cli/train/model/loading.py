"""Loads a model: transformers' config of a recipe, then weights from files or drawn from a seed. Under ZeRO-3 each
rank receives its part of every weight as it is read, through DeepSpeed; no rank ever holds the model.

A difference between files and config is an error: a missing or an unused weight would silently make another model.
Knows under which names a language model stands in a multimodal model's files."""

from __future__ import annotations

import contextlib
import difflib
import json
import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from pickle import UnpicklingError
from typing import Any

import torch
import torch.distributed as dist
from huggingface_hub.errors import StrictDataclassError
from safetensors import SafetensorError
from torch import Tensor, nn
from transformers import CONFIG_MAPPING, AutoConfig, AutoModelForCausalLM, PretrainedConfig
from transformers import __version__ as version
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import WeightConverter, WeightRenaming, rename_source_key
from transformers.integrations import HfDeepSpeedConfig
from transformers.integrations import deepspeed as integration
from transformers.utils import cached_file

from ulysses_cli.plan.models.family import FULL_ATTENTION
from ulysses_cli.plan.models.model_files import compute_vocab_size, grow_config, list_weight_names
from ulysses_cli.plan.models.shape import TEXT_PARTS, ModelShape, read_model_shape
from ulysses_cli.plan.recipe.recipe import Recipe, RopeScaling
from ulysses_cli.plan.resolved import Resolved

# A text model stands within its parent's `model`, or as a model of its own with a head of its own.
INNER_BODY, OWN_BODY, OWN_HEAD = "model.language_model.", "language_model.model.", "language_model.lm_head."
BODIES = (INNER_BODY, OWN_BODY)
TEXT_NAMES = {**{f"^{re.escape(body)}": "model." for body in BODIES}, f"^{re.escape(OWN_HEAD)}": "lm_head."}


def find_key_mapping(path: str, revision: str | None = None) -> dict[str, str] | None:
    """Returns transformers' key_mapping to load a text model from the files of a multimodal model; None for the files
    of a text model."""
    content, _ = PretrainedConfig.get_config_dict(path, revision=revision)
    return dict(TEXT_NAMES) if find_part(content) else None


def find_part(content: Mapping[str, Any]) -> str:
    """Returns the key under which a multimodal model's config.json holds its text model, or ''."""
    return next((part for part in TEXT_PARTS if isinstance(content.get(part), Mapping)), "")


def is_text_name(name: str) -> bool:
    """Returns whether a tensor of a multimodal model's files belongs to its text model."""
    return name.startswith((*BODIES, OWN_HEAD, "lm_head."))


# Buffers that old files hold and that a model computes from its config.
RECOMPUTED = (r"rotary_emb\.inv_freq$", r"(^|\.)position_ids$")
UNEXPLAINED = (KeyError, AttributeError, TypeError)  # their messages are often a name alone
MISFITS = (OSError, ValueError, StrictDataclassError, *UNEXPLAINED)  # of transformers, for a config it cannot use


class BuildError(ValueError):
    """The model cannot be built as the recipe says: the recipe or the files are wrong."""


@dataclass(frozen=True)
class ModelOptions:
    """Options for transformers to build the model with, from files or from a seed."""

    config: PretrainedConfig
    dtype: torch.dtype
    attention: str
    trusts_code: bool = False
    quantization: Any = None  # transformers' settings of a quantized base
    device: torch.device | None = None  # where a quantized base is made

    def list_options(self, dtype: torch.dtype | None = None) -> dict[str, Any]:
        return {
            "config": self.config,
            "dtype": dtype or self.dtype,
            "attn_implementation": self.attention,
            "trust_remote_code": self.trusts_code,
        }


def load_pretrained(options: ModelOptions, path: str, revision: str | None = None) -> Any:
    """The weights of a folder or of the hub's cache."""
    try:
        mapping = find_key_mapping(path, revision)
        model, loading_info = AutoModelForCausalLM.from_pretrained(
            path,
            revision=revision,
            output_loading_info=True,
            key_mapping=mapping,
            **_place(options),
            **options.list_options(),
        )
    except UnpicklingError as error:
        reason = "its pickle holds more than tensors, and is not run; convert the weights to safetensors"
        raise BuildError(f"{path} cannot be loaded: {reason}") from error
    except (*MISFITS, RuntimeError, SafetensorError) as error:
        if isinstance(error, torch.OutOfMemoryError):
            raise
        raise BuildError(f"{path} cannot be loaded: {first_line(error)}") from error
    unused = find_unused_weights(model, path, revision)
    loading_info["unexpected_keys"] = [name for name in unused if mapping is None or is_text_name(name)]
    if problem := describe_mismatch(loading_info, is_tied=bool(options.config.tie_word_embeddings)):
        raise BuildError(f"{path} {problem}")
    if options.quantization is not None:  # an export's config describes the base in 16 bits
        for config in (options.config, model.config):
            vars(config).pop("quantization_config", None)
    fix_rotary_frequencies(model)
    return model


def _place(options: ModelOptions) -> dict[str, Any]:
    """A quantized weight is made on its device while files are read; others are made in host memory or sharded."""
    if options.quantization is None:
        return {}
    return {"quantization_config": options.quantization, "device_map": {"": options.device}}


def describe_mismatch(loading_info: Mapping[str, Any], *, is_tied: bool) -> str:
    """'' when every weight of the model was read and every weight of the files has a place."""
    tied = {"lm_head.weight"} if is_tied else set()
    missing = sorted(set(loading_info["missing_keys"]) - tied)
    if missing or loading_info["mismatched_keys"]:
        names = [*missing, *sorted(map(str, loading_info["mismatched_keys"]))]
        return f"lacks weights of the model that its config.json describes: {_list_some(names)}"
    unused = sorted(set(loading_info["unexpected_keys"]) - tied)
    if unused:
        return (
            f"holds weights that the model of its config.json has no place for: {_list_some(unused)}; they would be "
            "missing from the trained model"
        )
    return ""


def find_unused_weights(model: Any, path: str, revision: str | None = None) -> list[str]:
    """Weights of the files that the model has no place for, by transformers' own rules of renaming. Under ZeRO-3
    from_pretrained drops such weights and reports none."""
    folder = Path(str(cached_file(path, "config.json", revision=revision))).parent
    return [name for name, own in map_names(model, folder).items() if not own]


def map_names(model: Any, folder: Path, key_mapping: dict[str, str] | None = None) -> dict[str, str]:
    """Returns the model's own name for each weight of the files; the renamed name where several become one or
    the model ignores it, '' where it has no place. `key_mapping` is transformers', for a model that was not loaded."""
    rules = getattr(model, "_weight_conversions", None)
    if rules is None:
        rules = get_model_conversion_mapping(model, key_mapping)
    renamings = [rule for rule in rules if isinstance(rule, WeightRenaming)]
    converters = [rule for rule in rules if isinstance(rule, WeightConverter)]
    prefix = model.base_model_prefix
    own = {name: torch.empty(0, device="meta") for name in model.state_dict()}
    ignored = [*RECOMPUTED, *(model._keys_to_ignore_on_load_unexpected or ())]

    def rename(name: str) -> str:
        renamed, _ = rename_source_key(name, renamings, converters, base_model_prefix=prefix, meta_state_dict=own)
        if f"{prefix}.{renamed}" in own:
            return f"{prefix}.{renamed}"
        return renamed if renamed in own or is_matched(renamed, ignored) else ""

    return {name: rename(name) for name in list_weight_names(folder)}


def is_matched(name: str, patterns: Iterable[str]) -> bool:
    return any(re.search(pattern, name) for pattern in patterns)


def _list_some(names: Sequence[str]) -> str:
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")


def start_from_random(options: ModelOptions, seed: int, device: torch.device) -> Any:
    """Collective over all ranks. Gives the same weights for a seed at any layout: rank 0 draws each whole weight and
    sends it to the others."""
    try:
        model = AutoModelForCausalLM.from_config(**options.list_options())
    except MISFITS as error:
        raise BuildError(f"transformers makes no model of model.config: {first_line(error)}") from error
    is_first = dist.get_rank() == 0
    if is_first:
        with sharded_loading(None):
            torch.manual_seed(seed)
            drawn = dict(AutoModelForCausalLM.from_config(**options.list_options(torch.float32)).named_parameters())
    for name, parameter in model.named_parameters():
        with gather_whole(parameter), torch.no_grad():
            if is_first:
                parameter.copy_(drawn.pop(name))
            if not hasattr(parameter, "ds_id"):
                sent = parameter.to(device)  # NCCL sends what is on a GPU; the model is still on the host
                dist.broadcast(sent, 0)
                parameter.copy_(sent)
    torch.manual_seed(seed)
    fix_rotary_frequencies(model)
    return model


def gather_whole(parameter: Any) -> contextlib.AbstractContextManager[Any]:
    """Under ZeRO-3, inside, the parameter is whole; what rank 0 has written there remains."""
    if not hasattr(parameter, "ds_id"):
        return contextlib.nullcontext()
    import deepspeed

    whole: contextlib.AbstractContextManager[Any] = deepspeed.zero.GatheredParameters([parameter], modifier_rank=0)
    return whole


def grow_rows(rows: Tensor, num_rows: int) -> Tensor:
    """Appends rows for new tokens to a matrix with one row per token. Each is the mean of the old rows, so that no new
    token is more likely than a token is on average. transformers draws around the mean: with the exact one, a base
    without such rows gets the same when adapters are loaded on it."""
    mean = rows.mean(0, dtype=torch.float64).to(rows.dtype)
    return torch.cat([rows, mean.expand(num_rows - len(rows), -1)])


@torch.no_grad()
def grow_embeddings(model: Any, vocab_size: int, ds_config: Mapping[str, Any] | None = None) -> None:
    """Adds rows for added tokens to embedding and head. Collective over all ranks where the model is sharded; then
    `ds_config` is the config that it was sharded by, and no rank keeps a whole matrix."""
    embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
    if getattr(head, "bias", None) is not None:
        raise BuildError("the model's head has a bias, which data.added_tokens cannot grow")
    is_tied = head.weight is embedding.weight
    for part in (embedding,) if is_tied else (embedding, head):
        part.weight = _grow(part.weight, vocab_size, ds_config)
    if is_tied:
        head.weight = embedding.weight
    embedding.num_embeddings = head.out_features = vocab_size
    model.config.get_text_config(decoder=True).vocab_size = vocab_size


def _grow(old: nn.Parameter, num_rows: int, ds_config: Mapping[str, Any] | None) -> nn.Parameter:
    if not hasattr(old, "ds_id"):
        return nn.Parameter(grow_rows(old.data, num_rows))
    import deepspeed

    with deepspeed.zero.Init(config_dict_or_path=dict(ds_config or {})):
        new: nn.Parameter = nn.Embedding(num_rows, old.ds_shape[1]).weight
    with deepspeed.zero.GatheredParameters([old, new], modifier_rank=0):
        if dist.get_rank() == 0:
            new.copy_(grow_rows(old.data, num_rows))
    return new


@torch.no_grad()
def fix_rotary_frequencies(model: Any) -> None:
    """Recomputes rotary frequencies in float32 by the model's own class. Under zero.Init every float tensor that a
    model makes has the weights' dtype: in bfloat16 an angle at position 100,000 is off by whole turns."""
    for module in model.modules():
        names = _list_frequencies(module)
        if not names:
            continue
        with sharded_loading(None):
            buffers = dict(type(module)(module.config).named_buffers())
        for name in names:
            buffer = getattr(module, name)
            buffer.data = buffers[name].to(buffer.device)


@contextlib.contextmanager
def positions_of(model: Any, config: PretrainedConfig) -> Iterator[None]:
    """Inside, the model's rotary embeddings are those of another config, such as that of its files."""
    served = [module for module in model.modules() if _list_frequencies(module)]
    kept = [vars(module).get("forward") for module in served]  # that of serve_rotary
    for module in served:
        with sharded_loading(None):
            other = type(module)(config)
        module.forward = other.to(getattr(module, _list_frequencies(module)[0]).device).forward
    try:
        yield
    finally:
        for module, forward in zip(served, kept, strict=True):
            del module.forward
            vars(module).update({} if forward is None else {"forward": forward})


def _list_frequencies(module: nn.Module) -> list[str]:
    return [name for name, _ in module.named_buffers(recurse=False) if name.endswith("inv_freq")]


@contextlib.contextmanager
def sharded_loading(ds_config: Mapping[str, Any] | None) -> Iterator[None]:
    """Inside, transformers shards each weight as it makes it, if `ds_config` is one of ZeRO-3. It reads DeepSpeed's
    config from a global of its own."""
    previous = integration._hf_deepspeed_config_weak_ref
    integration.unset_hf_deepspeed_config()
    holder = HfDeepSpeedConfig(dict(ds_config)) if ds_config else None
    try:
        yield
    finally:
        del holder
        integration._hf_deepspeed_config_weak_ref = previous


def first_line(error: Exception) -> str:
    """The first line of the error's message, with the next ones where it announces them."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    if not lines or isinstance(error, UNEXPLAINED):
        return f"{type(error).__name__}: {' '.join(lines)}".removesuffix(": ")
    last = next((at for at, line in enumerate(lines) if not line.endswith(":")), len(lines) - 1)
    return " ".join(lines[: last + 1])


ROPE_BASE = ("rope_theta", "partial_rotary_factor")  # what rope scaling does not change


def load_model_config(recipe: Recipe) -> PretrainedConfig:
    model = recipe.model
    try:
        if model.config is not None:
            # as config.json would hold it: a recipe's lists are tuples, which transformers' configs refuse
            config = AutoConfig.for_model(**json.loads(json.dumps(model.config)))
        else:
            path = os.path.expanduser(str(model.name_or_path))
            config = AutoConfig.from_pretrained(
                path, revision=model.revision, trust_remote_code=model.trust_remote_code
            )
        config = config.get_text_config(decoder=True)
    except MISFITS as error:
        raise BuildError(f"the model's config cannot be used: {_explain(error, model.config)}") from error
    return config


def _explain(error: Exception, config: Mapping[str, Any] | None) -> str:
    kind = "" if config is None else str(config.get("model_type"))
    if not kind or kind in CONFIG_MAPPING:
        return first_line(error)
    close = difflib.get_close_matches(kind, CONFIG_MAPPING, n=1)
    return f"transformers {version} knows no model type {kind}{f'; did you mean {close[0]}?' if close else ''}"


def read_shape(recipe: Recipe, config: PretrainedConfig, tokenizer: Any) -> ModelShape:
    """The shape of the model, with embedding rows for the tokens that the recipe adds to its tokenizer."""
    content, name = config.to_dict(), str(recipe.model.name_or_path or "the model of model.config")
    size = read_model_shape(content, name).vocab_size
    size = compute_vocab_size(size, tokenizer.convert_tokens_to_ids(list(recipe.data.added_tokens)))
    return read_model_shape(grow_config(content, size), name)


def stretch_positions(config: PretrainedConfig, recipe: Recipe, resolved: Resolved) -> None:
    """Writes the recipe's rope scaling, base and length into the config, which is exported with the model. Without them
    a model with rotary positions stays as it is: rows of training are not longer than its positions, and longer prompts
    of an evaluation must not change the model. Dynamic, longrope and yarn compute frequencies from that number."""
    scaled, theta = recipe.model.rope_scaling, resolved.rope_theta
    if scaled is not None or theta is not None:
        parameters = dict(getattr(config, "rope_parameters", None) or {})
        inner = parameters.get(FULL_ATTENTION)  # other kinds of layers, with windows, keep their own
        changed = dict(inner if isinstance(inner, Mapping) else parameters)
        if scaled is not None:
            changed = {name: changed[name] for name in ROPE_BASE if name in changed} | _list_scaling(scaled, resolved)
        if theta is not None:
            changed["rope_theta"] = theta
        config.rope_parameters = {**parameters, FULL_ATTENTION: changed} if isinstance(inner, Mapping) else changed
    elif resolved.is_rotary:
        return
    if scaled is None or scaled.type != "dynamic":  # it stretches from the model's own length
        config.max_position_embeddings = max(config.max_position_embeddings, recipe.data.max_length)


def _list_scaling(scaled: RopeScaling, resolved: Resolved) -> dict[str, Any]:
    """The number of original positions is part of llama3's formula and stays as written in the model."""
    written = scaled.model_dump(exclude_none=True, exclude={"type", "factor"})
    scaling = {"rope_type": scaled.type, "factor": resolved.rope_factor, **written}
    if scaled.type in ("yarn", "llama3"):
        scaling.setdefault("original_max_position_embeddings", resolved.original_positions)
    return scaling
