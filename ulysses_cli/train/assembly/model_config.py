"""The transformers config of a recipe's model: loads it, adds rows for added tokens, extends positions."""

from __future__ import annotations

import difflib
import json
import os
from collections.abc import Mapping
from typing import Any

from transformers import CONFIG_MAPPING, AutoConfig, PretrainedConfig
from transformers import __version__ as version

from ulysses_cli.plan.models.shape import ModelShape, read_model_shape
from ulysses_cli.plan.models.vocabulary import compute_vocab_size, grow_config
from ulysses_cli.plan.recipe.recipe import Recipe
from ulysses_cli.plan.resolved import Resolved
from ulysses_cli.train.assembly.loading import MISFITS, BuildError, first_line


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
    """Writes the recipe's rope scaling and length into the config, which is exported with the model. Without a scaling
    a model with rotary positions stays as it is: rows of training are not longer than its positions, and longer prompts
    of an evaluation must not change the model. Dynamic, longrope and yarn compute frequencies from that number."""
    scaled = recipe.model.rope_scaling
    if scaled is None:
        if not resolved.is_rotary:
            config.max_position_embeddings = max(config.max_position_embeddings, recipe.data.max_length)
        return
    written = scaled.model_dump(exclude_none=True, exclude={"type", "factor"})
    # The number of original positions is part of llama3's formula and stays as written in the model.
    scaling = {"rope_type": scaled.type, "factor": resolved.rope_factor, **written}
    if scaled.type in ("yarn", "llama3"):
        scaling.setdefault("original_max_position_embeddings", resolved.original_positions)
    config.rope_parameters = {**_get_rope_base(config), **scaling}
    if scaled.type != "dynamic":  # it stretches from the model's own length
        config.max_position_embeddings = max(config.max_position_embeddings, recipe.data.max_length)


def _get_rope_base(config: PretrainedConfig) -> dict[str, Any]:
    """The rotary base and the rotated part of a head, which rope scaling does not change."""
    parameters = getattr(config, "rope_parameters", None) or {}
    return {name: parameters[name] for name in ("rope_theta", "partial_rotary_factor") if name in parameters}
