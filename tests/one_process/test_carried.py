"""Tests that an export keeps tensors of the base model's files that transformers' text model ignores."""

from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file, save_file
from support.checkpoints import save_as_ranks
from support.families import make_config
from support.training import make_recipe
from transformers import AutoModelForCausalLM

from ulysses_cli.train.export.base_model import find_base_files
from ulysses_cli.train.export.job import ExportJob

IGNORED = {
    "qwen3_next": "mtp.layers.0.mlp.experts.0.up_proj.weight",
    "nemotron_h": "mtp.layers.0.norm.weight",
    "deepseek_v3": "model.layers.61.embed_tokens.weight",
    "glm4_moe": "model.layers.92.mlp.experts.1.gate_proj.weight",
}
SETTINGS: dict[str, Any] = {"r": 2, "lora_alpha": 4, "target_modules": ["q_proj", "o_proj"]}


def make_job(tmp_path: Path, model_type: str, *changes: str, is_merged: bool) -> tuple[ExportJob, Any, torch.Tensor]:
    """Returns a job, the trained model, and the tensor that the base's files hold beside it."""
    torch.manual_seed(1)
    model = AutoModelForCausalLM.from_config(make_config(model_type, vocab_size=260, num_hidden_layers=4))
    model.save_pretrained(tmp_path / "base")
    file, name = tmp_path / "base" / "model.safetensors", IGNORED[model_type]
    ignored = torch.rand(260, 3).bfloat16()
    old = {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(2)}  # is computed, not carried
    save_file({**load_file(file), **old, name: ignored}, file, {"format": "pt"})
    words = (f"model.name_or_path={tmp_path / 'base'}", "model.config=null", *changes)
    if is_merged:
        words += ("lora.r=2", "lora.alpha=4", "lora.target_modules=[q_proj, o_proj]")
        model = get_peft_model(model, LoraConfig(**SETTINGS)).get_base_model()
    trained = {name: each for name, each in model.named_parameters() if each.requires_grad}
    with torch.no_grad():
        for each in trained.values():
            each.add_(0.05 * torch.randn_like(each))
    checkpoint = save_as_ranks(trained, tmp_path / "run" / "checkpoints" / "step-1")
    state = {"step": 1, "recipe": make_recipe(*words).model_dump(mode="json")}
    return ExportJob(checkpoint, state, "float32", is_merged, trusts_code=False), model, ignored


@pytest.mark.parametrize(
    ("model_type", "is_merged"),
    [
        pytest.param(name, is_merged, marks=() if name == "qwen3_next" and not is_merged else pytest.mark.full)
        for name in IGNORED
        for is_merged in (False, True)
    ],
)
@torch.no_grad()
def test_ignored_tensors_are_carried_over(model_type: str, is_merged: bool, tmp_path: Path) -> None:
    job, model, ignored = make_job(tmp_path, model_type, is_merged=is_merged)
    result = job.run(tmp_path / "to", lambda _: None)
    tensors = load_file(tmp_path / "to" / "model.safetensors")
    carried = tensors[IGNORED[model_type]]
    assert carried.dtype == torch.bfloat16
    assert torch.equal(carried, ignored)
    assert not any(name.endswith("inv_freq") for name in tensors)
    assert result["carried"].startswith("1 tensors beside the text model are those of the base: ")
    assert "1 tensors beside the text model" in (tmp_path / "to" / "README.md").read_text()
    loaded, loading_info = AutoModelForCausalLM.from_pretrained(tmp_path / "to", output_loading_info=True)
    assert not any(loading_info[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    ids = torch.arange(12)[None]
    ours, expected = (each.eval()(ids, use_cache=False).logits for each in (loaded, model))
    torch.testing.assert_close(ours, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.check
def test_a_base_that_is_gone_is_said(tmp_path: Path) -> None:
    job, _, _ = make_job(tmp_path, "qwen3_next", is_merged=False)
    (tmp_path / "base" / "model.safetensors").unlink()
    result = job.run(tmp_path / "to", lambda _: None)
    assert "are left out if the base model has any" in result["carried"]
    assert "holds no weights" in result["carried"]
    assert "are left out" in (tmp_path / "to" / "README.md").read_text()
    with pytest.raises(ValueError, match="elsewhere is not on this machine"):
        find_base_files(str(tmp_path / "elsewhere"), None, is_here=True)


@pytest.mark.check
def test_tokens_that_a_run_adds_leave_ignored_tensors_alone(tmp_path: Path) -> None:
    job, model, ignored = make_job(tmp_path, "deepseek_v3", is_merged=False)
    job.config.vocab_size = 264
    with torch.no_grad():
        model.resize_token_embeddings(264)
    job.checkpoint = save_as_ranks(dict(model.named_parameters()), tmp_path / "run" / "checkpoints" / "step-2")
    job.run(tmp_path / "to", lambda _: None)
    tensors = load_file(tmp_path / "to" / "model.safetensors")
    assert len(tensors["model.embed_tokens.weight"]) == 264
    assert torch.equal(tensors[IGNORED["deepseek_v3"]], ignored)
