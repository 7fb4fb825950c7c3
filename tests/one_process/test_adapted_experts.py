"""Adapters of experts beside peft's own forward: results and every gradient, small updates, experts without tokens,
files that peft reads, and what the ledger and the plan say of them."""

import copy
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from peft.tuners.lora.layer import ParamWrapper
from support.families import has_experts
from support.hybrids import HYBRIDS
from support.refusals import explain
from support.tiers import sample_every
from support.training import make_recipe
from syrupy.assertion import SnapshotAssertion
from test_families import LAYERS, make_config, make_hybrid_config
from torch import Tensor
from transformers import AutoModelForCausalLM

from ulysses_cli.plan.ledger.adapted_layers import LoraExperts
from ulysses_cli.plan.ledger.depth import Depth
from ulysses_cli.plan.ledger.job import make_job
from ulysses_cli.plan.ledger.step import SizedRun, alone
from ulysses_cli.plan.ledger.weights import list_linear_modules, read_weights
from ulysses_cli.plan.levers import Levers
from ulysses_cli.plan.models.families import FAMILIES
from ulysses_cli.plan.models.shape import read_model_shape
from ulysses_cli.train.experts import AdaptedExperts, serve_adapted_experts, split_experts
from ulysses_cli.train.model.adapters import add_adapters, load_adapters, make_adapter_config
from ulysses_cli.train.model.loading import BuildError

OWN = {"gemma4_text": {"enable_moe_block": True, "top_k_experts": 2, "hidden_size_per_layer_input": 0}}
RANK = 3


def make_model(kind: str) -> Any:
    torch.manual_seed(0)
    config = make_hybrid_config(kind) if kind in HYBRIDS else make_config(kind, **LAYERS, **OWN.get(kind, {}))
    return AutoModelForCausalLM.from_config(config, dtype=torch.float32, attn_implementation="eager")


def make(kind: str) -> Any:
    """Experts of a model with peft's adapters around them, none of which is zero."""
    model = make_model(kind)
    names = [f"experts.{'up_proj' if kind == 'nemotron_h' else 'gate_up_proj'}", "experts.down_proj"]
    get_peft_model(model, LoraConfig(r=RANK, lora_alpha=6, target_modules=[], target_parameters=names))
    wrapper = next(module for name, module in model.named_modules() if name.endswith(".experts"))
    for parameter in wrapper.parameters():
        torch.nn.init.normal_(parameter, std=0.2)
    return wrapper


def run(experts: Any, dtype: torch.dtype) -> dict[str, Tensor]:
    """Results and gradients, of the tokens, of their experts' weights and of adapters. The last expert gets no token,
    and the others get different numbers."""
    generator, base = torch.Generator().manual_seed(1), experts.get_base_layer()
    num_tokens, width = 50, base.down_proj.shape[2 if base.is_transposed else 1]
    chosen = torch.stack([torch.randperm(base.num_experts - 1, generator=generator)[:2] for _ in range(num_tokens)])
    hidden, weights, slopes = (torch.rand(num_tokens, size, generator=generator) - 0.5 for size in (width, 2, width))
    leaves = {"hidden": hidden.to(dtype).requires_grad_(), "weights": weights.to(dtype).requires_grad_()}
    leaves |= {name: weight for name, weight in experts.named_parameters() if weight.requires_grad}
    out = experts(leaves["hidden"], chosen, leaves["weights"])
    grads = torch.autograd.grad((out * slopes.to(dtype)).sum(), list(leaves.values()))
    return {"out": out.detach(), **dict(zip(leaves, grads, strict=True))}


def serve(experts: Any) -> None:
    assert serve_adapted_experts(torch.nn.ModuleList([experts])) == 1


@pytest.mark.parametrize("kind", sample_every(8, [kind for kind in FAMILIES if has_experts(kind)]))
def test_results_and_gradients_are_peft_s(kind: str) -> None:
    """peft in float64, each expert by itself, of every family; ours in float32."""
    experts = make(kind)
    exact = copy.deepcopy(experts).double()
    exact.get_base_layer().config._experts_implementation = "eager"
    expected = run(exact, torch.float64)
    serve(experts)
    found = run(experts, torch.float32)
    assert found.keys() == expected.keys()
    assert len(found) == 3 + 2 * 2
    for name, value in expected.items():
        assert ((found[name] - value).norm() / value.norm()).item() < 5e-7, name
        if "lora_" in name:
            parts = split_experts(*[value, value.T][:: -1 if "lora_B" in name else 1], experts.num_experts)
            own = parts["lora_B" in name].flatten(1).abs().amax(1)
            assert own[-1] == 0, "an expert without a token"
            assert own[:-1].min() > 0


