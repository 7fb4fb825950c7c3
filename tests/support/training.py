"""The reference for training, written independently with plain torch on one process."""

import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from support.small_run import BYTES_CONFIG, CONFIG, make_settings
from ulysses_cli.data.steps import make_batching, plan_step
from ulysses_cli.plan.models.shape import ModelShape, read_model_shape
from ulysses_cli.plan.recipe.loader import parse_recipe
from ulysses_cli.plan.recipe.recipe import Recipe
from ulysses_cli.plan.resolved import resolve


@dataclass(frozen=True)
class Part:
    input_ids: np.ndarray
    labels: np.ndarray
    positions: np.ndarray
    classes: np.ndarray | None = None
    weights: np.ndarray | None = None


class MemoryRows:
    """Rows of synthetic documents, held in memory. A document is (length, first token that is a target). `shared`: how
    many tokens each begins with that are those of the last document that shares none, and stand in no second place."""

    def __init__(
        self, rows: list[list[tuple[int, int]]], vocabulary: int = 64, shared: list[list[int]] | None = None
    ) -> None:
        self.documents: list[list[tuple[np.ndarray, np.ndarray]]] = []
        self.shared = shared or [[0] * len(row) for row in rows]
        generator = np.random.default_rng(5)
        for row in rows:
            made = []
            for length, first in row:
                tokens = generator.integers(0, vocabulary, length)
                labels = np.append(tokens[1:], -100)
                labels[: max(0, first - 1)] = -100
                made.append((tokens, labels))
            stem = 0
            for at, num_shared in enumerate(self.shared[len(self.documents)]):
                stem = stem if num_shared else at
                made[at][0][:num_shared] = made[stem][0][:num_shared]
            self.documents.append(made)

    def __len__(self) -> int:
        return len(self.documents)

    def get_lengths(self, row: int) -> tuple[int, ...]:
        return tuple(len(tokens) - at for (tokens, _), at in zip(self.documents[row], self.shared[row], strict=True))

    def get_shared(self, row: int) -> tuple[int, ...]:
        return tuple(self.shared[row])

    def count_targets(self, row: int) -> int:
        return sum(int((labels >= 0).sum()) for _, labels in self.documents[row])

    def read(self, row: int, start: int, stop: int) -> Part:
        parts = list(zip(self.documents[row], self.shared[row], strict=True))
        ids = np.concatenate([tokens[at:] for (tokens, _), at in parts])
        labels = np.concatenate([labels[at:] for (_, labels), at in parts])
        positions = np.concatenate([np.arange(at, len(tokens)) for (tokens, _), at in parts])
        room = max(0, stop - len(ids))
        ids, labels = np.pad(ids, (0, room)), np.pad(labels, (0, room), constant_values=-100)
        positions = np.concatenate([positions, np.arange(room)])
        return Part(ids[start:stop], labels[start:stop], positions[start:stop])


class ScaledRows(MemoryRows):
    """All targets have the same weight, a power of two, so small that all together weigh less than one."""

    WEIGHT = 2.0**-9

    def weigh_targets(self, row: int) -> float:
        return self.count_targets(row) * self.WEIGHT

    def read(self, row: int, start: int, stop: int) -> Part:
        return replace(super().read(row, start, stop), weights=np.full(stop - start, self.WEIGHT, np.float32))


def make_recipe(*overrides: str, config: dict[str, Any] | None = None) -> Recipe:
    """Makes a small valid recipe in float32 on CPU ranks, changed by overrides as on the command line."""
    import yaml

    settings = make_settings(
        config or CONFIG,
        data={"max_length": 64},
        train={"max_steps": 5, "weight_decay": 0.1, "max_grad_norm": 1.0},
        run={"seed": 3},
    )
    return parse_recipe(yaml.safe_dump(settings), "test", overrides).recipe


@dataclass(frozen=True)
class Trajectory:
    """Holds the values of each step."""

    losses: list[float]
    grads: list[dict[str, Tensor]]
    norms: list[float]
    weights: dict[str, Tensor]


