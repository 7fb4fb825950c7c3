"""Formats a recipe's settings, the plan that a run starts with, and the messages at its start and end: interruption and
failure."""

from __future__ import annotations

import signal
import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from ulysses_cli.plan.layout import Placement
from ulysses_cli.plan.ledger.weights import find_num_parameters
from ulysses_cli.plan.levers import get_key
from ulysses_cli.plan.planner.lever_choice import WRITTEN
from ulysses_cli.plan.problem import Problem
from ulysses_cli.plan.recipe.loader import Loaded
from ulysses_cli.plan.recipe.schema import Setting, format_value
from ulysses_cli.plan.resolved import compute_least_theta, rank_experts
from ulysses_cli.plan.rules.files import list_distant_data
from ulysses_cli.plan.secrets import collect_secrets, mask_secrets
from ulysses_cli.plan.units import format_count, format_parameters
from ulysses_cli.report.ledger import format_mesh, format_stage
from ulysses_cli.report.planner import format_placement, list_warnings
from ulysses_cli.report.printing import format_table
from ulysses_cli.validate import Validated

WIDTH = 96


def tabulate_settings(settings: Sequence[Setting]) -> str:
    rows = [
        (
            setting.key,
            _write_default(setting),
            setting.unit,
            _write_takes(setting),
            setting.doc + _write_aliases(setting),
        )
        for setting in settings
    ]
    return format_table(("key", "default", "unit", "takes", "meaning"), rows)


def describe_settings(settings: Sequence[Setting]) -> str:
    return "\n\n".join(_describe(setting) for setting in settings)


def _describe(setting: Setting) -> str:
    unit = f" ({setting.unit})" if setting.unit else ""
    default = _write_default(setting)
    facts = [setting.doc, f"takes {_write_takes(setting)}{unit}"]
    facts += [default if setting.is_required else f"default: {default}"] if default else []
    facts += [f"also: {', '.join(setting.aliases)}"] if setting.aliases else []
    lines = [line for fact in facts for line in textwrap.wrap(fact, WIDTH, break_long_words=False)]
    return "\n  ".join([setting.key, *lines])


def _write_takes(setting: Setting) -> str:
    return "a section" if setting.accepts.section else setting.accepts.describe()


def _write_default(setting: Setting) -> str:
    if setting.is_required:
        return "required"
    return "" if setting.accepts.section else format_value(setting.default)


def _write_aliases(setting: Setting) -> str:
    return f" (also: {', '.join(setting.aliases)})" if setting.aliases else ""


SHOWN_GROUPS = 4
SHOWN_LETTERS = 90


def describe_plan(valid: Validated) -> dict[str, Any]:
    """The resolved plan of a valid recipe as plain data, for JSON and for the text below."""
    loaded, shape, resolved = valid.loaded, valid.shape, valid.resolved
    if loaded is None or shape is None or resolved is None:
        raise ValueError(f"{valid.file} has problems, so it has no plan")
    recipe, layout = loaded.recipe, resolved.layout
    return {
        "recipe": loaded.file,
        "recipe_hash": resolved.recipe_hash,
        "model": {
            "name": shape.name,
            "source": valid.source,
            "model_type": shape.model_type,
            "num_parameters": find_num_parameters(shape),
            "num_layers": shape.num_layers,
            "windows": list(shape.windows),
        },
        "num_processes": layout.world_size,
        "mesh": asdict(layout),
        "rows_are_shared_by": [list(group) for group in layout.list_sp_groups(SHOWN_GROUPS)],
        "heads": {
            "num_heads": shape.num_heads,
            "num_kv_heads": shape.num_kv_heads,
            "local_heads": resolved.num_local_heads,
            "local_kv_heads": resolved.kv_heads.num_local,
            "kv_heads_are": "repeated" if resolved.kv_heads.is_repeated else "sharded",
        },
        "ring_reason": resolved.ring_reason,
        "tokens": {
            "row": resolved.max_length,
            "local": resolved.local_tokens,
            "rows_per_step": resolved.rows_per_step,
            "per_step": resolved.tokens_per_step,
            "pad_to_multiple_of": resolved.pad_to_multiple_of,
        },
        "vocabulary": {"size": shape.vocab_size, "added": len(recipe.data.added_tokens)},
        "rope_factor": resolved.rope_factor,
        "rope_theta": resolved.rope_theta,
        "own_rope_theta": shape.rope_theta,
        "made_for_tokens": shape.max_position_embeddings,
        "is_rotary": resolved.is_rotary,
        "method": "lora" if recipe.lora else "full",
        "quantize_base": recipe.lora.quantize_base if recipe.lora else None,
        "use_dora": recipe.lora.use_dora if recipe.lora else False,
        "expert_ranks": rank_experts(recipe.lora, shape),
        "modules_to_save": list(recipe.lora.modules_to_save) if recipe.lora else [],
        "trust_remote_code": recipe.model.trust_remote_code,
        "distant_data": list_distant_data(recipe),
        "understood": list(loaded.notes),
        "settings": _list_settings(loaded),
        "defaults": list(resolved.defaults),
    }


