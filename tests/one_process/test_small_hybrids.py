"""The small model of `verify` keeps the layers of a model with convolutions and recurrences."""

import pytest
import torch
from support.hybrids import HYBRIDS, TINY
from transformers import AutoConfig, AutoModelForCausalLM

from ulysses_cli.plan.models.families import FAMILIES
from ulysses_cli.plan.models.layers import AttentionMixer
from ulysses_cli.plan.models.shape import read_model_shape
from ulysses_cli.prove.shrink import name_kind, pick_layers, shrink_config
from ulysses_cli.train.recurrence.interface import list_recurrent_layers


@pytest.mark.parametrize("model_type", [name for name in HYBRIDS if name in FAMILIES])
def test_a_small_model_keeps_kinds_heads_and_taps(model_type: str) -> None:
    config = {**TINY, "hidden_size": 128, **HYBRIDS[model_type], "model_type": model_type}
    if "mamba_expand" in config:
        config |= {"mamba_d_head": 32, "mamba_d_ssm": 256}
    shape = read_model_shape(config, "test")
    kept = [shape.layers[index] for index in pick_layers(shape)]
    small = shrink_config(config, shape)
    shrunk = read_model_shape(small, "test")
    assert [name_kind(layer) for layer in shrunk.layers] == [name_kind(layer) for layer in kept]
    assert [layer.num_experts > 0 for layer in shrunk.layers] == [layer.num_experts > 0 for layer in kept]
    assert shrunk.head_counts == tuple(
        dict.fromkeys(count for count in shape.head_counts if count in shrunk.head_counts)
    )
    for ours, theirs in zip(shrunk.layers, kept, strict=True):
        for mixer, large in zip(ours.mixers, theirs.mixers, strict=True):
            if not isinstance(mixer, AttentionMixer):
                assert mixer.conv_tokens == large.conv_tokens  # type: ignore[union-attr]
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**small))
    model.tie_weights()
    num_recurrent = sum(any(not isinstance(each, AttentionMixer) for each in layer.mixers) for layer in kept)
    assert len(list(list_recurrent_layers(model))) == num_recurrent
    assert sum(p.numel() for p in set(model.parameters())) == shrunk.num_parameters
