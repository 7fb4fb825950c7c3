"""A checkpoint exported without its run: config, tokenizer and adapters come from the recipe that lies in it."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
import yaml

from ulysses_cli.data.tokenizer import load_tokenizer
from ulysses_cli.plan.load import parse_recipe
from ulysses_cli.plan.model_shape import read_model_shape
from ulysses_cli.plan.problem import RecipeError
from ulysses_cli.train.build import load_model_config, make_adapter_config, stretch_positions
from ulysses_cli.train.checkpoint import index_sources
from ulysses_cli.train.export import PREFIX, export_model, put_folder, read_parameter
from ulysses_cli.train.export_check import check_adapter, check_model
from ulysses_cli.train.loading import BuildError
from ulysses_cli.train.run_file import make_card


class ExportError(ValueError):
    """What was asked for cannot be had: the user changes the command."""


class ExportJob:
    def __init__(self, checkpoint: Path, state: Mapping[str, Any], dtype: str | None, is_merged: bool) -> None:
        self.checkpoint, self.dumped, self.is_merged = checkpoint, state["recipe"], is_merged
        try:
            self.recipe = parse_recipe(yaml.safe_dump(self.dumped), "the checkpoint's recipe").recipe
            self.config = load_model_config(self.recipe)
        except (RecipeError, BuildError) as error:
            raise ExportError(f"{checkpoint}: {error}") from error
        self.dtype = getattr(torch, dtype or self.recipe.model.dtype)
        shape = read_model_shape(self.config.to_dict(), "the model")
        stretch_positions(self.config, self.recipe, shape)
        run_name = self.recipe.run.run_name or checkpoint.resolve().parts[-3]
        self.card = make_card(self.dumped, run_name, shape.model_type, is_merged=is_merged)
        if is_merged and self.recipe.lora is None:
            raise ExportError("--merge-lora: this run had no adapters; leave it out")

    def run(self, to: Path, tell: Callable[[str], None]) -> dict[str, str]:
        """-> what was done, in words."""
        if to.exists():
            raise ExportError(f"{to} is there already: name a folder that is not")
        tokenizer = load_tokenizer(self.recipe.model)
        checked: list[str] = []
        if self.is_merged:
            tell("merging")
            return {"folder": str(to), "checked": self.merge(to, tokenizer)}
        adapter_config = make_adapter_config(self.recipe) if self.recipe.lora is not None else None
        if adapter_config is not None:
            adapter_config.target_modules = self.find_targets()

        def check(folder: Path) -> None:
            tell("checking")
            if adapter_config is not None:
                checked.append(check_adapter(self.checkpoint, folder, self.dtype))
            else:
                checked.append(check_model(self.checkpoint, folder, self.config, self.dtype, tell))

        tell("writing")
        export_model(
            self.checkpoint, to, config=self.config, tokenizer=tokenizer, adapter_config=adapter_config,
            dtype=self.dtype, card=self.card, check=check,
        )  # fmt: skip
        return {"folder": str(to), "checked": checked[0]}

    def find_targets(self) -> list[str]:
        """The linear layers that have an adapter, by the last part of their names."""
        names, _ = index_sources(self.checkpoint)
        return sorted({name.partition(".lora_")[0].rpartition(".")[2] for name in names if ".lora_" in name})

    def merge(self, to: Path, tokenizer: Any) -> str:
        """The base model in host memory, its adapters added by peft: the one thing here that needs the whole model."""
        from peft import get_peft_model
        from transformers import AutoModelForCausalLM

        name = self.recipe.model.name_or_path
        if name is None:
            raise ExportError("--merge-lora: the base model was random and is not on disk; export the adapters alone")
        options = {"revision": self.recipe.model.revision, "trust_remote_code": self.recipe.model.trust_remote_code}
        base = AutoModelForCausalLM.from_pretrained(name, config=self.config, dtype=self.dtype, **options)
        adapted = get_peft_model(base, make_adapter_config(self.recipe), autocast_adapter_dtype=False)
        sources, shapes = index_sources(self.checkpoint)
        trained = {PREFIX + key: value for key, value in base.named_parameters() if ".lora_" in key}
        if trained.keys() != sources.keys():
            raise ExportError(f"the adapters do not fit {name}: {sorted(trained.keys() ^ sources.keys())[:3]}")
        for key, value in trained.items():
            value.data.copy_(read_parameter(key, sources, shapes))
        probe = torch.arange(16)[None] % self.config.vocab_size
        with torch.no_grad():
            before = base.eval()(probe, use_cache=False).logits
            merged = adapted.merge_and_unload()
            after = merged(probe, use_cache=False).logits
        beside = to.with_name(f"{to.name}.writing")
        shutil.rmtree(beside, ignore_errors=True)
        merged.save_pretrained(beside)
        tokenizer.save_pretrained(beside)
        (beside / "README.md").write_text(self.card, encoding="utf-8")
        loaded = AutoModelForCausalLM.from_pretrained(beside, dtype=self.dtype)
        with torch.no_grad():
            again = loaded(probe, use_cache=False).logits
        if not torch.equal(after, again):
            raise ExportError(f"{to} was not exported rightly: logits differ after loading it again")
        put_folder(beside, to)
        share = ((after - before).float().norm() / before.float().norm()).item()
        return f"logits of a probe differ from those with adapters by {share:.1e}, as {self.dtype} rounds"
