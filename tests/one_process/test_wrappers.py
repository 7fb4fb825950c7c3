"""Tests multimodal models whose text part is trained: it is loaded from their files, and an export is the whole model
again, with every other tensor as it was. The reference is transformers' own class of the whole model."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file, save_file
from support.checkpoints import save_as_ranks
from support.exports import export, run_card, save_trained
from support.refusals import explain
from support.tiers import sample
from support.training import make_recipe
from syrupy.assertion import SnapshotAssertion
from transformers import AutoConfig, AutoModelForImageTextToText

from ulysses_cli.data.tokenizing.tokenizer import make_bytes_tokenizer
from ulysses_cli.plan.models.shape import read_model_shape
from ulysses_cli.run.checkpoints import CheckpointError
from ulysses_cli.train.export.base_model import BaseModel, find_base_files, find_carried
from ulysses_cli.train.export.merging import Merging
from ulysses_cli.train.export.weights import check_model, make_probe
from ulysses_cli.train.model.loading import BuildError, ModelOptions, find_key_mapping, load_pretrained
from ulysses_cli.train.record import make_card

TEXT: dict[str, Any] = {
    "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 8, "vocab_size": 128, "tie_word_embeddings": False,
}  # fmt: skip
VISION: dict[str, Any] = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1, "num_attention_heads": 2}
DEEP = {"depth": 1, "hidden_size": 16, "intermediate_size": 24, "num_heads": 2, "out_hidden_size": 32}
DELTA = {
    "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 8, "linear_value_head_dim": 8,
    "layer_types": ["linear_attention", "full_attention"],
}  # fmt: skip
PER_LAYER = {"vocab_size_per_layer_input": 128, "hidden_size_per_layer_input": 4, "num_kv_shared_layers": 1}
IMAGE = {"image_size": 28, "patch_size": 14}
EXPERTS = {
    "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 12, "shared_expert_intermediate_size": 12,
}  # fmt: skip
GEMMA_EXPERTS = {"num_experts": 4, "top_k_experts": 2, "moe_intermediate_size": 12, "enable_moe_block": True}
STACKED = "qwen3_5_moe stacked"  # as released; transformers writes one tensor for each expert
WRAPPERS: dict[str, dict[str, Any]] = {
    "qwen3_5": {
        "text_config": {**TEXT, **DELTA, "model_type": "qwen3_5_text"},
        "vision_config": DEEP,
    },
    "gemma3": {
        "text_config": {**TEXT, "model_type": "gemma3_text", "tie_word_embeddings": True},
        "vision_config": {**VISION, **IMAGE, "model_type": "siglip_vision_model"},
        "mm_tokens_per_image": 4,
    },
    "gemma4": {
        "text_config": {
            **TEXT, **PER_LAYER, "model_type": "gemma4_text", "global_head_dim": 8, "tie_word_embeddings": True,
            "num_hidden_layers": 3, "layer_types": ["sliding_attention", "full_attention", "full_attention"],
        },
        "vision_config": {**VISION, "num_key_value_heads": 2, "head_dim": 8},
        "audio_config": None,
    },
    "cohere_compass": {
        "text_config": {
            **TEXT, "model_type": "cohere_compass_text", "tie_word_embeddings": True,
            "rope_parameters": {"full_attention": {"rope_type": "default", "rope_theta": 1e4}},
        },
        "vision_config": {**DEEP, "deepstack_visual_indexes": [0]},
        "tie_word_embeddings": True,
    },
    **{
        name: {
            "text_config": {**TEXT, "model_type": text},
            "vision_config": {**VISION, **IMAGE, "model_type": "pixtral", "head_dim": 8},
            "tie_word_embeddings": False,
        }
        for name, text in (("mistral3", "mistral"), ("mistral3 ministral3", "ministral3"))
    },
    **{
        name: {
            "text_config": {**TEXT, **DELTA, **EXPERTS, "model_type": "qwen3_5_moe_text"},
            "vision_config": DEEP,
        }
        for name in ("qwen3_5_moe", STACKED)
    },
    "gemma4 experts": {
        "text_config": {
            **TEXT, **GEMMA_EXPERTS, "model_type": "gemma4_text", "global_head_dim": 8, "tie_word_embeddings": True,
            "hidden_size_per_layer_input": 0, "layer_types": ["sliding_attention", "full_attention"],
            "attention_k_eq_v": True, "num_global_key_value_heads": 1,
        },
        "vision_config": {**VISION, "num_key_value_heads": 2, "head_dim": 8},
        "audio_config": None,
    },
    "gemma4_unified": {
        "text_config": {
            **TEXT, "model_type": "gemma4_unified_text", "global_head_dim": 8, "tie_word_embeddings": True,
            "layer_types": ["sliding_attention", "full_attention"],
        },
        "vision_config": {"patch_size": 2, "mm_embed_dim": 16, "mm_posemb_size": 8, "output_proj_dims": 16},
    },
}  # fmt: skip
# Tensors that released files hold and that transformers' classes ignore.
IGNORED = {
    "qwen3_5": "mtp.layers.0.mlp.up_proj.weight",
    "qwen3_5_moe": "mtp.layers.0.mlp.experts.gate_up_proj",
    STACKED: "mtp.layers.0.mlp.experts.0.up_proj.weight",
    "gemma4": "model.language_model.layers.2.self_attn.k_proj.weight",
}
IGNORED_NAMES = set(IGNORED.values())
IDS = torch.arange(24)[None] % 128
PROBE = make_probe(make_bytes_tokenizer(), 128)
SETTINGS: dict[str, Any] = {"r": 2, "target_modules": ["q_proj", "down_proj"]}


@pytest.fixture(params=sample(WRAPPERS, quick=[], checked=["qwen3_5", "gemma3", "gemma4", "mistral3", STACKED]))
def base(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """A multimodal model from random weights, with processor settings and a tensor that transformers ignores."""
    torch.manual_seed(0)
    config = AutoConfig.for_model(request.param.split()[0], **WRAPPERS[request.param])
    model = AutoModelForImageTextToText.from_config(config)
    for name, value in model.named_buffers():
        if name.endswith("layer_scalar"):
            value.fill_(0.7)
    model.save_pretrained(tmp_path / "base")
    (tmp_path / "base" / "preprocessor_config.json").write_text('{"size": 28}')
    file = tmp_path / "base" / "model.safetensors"
    if request.param == STACKED:
        save_file(model.state_dict(), file, {"format": "pt"})
        assert "model.language_model.layers.1.mlp.experts.gate_up_proj" in load_file(file)
    if request.param in IGNORED:
        save_file({**load_file(file), IGNORED[request.param]: torch.rand(3, 2)}, file, {"format": "pt"})
    return tmp_path / "base"


def load_text(folder: Path) -> Any:
    config = AutoConfig.from_pretrained(folder).get_text_config(decoder=True)
    return load_pretrained(ModelOptions(config, torch.float32, "eager"), str(folder))


def load_whole(folder: Path) -> Any:
    model, loading_info = AutoModelForImageTextToText.from_pretrained(
        folder, output_loading_info=True, attn_implementation="eager"
    )
    unknown = loading_info["unexpected_keys"] - IGNORED_NAMES
    assert not {*loading_info["missing_keys"], *loading_info["mismatched_keys"], *unknown}
    return model.eval()


@torch.no_grad()
def compute_logits(model: Any) -> torch.Tensor:
    logits: torch.Tensor = model.eval()(input_ids=IDS, use_cache=False).logits
    return logits


def test_an_export_is_the_whole_model_again(base: Path, tmp_path: Path) -> None:
    before = {file.name: file.read_bytes() for file in base.iterdir()}
    model = load_text(base)
    assert torch.equal(compute_logits(model), compute_logits(load_whole(base)))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.01 * torch.randn_like(parameter))
    checkpoint = save_as_ranks(dict(model.named_parameters()), tmp_path / "step-1")
    whole = BaseModel(str(base))
    assert whole.wrapper is not None
    model.config.max_position_embeddings = 4321  # what a longer recipe writes

    def check(to: Path) -> None:
        check_model(checkpoint, to, model.config, torch.float32, lambda _: None, PROBE, whole)

    folder = export(checkpoint, tmp_path / "out", model.config, base=whole, check=check)
    ours, theirs = load_file(folder / "model.safetensors"), load_file(base / "model.safetensors")
    assert ours.keys() == theirs.keys()
    unchanged = {name for name in ours if torch.equal(ours[name], theirs[name]) and not name.endswith("layer_scalar")}
    assert unchanged == find_carried(model, whole).names >= IGNORED_NAMES & theirs.keys()
    assert torch.equal(compute_logits(load_whole(folder)), compute_logits(model))
    config = json.loads((folder / "config.json").read_text())
    assert config["model_type"] == json.loads(before["config.json"])["model_type"]
    assert config["text_config"]["max_position_embeddings"] == 4321
    assert (folder / "preprocessor_config.json").read_bytes() == before["preprocessor_config.json"]
    assert f"\n{len(unchanged)} tensors " in (folder / "README.md").read_text()
    assert {file.name: file.read_bytes() for file in base.iterdir()} == before


def test_adapters_are_merged_into_the_whole_model(base: Path, tmp_path: Path) -> None:
    adapted = get_peft_model(load_text(base), LoraConfig(**SETTINGS))
    with torch.no_grad():
        for name, parameter in adapted.named_parameters():
            if ".lora_B." in name:
                parameter.normal_(std=0.05)
    parameters = {name.removeprefix("base_model.model."): each for name, each in adapted.named_parameters()}
    trained = {name: each for name, each in parameters.items() if ".lora_" in name}
    checkpoint, whole = save_as_ranks(trained, tmp_path / "step-1"), BaseModel(str(base))
    files = find_base_files(str(base), None)
    merging = Merging(checkpoint, files, LoraConfig(**SETTINGS), torch.float32, torch.float32, None, whole)
    config = AutoConfig.from_pretrained(base).get_text_config(decoder=True)
    folder = export(checkpoint, tmp_path / "out", config, merge=merging.write, base=whole)
    merging.check(folder, config, PROBE)
    ours, theirs = load_file(folder / "model.safetensors"), load_file(base / "model.safetensors")
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[name], theirs[name]) for name in IGNORED_NAMES & theirs.keys())
    assert torch.allclose(compute_logits(load_whole(folder)), compute_logits(adapted), atol=1e-5)


def test_the_card_of_adapters_loads_them(base: Path, tmp_path: Path) -> None:
    text = load_text(base)
    adapted = get_peft_model(text, LoraConfig(**SETTINGS, task_type="CAUSAL_LM"))
    checkpoint = save_trained(text, tmp_path / "step-1", 0.05)
    recipe = make_recipe("lora.r=2").model_dump(mode="json")
    recipe["model"] |= {"name_or_path": str(base), "config": None, "dtype": "float32"}
    shape = read_model_shape(text.config.to_dict(), "base")
    card = make_card(recipe, "mine", shape, shape.vocab_size, key_mapping=find_key_mapping(str(base)))
    own = {"adapter_config": adapted.peft_config["default"], "card": card, "base": BaseModel(str(base))}
    folder = export(checkpoint, tmp_path / "out", text.config, **own)
    assert torch.allclose(compute_logits(run_card(folder, base)), compute_logits(adapted), atol=1e-6)


@pytest.mark.check
@pytest.mark.parametrize("fault", ["text", "carried"])
def test_a_damaged_part_is_detected(fault: str, tmp_path: Path, snapshot: SnapshotAssertion) -> None:
    torch.manual_seed(0)
    config = AutoConfig.for_model("gemma3", **WRAPPERS["gemma3"])
    base = tmp_path / "base"
    AutoModelForImageTextToText.from_config(config).save_pretrained(base)
    tensors = load_file(base / "model.safetensors")
    if fault == "text":
        tensors["language_model.model.extra.weight"] = torch.zeros(2)
        save_file(tensors, base / "model.safetensors", {"format": "pt"})
        assert explain(load_text, base, error=BuildError) == snapshot
        return
    model, whole = load_text(base), BaseModel(str(base))
    assert whole.wrapper is not None
    checkpoint = save_as_ranks(dict(model.named_parameters()), tmp_path / "step-1")
    name = sorted(find_carried(model, whole).names)[0]
    tensors[name] += 1
    (tmp_path / "wrong").mkdir()
    save_file(tensors, tmp_path / "wrong" / "model.safetensors", {"format": "pt"})
    (tmp_path / "wrong" / "config.json").write_bytes((base / "config.json").read_bytes())
    assert (
        explain(
            check_model,
            checkpoint,
            tmp_path / "wrong",
            model.config,
            torch.float32,
            lambda _: None,
            PROBE,
            whole,
            error=CheckpointError,
        )
        == snapshot
    )
