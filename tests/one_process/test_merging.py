"""Compares adapters merged file by file with peft's merge in memory, for every family, and bounds the memory of it."""

import json
import re
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, PeftModel
from safetensors.torch import save_file
from support.exports import ADAPTERS, adapt, check_same_logits, export, read_tensors
from support.paths import ROOT
from support.refusals import explain
from support.tiers import mark_by
from syrupy.assertion import SnapshotAssertion
from transformers import AutoModelForCausalLM

from ulysses_cli.data.tokenizing.tokenizer import make_bytes_tokenizer
from ulysses_cli.plan.models.families import FAMILIES
from ulysses_cli.run.checkpoints import CheckpointError
from ulysses_cli.train.export.base_model import find_base_files
from ulysses_cli.train.export.merging import Merging, add_adapters
from ulysses_cli.train.export.weights import check_adapter, make_probe

NAMED = ["q_proj", "k_proj", "v_proj", "o_proj", "in_proj"]  # where peft refuses all-linear
UNSHARED = ["in_proj", "out_proj", "linear"]  # of layers that share a block
PROBE = make_probe(make_bytes_tokenizer(), 64)


def make_merging(tmp_path: Path, checkpoint: Path, trained: torch.dtype, dtype: torch.dtype, **more: Any) -> Merging:
    settings = LoraConfig(**{**ADAPTERS, **more})
    files = find_base_files(str(tmp_path / "base"), None)
    return Merging(checkpoint, files, settings, trained, dtype, shard_bytes=40_000)


def merge(
    tmp_path: Path, config: Any, checkpoint: Path, trained: torch.dtype, dtype: torch.dtype, **more: Any
) -> tuple[Path, str]:
    merging = make_merging(tmp_path, checkpoint, trained, dtype, **more)
    messages: list[str] = []
    check: Any = lambda to: messages.append(merging.check(to, config, PROBE))  # noqa: E731
    folder = export(checkpoint, tmp_path / "ours", config, dtype=dtype, merge=merging.write, check=check)
    return folder, messages[0]


def merge_both(
    tmp_path: Path, config: Any, adapted: Any, checkpoint: Path, **more: Any
) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor], Path]:
    """Merges file by file and by peft in memory. Returns both results, which are equal, and the first one's folder."""
    folder, _ = merge(tmp_path, config, checkpoint, torch.float32, torch.float32, **more)
    adapted.merge_and_unload().save_pretrained(tmp_path / "theirs")
    ours, reference = read_tensors(folder), read_tensors(tmp_path / "theirs")
    assert ours.keys() == reference.keys()
    for name, tensor in reference.items():
        torch.testing.assert_close(ours[name], tensor, rtol=1e-5, atol=1e-6)
    return ours, reference, folder


TELLING = ("mixtral", "phi3", "qwen3")  # experts split over files, fused projections, plain ones


OF_EXPERTS = ["experts.gate_up_proj", "experts.down_proj"]
EXPERTS = {"target_modules": ["q_proj"], "target_parameters": OF_EXPERTS, "rank_pattern": dict.fromkeys(OF_EXPERTS, 2)}
DORA = {"use_dora": True}
WHOLE = {"modules_to_save": ["embed_tokens", "lm_head", "norm"]}
OTHERS = [
    *((kind, more) for kind in ("phi3", "qwen3") for more in (WHOLE, DORA, {**WHOLE, **DORA})),
    *((kind, EXPERTS) for kind in ("qwen3_moe", "gpt_oss", "granitemoe")),  # one by one in files, transposed, whole
]


@pytest.mark.parametrize(
    ("model_type", "more"),
    [
        *(pytest.param(name, {}, marks=mark_by(name in TELLING, False)) for name in sorted(FAMILIES)),
        *(pytest.param(*case, marks=pytest.mark.check) for case in OTHERS),
    ],
)
def test_adapters_are_merged_as_peft_merges_them(model_type: str, more: dict[str, Any], tmp_path: Path) -> None:
    family = FAMILIES[model_type]
    targets = UNSHARED if family.shares_blocks else NAMED if family.refused_by_peft else "all-linear"
    settings = {"target_modules": targets, **more}
    config, adapted, checkpoint, _ = adapt(tmp_path, model_type, **settings)
    ours, reference, folder = merge_both(tmp_path, config, adapted, checkpoint, **settings)
    assert len(list(folder.glob("*.safetensors"))) > 1
    before = read_tensors(tmp_path / "base")
    changed = {name for name in ours if not torch.equal(ours[name], before[name])}
    assert changed == {name for name in reference if not torch.equal(reference[name], before[name])}
    assert len(changed) >= (2 * 4 if settings["target_modules"] == "all-linear" else 1)