def _list_settings(loaded: Loaded) -> list[str]:
    """`key: value` for each setting that the recipe or the command line sets, in their order."""
    masked = mask_secrets(loaded.recipe.model_dump(mode="json"), known=collect_secrets(loaded.recipe.model_dump(), {}))
    lines = []
    for key in loaded.places:
        value: Any = masked
        holder: Any = {}
        for name in key.split("."):
            holder = value
            if isinstance(value, list):
                value = value[int(name)] if name.isdecimal() and int(name) < len(value) else {}
            else:
                value = value.get(name, {}) if isinstance(value, Mapping) else {}
        is_leaf = not isinstance(value, Mapping) and not (isinstance(value, list) and value and _has_parts(value))
        if is_leaf and not isinstance(holder, list):  # a list of texts is shown as one
            text = format_value(tuple(value) if isinstance(value, list) else value)
            lines.append(f"{key}: {textwrap.shorten(text, SHOWN_LETTERS, placeholder=' ...')}")
    return lines


def _has_parts(values: Sequence[object]) -> bool:
    return any(isinstance(value, Mapping) for value in values)


def format_plan(plan: Mapping[str, Any], *, with_settings: bool = True, with_defaults: bool = False) -> str:
    model = plan["model"]
    mesh = plan["mesh"]
    heads = plan["heads"]
    tokens = plan["tokens"]
    size = f"{format_parameters(model['num_parameters'])} parameters, " if model["num_parameters"] else ""
    layers = format_count(model["num_layers"], "layer")
    windows = f", windows of {' and '.join(f'{w:,}' for w in model['windows'])} tokens" if model["windows"] else ""
    groups = " ".join(_format_ranks(group) for group in plan["rows_are_shared_by"])
    trained = _format_trained(plan)
    more = " ..." if plan["num_processes"] // mesh["sp_size"] > SHOWN_GROUPS else ""

    lines = [
        ("recipe", f"{plan['recipe']} is valid"),
        ("model", f"{model['name']}: {model['model_type']}, {size}{layers}{windows}"),
        ("", f"shape from {model['source']}; {trained}"),
        ("mesh", f"{format_count(plan['num_processes'], 'process')} = {format_mesh(mesh)}"),
        ("rows", f"shared by ranks {groups}{more}" if mesh["sp_size"] > 1 else "one rank has a whole row"),
        ("tokens", f"{tokens['row']:,} per row, {tokens['local']:,} per rank and row"),
        ("step", f"{tokens['per_step']:,} tokens in {format_count(tokens['rows_per_step'], 'row')} per optimizer step"),
        ("heads", _format_heads(heads, mesh["sp_size"])),
    ]
    if plan["ring_reason"]:
        lines.append(("ring", _format_ring(mesh, plan["ring_reason"])))
    if plan["trust_remote_code"]:
        lines.append(("trust", "model.trust_remote_code is on: Python code that comes with the model runs here"))
    if plan["vocabulary"]["added"]:
        lines.append(("vocabulary", _format_vocabulary(plan)))
    if plan["rope_factor"] or plan["rope_theta"]:
        lines.append(("positions", _format_positions(plan)))
    elif tokens["row"] > plan["made_for_tokens"] and not plan["is_rotary"]:
        made_for = f"the {plan['made_for_tokens']:,} tokens that the model was made for"
        lines.append(("positions", f"rows are longer than {made_for}; it has no rotary positions to stretch"))
    if plan["distant_data"]:
        them = "them" if len(plan["distant_data"]) > 1 else "it"
        lines.append(("data", f"not looked at: {', '.join(plan['distant_data'])}; prepare and train download {them}"))
    if "memory" in plan:
        memory = plan["memory"]
        lines.append(("memory", f"{memory['gpu']}: {memory['text']}"))
        reasons, why_stage = memory["lever_reasons"], memory["zero_stage_reason"]
        lines += [("stage", format_stage(memory["zero_stage"], why_stage))] if why_stage != WRITTEN else []
        lines += [
            ("", f"{get_key(name)} {format_value(memory['levers'][name])}: {reason}")
            for name, reason in reasons.items()
        ]
        lines += [("", line) for line in memory["suggestion"].splitlines()]
    if "placement" in plan:
        lines += format_placement(plan["placement"])
    lines += [("understood", note) for note in plan["understood"]]
    text = "\n".join(f"{name:<11} {value}" for name, value in lines)
    if with_settings:
        text += "\nsettings\n" + "\n".join(f"  {line}" for line in plan["settings"])
    if with_defaults:
        text += "\ndefaults\n" + "\n".join(f"  {line}" for line in plan["defaults"])
    elif with_settings:
        text += f"\n{'defaults':<11} {format_count(len(plan['defaults']), 'setting')} besides; --all lists them"
    return text


