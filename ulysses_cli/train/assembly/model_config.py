"""The transformers config of a recipe's model: loads it, adds rows for added tokens, extends positions."""

from __future__ import annotations

import difflib
import json
import os
from collections.abc import Mapping
from typing import Any

from transformers import CONFIG_MAPPING, AutoConfig, PretrainedConfig
from transformers import __version__ as version

from ulysses_cli.plan.models.family import FULL_ATTENTION
from ulysses_cli.plan.models.shape import ModelShape, read_model_shape
from ulysses_cli.plan.models.vocabulary import compute_vocab_size, grow_config
from ulysses_cli.plan.recipe.recipe import Recipe, RopeScaling
from ulysses_cli.plan.resolved import Resolved
from ulysses_cli.train.assembly.loading import MISFITS, BuildError, first_line

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
