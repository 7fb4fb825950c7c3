"""Makes checkpoints of small trained models, exports them, and compares what plain libraries load."""

import json
import os
import signal
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from safetensors.torch import load_file

from support.checkpoints import save_as_ranks
from support.families import make_config
from support.training import make_recipe
from ulysses_cli.data.tokenizing.tokenizer import make_bytes_tokenizer
from ulysses_cli.train.export import __main__ as export_process
from ulysses_cli.train.export.weights import export_model

ADAPTERS: dict[str, Any] = {"r": 4, "lora_alpha": 8, "target_modules": "all-linear", "task_type": "CAUSAL_LM"}


class Adapted(NamedTuple):
    """`model`: transformers' own inside of peft's. `state`: of the checkpoint, which three ranks wrote."""

    config: Any
    model: Any
    checkpoint: Path
    state: dict[str, Any]


def adapt(folder: Path, model_type: str, *words: str, dtype: torch.dtype = torch.float32, **settings: Any) -> Adapted:
    """Saves a base model in several files, and a run that has trained adapters around it. `words`: of its recipe,
    `settings`: of peft."""
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM

    torch.manual_seed(1)
    config = make_config(model_type)
    model = AutoModelForCausalLM.from_config(config, dtype=dtype)
    model.save_pretrained(folder / "base", max_shard_size="20KB")
    adapted = get_peft_model(model, LoraConfig(**{**ADAPTERS, **settings}), autocast_adapter_dtype=False)
    where = ("model.config=null", f"model.name_or_path={folder / 'base'}", "lora.r=4", "lora.alpha=8")
    state = {"step": 1, "recipe": make_recipe(*where, *words).model_dump(mode="json")}
    return Adapted(config, adapted, save_trained(model, folder / "run" / "checkpoints" / "step-1"), state)


def save_trained(model: Any, to: Path, std: float = 0.1) -> Path:
    """Draws what a training would change, and saves it as three ranks do."""
    trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
    with torch.no_grad():
        for parameter in trained.values():
            parameter.normal_(std=std)
    return save_as_ranks({name.replace(".modules_to_save.default", ""): p for name, p in trained.items()}, to)


def export(checkpoint: Path, to: Path, config: Any, **options: Any) -> Path:
    made: dict[str, Any] = {"tokenizer": make_bytes_tokenizer(), "adapter_config": None, "dtype": torch.float32}
    return export_model(checkpoint, to, config=config, **{**made, "card": "a card", "step": 1, **options})


def read_tensors(folder: Path) -> dict[str, torch.Tensor]:
    """Reads all files of weights."""
    return {name: value for file in folder.glob("*.safetensors") for name, value in load_file(file).items()}


def run_export(words: Sequence[object], monkeypatch: pytest.MonkeyPatch) -> tuple[int, list[dict[str, Any]]]:
    """What the command's child does, in this process: its exit code, and what it told the command."""
    monkeypatch.setattr(signal, "signal", lambda number, handler: None)
    ours, theirs = os.pipe()
    code = export_process.main([*map(str, words), "--events", str(theirs)])
    with open(ours, encoding="utf-8") as events:
        return code, [json.loads(line) for line in events]


@torch.no_grad()
def check_same_logits(loaded: Any, expected: Any, tolerance: float = 1e-4) -> None:
    ids = torch.arange(12)[None]
    ours, right = (model.eval()(ids, use_cache=False).logits for model in (loaded, expected))
    torch.testing.assert_close(ours, right, rtol=tolerance, atol=tolerance)


def run_card(folder: Path, base: Path) -> Any:
    """Runs the lines that the card of exported adapters tells people to run, and returns the model."""
    code = (folder / "README.md").read_text().split("```python\n")[1].split("```")[0]
    code = code.replace('folder = "."', f"folder = {str(folder)!r}").replace("the base model's folder", str(base))
    names: dict[str, Any] = {}
    exec(code, names)
    return names["model"]
