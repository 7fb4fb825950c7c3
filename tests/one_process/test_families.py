"""Compares the light half's facts about model families with transformers: defaults, windows, parameters, modules."""

import dataclasses
import inspect
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from peft.utils.transformers_weight_conversion import _MODEL_TO_CONVERSION_PATTERN, _MOE_FUSED_TARGETS
from safetensors.torch import load_file, save_file
from support.families import TELLING, has_experts, make_config
from support.hybrids import HYBRIDS, make_hybrid_config
from support.recipes import load
from support.tiers import mark_by, sample, sample_every
from support.training import make_recipe
from torch.utils.flop_counter import FlopCounterMode
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from ulysses_cli.hub import SHIPPED_TABLE
from ulysses_cli.plan.layout import Layout
from ulysses_cli.plan.ledger.adapted_layers import LoraLinear
from ulysses_cli.plan.ledger.depth import Depth
from ulysses_cli.plan.ledger.job import Job, make_job
from ulysses_cli.plan.ledger.products import count_products
from ulysses_cli.plan.ledger.step import SizedRun, alone
from ulysses_cli.plan.ledger.weights import list_linear_modules, read_weights
from ulysses_cli.plan.levers import Levers
from ulysses_cli.plan.models.families import FAMILIES
from ulysses_cli.plan.models.family import Trait
from ulysses_cli.plan.models.layers import NUM_CHOSEN, NUM_EXPERTS
from ulysses_cli.plan.models.shape import ModelShape, read_model_shape
from ulysses_cli.plan.recipe.sections import Lora
from ulysses_cli.plan.resolved import resolve
from ulysses_cli.plan.rows.indexing import RowSizes, size_call
from ulysses_cli.plan.rules.check import check_recipe
from ulysses_cli.plan.sizes import library
from ulysses_cli.plan.sizes.sources import read_defaults
from ulysses_cli.plan.sizes.tensor import Running
from ulysses_cli.prove.shrink import name_kind, pick_layers, shrink_config
from ulysses_cli.train.model.adapters import choose_layers
from ulysses_cli.train.model.loading import find_unused_weights, stretch_positions
from ulysses_cli.train.model.routers import find_routers, list_router_layers

LAYERS: dict[str, Any] = {"num_hidden_layers": 6}  # with fewer layers, no family has both kinds


def make_any_config(model_type: str, **changes: Any) -> Any:
    is_hybrid = model_type in HYBRIDS
    return make_hybrid_config(model_type, **changes) if is_hybrid else make_config(model_type, **LAYERS, **changes)


def read_shape(config: Any, name: str = "tiny") -> ModelShape:
    return read_model_shape(json.loads(config.to_json_string(use_diff=False)), name)


def make_model(config: Any) -> Any:
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(config)


@pytest.mark.parametrize("model_type", FAMILIES)
def test_the_defaults_are_transformers_own(model_type: str) -> None:
    fields = dataclasses.fields(CONFIG_MAPPING[model_type])
    own = {field.name: field.default for field in fields if field.default is not dataclasses.MISSING}
    found, _ = read_defaults(model_type)
    assert {name: value for name, value in own.items() if name in found and value != found[name]} == {}
    assert own.keys() == found.keys()


def test_peft_adapts_the_experts_of_these() -> None:
    adapted = {name for name in FAMILIES if _MODEL_TO_CONVERSION_PATTERN.get(name) in _MOE_FUSED_TARGETS}
    assert adapted == {name for name, family in FAMILIES.items() if Trait.EXPERTS_ADAPTED in family.traits}


def list_adapted(config: Any, targets: Any) -> set[str]:
    """The last parts of the names of the linear layers on which peft adds adapters."""
    model = make_model(config)
    get_peft_model(model, LoraConfig(r=2, target_modules=targets), autocast_adapter_dtype=False)
    return {name.split(".")[-2] for name, _ in model.named_modules() if name.endswith(".lora_A")}


@pytest.mark.parametrize("model_type", sample_every(8, sorted(FAMILIES)))
def test_all_linear_is_what_peft_adapts(model_type: str) -> None:
    """A family of which peft refuses all-linear, or adapts experts too, is told which names to write."""
    config = make_any_config(model_type)
    shape = read_shape(config)
    able = set(list_linear_modules(shape))
    if refused := FAMILIES[model_type].refused_by_peft:
        with pytest.raises(ValueError, match=f"'{refused}'"):
            list_adapted(config, "all-linear")
    if not shape.adapts_all:
        assert list_adapted(config, list(able)) == able
    else:
        assert list_adapted(config, "all-linear") == able


