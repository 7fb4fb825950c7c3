"""What a run leaves beside its model: run.json, the model card, lines for trackers. Facts in, files out."""

from __future__ import annotations

import json
import os
import platform
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Any, Protocol

import torch

from ulysses_cli import __version__
from ulysses_cli.data.rows import PackedRows
from ulysses_cli.plan.layout import Layout
from ulysses_cli.plan.load import Loaded
from ulysses_cli.plan.model_shape import ModelShape
from ulysses_cli.plan.resolved import resolve
from ulysses_cli.train.kernel_choice import Choice

PACKAGES = ("torch", "transformers", "deepspeed", "peft", "datasets", "safetensors")


def list_versions() -> dict[str, str]:
    found = {"ulysses": __version__, "python": platform.python_version()}
    for name in PACKAGES:
        found[name] = metadata.version(name)
    return found


def read_peak_bytes(device: torch.device) -> int | None:
    return torch.cuda.max_memory_allocated(device) if device.type == "cuda" else None


def write_run_file(
    run_dir: Path,
    loaded: Loaded,
    shape: ModelShape,
    layout: Layout,
    data: Path,
    rows: PackedRows,
    kernel: Choice,
    num_steps: int,
    device: torch.device,
) -> None:
    run = loaded.recipe.run
    content = {
        "recipe_hash": resolve(loaded.recipe, shape).recipe_hash,
        "recipe_file": loaded.file,
        "recipe": loaded.recipe.model_dump(mode="json"),
        "run_name": run.run_name or run_dir.name,
        "layout": {**vars(layout), "world_size": layout.world_size},
        "model": {"name": shape.name, "model_type": shape.model_type, "num_parameters": shape.num_parameters},
        "versions": list_versions(),
        "machine": describe_machine(device),
        "data": {
            "hash": data.name,
            "num_rows": len(rows),
            "num_tokens": sum(rows.count_tokens(row) for row in range(len(rows))),
        },
        "attention": {"kernel": kernel.name, "reason": kernel.reason},
        "prediction": None,
        "price_per_gpu_hour": run.price_per_gpu_hour,
        "started": datetime.now(UTC).isoformat(timespec="seconds"),
        "num_steps": num_steps,
    }
    beside = run_dir / "run.json.part"
    beside.write_text(json.dumps(content, indent=1), encoding="utf-8")
    os.replace(beside, run_dir / "run.json")


def describe_machine(device: torch.device) -> dict[str, Any]:
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else platform.processor() or platform.machine()
    return {"device": name, "processes_per_machine": int(os.environ.get("LOCAL_WORLD_SIZE", "1"))}


def make_card(loaded: Loaded, shape: ModelShape) -> str:
    """The model card: what was trained, on what, and the whole recipe."""
    import yaml

    recipe = loaded.recipe
    base = recipe.model.name_or_path
    lines = ["---", "library_name: " + ("peft" if recipe.lora else "transformers")]
    lines += [f"base_model: {base}"] if base else []
    lines += ["---", "", f"# {recipe.run.run_name or Path(recipe.run.output_dir).name}", ""]
    lines += [f"{base or 'A model from random weights'} ({shape.model_type}), fine-tuned at {recipe.data.max_length:,}"]
    lines[-1] += " tokens per row with ulysses " + __version__ + ". The recipe, all defaults included:"
    written = yaml.safe_dump(recipe.model_dump(mode="json"), sort_keys=False, allow_unicode=True)
    return "\n".join([*lines, "", "```yaml", written.rstrip(), "```", ""])


class Tracker(Protocol):
    def write(self, split: str, line: dict[str, Any]) -> None: ...

    def close(self) -> None: ...


class MissingTrackerError(ValueError):
    """A tracker that the recipe names is not installed."""


def make_trackers(names: Sequence[str], run_dir: Path, run_name: str) -> list[Tracker]:
    """Only rank 0 has any."""
    if int(os.environ.get("RANK", "0")) != 0:
        return []
    makers: dict[str, Callable[[Path, str], Tracker]] = {"tensorboard": TensorBoard, "wandb": WeightsAndBiases}
    try:
        return [makers[name](run_dir, run_name or run_dir.name) for name in names]
    except ImportError as error:
        raise MissingTrackerError(
            f"run.report_to needs a package that is not installed: {error.name}; pip install ulysses-cli[{names[0]}]"
        ) from error


def _pick_numbers(line: dict[str, Any]) -> dict[str, float]:
    return {name: value for name, value in line.items() if isinstance(value, int | float) and name != "step"}


class TensorBoard:
    def __init__(self, run_dir: Path, run_name: str) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self.writer = SummaryWriter(str(run_dir / "tensorboard" / run_name))

    def write(self, split: str, line: dict[str, Any]) -> None:
        for name, value in _pick_numbers(line).items():
            self.writer.add_scalar(f"{split}/{name}", value, line["step"])

    def close(self) -> None:
        self.writer.close()


class WeightsAndBiases:
    def __init__(self, run_dir: Path, run_name: str) -> None:
        import wandb

        self.run = wandb.init(project="ulysses", name=run_name, dir=str(run_dir))

    def write(self, split: str, line: dict[str, Any]) -> None:
        self.run.log({f"{split}/{name}": value for name, value in _pick_numbers(line).items()}, step=line["step"])

    def close(self) -> None:
        self.run.finish()
