"""Completes the card of a model for publication: what it was trained on, losses by length, layout, versions, and how to
load it in transformers and vLLM. Takes the card that the export wrote and the facts of the run, returns text."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ulysses_cli.plan.nouns import format_count
from ulysses_cli.plan.resolved import changes_positions
from ulysses_cli.plan.rules.public_names import LOCAL_FOLDER, list_public_datasets, make_public
from ulysses_cli.report.run_files import RecordedRun
from ulysses_cli.report.run_summary import list_values

LOADED_BY_TRANSFORMERS = """\
```python
from transformers import AutoModelForCausalLM, AutoTokenizer

tokenizer = AutoTokenizer.from_pretrained("{name}")
model = AutoModelForCausalLM.from_pretrained("{name}", dtype="auto")
```"""
LAST_HEADING = "\n## Recipe\n"
VLLM_RANKS = (8, 16, 32, 64, 128, 256, 320, 512)  # what --max-lora-rank takes
LOSS_TABLES = {
    "by_position": "position in the document",
    "by_class": "what the assistant writes",
    "by_turn": "turn of the assistant",
}
SHOWN_VERSIONS = ("ulysses", "torch", "transformers", "deepspeed", "peft", "python")


def complete_card(card: str, name: str, run: RecordedRun, folder: Path, licence: Mapping[str, str]) -> str:
    """`folder`: the model's; `licence`: what the base model's card says of it."""
    recipe, written = read_recipe(card, run)
    holds_adapters = (folder / "adapter_config.json").is_file()
    head, _, body = card.removeprefix("---\n").partition("\n---\n")
    keys = [line for line in head.splitlines() if line]
    keys += [f"{key}: {json.dumps(value)}" for key, value in licence.items()]
    keys += ["pipeline_tag: text-generation", "tags:", "- ulysses", "- long-context"]
    datasets = list_public_datasets(recipe.get("data", {}).get("datasets", ()))
    named = [path for path in datasets if "/" in path]
    keys += ["datasets:", *(f"- {path}" for path in named)] if named else []
    sections = [
        *_write_data(run, datasets),
        *_write_losses(run),
        *_write_layout(run),
        *_write_loading(name, recipe, folder, holds_adapters=holds_adapters),
        *_write_licence(recipe, licence),
    ]
    before, heading, after = body.partition(LAST_HEADING)
    return "\n".join(["---", *keys, "---", before.rstrip(), "", *sections]) + heading + (written or after)


def read_recipe(card: str, run: RecordedRun) -> tuple[dict[str, Any], str]:
    """The recipe as the card shows it, without what earlier versions have written of the machine, and its section; the
    run's own and '' where the card shows none. The export has written the card where relative paths lead somewhere."""
    import yaml

    before, fence, rest = card.partition(LAST_HEADING)[2].partition("```yaml\n")
    content, end, after = rest.rpartition("```")
    try:
        recipe = yaml.safe_load(content) if fence and end else None
    except yaml.YAMLError:
        recipe = None
    if not isinstance(recipe, dict):
        return make_public(run.get_part("recipe")), ""
    public = make_public(recipe)
    dumped = yaml.safe_dump(public, sort_keys=False, allow_unicode=True)
    return public, f"{before}{fence}{dumped.rstrip()}\n{end}{after}"


def _write_data(run: RecordedRun, datasets: Sequence[str]) -> list[str]:
    tokens, targets = (int(sum(list_values(run.metrics, key))) for key in ("tokens", "supervised_tokens"))
    steps = run.metrics[-1]["step"] if run.metrics else 0
    lines = ["## Data", "", f"- sources: {', '.join(datasets) or 'not recorded'}"]
    lines += [f"- trained on {tokens:,} tokens, {targets:,} of them targets, in {format_count(steps, 'step')}"]
    length = run.get_part("recipe").get("data", {}).get("max_length")
    return [*lines, *([f"- rows of {length:,} tokens"] if length else []), ""]


def _write_losses(run: RecordedRun) -> list[str]:
    if not run.evals:
        loss = run.metrics[-1].get("loss") if run.metrics else None
        is_known = isinstance(loss, int | float)
        return ["## Loss", "", f"Training loss at the end: {loss:.4f}. Nothing was held out.", ""] if is_known else []
    first, last = run.evals[0], run.evals[-1]
    before = f" Before step 1: {_format(first.get('loss'))}." if first["step"] == 0 < last["step"] else ""
    name, key = "perplexity", "perplexity"
    if "rewards/accuracies" in last:
        name, key = "share of pairs whose chosen answer has the higher reward", "rewards/accuracies"
    lines = ["## Loss on held-out documents", "", f"After step {last['step']}: {_format(last.get('loss'))}, "
             f"{name} {_format(last.get(key))}.{before}", ""]  # fmt: skip
    for key, title in LOSS_TABLES.items():
        buckets = last.get(key)
        if not isinstance(buckets, dict) or not buckets:
            continue
        lines += [f"| {title} | loss | tokens |", "| --- | --- | --- |"]
        for place, facts in buckets.items():
            loss, tokens = (facts.get("loss"), facts.get("tokens")) if isinstance(facts, dict) else (facts, None)
            lines.append(f"| {place} | {_format(loss)} | {f'{tokens:,}' if isinstance(tokens, int) else ''} |")
        lines.append("")
    return lines


