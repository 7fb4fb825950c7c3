"""Tests that a step's clock counts recurrences, forward and backward, as a part of their own."""

import pytest
import torch
from support.families import make_config
from transformers import AutoModelForCausalLM

from ulysses_cli.train.attention.documents import make_documents
from ulysses_cli.train.clock import Clock
from ulysses_cli.train.processes.groups import make_sequence_axis
from ulysses_cli.train.recurrence.interface import serve_recurrent_layers


@pytest.mark.parametrize("family", ["qwen3_5_text", "bamba", "lfm2"])
def test_recurrences_are_counted_in_both_passes(family: str) -> None:
    torch.manual_seed(0)
    kinds = {"layer_types": ["linear_attention", "linear_attention"]} if family == "qwen3_5_text" else {}
    model = AutoModelForCausalLM.from_config(make_config(family, **kinds), attn_implementation="eager")
    model.model.layers = model.model.layers[:1]  # the recurrent one
    serve_recurrent_layers(model, make_sequence_axis(None))
    clock = Clock(torch.device("cpu"))
    clock.start()
    loss = model(torch.arange(1, 13)[None], documents=make_documents((8, 4)), use_cache=False).logits.sum()
    num_forward = sum(part == "recurrence" for _, part in clock.marks)
    loss.backward()
    parts = [part for _, part in clock.marks]
    assert clock.stop()["recurrence"] > 0
    assert 0 < num_forward < parts.count("recurrence")
    assert parts[-1] == "projections"  # what the backward computes after the first convolution