@pytest.mark.parametrize("model_type", sample_every(8, sorted(FAMILIES)))
def test_products_with_weights_and_norms_are_those_that_torch_runs(model_type: str) -> None:
    """Products of attention and of recurrences are batched; those with weights are not. Norms with a gate are apart."""
    config = make_any_config(model_type)
    shape = read_shape(config)
    model = AutoModelForCausalLM.from_config(config, experts_implementation="eager")
    normed = [0]
    for name, module in model.model.named_modules():
        is_norm = "layers." in name and "Norm" in type(module).__name__ and "Gated" not in type(module).__name__
        if is_norm:
            module.register_forward_hook(lambda _, __, out: normed.append(out.numel()))
    with torch.no_grad(), FlopCounterMode(display=False) as counter:
        model(input_ids=torch.arange(8)[None])
    counts = counter.get_flop_counts()["Global"]
    found = sum(counts.get(name, 0) for name in (torch.ops.aten.mm, torch.ops.aten.addmm))
    products = count_products(shape)
    assert found == 2 * 8 * (products.mlp + products.others + shape.vocab_size * shape.hidden_size)
    assert sum(normed) == 8 * products.normed


SPLIT = (Layout(1, 1, 4, 2), 1), (Layout(1, 1, 2), 1), (Layout(1, 1, 2), 2)


@pytest.mark.parametrize("model_type", sample_every(16, sorted(FAMILIES)))
@pytest.mark.parametrize(("layout", "chunks"), sample(SPLIT, SPLIT[:1], ()))
def test_the_census_knows_the_largest_calls_of_a_run_on_sizes(model_type: str, layout: Layout, chunks: int) -> None:
    """On a ring a call may get fewer queries and keys. The census reads a shape's layers (plan/rows/indexing.py), since
    a rule asks before anything runs, and a search asks thousands of times."""
    config = make_hybrid_config(model_type) if model_type in HYBRIDS else make_config(model_type, **LAYERS)
    shape = read_model_shape(json.loads(config.to_json_string(use_diff=False)), "tiny")
    if layout.sp_size // layout.ring_size not in shape.sp_sizes or shape.ring_obstacle:
        layout = Layout()
    sizes = RowSizes(1024, layout.sp_size, layout.ring_size, chunks, tiled_mlp=False, is_quantized=False)
    every = tuple(range(shape.num_layers))
    calls, rows = list[list[Any]](), [0]
    with alone():
        levers = Levers(gradient_checkpointing=False, head_chunks=chunks)
        run = SizedRun(Job(shape, layout, 1024, levers), 0, Depth(every, every))
        library.CustomOperator.inside = {"ulysses::attend": lambda *call: calls.append(list(call)) or 0}
        Running.product = lambda a, b, _: rows.append(max(a.numel(), a.shape[0] * b.shape[-1]) if b.ndim == 3 else 0)
        run.step()
    told = {
        (call.heads, call.kv_heads, call.head_dim): (call.queries, call.keys)
        for call in (size_call(mixer, shape, sizes) for mixer in shape.attentions)
    }
    for q, k, v, *_ in calls:
        queries, keys = told[q.shape[1], k.shape[1], max(q.shape[2], v.shape[2])]
        is_whole = layout.ring_size == 1
        assert (q.shape[0], k.shape[0]) == (queries, keys) if is_whole else q.shape[0] <= queries and k.shape[0] <= keys
    width = max(shape.hidden_size, 2 * shape.moe_intermediate_size)
    assert max(rows) <= sizes.local_tokens * max(1, shape.num_experts_per_token) * width


def test_each_family_has_its_proof_on_ranks() -> None:
    """tests/ranks/test_models.py proves those with attention alone, test_recurrent_models.py the others."""
    assert {name for name, family in FAMILIES.items() if family.other_kinds} == HYBRIDS.keys()


def find_attention(model: Any, num_layers: int) -> list[Any]:
    """Each layer's softmax attention, or None."""
    found: list[Any] = [None] * num_layers
    for name, module in model.named_modules():
        if hasattr(module, "num_key_value_groups"):
            found[int(name.split(".")[2])] = module
    return found