def _format_trained(plan: Mapping[str, Any]) -> str:
    if plan["method"] != "lora":
        return "all weights are trained"
    ranks = set(plan["expert_ranks"].values())
    of_experts = f" of linear layers and of experts (rank {ranks.pop()})" if ranks else ""
    parts = [f"adapters{' with DoRA' if plan['use_dora'] else ''}{of_experts}", *plan["modules_to_save"]]
    base = f" on a base in {plan['quantize_base']}" if plan["quantize_base"] else ""
    return f"{' and '.join(filter(None, (', '.join(parts[:-1]), parts[-1])))} are trained{base}"


def _format_heads(heads: Mapping[str, Any], sp_size: int) -> str:
    if sp_size == 1:
        return f"{heads['num_heads']}, and {heads['num_kv_heads']} key/value heads"
    text = f"{heads['local_heads']} of {heads['num_heads']} per rank, "
    text += f"{heads['local_kv_heads']} of {heads['num_kv_heads']} key/value heads per rank"
    if heads["kv_heads_are"] == "repeated":
        return text + " (repeated: some ranks share a head, gradients are summed)"
    return text + " (sharded)"


def _format_ring(mesh: Mapping[str, Any], reason: str) -> str:
    ring_size, num_inner = mesh["ring_size"], mesh["sp_size"] // mesh["ring_size"]
    if ring_size == 1:
        who = f"{num_inner} ranks exchange heads" if num_inner > 1 else "one rank has all heads"
        return f"none: {who}; {reason}"
    inner = f"{num_inner} ranks that exchange heads" if num_inner > 1 else "one rank"
    return f"{ring_size} shares of a row's queries, each of {inner}: {reason}"


def _format_positions(plan: Mapping[str, Any]) -> str:
    parts = [f"stretched {plan['rope_factor']:g}x"] if plan["rope_factor"] else []
    theta, own = plan["rope_theta"], plan["own_rope_theta"]
    if theta:
        parts.append(f"base {theta:,.0f}" + (f", the model's own is {own:,.0f}" if own else ""))
        least = compute_least_theta(plan["tokens"]["row"])
        if theta < least and not plan["rope_factor"]:
            parts.append(f"arXiv 2405.14591 finds {float(f'{least:.2g}'):,.0f} necessary for such rows")
    return "; ".join(parts)