def _format(value: object) -> str:
    return f"{value:.4f}" if isinstance(value, int | float) else "not a number"


def _write_layout(run: RecordedRun) -> list[str]:
    layout, versions = run.get_part("layout"), run.get_part("versions")
    sizes = " x ".join(f"{key.removesuffix('_size')} {size}" for key, size in layout.items() if key != "world_size")
    device = run.get_part("machine").get("device", "an unknown device")
    attention = run.get_part("attention").get("name", "unknown")
    size = layout.get("world_size")
    ranks = "an unknown number of ranks" if size is None else format_count(size, "rank")
    lines = ["## How it was trained", "", f"- {ranks} on {device}: {sizes}"]
    lines += [f"- attention kernel: {attention}"]
    exact = ", ".join(f"{name} {versions[name]}" for name in SHOWN_VERSIONS if name in versions)
    return [*lines, f"- versions: {exact}", ""]


def _write_loading(name: str, recipe: Mapping[str, Any], folder: Path, *, holds_adapters: bool) -> list[str]:
    config = _read_json(folder / ("base_config/config.json" if holds_adapters else "config.json"))
    lengths = (recipe.get("data", {}).get("max_length"), config.get("max_position_embeddings"))
    trained, positions = (value if isinstance(value, int) else 0 for value in lengths)
    length = min(filter(None, (trained, positions)), default=0)
    limit = f" --max-model-len {length}" if length else ""
    rope = config.get("rope_parameters") or config.get("rope_scaling")
    is_stretched = changes_positions(recipe.get("model", {}))
    lines, unserved = ["## Serving", ""], _list_unserved(recipe.get("lora") or {}) if holds_adapters else ""
    if unserved:
        merged = "`ulysses export CHECKPOINT --to MERGED --merge-lora`"
        lines += [f"vLLM does not serve {unserved} beside a base model: merge them first, {merged}.", ""]
        command, written = "", "base_config/config.json tells transformers, and a merged model's config.json tells both"
    elif holds_adapters:
        base = _get_public_base(recipe) or "BASE_MODEL"
        override = f" --hf-overrides '{json.dumps({'rope_parameters': rope})}'" if is_stretched else ""
        own_rank = (recipe.get("lora") or {}).get("r", 16)
        rank = next((rank for rank in VLLM_RANKS if rank >= own_rank), own_rank)
        command = f"vllm serve {base} --enable-lora --max-lora-rank {rank} --lora-modules tuned={name}{limit}{override}"
        lines += [] if base != "BASE_MODEL" else ["BASE_MODEL is the base model's folder.", ""]
        written = "the command above tells vLLM"
    else:
        lines += [LOADED_BY_TRANSFORMERS.format(name=name), ""]
        command, written = f"vllm serve {name}{limit}", "config.json tells both"
    lines += ["```sh", command, "```", ""] if command else []
    if is_stretched and isinstance(rope, dict):
        lines += [f"Positions are {_describe_positions(rope)}: {written}.", ""]
    if 0 < trained < positions:
        lines += [f"No row of the training was longer than {trained:,} tokens. The model has {positions:,} positions; "
                  "measure it at longer texts before you serve them.", ""]  # fmt: skip
    return lines


def _describe_positions(rope: Mapping[str, Any]) -> str:
    inner = rope.get("full_attention")  # plan.models.family is not needed for a word of transformers
    rope = inner if isinstance(inner, dict) else rope
    kind, theta = rope.get("rope_type", rope.get("type")), rope.get("rope_theta")
    parts = [] if kind == "default" else [f"stretched by {kind}, factor {rope.get('factor')}"]
    return " and ".join([*parts, *([f"computed with base {theta:,.0f}"] if isinstance(theta, int | float) else [])])


def _list_unserved(lora: Mapping[str, Any]) -> str:
    """What vLLM refuses of adapters (vllm/lora/peft_helper.py)."""
    whole = ["adapters with parts that were trained whole"] if lora.get("modules_to_save") else []
    return " or ".join([*whole, *(["DoRA"] if lora.get("use_dora") else [])])


def _write_licence(recipe: Mapping[str, Any], licence: Mapping[str, str]) -> list[str]:
    base = _get_public_base(recipe)
    if not base:
        return []
    text = licence.get("license_name") or licence.get("license") or "not stated by its card"
    return ["## Licence", "", f"The base model's: {text} ({base}).", ""]


def _get_public_base(recipe: Mapping[str, Any]) -> str:
    base = str(recipe.get("model", {}).get("name_or_path") or "")
    return base if base != LOCAL_FOLDER else ""


def _read_json(file: Path) -> dict[str, Any]:
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return content if isinstance(content, dict) else {}