# Their attention reads the window from the config, whatever the layer.
WINDOWED_BY_CONFIG = {"mistral", "mixtral", "phi3", "qwen3_moe", "starcoder2", "ministral3"}
VARIANTS = [(model_type, {}) for model_type in FAMILIES]
VARIANTS += [("qwen3", {"use_sliding_window": True, "max_window_layers": 4}), ("llama", {"attention_bias": True})]
VARIANTS += [("llama", {"mlp_bias": True, "tie_word_embeddings": True}), ("qwen3_moe", {"decoder_sparse_step": 2})]
VARIANTS += [("gemma3_text", {"num_hidden_layers": 7}), ("granite", {"attention_multiplier": 0.1})]
VARIANTS += [("qwen3_moe", {"mlp_only_layers": [0, 3]}), ("mistral", {"sliding_window": None})]
VARIANTS += [("ministral", {"layer_types": ["full_attention", "sliding_attention"]})]
VARIANTS += [("laguna", {"num_attention_heads_per_layer": [4, 8] * 3}), ("kimi_linear", {"q_lora_rank": 12})]
VARIANTS += [("deepseek_v3", {"q_lora_rank": None}), ("deepseek_v3", {"attention_bias": True})]
VARIANTS += [("glm4_moe", {"use_qk_norm": True, "attention_bias": True}), ("cohere", {"use_qk_norm": True})]
VARIANTS += [("hyperclovax", {"use_post_norm": False}), ("qwen3_next", {"mlp_only_layers": [1]})]
VARIANTS += [("gemma4_text", {"num_kv_shared_layers": 1, "num_hidden_layers": 12, "use_double_wide_mlp": True})]
VARIANTS += [("gemma4_text", {"attention_k_eq_v": True, "num_global_key_value_heads": 1})]
VARIANTS += [("gemma4_text", {"enable_moe_block": True, "top_k_experts": 2, "hidden_size_per_layer_input": 0})]
VARIANTS += [("nemotron_h", {"layer_types": ["mamba", "moe", "attention"], "moe_latent_size": 16})]
VARIANTS += [("granitemoehybrid", {"position_embedding_type": "rope"})]
VARIANTS += [("olmo_hybrid", {"rope_parameters": {"rope_theta": None, "rope_type": "default"}})]
VARIANTS += [("falcon_h1", {"mamba_rms_norm": True, "mamba_proj_bias": True})]
VARIANTS += [("zamba2", {"use_shared_attention_adapter": True, "use_mem_rope": True, "add_bias_linear": True})]
VARIANTS += [("cohere2_moe", {"num_shared_experts": 2, "first_k_dense_replace": 2})]


@pytest.mark.parametrize(("model_type", "changes"), sample_every(6, VARIANTS))
def test_the_shape_equals_the_models(model_type: str, changes: dict[str, Any]) -> None:
    config = make_config(model_type, **{**LAYERS, **changes})
    model = make_model(config)
    shape = read_shape(config)
    assert read_weights(shape, None).num_elements == sum(parameter.numel() for parameter in model.parameters())
    assert bool(shape.rope_type) == any("Rotary" in type(module).__name__ for module in model.modules())
    layers = [layer.attention for layer in shape.layers]
    for layer, attention in zip(layers, find_attention(model, shape.num_layers), strict=True):
        assert (layer is None) == (attention is None)
        if layer is not None and attention is not None:
            window = getattr(attention, "sliding_window", None)
            if model_type in WINDOWED_BY_CONFIG:
                window = config.sliding_window
            assert layer.window_tokens == (window if getattr(attention, "is_sliding", True) else None)
            assert getattr(attention, "attention_dropout", 0.0) == shape.attention_dropout
            if not layer.is_latent:
                assert attention.scaling == pytest.approx(shape.attention_scale)
    # where peft would adapt experts by the MLP's names, no layer of such a name is offered
    paths = [name for name, module in model.model.named_modules() if isinstance(module, torch.nn.Linear)]
    linear = {path.split(".")[-1] for path in paths if not path.endswith(tuple(list_router_layers(model)))}
    refused = {path.split(".")[-1] for path in paths if ".mlp." in path and shape.adapts_experts}
    assert set(list_linear_modules(shape)) == linear - refused - {FAMILIES[model_type].refused_by_peft}


