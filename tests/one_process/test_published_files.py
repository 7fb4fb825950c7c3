"""Tests that what is published of a run made of local files says nothing of the machine, and that it still loads."""

import json
import socket
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from support.commands import succeed
from support.exports import check_same_logits, export, save_trained
from support.hub_server import use_hub
from support.run_directory import write_run
from support.small_run import CONFIG
from support.tiers import sample_every
from support.training import make_recipe
from transformers import AutoConfig, AutoModelForCausalLM

from ulysses_cli.data.tokenizing.tokenizer import make_bytes_tokenizer
from ulysses_cli.plan.models.shape import read_model_shape
from ulysses_cli.plan.recipe.loader import parse_recipe
from ulysses_cli.plan.rules.public_names import find_public_name, make_public
from ulysses_cli.train.record import make_card

USER, HOST = "user-of-this-machine", "name-of-this-machine"


def make_private_recipe(home: Path, base: Path, adapters: Path | None) -> dict[str, Any]:
    """A recipe that names something of the machine wherever a recipe can."""
    (home / "chat.jinja").write_text("{{ messages[0].content }}")
    (home / "secret.jsonl").write_text('{"text": "a"}\n')
    dumped = make_recipe(*(["lora.r=4"] if adapters else [])).model_dump(mode="json")
    dumped["model"] |= {"name_or_path": str(base), "config": None, "tokenizer": str(base)}
    dumped["data"] |= {"store_dir": str(home / "store"), "chat_template": str(home / "chat.jinja")}
    own = {"path": str(home / "secret.jsonl")}
    files = {"path": None, "data_files": [str(home / "secret.jsonl")]}
    dumped["data"]["datasets"] = [
        {**dumped["data"]["datasets"][0], "type": "auto", **named} for named in (own, files, {"path": "owner/texts"})
    ]
    dumped["data"]["eval_datasets"] = [{**dumped["data"]["datasets"][0], **own}]
    dumped["memory"]["nvme_path"] = str(home / "nvme")
    dumped["deepspeed"] = {"aio": {"path": str(home / "aio")}, "flops_profiler": {"output_file": f"{home}/f"}}
    dumped["run"] |= {
        "output_dir": str(home / "mine"),
        "checkpoint_uri": f"file://{home}/bucket",
        "resume_from_checkpoint": str(home / "mine/checkpoints/step-1"),
        "notify_command": f"{home}/tell.sh",
        "notify_webhook": f"http://{HOST}/hook",
    }
    if adapters:
        dumped["lora"]["adapter_name_or_path"] = str(adapters)
    return dumped


@pytest.mark.parametrize(
    "kind", sample_every(2, ["whole", "adapters", "a base in the hub's cache", "an earlier version's card"])
)
def test_nothing_of_the_machine_is_published(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    home = tmp_path / USER
    home.mkdir()
    monkeypatch.setenv("HOME", str(home))
    monkeypatch.setenv("USER", USER)
    monkeypatch.setattr(socket, "gethostname", lambda: HOST)
    is_cached = kind == "a base in the hub's cache"
    base = home / ("models--owner--base/snapshots/0123abcd" if is_cached else "base")
    torch.manual_seed(0)
    config: Any = AutoConfig.for_model(**CONFIG)
    AutoModelForCausalLM.from_config(config).save_pretrained(base)
    model: Any = AutoModelForCausalLM.from_pretrained(base)
    config = model.config
    holds_adapters = kind != "whole"
    recipe = make_private_recipe(home, base, home / "before" if holds_adapters else None)
    settings = LoraConfig(r=4, target_modules="all-linear", task_type="CAUSAL_LM", base_model_name_or_path=str(base))
    adapted: Any = get_peft_model(model, settings) if holds_adapters else model
    checkpoint = save_trained(model, home / "step-1")
    shape = read_model_shape(config.to_dict(), str(base))
    tokenizer = make_bytes_tokenizer()
    tokenizer.save_pretrained(base)
    filled = adapted.peft_config["default"] if holds_adapters else None
    card = make_card(recipe, "mine", shape, shape.vocab_size)
    own = {"tokenizer": type(tokenizer).from_pretrained(base), "adapter_config": filled, "card": card}
    folder = export(checkpoint, home / "mine/model", config, **own)
    write_run(home / "mine")
    facts = json.loads((home / "mine/run.json").read_text())
    (home / "mine/run.json").write_text(json.dumps({**facts, "recipe": recipe, "run_name": "mine"}))
    if kind == "an earlier version's card":
        card = (folder / "README.md").read_text().replace("path: local files", f"path: {home}/secret.jsonl")
        (folder / "README.md").write_text(card.replace("run:\n", f"run:\n  output_dir: {home}/mine\n"))

    with use_hub(monkeypatch) as hub:
        hub.licences["owner/base"] = "apache-2.0"
        succeed("push", str(home / "mine"), cwd=tmp_path)
        files = hub.repos["me/mine"]
    assert files.keys() == {file.relative_to(folder).as_posix() for file in folder.rglob("*") if file.is_file()}
    for name, content in files.items():
        found = [word for word in (str(tmp_path), USER, HOST, "secret.jsonl") if word.encode() in content]
        assert not found, f"{name} holds {found}"
    card = files["README.md"].decode()
    assert "local files" in card
    assert card.count("owner/texts") == 3, "as a key, a source and in the recipe"
    assert ("base_model: owner/base" in card, "(owner/base)" in card) == (is_cached, is_cached)
    if not holds_adapters:
        return
    assert json.loads(files["adapter_config.json"])["base_model_name_or_path"] == ("owner/base" if is_cached else None)
    assert f"vllm serve {'owner/base' if is_cached else 'BASE_MODEL'} --enable-lora" in card
    local = json.loads((folder / "adapter_config.json").read_text())
    assert local["base_model_name_or_path"] == str(base), "sample and peft find the base on this machine"
    for name, content in files.items():
        file = tmp_path / "downloaded" / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(content)
    loaded = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base), str(tmp_path / "downloaded"))
    check_same_logits(loaded, adapted, 0.0)


def test_a_published_recipe_is_one_and_stays_the_same(tmp_path: Path) -> None:
    public = make_public(make_private_recipe(tmp_path, tmp_path / "base", tmp_path / "before"))
    assert make_public(public) == public
    assert public["data"]["datasets"][2]["path"] == "owner/texts"
    public["model"]["name_or_path"], public["lora"]["adapter_name_or_path"] = "owner/base", None
    public["model"]["tokenizer"] = public["data"]["chat_template"] = None
    assert parse_recipe(json.dumps(public), "published").recipe.data.max_length == 64


CACHE = "/x/.cache/huggingface/hub"
PRIVATE = (
    None, "/models/base", "~/base", "./base", ".base", "data/texts.jsonl", "s3://bucket/base",
    "~/.cache/ulysses/s3/bucket/base",
)  # fmt: skip
PUBLIC = {
    "owner/base": ("owner/base", "hf://owner/base", "~/.cache/ulysses/hf/owner/base"),
    "bytes": ("bytes",),
    "owner/a--b": (f"{CACHE}/models--owner--a--b/snapshots/12ab",),
    "gpt2": (f"{CACHE}/models--gpt2/snapshots/12ab/",),
}


def test_public_names() -> None:
    assert {find_public_name(name) for name in PRIVATE} == {None}
    assert {name: {find_public_name(each) for each in PUBLIC[name]} for name in PUBLIC} == {
        name: {name} for name in PUBLIC
    }