def _format_vocabulary(plan: Mapping[str, Any]) -> str:
    text = f"{plan['vocabulary']['size']:,} tokens, with {plan['vocabulary']['added']:,} of data.added_tokens"
    frozen = [name for name in ("embed_tokens", "lm_head") if name not in plan["modules_to_save"]]
    if plan["method"] != "lora" or not frozen:
        return text
    where = "" if len(frozen) == 2 else f" in {frozen[0]}"
    return f"{text}; under lora, rows that the model lacks stay frozen{where}, each at the mean of the others"


def _format_ranks(group: Sequence[int]) -> str:
    return f"{group[0]}-{group[-1]}" if len(group) > 1 else str(group[0])


def format_missing_lock(run_dir: Path) -> str:
    return f"warning     {run_dir} is on a disk without file locks: a second run in it will not be refused"


def format_start(valid: Validated, machines: str, num_machines: int = 1) -> str:
    plan = format_plan(describe_plan(valid), with_settings=False)
    lines = [plan, f"machines    {machines}"] if machines else [plan]
    if num_machines > 1 and valid.resolved is not None and valid.shape is not None:
        placement = Placement(valid.resolved.layout, num_machines)
        lines += [f"warning     {text}" for text in list_warnings(placement, None, valid.shape)]
    return "\n".join(lines)


def explain_tokens(loaded: Loaded, source: Mapping[str, Any], vocabulary: int) -> Problem:
    """The problem when the data holds a token id that the model's embedding does not have."""
    return Problem(
        "model.tokenizer",
        f"{source['name']} holds token {source['max_id']:,}, the model's embedding has {vocabulary:,}",
        "name the tokenizer that belongs to the model",
        loaded.locate("model.tokenizer"),
    )


def format_interruption(failure: Mapping[str, Any], checkpoint: Path | None) -> str:
    """What the run was doing when it was interrupted, and how to continue it."""
    head = f"interrupted during {failure['phase']}" if failure.get("is_interruption") else "interrupted"
    if checkpoint is None:
        return f"{head}, before a checkpoint was written: the same command starts from the beginning"
    return f"{head}; {explain_resume(checkpoint)}"


def explain_interrupted_start() -> str:
    return "interrupted before the ranks were started: the same command starts again"


def explain_interrupted_export(folder: Path) -> str:
    return f"interrupted: {folder} was not written"


def explain_interrupted_data() -> str:
    return "interrupted while data was prepared: sources that were done are kept; the same command prepares the rest"


def explain_resume(checkpoint: Path, stopped_by: str = "") -> str:
    """`stopped_by` names the setting whose limit ended the run: with the same one it would stop again at once."""
    words = "the same command and --resume auto"
    if stopped_by.startswith("run."):
        words = f"the same command, --resume auto and a larger {stopped_by}"
    return f"the newest checkpoint is {checkpoint}: continue from it with {words}"


SIGNALS = {
    signal.SIGKILL: ": most often the system ran out of host memory",
    signal.SIGBUS: ": a file that it had mapped into memory was truncated while it was read, or its disk failed",
}


def describe_end(code: int | None) -> str:
    """How a process ended that left no message. A code below 0 is minus the signal's number, as in subprocess."""
    if code is None or code >= 0:
        return f"ended with exit code {'unknown' if code is None else code}"
    number = signal.Signals(-code)
    return f"was killed by {number.name}{SIGNALS.get(number, '')}"


def format_failure(failure: Mapping[str, Any], logs: Path) -> str:
    """The error of the rank that failed first, in short, with the path of the log that holds the whole trace."""
    rank = failure.get("rank")
    who = f"rank {rank}" if rank is not None else failure.get("process", "the run")
    if failure.get("message"):
        at = f" ({failure['phase']})" if failure.get("phase") else ""
        first, *more = str(failure["message"]).splitlines() or [""]
        # Indented, so that no line of the message looks like a message of its own.
        text = "\n  ".join((f"{who} failed{at}: {first}", *map(str.strip, more)))
    else:
        text = f"{who} {describe_end(failure.get('exit_code'))}"
    is_of_rank = rank is not None and failure.get("message")
    trace = logs / (f"rank-{rank}.log" if is_of_rank else failure.get("log", "agent.log"))
    hint = f"\n\nhint: {failure['hint']}" if failure.get("hint") else ""
    return f"{text}{hint}\n\nthe whole trace: {trace}"