BIASED: list[tuple[str, dict[str, Any]]] = [
    *((name, {}) for name in ("qwen2", "jais2", "starcoder2", "granitemoehybrid", "bamba", "nemotron_h", "zamba2")),
    *((name, {"attention_bias": True, "mlp_bias": True}) for name in ("llama", "glm", "deepseek_v3")),
    ("falcon_h1", {"mamba_proj_bias": True, "projectors_bias": True, "attention_bias": True, "mlp_bias": True}),
    ("lfm2", {"conv_bias": True}),
    ("nemotron_h", {"use_bias": True}),
    ("zamba2", {"add_bias_linear": True}),
]


@pytest.mark.parametrize(("model_type", "changes"), sample_every(6, BIASED))
def test_the_ledger_lists_every_weight_in_the_models_order_and_what_peft_adds(
    model_type: str, changes: dict[str, Any]
) -> None:
    """Also what peft puts on copies of a shared block's adapters."""
    config = make_any_config(model_type, **changes)
    model, shape = make_model(config), read_shape(config)
    weights = read_weights(shape, None)
    assert weights.every == tuple((name, each.numel(), True) for name, each in model.named_parameters())
    layers = [[each.numel() for each in layer.parameters()] for layer in model.get_decoder().layers]
    assert [list(block) for block in weights.blocks[1:-1]] == layers
    targets: Any = "all-linear" if shape.adapts_all else list(list_linear_modules(shape))
    get_peft_model(model, LoraConfig(r=2, target_modules=targets), autocast_adapter_dtype=False)
    counted = read_weights(shape, Lora(r=2, target_modules=targets if shape.adapts_all else tuple(targets)))
    assert sorted(counted.trained) == sorted(each.numel() for each in model.parameters() if each.requires_grad)
    assert counted.num_elements == sum(each.numel() for each in model.parameters())


def test_routers_that_score_by_sigmoids_are_known() -> None:
    """By the source of each router's forward; Cohere's choice is in its config."""
    for model_type, family in FAMILIES.items():
        config = make_any_config(model_type)
        routers = list(find_routers(make_model(config)).values())
        if routers and model_type != "cohere2_moe":
            by_sigmoid = "sigmoid" in inspect.getsource(type(routers[0]).forward)
            assert by_sigmoid == (Trait.SIGMOID_ROUTERS in family.traits), model_type
    content = json.loads(make_config("cohere2_moe").to_json_string(use_diff=False))
    assert not read_model_shape(content, "tiny").has_sigmoid_routers
    assert read_model_shape({**content, "expert_selection_fn": "sigmoid"}, "tiny").has_sigmoid_routers


LINEAR_ROUTERS = {"gemma4_text": "router.proj", "hunyuan_v1_moe": "gate.wg", "afmoe": "router.gate"}


@pytest.mark.parametrize("model_type", LINEAR_ROUTERS)
def test_no_router_takes_an_adapter_on_ranks_or_on_sizes(model_type: str) -> None:
    """peft's all-linear alone takes in routers that are linear layers. Two of these families are refused all-linear."""
    changes = {"enable_moe_block": True, "top_k_experts": 2, "hidden_size_per_layer_input": 0}
    config = make_config(model_type, **LAYERS, **(changes if model_type == "gemma4_text" else {}))
    router, plain, model = LINEAR_ROUTERS[model_type], make_model(config), make_model(config)
    content = json.loads(config.to_json_string(use_diff=False))
    shape = read_model_shape(content, "tiny")
    targets: Any = "all-linear" if shape.adapts_all else list(list_linear_modules(shape))
    get_peft_model(plain, LoraConfig(r=2, target_modules="all-linear"), autocast_adapter_dtype=False)
    assert any(f"{router}.lora_A" in name for name, _ in plain.named_parameters())
    settings = choose_layers(LoraConfig(r=2, target_modules=targets), model)
    assert settings.exclude_modules == [router]
    get_peft_model(model, settings, autocast_adapter_dtype=False)
    found = {name.removesuffix(".lora_A") for name, _ in model.named_modules() if name.endswith(".lora_A")}
    assert found
    assert not any(name.endswith(router) for name in found)
    words = "all-linear" if shape.adapts_all else f"[{', '.join(targets)}]"
    job = make_job(make_recipe("lora.r=2", f"lora.target_modules={words}", config=content), shape, Levers())
    with alone():
        sized = SizedRun(job, 0, Depth(tuple(range(shape.num_layers)), tuple(range(shape.num_layers)))).module.model
    assert {name for name, layer in sized.named_modules() if isinstance(layer, LoraLinear)} == found
    counted = read_weights(shape, job.lora)
    assert counted.num_trained == sum(each.numel() for each in model.parameters() if each.requires_grad)


