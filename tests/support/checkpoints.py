"""A checkpoint as a run leaves it, but for the tensors: any bytes will do where nothing is loaded."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

from ulysses_cli.run_folder.manifest import name_share

RECIPE = {
    "model": {"name_or_path": "owner/model"},
    "data": {"max_length": 512},
    "train": {"per_device_train_batch_size": 1, "gradient_accumulation_steps": 1},
    "run": {"seed": 0},
    "lora": None,
}


def make_state(step: int, world_size: int = 2, **changes: Any) -> dict[str, Any]:
    return {
        "step": step,
        "position": 4 * step,
        "optimizer_steps": step,
        "bad_steps": 0,
        "hours": 0.5,
        "world_size": world_size,
        "rows_per_step": 4,
        "recipe": RECIPE,
        "data": "abc",
        **changes,
    }


def make_checkpoint(run_dir: Path, step: int, world_size: int = 2, **changes: Any) -> Path:
    path = run_dir / "checkpoints" / f"step-{step}"
    path.mkdir(parents=True)
    contents = {name_share(rank): f"rank {rank} step {step} ".encode() * 50 for rank in range(world_size)}
    contents["state.json"] = json.dumps(make_state(step, world_size, **changes)).encode()
    write_contents(path, contents)
    return path


def write_contents(path: Path, contents: dict[str, bytes]) -> None:
    """Files, and a manifest that names them rightly."""
    files = {}
    for name, content in contents.items():
        (path / name).write_bytes(content)
        files[name] = {"bytes": len(content), "sha256": hashlib.sha256(content).hexdigest()}
    (path / "manifest.json").write_text(json.dumps({"format": 1, "files": files}))