@pytest.mark.parametrize(("size", "theirs"), [(1e-4, 0.5), (1e-2, 0.01)])
def test_small_updates_survive_in_bfloat16(size: float, theirs: float) -> None:
    """Of tokens whose products with the weights cancel, the update alone is left. peft rounds it with the weights."""
    wrapper = make("qwen3_moe").base_layer
    base, (first, second) = wrapper.get_base_layer(), (wrapper.lora_A["default"], wrapper.lora_B["default"])
    torch.nn.init.uniform_(second.weight, -size, size)
    wrapper.bfloat16()
    base.gate_up_proj.data[..., 1::2] = -base.gate_up_proj.data[..., ::2]
    rows = torch.randn(64, base.gate_up_proj.size(2) // 2).repeat_interleave(2, 1).bfloat16()
    numbers, ends = torch.zeros(64).long(), torch.full((base.num_experts,), 64, dtype=torch.int32)
    parts = (each.weight.double() for each in (first, second))
    down, up = (each[0] for each in split_experts(*parts, base.num_experts))
    exact = 2 * (rows.double() @ down.T) @ up
    with torch.no_grad():
        ours = AdaptedExperts(base, {"gate_up_proj": wrapper}).multiply("gate_up_proj", rows, numbers, ends)
        with wrapper._activate_lora(["default"]):
            rounded = rows @ base.gate_up_proj[0].T
    assert ((ours - exact).norm() / exact.norm()).item() < 0.005
    assert ((rounded - exact).norm() / exact.norm()).item() > theirs


def adapt(kind: str, *words: str) -> tuple[Any, Any, Any]:
    """As a run does. Adapters of experts are not zero."""
    model = make_model(kind)
    content = json.loads(model.config.to_json_string(use_diff=False))
    shape = read_model_shape(content, "tiny")
    targets = f"lora.target_modules=[{', '.join(list_linear_modules(shape))}]"
    recipe = make_recipe("lora.r=8", targets, "lora.experts=[gate_up, down]", *words, config=content)
    adapted = add_adapters(recipe, shape, model)
    serve_adapted_experts(model)
    for name, weight in model.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(weight, std=0.2)
    return recipe, shape, adapted


@pytest.mark.parametrize("kind", ["qwen3_moe", pytest.param("gpt_oss", marks=pytest.mark.check)])
def test_peft_reads_the_files_and_so_does_a_run(kind: str, tmp_path: Path, snapshot: SnapshotAssertion) -> None:
    """peft's forward adds the adapters to the weights."""
    recipe, shape, adapted = adapt(kind)
    settings = adapted.peft_config["default"]
    assert set(settings.rank_pattern.values()) == {4}, "auto: r over two experts of a token"
    adapted.save_pretrained(tmp_path)
    read = PeftModel.from_pretrained(make_model(kind), str(tmp_path))
    assert type(read.base_model.model.model.layers[-1].mlp.experts).forward is ParamWrapper.forward
    tokens = torch.arange(3, 40)[None]
    with torch.no_grad():
        theirs, ours = (each.eval()(tokens, use_cache=False).logits for each in (read, adapted))
    assert not torch.equal(theirs, ours)
    torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)
    _, _, other = adapt(kind)
    load_adapters(other, make_adapter_config(recipe, shape), str(tmp_path))
    assert all(torch.equal(*pair) for pair in zip(other.parameters(), adapted.parameters(), strict=True))
    *_, other = adapt(kind, "lora.expert_r=3")
    assert (
        explain(load_adapters, other, make_adapter_config(recipe, shape), str(tmp_path), error=BuildError) == snapshot
    )


def test_experts_that_a_model_does_not_have_are_an_error(snapshot: SnapshotAssertion) -> None:
    """Of a shape that is not the model's: peft would adapt the others and say nothing."""
    content = json.loads(make_model("nemotron_h").config.to_json_string(use_diff=False))
    recipe = make_recipe("lora.target_modules=[q_proj]", "lora.experts=[gate_up, down]", config=content)
    assert (
        explain(add_adapters, recipe, read_model_shape(content, "tiny"), make_model("qwen3_moe"), error=BuildError)
        == snapshot
    )


@pytest.mark.parametrize("kind", ["gpt_oss", pytest.param("nemotron_h", marks=pytest.mark.check)])
def test_adapters_on_sizes_are_those_of_a_run(kind: str) -> None:
    recipe, shape, adapted = adapt(kind)
    real = {name: tuple(each.shape) for name, each in adapted.base_model.model.named_parameters() if each.requires_grad}
    trained = sum(each.numel() for each in adapted.parameters() if each.requires_grad)
    assert read_weights(shape, recipe.lora).num_trained == trained
    depth = Depth(tuple(range(shape.num_layers)), tuple(range(shape.num_layers)))
    with alone():
        sized = SizedRun(make_job(recipe, shape, Levers()), 0, depth).module.model
    assert {name: each.shape for name, each in sized.named_parameters() if each.requires_grad} == real
    assert any(isinstance(module, LoraExperts) for module in sized.modules())