@pytest.mark.parametrize(("model_type", "positions"), [("kimi_linear", 8192), ("nemotron_h", 8192), ("lfm2", 64)])
def test_a_model_without_rotary_positions_is_exported_with_the_length_of_its_rows(
    model_type: str, positions: int
) -> None:
    """Nothing in it ends at that number, by which servers bound a prompt. One with rotary positions keeps its own."""
    config = make_hybrid_config(model_type)
    config.max_position_embeddings = 64
    shape = read_shape(config)
    recipe = load("data.max_length=8Ki").recipe
    stretch_positions(config, recipe, resolve(recipe, shape))
    assert config.max_position_embeddings == positions


@pytest.mark.parametrize(
    ("model_type", "rope", "words", "expected"),
    [
        ("llama", {"rope_type": "default", "rope_theta": 1e4}, ["model.rope_theta=1e6"],
         {"rope_type": "default", "rope_theta": 1e6}),
        ("llama", {"rope_type": "default", "rope_theta": 1e4}, ["model.rope_theta=auto"],
         {"rope_type": "default", "rope_theta": 3.09e5}),
        ("llama", {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 256},
         ["model.rope_theta=1e6"],
         {"rope_type": "yarn", "rope_theta": 1e6, "factor": 4.0, "original_max_position_embeddings": 256}),
        ("llama", {"rope_type": "default", "rope_theta": 1e4},
         ["model.rope_theta=1e6", "model.rope_scaling={type: yarn, factor: 4}"],
         {"rope_type": "yarn", "rope_theta": 1e6, "factor": 4.0, "original_max_position_embeddings": 1024}),
        ("gemma3_text", None, ["model.rope_theta=8e6"],
         {"sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
          "full_attention": {"rope_type": "default", "rope_theta": 8e6}}),
        ("gemma3_text", None, ["model.rope_scaling={type: linear, factor: 8}"],
         {"sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
          "full_attention": {"rope_type": "linear", "rope_theta": 1e6, "factor": 8.0}}),
    ],
)  # fmt: skip
def test_another_base_is_what_the_exported_model_computes_with(
    model_type: str, rope: dict[str, Any] | None, words: list[str], expected: dict[str, Any], tmp_path: Path
) -> None:
    """Layers with windows keep their own. The frequencies are those of the plain formula, after saving and reading."""
    sizes: dict[str, Any] = {**LAYERS, "max_position_embeddings": 1024, "sliding_window": 64}
    config = make_config(model_type, **sizes, **({"rope_parameters": rope} if rope else {}))
    shape = read_shape(config)
    loaded = load("data.max_length=8Ki", *words)
    assert check_recipe(loaded, shape) == []
    stretch_positions(config, loaded.recipe, resolve(loaded.recipe, shape))
    config.save_pretrained(tmp_path)
    read = AutoConfig.from_pretrained(tmp_path)
    assert (read.rope_parameters, read.max_position_embeddings) == (expected, 8192)
    buffers = dict(AutoModelForCausalLM.from_config(read).named_buffers())
    (name,) = (each for each in buffers if each.endswith(("rotary_emb.inv_freq", "full_attention_inv_freq")))
    inner = expected.get("full_attention", expected)
    if inner["rope_type"] == "default":
        plain = [inner["rope_theta"] ** (-2 * i / read.head_dim) for i in range(read.head_dim // 2)]
        torch.testing.assert_close(buffers[name], torch.tensor(plain), rtol=1e-6, atol=0)


SPARSE = {"enable_moe_block": True, "first_k_dense_replace": 0, "num_dense_layers": 0, "hidden_size_per_layer_input": 0}


@pytest.mark.parametrize("model_type", sample_every(6, [name for name in FAMILIES if has_experts(name)]))
def test_experts_are_counted_by_the_name_that_transformers_reads(model_type: str) -> None:
    """Each name that a family has for them is written, with a number of its own."""
    names = [(name, number) for number, name in enumerate(NUM_EXPERTS, 5)]
    names += [(name, number) for number, name in enumerate(NUM_CHOSEN, 1)]
    saved = make_config(model_type, **LAYERS, **SPARSE).to_dict()
    written = {key: value for key, value in saved.items() if key not in dict(names)} | dict(names)
    config = AutoConfig.for_model(**written)
    named = make_model(config).named_parameters()
    stacks = {weight.shape[0] for name, weight in named if ".experts." in name and weight.dim() == 3}
    shape = read_model_shape(json.loads(json.dumps(written)), "tiny")
    assert stacks == {shape.num_experts}
    (own,) = (name for name in NUM_CHOSEN if name in read_defaults(model_type)[0])
    assert shape.num_experts_per_token == getattr(config, own)


def name_kinds(shape: ModelShape) -> set[tuple[str, type, bool]]:
    borrows = ((layer, bool(layer.attention and layer.attention.shares_kv)) for layer in shape.layers)
    return {(name_kind(layer), type(layer.mlp), each) for layer, each in borrows}


SHRUNK = [(model_type, {}) for model_type in FAMILIES]
SHRUNK += [("gemma4_text", {"num_kv_shared_layers": 6, "num_hidden_layers": 12}), ("deepseek_v3", {"n_group": 2})]


@pytest.mark.check
@pytest.mark.parametrize(("model_type", "changes"), SHRUNK)
def test_the_small_model_of_verify_has_the_same_kinds_of_layers(model_type: str, changes: dict[str, Any]) -> None:
    config = json.loads(make_config(model_type, **{"num_hidden_layers": 8, **changes}).to_json_string(use_diff=False))
    shape = read_model_shape(config, "large")
    small = AutoConfig.for_model(**shrink_config(config, shape))
    small_shape = read_shape(small, "small")
    made = sum(parameter.numel() for parameter in make_model(small).parameters())
    assert read_weights(small_shape, None).num_elements == made
    assert name_kinds(small_shape) == name_kinds(shape)
    assert small_shape.head_counts == shape.head_counts
    kept = [mixer for index in pick_layers(shape) for mixer in shape.layers[index].mixers]
    for ours, theirs in zip((mixer for layer in small_shape.layers for mixer in layer.mixers), kept, strict=True):
        assert getattr(ours, "conv_tokens", None) == getattr(theirs, "conv_tokens", None)


TABLE = [json.loads(file.read_text()) for file in sorted(SHIPPED_TABLE.glob("*.json"))]


@pytest.mark.parametrize("entry", sample_every(5, TABLE), ids=lambda entry: entry["repo"])
def test_verify_makes_a_small_model_of_each_model_of_the_table(entry: dict[str, Any]) -> None:
    """transformers' own validation refuses hidden sizes that the heads do not divide, and lists of other lengths."""
    shape = read_model_shape(entry["config"], entry["repo"])
    small = AutoConfig.for_model(**shrink_config(entry["config"], shape))
    small.validate()
    assert small.num_attention_heads == shape.num_heads


@pytest.mark.full
@pytest.mark.parametrize("entry", TABLE, ids=lambda entry: entry["repo"])
def test_the_tables_parameters_are_transformers_own(entry: dict[str, Any]) -> None:
    config = entry["config"].get("text_config", entry["config"])
    shape = read_model_shape(entry["config"], entry["repo"])
    if shape.inexact:
        pytest.skip(f"refused: {shape.inexact}")
    values = {k: v for k, v in config.items() if k not in ("rope_scaling", "quantization_config", "architectures")}
    model = make_model(AutoConfig.for_model(**values))
    assert read_weights(shape, None).num_elements == sum(parameter.numel() for parameter in model.parameters())


@pytest.mark.parametrize("model_type", [pytest.param(n, marks=mark_by(n in TELLING, False)) for n in FAMILIES])
def test_a_saved_model_of_each_family_has_no_weight_without_a_place(model_type: str, tmp_path: Path) -> None:
    """transformers saves some families under other names than their modules have (experts, one by one)."""
    AutoModelForCausalLM.from_config(make_config(model_type)).save_pretrained(tmp_path)
    model = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert find_unused_weights(model, str(tmp_path)) == []
    file = tmp_path / "model.safetensors"
    save_file({**load_file(file), "model.layers.0.extra.weight": torch.zeros(1)}, file, {"format": "pt"})
    assert find_unused_weights(model, str(tmp_path)) == ["model.layers.0.extra.weight"]
