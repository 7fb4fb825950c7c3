"""Exports a checkpoint: at the end of its run, or without the run, with config, tokenizer and adapters from the recipe
in the checkpoint. `ulysses merge`: writes the weighted sum of models, one tensor after another; each sum is float32 and
is rounded once."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
import yaml
from safetensors import safe_open

from ulysses_cli.data.tokenizing.tokenizer import get_template, load_tokenizer
from ulysses_cli.plan.models.model_files import list_weight_files
from ulysses_cli.plan.problem import RecipeError
from ulysses_cli.plan.recipe.loader import parse_recipe
from ulysses_cli.plan.resolved import resolve
from ulysses_cli.plan.rules.merged_models import MergedModel, find_differences, list_config_differences, read_entries
from ulysses_cli.plan.rules.public_names import LOCAL_FOLDER, find_public_name
from ulysses_cli.plan.schedule import name_measure
from ulysses_cli.plan.units import format_count
from ulysses_cli.run.checkpoints import CheckpointError, find_damage, get_step
from ulysses_cli.train.export.base_model import COMPANIONS, BaseModel, find_base_files
from ulysses_cli.train.export.merging import Merging, add_adapters
from ulysses_cli.train.export.weights import (
    PROBE_TEXT,
    CheckpointWeights,
    ShardWriter,
    add_weighted,
    check_adapter,
    check_model,
    convert,
    export_model,
    make_probe,
    temporary_folder,
)
from ulysses_cli.train.model.adapters import make_adapter_config
from ulysses_cli.train.model.build import AssembledRun
from ulysses_cli.train.model.loading import (
    BuildError,
    find_key_mapping,
    load_model_config,
    read_shape,
    stretch_positions,
)
from ulysses_cli.train.record import EXPERTS_LEFT_OUT, Record, get_own_version, make_card


class ExportError(ValueError):
    """The command's arguments do not fit the checkpoint: the user must change them."""


class ExportJob:
    """`trusts_code`: whether code that comes with the model may run here. The run's own setting does not count: a
    checkpoint is data, and may come from anyone. `earlier`: checkpoints whose mean with the first one is exported."""

    def __init__(
        self,
        checkpoint: Path,
        state: Mapping[str, Any],
        dtype: str | None,
        is_merged: bool,
        *,
        trusts_code: bool,
        earlier: Sequence[Path] = (),
    ) -> None:
        self.checkpoint, self.dumped, self.is_merged = checkpoint, state["recipe"], is_merged
        self.earlier = tuple(earlier)
        self.step, self.turn_ends = int(state["step"]), state.get("turn_ends", ())
        needs_code = self.dumped["model"].get("trust_remote_code", False)
        dumped = {**self.dumped, "model": {**self.dumped["model"], "trust_remote_code": trusts_code}}
        try:
            self.recipe = parse_recipe(yaml.safe_dump(dumped), "the checkpoint's recipe").recipe
            self.config = load_model_config(self.recipe)
            self.num_own_tokens = self.config.vocab_size
            self.tokenizer = _load_tokenizer(self.recipe, state)
            name = self.recipe.model.name_or_path
            self.mapping = find_key_mapping(os.path.expanduser(name), self.recipe.model.revision) if name else None
        except (RecipeError, BuildError, OSError) as error:
            hint = "; its code may run here with --trust-remote-code" if needs_code and not trusts_code else ""
            raise ExportError(f"{checkpoint}: {error}{hint}") from error
        self.dtype = getattr(torch, dtype or self.recipe.model.dtype)
        shape = read_shape(self.recipe, self.config, self.tokenizer)
        self.config.vocab_size, self.shape = shape.vocab_size, shape
        stretch_positions(self.config, self.recipe, resolve(self.recipe, shape))
        run_name = self.recipe.run.run_name or checkpoint.resolve().parts[-3]
        self.card = make_card(
            self.dumped, run_name, shape, self.num_own_tokens, is_merged=is_merged, key_mapping=self.mapping,
            template=get_template(self.tokenizer),
        )  # fmt: skip
        if earlier:
            steps = [str(get_step(each)) for each in reversed(self.checkpoints)]
            self.card += f"\nThe weights are the mean of those after steps {', '.join(steps)}.\n"
        if earlier and self.recipe.lora is not None:
            what = "the mean of A and the mean of B are not the mean of what they add"
            fix = "export each with --merge-lora and merge the folders"
            raise ExportError(f"`ulysses merge --last`: this run trained adapters, and {what}\n\nhint: {fix}")
        if is_merged and self.recipe.lora is None:
            raise ExportError("--merge-lora: this run had no adapters; leave it out")
        if is_merged and self.recipe.model.name_or_path is None:
            raise ExportError("--merge-lora: the base model was random and is not on disk; export the adapters alone")

    @property
    def checkpoints(self) -> tuple[Path, ...]:
        """Whose mean is exported."""
        return (self.checkpoint, *self.earlier)

    def run(self, to: Path, report: Callable[[str], None]) -> dict[str, str]:
        """Returns the folder and what was checked."""
        if to.exists():
            raise ExportError(f"{to} is there already: name a folder that is not")
        from transformers import AutoModelForCausalLM

        checked, carried = list[str](), list[str]()
        merging = self.make_merging() if self.is_merged else None
        holds_adapters = self.recipe.lora is not None and not merging
        adapter_config = make_adapter_config(self.recipe, self.shape) if holds_adapters else None
        named = self.recipe.model
        base = BaseModel(named.name_or_path, named.revision) if named.name_or_path is not None else None
        if adapter_config is not None:
            with torch.device("meta"):
                adapter_config = add_adapters(AutoModelForCausalLM.from_config(self.config), adapter_config)

        weights = CheckpointWeights(*self.checkpoints)
        probe = make_probe(self.tokenizer, self.config.vocab_size)

        def check(folder: Path) -> None:
            report("checking")
            if merging is not None:
                checked.append(merging.check(folder, self.config, probe))
            elif adapter_config is not None:
                checked.append(check_adapter(self.checkpoint, folder, self.dtype))
            else:
                checked.append(check_model(weights, folder, self.config, self.dtype, report, probe, base))

        report("merging" if merging is not None else "writing")
        export_model(
            weights, to, config=self.config, tokenizer=self.tokenizer, adapter_config=adapter_config,
            dtype=self.dtype, card=self.card, step=self.step, check=check,
            merge=merging.write if merging is not None else None, base=base, tell=carried.append,
            turn_ends=self.turn_ends,
        )  # fmt: skip
        result = {"folder": str(to), "checked": checked[0], **({"carried": carried[0]} if carried else {})}
        is_left_out = holds_adapters and self.recipe.lora is not None and self.recipe.lora.experts
        return {**result, **({"note": EXPERTS_LEFT_OUT} if is_left_out else {})}

    def make_merging(self) -> Merging:
        model = self.recipe.model
        try:
            files = find_base_files(str(model.name_or_path), model.revision)
        except (OSError, ValueError) as error:
            raise ExportError(f"--merge-lora: {error}") from error
        return Merging(
            self.checkpoint, files, make_adapter_config(self.recipe, self.shape), getattr(torch, model.dtype),
            self.dtype, self.num_own_tokens, BaseModel(str(model.name_or_path), model.revision),
        )  # fmt: skip


