"""Makes checkpoints as a run leaves them: with arbitrary bytes where nothing is loaded, or with tensors."""

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ulysses_cli.run.checkpoints import name_share

RECIPE = {
    "model": {"name_or_path": "owner/model"},
    "data": {"max_length": 512},
    "train": {"per_device_train_batch_size": 1, "gradient_accumulation_steps": 1},
    "run": {"seed": 0},
    "lora": None,
}


def make_state(step: int, world_size: int = 2, **changes: Any) -> dict[str, Any]:
    return {
        "step": step, "position": 4 * step, "optimizer_steps": step, "bad_steps": 0, "hours": 0.5,
        "world_size": world_size, "rows_per_step": 4, "recipe": RECIPE, "data": "abc", **changes,
    }  # fmt: skip


def make_checkpoint(run_dir: Path, step: int, world_size: int = 2, **changes: Any) -> Path:
    path = run_dir / "checkpoints" / f"step-{step}"
    path.mkdir(parents=True)
    contents = {name_share(rank): f"rank {rank} step {step} ".encode() * 50 for rank in range(world_size)}
    contents["state.json"] = json.dumps(make_state(step, world_size, **changes)).encode()
    write_contents(path, contents)
    return path


def write_contents(path: Path, contents: dict[str, bytes]) -> None:
    for name, content in contents.items():
        (path / name).write_bytes(content)
    write_manifest(path)


def write_manifest(path: Path) -> None:
    """Writes a manifest that names every file of the checkpoint with its true size and hash."""
    files = {}
    for name in sorted(file.name for file in path.iterdir() if file.name != "manifest.json"):
        content = (path / name).read_bytes()
        files[name] = {"bytes": len(content), "sha256": hashlib.sha256(content).hexdigest()}
    (path / "manifest.json").write_text(json.dumps({"format": 1, "files": files}))


def save_as_ranks(tensors: Mapping[str, Any], path: Path, num_ranks: int = 3) -> Path:
    """Saves a checkpoint with tensors: each rank holds a stretch of every flattened one."""
    from ulysses_cli.train.tensor_file import write_tensors  # imports torch

    path.mkdir(parents=True)
    for rank in range(num_ranks):
        shards, stretches = [], []
        for name, tensor in tensors.items():
            flat = tensor.detach().float().reshape(-1)
            width = -(-len(flat) // num_ranks)
            stretch = flat[rank * width : (rank + 1) * width]
            if len(stretch):
                shards.append([f"model.{name}", list(tensor.shape), rank * width, len(stretch)])
                stretches.append((f"model.{name}|master", stretch))
        write_tensors(path / name_share(rank), stretches, {"shards": json.dumps(shards)})
    (path / "state.json").write_text("{}")
    write_manifest(path)
    return path