@pytest.mark.check
def test_adapters_on_a_weight_that_layers_share_are_not_merged(tmp_path: Path, snapshot: SnapshotAssertion) -> None:
    """Each layer has its own, and the merged weight would be one."""
    config, _, checkpoint, _ = adapt(tmp_path, "zamba2")
    assert explain(merge, tmp_path, config, checkpoint, torch.float32, torch.float32, error=CheckpointError) == snapshot
    assert not (tmp_path / "ours").exists()


@pytest.mark.check
@pytest.mark.parametrize("more", [WHOLE, DORA], ids=["whole", "DoRA"])
def test_plain_peft_loads_whole_parts_and_dora(more: dict[str, Any], tmp_path: Path) -> None:
    config, adapted, checkpoint, _ = adapt(tmp_path, "qwen3", **more)
    with torch.device("meta"):
        filled = add_adapters(AutoModelForCausalLM.from_config(config), LoraConfig(**ADAPTERS, **more))
    check: Any = lambda to: check_adapter(checkpoint, to, torch.float32)  # noqa: E731
    folder = export(checkpoint, tmp_path / "ours", config, adapter_config=filled, check=check)
    adapted.save_pretrained(tmp_path / "theirs")
    ours, reference = read_tensors(folder), read_tensors(tmp_path / "theirs")
    assert ours.keys() == reference.keys()
    assert all(torch.equal(ours[name], reference[name]) for name in ours)
    base = AutoModelForCausalLM.from_pretrained(tmp_path / "base", dtype=torch.float32)
    check_same_logits(PeftModel.from_pretrained(base, str(folder)), adapted, 0.0)


def test_a_merge_in_bfloat16_rounds_once_and_one_weight_off_by_a_rounding_is_found(
    tmp_path: Path, snapshot: SnapshotAssertion
) -> None:
    """The tensors prove a merge: no tolerance of logits hides a wrong one."""
    config, adapted, checkpoint, _ = adapt(tmp_path, "llama", dtype=torch.bfloat16)
    folder, said = merge(tmp_path, config, checkpoint, torch.bfloat16, torch.bfloat16)
    assert re.sub(r"\d\S*e[+-]\d+", "NUMBER", said) == snapshot
    name, tensors = "model.layers.1.mlp.down_proj", read_tensors(folder)
    layer = adapted.get_submodule(f"base_model.model.{name}")
    exact = layer.base_layer.weight.double() + 2 * (
        layer.lora_B["default"].weight.double() @ layer.lora_A["default"].weight.double()
    )
    assert torch.equal(tensors[f"{name}.weight"], exact.bfloat16())
    merging = make_merging(tmp_path, checkpoint, torch.bfloat16, torch.bfloat16)
    tensors[f"{name}.weight"].view(torch.int16)[0, 0] += 1
    for file in folder.glob("*.safetensors*"):
        file.unlink()
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    assert explain(merging.check, folder, config, PROBE, error=CheckpointError) == snapshot


def test_a_merged_model_that_computes_something_else_is_found(tmp_path: Path, snapshot: SnapshotAssertion) -> None:
    """Its tensors are right, and its config is not."""
    config, _, checkpoint, _ = adapt(tmp_path, "llama")
    folder, _ = merge(tmp_path, config, checkpoint, torch.float32, torch.float32)
    written = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**written, "rms_norm_eps": 1e-3}))
    merging = make_merging(tmp_path, checkpoint, torch.float32, torch.float32)
    said = explain(merging.check, folder, config, PROBE, error=CheckpointError)
    assert re.sub(r"\d\S*e[+-]\d+", "NUMBER", said) == snapshot