def write_model(
    run: AssembledRun, checkpoint: Path, tokenizer: Any, record: Record, *, run_name: str, num_own_tokens: int,
    turn_ends: Sequence[str],
) -> None:  # fmt: skip
    """Runs on rank 0 alone, at the end of the run. `num_own_tokens`: rows of the embedding in the model's files."""
    recipe, built, step = run.plan.recipe, run.built, get_step(checkpoint)
    if step != run.state.step and (damage := find_damage(checkpoint)):
        raise CheckpointError(
            f"{checkpoint}, the best by {name_measure(run.state.measure)}, cannot be exported: {damage}; "
            "export another one with ulysses export"
        )
    dtype = getattr(torch, recipe.model.dtype)
    named = recipe.model.name_or_path
    base = BaseModel(named, recipe.model.revision) if named is not None else None
    probe = make_probe(tokenizer, built.config.vocab_size)
    check = partial(
        check_model, checkpoint, config=built.config, dtype=dtype, report=record.set_phase, probe=probe, base=base
    )
    export_model(
        checkpoint,
        record.run_dir / "model",
        config=built.config,
        tokenizer=tokenizer,
        adapter_config=built.adapter.peft_config["default"] if built.adapter is not None else None,
        dtype=dtype,
        check=check if built.adapter is None else partial(check_adapter, checkpoint, dtype=dtype),
        card=make_card(
            recipe.model_dump(mode="json"),
            run_name,
            run.plan.shape,
            num_own_tokens,
            key_mapping=find_key_mapping(os.path.expanduser(named), recipe.model.revision) if named else None,
            template=get_template(tokenizer),
        ),
        step=step,
        run_step=run.state.step,
        base=base,
        tell=record.report,
        turn_ends=turn_ends,
    )


def _load_tokenizer(recipe: Any, state: Mapping[str, Any]) -> Any:
    """Loads the tokenizer with the template that the run used: the template's file may have changed or be gone."""
    if "chat_template" not in state:
        return load_tokenizer(recipe.model, recipe.data)
    tokenizer = load_tokenizer(recipe.model, recipe.data.model_copy(update={"chat_template": None}))
    tokenizer.chat_template = state["chat_template"]
    return tokenizer


