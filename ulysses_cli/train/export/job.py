"""Exports a checkpoint without its run: config, tokenizer and adapters come from the recipe in the checkpoint."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import yaml

from ulysses_cli.data.tokenizing.tokenizer import get_template, load_tokenizer
from ulysses_cli.plan.problem import RecipeError
from ulysses_cli.plan.recipe.loader import parse_recipe
from ulysses_cli.plan.resolved import resolve
from ulysses_cli.run_folder.archive import get_step
from ulysses_cli.train.assembly.adapters import make_adapter_config
from ulysses_cli.train.assembly.loading import BuildError
from ulysses_cli.train.assembly.model_config import load_model_config, read_shape, stretch_positions
from ulysses_cli.train.assembly.text_part import find_key_mapping
from ulysses_cli.train.export.base_files import find_base_files
from ulysses_cli.train.export.check import check_adapter, check_model, make_probe
from ulysses_cli.train.export.merging import Merging, add_adapters
from ulysses_cli.train.export.weights import CheckpointWeights, export_model
from ulysses_cli.train.export.wrapper import BaseModel
from ulysses_cli.train.telemetry.run_file import make_card


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
        self.config.vocab_size = shape.vocab_size
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
        adapter_config = make_adapter_config(self.recipe) if self.recipe.lora is not None and not merging else None
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
        return {"folder": str(to), "checked": checked[0], **({"carried": carried[0]} if carried else {})}

    def make_merging(self) -> Merging:
        model = self.recipe.model
        try:
            files = find_base_files(str(model.name_or_path), model.revision)
        except (OSError, ValueError) as error:
            raise ExportError(f"--merge-lora: {error}") from error
        return Merging(
            self.checkpoint, files, make_adapter_config(self.recipe), getattr(torch, model.dtype), self.dtype,
            self.num_own_tokens, BaseModel(str(model.name_or_path), model.revision),
        )  # fmt: skip


def _load_tokenizer(recipe: Any, state: Mapping[str, Any]) -> Any:
    """Loads the tokenizer with the template that the run used: the template's file may have changed or be gone."""
    if "chat_template" not in state:
        return load_tokenizer(recipe.model, recipe.data)
    tokenizer = load_tokenizer(recipe.model, recipe.data.model_copy(update={"chat_template": None}))
    tokenizer.chat_template = state["chat_template"]
    return tokenizer