def test_the_text_part_of_a_larger_model_is_merged(tmp_path: Path) -> None:
    """Models that also read images keep the text part beside a part with layers of the same names."""
    config, _, checkpoint, _ = adapt(tmp_path, "llama")
    tensors = {f"language_model.{name}": tensor for name, tensor in read_tensors(tmp_path / "base").items()}
    tensors["vision_tower.layers.0.self_attn.q_proj.weight"] = torch.ones(3, 3)
    for file in (tmp_path / "base").glob("*.safetensors*"):
        file.unlink()
    save_file(tensors, tmp_path / "base" / "model.safetensors")
    files = find_base_files(str(tmp_path / "base"), None)
    with torch.device("meta"):
        skeleton = AutoModelForCausalLM.from_config(config)
    merging = Merging(checkpoint, files, LoraConfig(**ADAPTERS), torch.float32, torch.float32)
    (tmp_path / "to").mkdir()
    assert set(merging.write(tmp_path / "to", skeleton)) == {name.removeprefix("language_model.") for name in tensors
                                                            if "vision" not in name}  # fmt: skip


def test_a_base_that_does_not_fit_is_refused(tmp_path: Path, snapshot: SnapshotAssertion) -> None:
    config, _, checkpoint, _ = adapt(tmp_path, "llama")
    with torch.device("meta"):
        skeleton = AutoModelForCausalLM.from_config(config)
    files = find_base_files(str(tmp_path / "base"), None)
    (tmp_path / "to").mkdir()
    merging = Merging(checkpoint, files[1:], LoraConfig(**ADAPTERS), torch.float32, torch.float32)
    said = [explain(merging.write, tmp_path / "to", skeleton, error=CheckpointError)]
    index = tmp_path / "base" / "model.safetensors.index.json"
    content = json.loads(index.read_text())
    content["weight_map"]["lm_head.weight"] = "../elsewhere.safetensors"
    index.write_text(json.dumps(content))
    said.append(explain(find_base_files, str(tmp_path / "base"), None, error=ValueError))
    assert said == snapshot


@pytest.mark.full
def test_memory_is_bounded_by_a_shard(tmp_path: Path) -> None:
    """A model of 245 MB in shards of 30 MB peaks at a few shards."""
    code = f"""
        import re, sys
        from pathlib import Path
        sys.path.insert(0, {str(ROOT / "tests")!r})
        import torch
        from support.checkpoints import save_as_ranks
        from support.families import make_config
        from transformers import AutoModelForCausalLM
        from peft import LoraConfig, PeftModel, get_peft_model
        from ulysses_cli.train.export.base_model import find_base_files
        from ulysses_cli.train.export.merging import Merging

        def read_peak():
            return int(re.search(r"VmHWM:\\s+(\\d+)", Path("/proc/self/status").read_text())[1]) * 1024

        folder = Path({str(tmp_path)!r})
        config = make_config("llama")
        config.update(dict(hidden_size=512, intermediate_size=2048, num_hidden_layers=18, vocab_size=2048))
        base = AutoModelForCausalLM.from_config(config)
        base.save_pretrained(folder / "base", max_shard_size="30MB")
        settings = LoraConfig(r=4, target_modules="all-linear")
        get_peft_model(base, settings)
        trained = {{name: p.detach() for name, p in base.named_parameters() if p.requires_grad}}
        checkpoint = save_as_ranks(trained, folder / "step-1")
        size = sum(p.numel() * 4 for name, p in base.named_parameters())
        del base, trained
        with torch.device("meta"):
            skeleton = AutoModelForCausalLM.from_config(config)
        (folder / "to").mkdir()
        files = find_base_files(str(folder / "base"), None)
        merging = Merging(checkpoint, files, settings, torch.float32, torch.float32, shard_bytes=30 * 10**6)
        Path("/proc/self/clear_refs").write_text("5")  # resets the peak
        before = read_peak()
        merging.write(folder / "to", skeleton)
        print(size, read_peak() - before)
    """
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(code)], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    size, grown = map(int, done.stdout.split()[-2:])
    assert size > 240e6
    assert grown < 110e6, (size, grown)  # one shard that is read, one that is written, and working memory
