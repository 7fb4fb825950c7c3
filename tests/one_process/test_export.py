"""Tests that transformers loads an exported folder of every family: its own names, the same values, the same logits."""

import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from support.checkpoints import save_as_ranks
from support.exports import check_same_logits, export, read_tensors, run_card, save_trained
from support.families import TELLING, make_config
from support.real_model import READY, needs_real_model
from support.refusals import explain
from support.templates import CHATML
from support.tiers import FULL, TIER, mark_by
from support.training import make_recipe
from syrupy.assertion import SnapshotAssertion
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, GenerationConfig

from ulysses_cli.data.tokenizing.encoder import Encoder, EncoderSettings
from ulysses_cli.data.tokenizing.targets import list_turn_ends
from ulysses_cli.data.tokenizing.tokenizer import make_bytes_tokenizer
from ulysses_cli.plan.models.families import FAMILIES
from ulysses_cli.plan.models.shape import read_model_shape
from ulysses_cli.readers.columns import read_sample
from ulysses_cli.run.checkpoints import CheckpointError
from ulysses_cli.train.export import weights
from ulysses_cli.train.export.weights import check_adapter, check_model, make_probe
from ulysses_cli.train.record import make_card

PROBE = make_probe(make_bytes_tokenizer(), 64)


@pytest.mark.parametrize(
    "model_type",
    [pytest.param(name, marks=mark_by(name in TELLING[::3], name in TELLING)) for name in sorted(FAMILIES)],
)
def test_a_family_is_exported_as_transformers_saves_it(model_type: str, tmp_path: Path) -> None:
    torch.manual_seed(1)
    config = make_config(model_type)
    model = AutoModelForCausalLM.from_config(config)
    model.save_pretrained(tmp_path / "theirs")
    trained = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
    checkpoint = save_as_ranks(trained, tmp_path / "step-1")
    messages: list[str] = []

    def check(to: Path) -> None:
        messages.append(check_model(checkpoint, to, config, torch.float32, lambda _: None, PROBE))

    folder = export(checkpoint, tmp_path / "ours", config, check=check, shard_bytes=40_000)
    assert "off by 0.0e+00;" in messages[0]
    ours, theirs = (read_tensors(tmp_path / name) for name in ("ours", "theirs"))
    assert ours.keys() == theirs.keys()
    assert len(list(folder.glob("*.safetensors"))) > 1
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == sum(4 * values.numel() for values in theirs.values())


@needs_real_model
def test_ends_of_turns_are_stop_tokens_besides_the_models_own(tmp_path: Path) -> None:
    """From chats in a template of the user's own to the generation config that servers read."""
    tokenizer, config = AutoTokenizer.from_pretrained(READY), AutoConfig.from_pretrained(READY)
    tokenizer.chat_template = CHATML.replace("<|im_end|>", "<file_sep>")
    own = GenerationConfig.from_pretrained(READY).to_dict()
    encoder = Encoder(tokenizer, EncoderSettings(assistant_only_loss=True))
    turns = [{"role": "user", "content": "Why?"}, {"role": "assistant", "content": "So."}]
    encoder.encode_documents(read_sample("chat", {"messages": turns * 2}))
    ends = list_turn_ends([encoder.counts])
    assert ends == ["<file_sep>"]
    for given, expected in ((ends, [own["eos_token_id"], tokenizer.convert_tokens_to_ids("<file_sep>")]), ([], None)):
        weights._write_generation_config(config, tokenizer, given, tmp_path)
        written = GenerationConfig.from_pretrained(tmp_path).to_dict()
        assert written == {**own, **({"eos_token_id": expected} if expected else {})}
    weights._write_generation_config(config, tokenizer, ["<|im_end|>"], tmp_path)
    assert GenerationConfig.from_pretrained(tmp_path).eos_token_id == [own["eos_token_id"]], "it is there already"


@pytest.mark.full
@needs_real_model
@pytest.mark.skipif("LLAMA_CPP" not in os.environ, reason="LLAMA_CPP names no folder of llama.cpp")
def test_the_converter_of_llama_cpp_keeps_every_weight(tmp_path: Path) -> None:
    """Its script is in no package. It needs sentencepiece besides what is installed here."""
    config, tokenizer = AutoConfig.from_pretrained(READY), AutoTokenizer.from_pretrained(READY)
    trained = dict(AutoModelForCausalLM.from_pretrained(READY, dtype=torch.bfloat16).named_parameters())
    with torch.no_grad():
        for parameter in trained.values():
            parameter.mul_(1.5)
    checkpoint = save_as_ranks(trained, tmp_path / "step-1")
    folder = export(checkpoint, tmp_path / "ours", config, tokenizer=tokenizer, dtype=torch.bfloat16)
    script = Path(os.environ["LLAMA_CPP"], "convert_hf_to_gguf.py")
    subprocess.run([sys.executable, script, folder, "--outfile", tmp_path / "model.gguf"], check=True)
    read = AutoModelForCausalLM.from_pretrained(tmp_path, gguf_file="model.gguf", dtype=torch.bfloat16)
    found = dict(read.named_parameters())
    assert found.keys() == trained.keys()
    assert all(torch.equal(found[name], value) for name, value in trained.items())


