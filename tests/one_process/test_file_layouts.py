"""Tests that exports and merges of every family whose files transformers renames or splits have the layout of the base
model's own files, whichever of the two that transformers reads."""

from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file, save_file
from support.checkpoints import save_as_ranks
from support.families import make_config
from support.tiers import sample
from support.training import make_recipe
from transformers import AutoModelForCausalLM

from ulysses_cli.plan.models.families import FAMILIES
from ulysses_cli.train.export.job import ExportJob

LAYOUTS = ("split", "stacked")  # as transformers writes the files, and as its models hold the tensors
# Their dense layers stand under a name that transformers does not write.
DENSE = {"kimi_linear": ("model.layers.0.block_sparse_moe.", "model.layers.0.mlp.")}
SETTINGS: dict[str, Any] = {"r": 2, "lora_alpha": 4, "task_type": "CAUSAL_LM"}


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


def make_job(tmp_path: Path, model: Any, *, is_merged: bool) -> ExportJob:
    words = [f"model.name_or_path={tmp_path / 'base'}", "model.config=null"]
    if is_merged:
        targets = ["q_proj"] if FAMILIES[model.config.model_type].refused_by_peft else "all-linear"
        words += ["lora.r=2", "lora.alpha=4", f"lora.target_modules={targets}"]
        model = get_peft_model(model, LoraConfig(**SETTINGS, target_modules=targets)).get_base_model()
    trained = {name: each for name, each in model.named_parameters() if each.requires_grad}
    with torch.no_grad():
        for each in trained.values():
            each.add_(0.05 * torch.randn_like(each))
    checkpoint = save_as_ranks(trained, tmp_path / "run" / "checkpoints" / "step-1")
    state = {"step": 1, "recipe": make_recipe(*words).model_dump(mode="json")}
    return ExportJob(checkpoint, state, "float32", is_merged, trusts_code=False)


@pytest.mark.parametrize("is_merged", [False, True], ids=["whole", "merged"])
@pytest.mark.parametrize(
    ("model_type", "layout"),
    sample([(name, layout) for name in FAMILIES for layout in LAYOUTS], [("qwen3_moe", "stacked")], []),
)
@torch.no_grad()
def test_the_layout_of_the_base_is_kept(model_type: str, layout: str, is_merged: bool, tmp_path: Path) -> None:
    model = write_base(tmp_path / "base", model_type, layout)
    make_job(tmp_path, model, is_merged=is_merged).run(tmp_path / "to", lambda _: None)
    ours, theirs = (load_file(tmp_path / name / "model.safetensors") for name in ("to", "base"))
    assert {name: value.shape for name, value in ours.items()} == {name: value.shape for name, value in theirs.items()}
    loaded, loading_info = AutoModelForCausalLM.from_pretrained(tmp_path / "to", output_loading_info=True)
    assert not any(loading_info[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    ids = torch.arange(12)[None]
    result, expected = (each.eval()(ids, use_cache=False).logits for each in (loaded, model))
    torch.testing.assert_close(result, expected, rtol=1e-4, atol=1e-5)