def train_plainly(
    model: Any, rows: MemoryRows, steps: list[list[int]], recipe: Recipe, rates: list[float]
) -> Trajectory:
    """Trains the plain model, one document at a time, with the whole step as one mean over its targets."""
    train = recipe.train
    trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
    # Experts' biases are vectors, one for each expert.
    matrices = {name for name, p in trained.items() if p.dim() >= 2 and not name.endswith("bias")}
    groups = [
        {"params": [p for name, p in trained.items() if name in matrices], "weight_decay": train.weight_decay},
        {"params": [p for name, p in trained.items() if name not in matrices], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, lr=1.0, betas=(train.adam_beta1, train.adam_beta2), eps=train.adam_epsilon)
    losses, grads, norms = [], [], []
    for ids, rate in zip(steps, rates, strict=True):
        optimizer.zero_grad()
        total, count = torch.zeros((), dtype=torch.float64), 0
        for tokens, labels in [document for row in ids for document in rows.documents[row]]:
            logits = model(torch.from_numpy(tokens)[None], use_cache=False).logits[0]
            total = total + functional.cross_entropy(logits.double(), torch.from_numpy(labels), reduction="sum")
            count += int((labels >= 0).sum())
        (total / count).backward()
        for parameter in trained.values():
            if parameter.grad is None:  # DeepSpeed steps these too: they decay
                parameter.grad = torch.zeros_like(parameter)
        losses.append((total / count).item())
        grads.append({name: p.grad.clone() for name, p in trained.items()})
        norms.append(torch.nn.utils.clip_grad_norm_(list(trained.values()), train.max_grad_norm or float("inf")).item())
        for group in optimizer.param_groups:
            group["lr"] = rate
        optimizer.step()
    return Trajectory(losses, grads, norms, {name: p.detach().clone() for name, p in trained.items()})


def make_plain_model(recipe: Recipe, **options: Any) -> Any:
    """Returns transformers' own model, with the weights that a run of the recipe begins with."""
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(recipe.run.seed)
    config = AutoConfig.for_model(**json.loads(json.dumps(recipe.model.config)))
    options = {"dtype": torch.float32, "attn_implementation": "eager", **options}
    return AutoModelForCausalLM.from_config(config, **options)


def save_bytes_model(folder: Path, seed: int = 0, **changes: Any) -> None:
    """Saves a small random model that reads bytes."""
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(seed)
    config = AutoConfig.for_model(**{**BYTES_CONFIG, **changes})
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)


def plan_rows(recipe: Recipe, shape: ModelShape, rows: MemoryRows, num_steps: int) -> list[list[int]]:
    """Returns the rows of each step, as a run takes them."""
    batching = make_batching(recipe, shape, resolve(recipe, shape))
    per_step = batching.rows_per_step
    return [list(plan_step(rows, batching, step * per_step, 1000).rows) for step in range(num_steps)]


def train_as_planned(model: Any, rows: MemoryRows, recipe: Recipe, num_steps: int) -> Trajectory:
    """Trains the plain model with a run's rows, and a rate that falls in a line."""
    shape = read_model_shape(model.config.to_dict(), "test")
    rates = [recipe.train.learning_rate * (1 - step / num_steps) for step in range(num_steps)]
    return train_plainly(model.train(), rows, plan_rows(recipe, shape, rows, num_steps), recipe, rates)


def measure_difference(ours: dict[str, Tensor], right: dict[str, Tensor], floor: float = 1e-12) -> float:
    """Returns the worst tensor's relative error: length of the difference over length of the right one, or over `floor`
    where that is shorter."""
    assert ours.keys() == right.keys(), ours.keys() ^ right.keys()
    pairs = [(ours[name].double(), right[name].double()) for name in right]
    return max(((a - b).norm() / b.norm().clamp_min(floor)).item() for a, b in pairs)