def test_an_export_that_differs_is_refused(tmp_path: Path, snapshot: SnapshotAssertion) -> None:
    config = make_config("qwen3")
    model = AutoModelForCausalLM.from_config(config)
    checkpoint = save_as_ranks(dict(model.named_parameters()), tmp_path / "step-1")
    with torch.no_grad():
        model.model.norm.weight[3] += 1e-3
    model.save_pretrained(tmp_path / "wrong")
    assert (
        explain(
            check_model,
            checkpoint,
            tmp_path / "wrong",
            config,
            torch.float32,
            lambda _: None,
            PROBE,
            error=CheckpointError,
        )
        == snapshot
    )


def test_adapters_are_exported_as_peft_loads_them(tmp_path: Path) -> None:
    torch.manual_seed(1)
    config = make_config("llama")
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path / "base")
    config.rope_parameters = {"rope_type": "linear", "rope_theta": 1e4, "factor": 8.0}  # the run stretched positions
    base = AutoModelForCausalLM.from_pretrained(tmp_path / "base", config=config)
    settings = LoraConfig(r=4, target_modules="all-linear", task_type="CAUSAL_LM")
    adapted = get_peft_model(base, settings)
    checkpoint = save_trained(base, tmp_path / "step-1", 1.0)
    recipe = make_recipe("lora.r=4").model_dump(mode="json")
    recipe["model"] |= {"name_or_path": str(tmp_path / "base"), "config": None}
    shape = read_model_shape(config.to_dict(), "base")
    card, filled = make_card(recipe, "mine", shape, shape.vocab_size), adapted.peft_config["default"]
    folder = export(checkpoint, tmp_path / "ours", base.config, adapter_config=filled, card=card)
    num_trained = sum(p.requires_grad for p in base.parameters())
    assert check_adapter(checkpoint, folder, torch.float32).startswith(f"{num_trained} ")
    assert not (folder / "config.json").exists()
    assert str(tmp_path) not in (folder / "README.md").read_text(), "the card names no folder of this machine"
    check_same_logits(run_card(folder, tmp_path / "base"), adapted, 0.0)


@pytest.mark.parametrize("name", ["model.writing", "model.replaced", "model"])
def test_an_export_follows_no_link(tmp_path: Path, name: str) -> None:
    """A link in the place of a folder that an export makes or removes is replaced; it made a second export fail."""
    victim = tmp_path / "victim"
    victim.mkdir()
    (victim / "file").write_text("mine")
    for other in {"model"} - {name}:
        (tmp_path / other).mkdir()
    (tmp_path / name).symlink_to(victim)
    for number in range(2):
        with weights.temporary_folder(tmp_path / "model") as folder:
            (folder / "weights").write_text(str(number))
    assert (tmp_path / "model" / "weights").read_text() == "1"
    assert [file.read_text() for file in victim.iterdir()] == ["mine"]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["model", "victim"]


def export_until(event: int, checkpoint: Path, to: Path, config: Any, step: int) -> bool:
    """Exports in a process that is killed when it opens, makes, renames or removes something for the `event`-th time.
    Returns whether it was killed."""
    pid = os.fork()
    if pid:
        return os.WIFSIGNALED(os.waitpid(pid, 0)[1])
    left = event

    def count(name: str, arguments: tuple[object, ...]) -> None:
        nonlocal left
        if name in ("open", "os.mkdir", "os.rename", "shutil.rmtree", "os.rmdir") and str(to) in str(arguments[0]):
            left -= 1
            if left < 0:
                os.kill(os.getpid(), signal.SIGKILL)

    sys.addaudithook(count)
    try:
        export(checkpoint, to, config, step=step)
    finally:
        os._exit(0)


def read_whole(folder: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in folder.iterdir()}


@pytest.mark.check
@pytest.mark.parametrize("has_older", [False, True])
def test_an_export_can_be_killed_at_any_moment(tmp_path: Path, has_older: bool) -> None:
    """A folder of the model's name is whole, the older or the new one, and the next export works."""
    config = make_config("qwen3")
    model = AutoModelForCausalLM.from_config(config)
    checkpoint = save_as_ranks(dict(model.named_parameters()), tmp_path / "step-1")
    to, wholes = tmp_path / "model", []
    for step in (1, 2):
        export(checkpoint, tmp_path / f"whole-{step}", config, step=step)
        wholes.append(read_whole(tmp_path / f"whole-{step}"))
    for event in range(0, 100, 1 if TIER == FULL else 2):
        shutil.rmtree(to, ignore_errors=True)
        if has_older:
            export(checkpoint, to, config, step=1)
        was_killed = export_until(event, checkpoint, to, config, 2)
        if to.exists():
            assert read_whole(to) in wholes[0 if has_older else 1 :]
        export(checkpoint, to, config, step=2)
        assert read_whole(to) == wholes[1]
        assert not (tmp_path / "model.writing").exists()
        assert not (tmp_path / "model.replaced").exists()
        if not was_killed:
            break
    assert 10 < event < 99


def test_an_export_that_fails_leaves_and_deletes_no_file(tmp_path: Path, snapshot: SnapshotAssertion) -> None:
    (tmp_path / "model").mkdir()
    checkpoint = save_as_ranks({}, tmp_path / "step-1")
    assert explain(export, checkpoint, tmp_path / "model", make_config("qwen3"), error=CheckpointError) == snapshot
    assert sorted(path.name for path in tmp_path.iterdir()) == ["model", "step-1"]
