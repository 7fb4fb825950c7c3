"""Tests files of exports and merges: tensors that transformers' text model ignores are carried over, and every family's
layout is that of the base model's own files, whichever of the two that transformers reads."""

from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file, save_file
from support.checkpoints import save_as_ranks
from support.exports import check_same_logits
from support.families import make_config
from support.refusals import explain
from support.tiers import sample
from support.training import make_recipe
from syrupy.assertion import SnapshotAssertion
from transformers import AutoModelForCausalLM

from ulysses_cli.plan.models.families import FAMILIES
from ulysses_cli.train.export.base_model import find_base_files
from ulysses_cli.train.export.job import ExportJob

IGNORED = {
    "qwen3_next": "mtp.layers.0.mlp.experts.0.up_proj.weight",
    "nemotron_h": "mtp.layers.0.norm.weight",
    "deepseek_v3": "model.layers.61.embed_tokens.weight",
    "glm4_moe": "model.layers.92.mlp.experts.1.gate_proj.weight",
}


def train_a_little(tmp_path: Path, model: Any, *words: str, targets: Any = None) -> tuple[ExportJob, Any]:
    """Returns a job for the trained model, and the model: inside of its adapters, if `targets` are adapted."""
    words = (f"model.name_or_path={tmp_path / 'base'}", "model.config=null", *words)
    if targets:
        words += ("lora.r=2", "lora.alpha=4", f"lora.target_modules={targets}")
        settings = LoraConfig(r=2, lora_alpha=4, task_type="CAUSAL_LM", target_modules=targets)
        model = get_peft_model(model, settings).get_base_model()
    trained = {name: each for name, each in model.named_parameters() if each.requires_grad}
    with torch.no_grad():
        for each in trained.values():
            each.add_(0.05 * torch.randn_like(each))
    checkpoint = save_as_ranks(trained, tmp_path / "run" / "checkpoints" / "step-1")
    state = {"step": 1, "recipe": make_recipe(*words).model_dump(mode="json")}
    return ExportJob(checkpoint, state, "float32", bool(targets), trusts_code=False), model


def compare_loaded(folder: Path, model: Any) -> None:
    """Compares the logits of an exported model with those of the trained one."""
    loaded, loading_info = AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True)
    assert not any(loading_info[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    check_same_logits(loaded, model)


def make_job(tmp_path: Path, model_type: str, *, is_merged: bool) -> tuple[ExportJob, Any, torch.Tensor]:
    """Returns a job, the trained model, and the tensor that the base's files hold beside it."""
    torch.manual_seed(1)
    model = AutoModelForCausalLM.from_config(make_config(model_type, vocab_size=260, num_hidden_layers=4))
    model.save_pretrained(tmp_path / "base")
    file, name = tmp_path / "base" / "model.safetensors", IGNORED[model_type]
    ignored = torch.rand(260, 3).bfloat16()
    old = {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(2)}  # is computed, not carried
    save_file({**load_file(file), **old, name: ignored}, file, {"format": "pt"})
    return *train_a_little(tmp_path, model, targets=["q_proj", "o_proj"] if is_merged else None), ignored


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
    assert result["carried"].startswith("1 ")
    assert "\n1 tensors " in (tmp_path / "to" / "README.md").read_text()
    compare_loaded(tmp_path / "to", model)


@pytest.mark.check
def test_a_base_that_is_gone_is_said(tmp_path: Path, snapshot: SnapshotAssertion) -> None:
    job, _, _ = make_job(tmp_path, "qwen3_next", is_merged=False)
    (tmp_path / "base" / "model.safetensors").unlink()
    result = job.run(tmp_path / "to", lambda _: None)
    in_card = [line for line in (tmp_path / "to" / "README.md").read_text().splitlines() if "left out" in line]
    elsewhere = [
        explain(find_base_files, str(tmp_path / "elsewhere"), None, is_here=is_here, error=ValueError)
        for is_here in (True, False)
    ]
    assert [result["carried"], *in_card, *elsewhere] == snapshot


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


LAYOUTS = ("split", "stacked")  # as transformers writes the files, and as its models hold the tensors
# Their dense layers stand under a name that transformers does not write.
DENSE = {"kimi_linear": ("model.layers.0.block_sparse_moe.", "model.layers.0.mlp.")}


def write_base(folder: Path, model_type: str, layout: str) -> Any:
    torch.manual_seed(1)
    model = AutoModelForCausalLM.from_config(make_config(model_type, vocab_size=260, num_hidden_layers=4))
    with torch.no_grad():
        for name, value in model.state_dict().items():
            if name.endswith("bias"):
                value.normal_()  # also those of routers, which training does not change
    model.save_pretrained(folder)
    file = folder / "model.safetensors"
    own = [*model.named_parameters(), *model.named_buffers()]  # a weight that layers share is one of them
    split, held = load_file(file), model.state_dict().keys()
    stacked = {name: value.clone() for name, value in own if name in held}
    if split.keys() == stacked.keys():
        pytest.skip("transformers neither renames nor splits its tensors")
    if layout == "stacked":
        save_file(stacked, file, {"format": "pt"})
    elif model_type in DENSE:
        own = {name.replace(*DENSE[model_type]): value for name, value in split.items()}
        assert own.keys() != split.keys()
        save_file(own, file, {"format": "pt"})
    return model


@pytest.mark.parametrize("is_merged", [False, True], ids=["whole", "merged"])
@pytest.mark.parametrize(
    ("model_type", "layout"),
    sample([(name, layout) for name in FAMILIES for layout in LAYOUTS], [("qwen3_moe", "stacked")], []),
)
@torch.no_grad()
def test_the_layout_of_the_base_is_kept(model_type: str, layout: str, is_merged: bool, tmp_path: Path) -> None:
    model = write_base(tmp_path / "base", model_type, layout)
    targets: Any = ["q_proj"] if FAMILIES[model_type].refused_by_peft else "all-linear"
    job, _ = train_a_little(tmp_path, model, targets=targets if is_merged else None)
    job.run(tmp_path / "to", lambda _: None)
    ours, theirs = (load_file(tmp_path / name / "model.safetensors") for name in ("to", "base"))
    assert {name: value.shape for name, value in ours.items()} == {name: value.shape for name, value in theirs.items()}
    compare_loaded(tmp_path / "to", model)
