"""Tests the export of a checkpoint without its run: merged, as adapters, and without running code of the model."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel
from support.checkpoints import make_state, write_manifest
from support.exports import adapt, check_same_logits, run_export
from support.small_run import BYTES_CONFIG
from support.tiers import sample_every
from syrupy.assertion import SnapshotAssertion
from transformers import AutoConfig, AutoModelForCausalLM

from ulysses_cli.data.tokenizing.tokenizer import make_bytes_tokenizer
from ulysses_cli.plan.problem import USAGE
from ulysses_cli.train.export import sampling
from ulysses_cli.train.export.job import ExportError, ExportJob

CODE = """
from pathlib import Path
Path(__file__).with_name("ran").touch()
Path({marker!r}).touch()
from transformers import Qwen3Config
class MineConfig(Qwen3Config):
    model_type = "mine"
"""


FIRST = "experts.gate_up_proj"
OF_EXPERTS = {"target_modules": ["q_proj"], "target_parameters": [FIRST], "rank_pattern": {FIRST: 3}}
WORDS_OF_EXPERTS = ("lora.target_modules=[q_proj]", "lora.experts=[gate_up]", "lora.expert_r=3")


@pytest.mark.parametrize("model_type", ["qwen3", "mixtral", "qwen3_moe"])
@pytest.mark.parametrize("is_merged", sample_every(2, [True, False]))
def test_adapters_are_exported_merged_or_alone(
    tmp_path: Path, model_type: str, is_merged: bool, snapshot: SnapshotAssertion
) -> None:
    """What peft reads, and what is merged, computes as peft's own forward does, and what servers do with adapters of
    experts is said."""
    words, own = (WORDS_OF_EXPERTS, OF_EXPERTS) if model_type == "qwen3_moe" else ((), {})
    _, adapted, checkpoint, state = adapt(tmp_path, model_type, *words, **own)
    job = ExportJob(checkpoint, state, None, is_merged, trusts_code=False)
    result = job.run(tmp_path / "to", lambda _: None)
    assert (re.sub(r"\d\S*e[+-]\d+", "NUMBER", result["checked"]), result.get("note")) == snapshot
    loaded: Any = AutoModelForCausalLM.from_pretrained(tmp_path / ("to" if is_merged else "base"))
    check_same_logits(loaded if is_merged else PeftModel.from_pretrained(loaded, tmp_path / "to"), adapted)
    assert "lora" in (tmp_path / "to" / "README.md").read_text()


def test_the_exporting_process_tells_what_it_does_and_why_it_cannot(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, snapshot: SnapshotAssertion
) -> None:
    _, _, checkpoint, state = adapt(tmp_path, "qwen3")
    (checkpoint / "state.json").write_text(json.dumps({**make_state(1, 3), **state}))
    write_manifest(checkpoint)
    words = [str(checkpoint), "--to", str(tmp_path / "to")]
    code, events = run_export(words, monkeypatch)
    assert (code, list(events[0])) == (0, ["phase"])
    assert "checked" in events[-1]["result"]
    code, events = run_export(words, monkeypatch)
    assert (code, events[-1]) == (USAGE, {"problem": snapshot})


def test_an_exported_model_continues_prompts_greedily(tmp_path: Path) -> None:
    """The reference takes the most likely token of a whole forward, again and again."""
    torch.manual_seed(2)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**BYTES_CONFIG)).eval()
    model.save_pretrained(tmp_path / "model")
    tokenizer = make_bytes_tokenizer()
    tokenizer.save_pretrained(tmp_path / "model")
    request = {"model": str(tmp_path / "model"), "prompts": ["Once", "b"], "max_new_tokens": 6, "as_chat": False}
    request |= {"trust_remote_code": False, "device": "cpu", "dtype": "float32"}
    for asked, answer in zip(request["prompts"], sampling.answer(request)["answers"], strict=True):
        tokens = tokenizer(asked)["input_ids"]
        start = len(tokens)
        while len(tokens) < start + 6:
            with torch.no_grad():
                tokens.append(int(model(torch.tensor([tokens]), use_cache=False).logits[0, -1].argmax()))
            if tokens[-1] == tokenizer.eos_token_id:
                tokens.pop()
                break
        assert answer == {"prompt": asked, "text": tokenizer.decode(tokens[start:]), "num_tokens": len(tokens) - start}


def test_code_of_a_model_runs_only_when_this_command_allows_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, snapshot: SnapshotAssertion
) -> None:
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(tmp_path / "modules"))
    _, _, checkpoint, state = adapt(tmp_path, "qwen3")
    file = tmp_path / "base" / "config.json"
    content = json.loads(file.read_text()) | {"model_type": "mine", "auto_map": {"AutoConfig": "mine.MineConfig"}}
    file.write_text(json.dumps(content))
    marker = tmp_path / "the code ran"
    (tmp_path / "base" / "mine.py").write_text(CODE.format(marker=str(marker)))
    state["recipe"]["model"]["trust_remote_code"] = True  # as the run was allowed to
    with pytest.raises(ExportError) as refused:
        ExportJob(checkpoint, state, None, True, trusts_code=False)
    assert str(refused.value) == snapshot
    assert not marker.exists()
    ExportJob(checkpoint, state, None, False, trusts_code=True)
    assert marker.exists()