COPIED = ("config.json", "generation_config.json", *COMPANIONS)
CARD = """---
library_name: transformers
base_model: {bases}
tags: [merge]
---

# {name}

The weighted sum of these models, computed in float32 and rounded once by ulysses {version}:

| model | weight |
| --- | --- |
{rows}
{notes}"""


def merge_models(parts: Sequence[MergedModel], to: Path, report: Callable[[str], None]) -> dict[str, Any]:
    """Returns the folder and what was done. The first model gives config, tokenizer and the layout of the files."""
    if to.exists():
        raise ExportError(f"{to} is there already: name a folder that is not")
    folders = _find_folders(parts)
    for other in folders[1:]:  # those of the hub could not be compared before
        if problem := next(find_differences(folders[0], other), None):
            raise ExportError(str(problem).strip())
    report("comparing tokenizers")
    tokenizer = _load_shared_tokenizer(parts)
    with temporary_folder(to) as folder:
        num_tensors = _write_sums(parts, folders, folder, report)
        for name in (*COPIED, *(path.name for path in folders[0].glob("*.py"))):
            if (folders[0] / name).is_file():
                shutil.copyfile(folders[0] / name, folder / name)
        if tokenizer is not None:
            tokenizer.save_pretrained(folder)
        differing = list_config_differences(folders[0], folders[1:])
        note = f"config.json differs in {', '.join(differing)}: that of {parts[0].name} is taken" if differing else ""
        (folder / "README.md").write_text(_write_card(parts, to.name, differing), encoding="utf-8")
    checked = f"{format_count(num_tensors, 'tensor')} of {len(parts)} models are summed in float32 and rounded once"
    return {"folder": str(to), "checked": checked, **({"note": note} if note else {})}


def _find_folders(parts: Sequence[MergedModel]) -> list[Path]:
    try:
        return [find_base_files(part.name, None)[0].parent for part in parts]
    except (OSError, ValueError) as error:
        raise ExportError(str(error)) from error


def _load_shared_tokenizer(parts: Sequence[MergedModel]) -> Any:
    """The first model's tokenizer, which gives every token the same number as the others do; None if no model has
    one."""
    from transformers import AutoTokenizer

    loaded = []
    for part in parts:
        try:
            loaded.append(AutoTokenizer.from_pretrained(part.folder if part.folder.is_dir() else part.name))
        except (OSError, ValueError, KeyError):  # what transformers raises where a folder holds none
            loaded.append(None)
    known = [tokenizer and (tokenizer.get_vocab(), tokenizer(PROBE_TEXT)["input_ids"]) for tokenizer in loaded]
    for part, facts in zip(parts, known, strict=True):
        if facts != known[0]:
            what = "its rows of embeddings stand for other tokens" if facts and known[0] else "one of them has none"
            raise ExportError(f"the tokenizers of {parts[0].name} and {part.name} differ: {what}")
    return loaded[0]


def _write_sums(parts: Sequence[MergedModel], folders: Sequence[Path], to: Path, report: Callable[[str], None]) -> int:
    entries, weights = [read_entries(folder) for folder in folders], [part.weight for part in parts]
    writer, files = ShardWriter(to, "model", torch.float32), list_weight_files(folders[0])
    for number, file in enumerate(files, 1):
        report(f"merging {file.name}, {number} of {len(files)}")
        own = [name for name, entry in entries[0].items() if entry["file"] == file]
        opened: dict[Path, Any] = {}
        for name in own:
            sources = [each[name]["file"] for each in entries]
            opened |= {source: safe_open(source, "pt") for source in sources if source not in opened}
            tensors = [opened[source].get_tensor(name) for source in sources]
            if all(tensor.is_floating_point() for tensor in tensors):
                writer.add_unchanged(name, convert(name, add_weighted(tensors, weights), tensors[0].dtype))
            elif all(tensor.equal(tensors[0]) for tensor in tensors):
                writer.add_unchanged(name, tensors[0])
            else:
                raise CheckpointError(f"{name} holds whole numbers, which differ between the models")
    return len(writer.finish())


def _write_card(parts: Sequence[MergedModel], name: str, differing: Sequence[str]) -> str:
    """Names no folder of this machine."""
    names = [find_public_name(part.name) or LOCAL_FOLDER for part in parts]
    rows = "\n".join(f"| {name} | {part.weight:.6g} |" for name, part in zip(names, parts, strict=True))
    notes = f"\nconfig.json is the first model's. Others differ in {', '.join(differing)}.\n" if differing else ""
    bases = json.dumps([name for name in names if name != LOCAL_FOLDER])
    return CARD.format(bases=bases, name=name, version=get_own_version(), rows=rows, notes=notes)
