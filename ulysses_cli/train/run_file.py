"""Facts of a run as plain data: run.json, versions, the machine, the model card. Facts in, text out."""

from __future__ import annotations

import json
import os
import platform
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

from ulysses_cli.plan.secrets import collect_secrets, mask_secrets, mask_text

PACKAGES = ("torch", "transformers", "deepspeed", "peft", "datasets", "safetensors")
TOOL = "ulysses-cli"


def list_versions() -> dict[str, str]:
    found = {"ulysses": metadata.version(TOOL), "python": platform.python_version()}
    return found | {name: metadata.version(name) for name in PACKAGES}


def describe_machine(device: torch.device) -> dict[str, Any]:
    here = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    if device.type != "cuda":
        return {"device": f"CPU, {platform.machine()}", "processes_per_machine": here}
    facts = torch.cuda.get_device_properties(device)
    return {"device": facts.name, "device_memory_bytes": facts.total_memory, "processes_per_machine": here}


def mask_facts(content: dict[str, Any]) -> dict[str, Any]:
    """What of a run may be written: its recipe's secrets, and this process's, are nowhere in it."""
    masked: dict[str, Any] = mask_secrets(content, known=collect_secrets(content.get("recipe"), os.environ))
    return masked


def write_run_file(run_dir: Path, content: dict[str, Any]) -> None:
    started = datetime.now(UTC).isoformat(timespec="seconds")
    beside = run_dir / "run.json.part"
    beside.write_text(json.dumps({**mask_facts(content), "started": started}, indent=1), encoding="utf-8")
    os.replace(beside, run_dir / "run.json")


LOADING = """\
# The base model with the positions that these adapters were trained with, and the adapters on it
from peft import PeftModel
from transformers import AutoConfig, AutoModelForCausalLM

folder = "."  # where this card is
config = AutoConfig.from_pretrained(f"{{folder}}/base_config")
model = AutoModelForCausalLM.from_pretrained({base!r}, config=config, dtype={dtype!r})
model = PeftModel.from_pretrained(model, folder)"""


def make_card(recipe: dict[str, Any], name: str, model_type: str, *, is_merged: bool = False) -> str:
    """The model card: what was trained, on what, how adapters are loaded, and the whole recipe."""
    import yaml

    holds_adapters = bool(recipe["lora"]) and not is_merged
    known = collect_secrets(recipe, os.environ)
    base, max_length = recipe["model"]["name_or_path"], recipe["data"]["max_length"]
    lines = ["---", f"library_name: {'peft' if holds_adapters else 'transformers'}"]
    lines += [f"base_model: {base}"] if base else []
    lines += ["---", "", f"# {name}", ""]
    what = f"{base or 'A model from random weights'} ({model_type}), fine-tuned at {max_length:,} tokens per row"
    lines += [f"{what} with ulysses {metadata.version(TOOL)}.", ""]
    if holds_adapters and base:
        code = LOADING.format(base=base, dtype=recipe["model"]["dtype"])
        lines += ["## Loading", "", "```python", *code.splitlines(), "```", ""]
    lines += ["## Recipe", "", "All defaults included:", ""]
    written = yaml.safe_dump(mask_secrets(recipe, known=known), sort_keys=False, allow_unicode=True)
    return "\n".join([mask_text("\n".join(lines), known), "```yaml", written.rstrip(), "```", ""])
