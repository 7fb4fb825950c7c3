"""Tests a base in 4 or 8 bits on one process: how it is made, what it takes, and adapters that a run starts from."""

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from support.refusals import explain
from support.small_run import CONFIG
from support.training import make_recipe
from syrupy.assertion import SnapshotAssertion
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM

from ulysses_cli.plan.ledger.weights import count_quantized_bytes
from ulysses_cli.plan.models.shape import read_model_shape
from ulysses_cli.plan.recipe.recipe import Recipe
from ulysses_cli.train.model.adapters import (
    add_adapters,
    find_nonfinite_scale,
    make_quantization_config,
    quantize_layers,
    settle_layers,
)
from ulysses_cli.train.model.loading import BuildError, ModelOptions, load_pretrained

pytestmark = pytest.mark.check
SIZES = {**CONFIG, "hidden_size": 256, "intermediate_size": 512, "head_dim": 64}


@pytest.fixture(scope="module")
def plain() -> Any:
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(AutoConfig.for_model(**SIZES), dtype=torch.bfloat16)


def read_codes(model: Any) -> dict[str, torch.Tensor]:
    return {name: value for name, value in model.named_parameters() if not value.is_floating_point()}


@pytest.mark.parametrize("kind", ["nf4", "int8"])
def test_a_random_model_is_quantized_as_one_from_files(plain: Any, tmp_path: Path, kind: str) -> None:
    plain.save_pretrained(tmp_path)
    ours, cpu = copy.deepcopy(plain), torch.device("cpu")
    quantize_layers(ours, kind, cpu)
    settings = make_quantization_config(kind, torch.bfloat16)
    config = AutoConfig.for_model(**SIZES)
    read = load_pretrained(
        ModelOptions(config, torch.bfloat16, "sdpa", quantization=settings, device=cpu), str(tmp_path)
    )
    assert not hasattr(read.config, "quantization_config")
    counted = count_quantized_bytes(read_model_shape(SIZES, "test"), 2, kind)
    assert counted == pytest.approx(count_bytes(ours), rel=1e-3), "what the ledger counts"
    codes, expected = read_codes(ours), read_codes(read)
    assert codes.keys() == expected.keys()
    assert len(codes) == 2 * 7  # linear layers, without the head
    assert all(torch.equal(codes[name], expected[name]) for name in codes)
    tokens = torch.arange(32)[None]
    with torch.no_grad():
        assert torch.equal(ours.eval()(tokens).logits, read.eval()(tokens).logits)


def count_bytes(model: nn.Module) -> int:
    total = 0
    for parameter in model.parameters():
        total += parameter.nbytes
        state: Any = getattr(parameter, "quant_state", None)
        if state is not None:
            total += sum(part.nbytes for part in (state.absmax, state.code, state.offset))
            total += state.state2.absmax.nbytes + state.state2.code.nbytes
        if getattr(parameter, "SCB", None) is not None:
            total += parameter.SCB.nbytes
    return total


def test_a_weight_that_is_not_finite_is_found(plain: Any) -> None:
    broken = copy.deepcopy(plain)
    broken.model.layers[1].mlp.up_proj.weight.data[3, 5] = torch.inf
    for kind in ("nf4", "int8"):
        model = copy.deepcopy(broken)
        quantize_layers(model, kind, torch.device("cpu"))
        assert find_nonfinite_scale(model) == "model.layers.1.mlp.up_proj.weight"


def test_a_backward_follows_an_evaluation(plain: Any) -> None:
    model = copy.deepcopy(plain)
    quantize_layers(model, "nf4", torch.device("cpu"))
    settle_layers(model)
    get_peft_model(model, LoraConfig(r=2, target_modules="all-linear"))
    tokens = torch.arange(32)[None]
    with torch.no_grad():
        model.eval()(tokens)
    model.train()(tokens, labels=tokens).loss.backward()
    assert all(p.grad is not None for p in model.parameters() if p.requires_grad)


def test_a_product_in_8_bits_keeps_no_input(plain: Any) -> None:
    """bitsandbytes' keeps it in a place that recomputation does not see. Its results stay the same."""
    from bitsandbytes.autograd import _functions

    model = copy.deepcopy(plain)
    quantize_layers(model, "int8", torch.device("cpu"))
    layer = model.model.layers[0].mlp.down_proj.eval()  # in training a CPU has another product
    hidden = torch.randn(7, 512, dtype=torch.bfloat16, requires_grad=True)
    results = []
    for settle in (lambda _: None, settle_layers):
        settle(model)
        output = layer(hidden)
        (gradient,) = torch.autograd.grad(output.sum(), hidden, retain_graph=True)
        results.append((output, gradient, [kept for kept in output.grad_fn.tensors if kept is not None]))
    (before, gradient_before, kept), (after, gradient_after, kept_after) = results
    assert torch.equal(before, after)
    assert torch.equal(gradient_before, gradient_after)
    assert not kept_after
    assert kept or hasattr(_functions.MatMul8bitLt, "forgets_inputs")  # another test may have settled layers before
    assert type(after.grad_fn).__name__.startswith("FrozenMatMul8bitLt")


def start_from(folder: Path, plain: Any, *more: str) -> dict[str, torch.Tensor]:
    recipe: Recipe = make_recipe(f"lora.adapter_name_or_path={folder}", "lora.r=4", *more, config=SIZES)
    model = copy.deepcopy(plain).float()
    add_adapters(recipe, read_model_shape(SIZES, "tiny"), model)
    return {name: value for name, value in model.named_parameters() if value.requires_grad}


def test_a_run_starts_from_adapters_that_peft_has_written(
    plain: Any, tmp_path: Path, snapshot: SnapshotAssertion
) -> None:
    model = copy.deepcopy(plain).float()
    adapted = get_peft_model(model, LoraConfig(r=4, lora_alpha=32, target_modules="all-linear"))
    for parameter in adapted.parameters():
        if parameter.requires_grad:
            nn.init.normal_(parameter)
    adapted.save_pretrained(tmp_path)
    expected = {name: value for name, value in model.named_parameters() if value.requires_grad}
    ours = start_from(tmp_path, plain)
    assert ours.keys() == expected.keys()
    assert all(torch.equal(ours[name], expected[name]) for name in ours)
    starts = ((tmp_path, ["lora.alpha=8"]), (tmp_path, ["lora.r=2"]), (tmp_path, ["lora.target_modules=[q_proj]"]))
    said = [
        explain(start_from, folder, plain, *words, error=BuildError)
        for folder, words in (*starts, (tmp_path / "missing", []))
    ]
    assert said == snapshot
