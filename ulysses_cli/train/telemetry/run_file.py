"""Facts of a run as plain data: run.json, versions, the machine, the model card. Takes facts, returns text."""

from __future__ import annotations

import json
import os
import platform
import sys
from collections.abc import Mapping
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

from ulysses_cli.plan.files.whole_files import write_whole
from ulysses_cli.plan.models.chat_template import CLOCK, list_variables, read_date
from ulysses_cli.plan.models.shape import ModelShape
from ulysses_cli.plan.resolved import changes_positions
from ulysses_cli.plan.rules.public_names import LOCAL_FOLDER, make_public
from ulysses_cli.plan.secrets import collect_secrets, mask_secrets, mask_text

PACKAGES = ("torch", "transformers", "deepspeed", "peft", "datasets", "safetensors")
TOOL = "ulysses-cli"


def get_own_version() -> str:
    """That of this code. The package need not be installed: a checkout on the path will do. Its root is loaded before
    any of its modules."""
    return str(sys.modules["ulysses_cli"].__version__)


def list_versions() -> dict[str, str]:
    versions = {"ulysses": get_own_version(), "python": platform.python_version()}
    return versions | {name: metadata.version(name) for name in PACKAGES}


def describe_machine(device: torch.device) -> dict[str, Any]:
    here = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    if device.type != "cuda":
        return {"device": f"CPU, {platform.machine()}", "processes_per_machine": here}
    facts = torch.cuda.get_device_properties(device)
    return {"device": facts.name, "device_memory_bytes": facts.total_memory, "processes_per_machine": here}


def mask_facts(content: dict[str, Any]) -> dict[str, Any]:
    """The facts without the recipe's secrets and without this process's."""
    masked: dict[str, Any] = mask_secrets(content, known=collect_secrets(content.get("recipe"), os.environ))
    return masked


def write_run_file(run_dir: Path, content: dict[str, Any]) -> None:
    started = datetime.now(UTC).isoformat(timespec="seconds")
    write_whole(run_dir / "run.json", json.dumps({**mask_facts(content), "started": started}, indent=1))


LOADING = """\
# The base model with the positions that these adapters were trained with, and the adapters on it
from peft import PeftModel
from transformers import AutoConfig, AutoModelForCausalLM

folder = "."  # where this card is
config = AutoConfig.from_pretrained(f"{{folder}}/base_config"){own_size}
model = AutoModelForCausalLM.from_pretrained({base!r}, config=config, dtype={dtype!r}{mapping}){growth}
model = PeftModel.from_pretrained(model, folder)"""
MAPPING = """,
    key_mapping={mapping},  # the base's files hold other parts too
"""
OWN_SIZE = """
config.vocab_size = {own}  # rows in the base model's files"""
GROWTH = """
model.resize_token_embeddings({grown}, mean_resizing=False)
for part in (model.get_input_embeddings(), model.get_output_embeddings()):
    rows = part.weight.data  # tokens that were added begin, and stay, at the mean of the others
    rows[{own}:] = rows[:{own}].double().mean(0).to(rows.dtype)"""
VARIABLES_NOTE = """\
Chats were rendered with variables of the template. A server gets them with each request, such as vLLM and SGLang by
`"chat_template_kwargs": {variables}`, and transformers' `apply_chat_template` as arguments. tokenizer_config.json has
them too, for `ulysses evaluate` and `ulysses sample`."""
DATE_NOTE = """\
The chat template writes a date. Training wrote {date} into every chat, and so do `ulysses evaluate` and `ulysses
sample`. A server writes the day's, which the model has not seen{remedy}."""
DATE_VARIABLE, DATE_FORM = "date_string", "%d %b %Y"  # of Llama's templates
RECIPE_NOTE = "All defaults included; what names folders and services of the machine is left out:"


def make_card(
    recipe: dict[str, Any],
    name: str,
    shape: ModelShape,
    num_own_tokens: int,
    *,
    is_merged: bool = False,
    key_mapping: Mapping[str, str] | None = None,
    template: str = "",
) -> str:
    """The model card: what was trained, on what, how to load adapters, and the whole recipe. `num_own_tokens`: rows of
    the base model's embedding in its files. `key_mapping`: transformers', where the base's files are those of a
    multimodal model. `template`: the chats'. The card may be published: it says nothing of the machine."""
    import yaml

    holds_adapters = bool(recipe["lora"]) and not is_merged
    known, public = collect_secrets(recipe, os.environ), make_public(recipe)
    model, max_length = public["model"], public["data"]["max_length"]
    base = model["name_or_path"]
    lines = ["---", f"library_name: {'peft' if holds_adapters else 'transformers'}"]
    lines += [f"base_model: {base}"] if base not in (None, LOCAL_FOLDER) else []
    lines += ["---", "", f"# {name}", ""]
    size = f", {shape.num_parameters:,} parameters" if shape.num_parameters else ""
    origin = {None: "A model from random weights", LOCAL_FOLDER: "A model from a local folder"}.get(base, base)
    summary = f"{origin} ({shape.model_type}{size}), fine-tuned at {max_length:,} tokens per row"
    lines += [f"{summary} with ulysses {get_own_version()}.", ""]
    if recipe["run"].get("start_from"):
        lines += ["Its training went on from the weights of an earlier run, not from the base model's.", ""]
    if holds_adapters and base:
        sizes = {"own": num_own_tokens, "grown": shape.vocab_size}
        has_grown = shape.vocab_size > num_own_tokens
        code = LOADING.format(
            base="the base model's folder" if base == LOCAL_FOLDER else base,
            dtype=model["dtype"],
            mapping=MAPPING.format(mapping=dict(key_mapping)) if key_mapping else "",
            own_size=OWN_SIZE.format(**sizes) if has_grown else "",
            growth=GROWTH.format(**sizes) if has_grown else "",
        )
        lines += ["## Loading", "", "```python", *code.splitlines(), "```", ""]
    if notes := _describe_template(public["data"].get("chat_template_kwargs") or {}, template):
        lines += ["## Chat template", "", "\n\n".join(notes), ""]
    lines += ["## Recipe", "", RECIPE_NOTE, ""]
    written = yaml.safe_dump(mask_secrets(public, known=known), sort_keys=False, allow_unicode=True)
    return "\n".join([mask_text("\n".join(lines), known), "```yaml", written.rstrip(), "```", ""])


def _describe_template(variables: Mapping[str, Any], template: str) -> list[str]:
    """What a server must know to write the prompts of training."""
    given = {name: value for name, value in variables.items() if name != CLOCK}
    notes = [VARIABLES_NOTE.format(variables=json.dumps(given, ensure_ascii=False))] if given else []
    read = list_variables(template)
    if CLOCK in read and DATE_VARIABLE not in given:
        date = read_date(variables)
        known = json.dumps({DATE_VARIABLE: date.strftime(DATE_FORM)})
        remedy = f', unless it gets `"chat_template_kwargs": {known}`' if DATE_VARIABLE in read else ""
        notes.append(DATE_NOTE.format(date=f"{date:%Y-%m-%d}", remedy=remedy))
    return notes


def list_base_warnings(model: Mapping[str, Any]) -> list[str]:
    """Warnings about the base model that adapters need, where it is not the plain one. `model`: the recipe's
    section."""
    base_warnings = []
    if changes_positions(model):
        base_warnings.append(
            "adapters do not carry the stretched positions: load the base as the README.md next to them shows, or run "
            "`ulysses export CHECKPOINT --to DIR --merge-lora`"
        )
    if model["config"] is not None:
        base_warnings.append("the adapters belong to a random model, which is not on disk")
    return base_warnings
