"""A run without its command: rows in memory, an engine on the ranks of a test, the real loop."""

from __future__ import annotations

from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from ulysses_cli.data.batching import make_batching
from ulysses_cli.plan.hardware import Gpu
from ulysses_cli.plan.lever_choice import choose_levers
from ulysses_cli.plan.model_shape import ModelShape, read_model_shape
from ulysses_cli.plan.recipe import Recipe
from ulysses_cli.plan.resolved import make_layout
from ulysses_cli.train.agreement import gather_values
from ulysses_cli.train.bad_steps import BadSteps
from ulysses_cli.train.build import Built, build, load_model_config
from ulysses_cli.train.checkpoint import Owner
from ulysses_cli.train.groups import make_groups
from ulysses_cli.train.loop import Course, StepResult
from ulysses_cli.train.record import Record
from ulysses_cli.train.saves import Habits, Saves
from ulysses_cli.train.stop import StopWishes


class Trip:
    """A course with what stands around it."""

    def __init__(
        self,
        recipe: Recipe,
        rows: Any,
        num_steps: int,
        run_dir: str = "",
        device: torch.device | None = None,
        gpu: Gpu | None = None,
        habits: Habits | None = None,
        shape: ModelShape | None = None,
    ) -> None:
        device = device or torch.device("cpu")
        layout = make_layout(recipe)
        groups = make_groups(layout, timedelta(seconds=60))
        shape = shape or read_model_shape(load_model_config(recipe).to_dict(), "test")
        torch.manual_seed(recipe.run.seed)
        levers = choose_levers(recipe, shape, gpu).levers
        # a run's own folder: life.py makes it
        swap = Path(recipe.memory.nvme_path) if recipe.memory.nvme_path else None
        self.built: Built = build(recipe, shape, groups, device, num_steps, levers, swap_folder=swap)
        torch.manual_seed(recipe.run.seed + groups.rank)
        batching = make_batching(recipe, shape)
        self.course = Course(
            self.built.engine, groups, rows, batching, num_steps, num_steps * batching.rows_per_step, StopWishes()
        )
        self.results: list[StepResult] = []
        self.warnings: list[str] = []
        self.bad_steps = BadSteps(recipe.run.max_bad_steps, self.warnings.append)
        self.course.after = (lambda _, result: self.results.append(result), self.bad_steps.judge)
        self.owner = Owner(
            self.built.module,
            self.built.engine.wrapped.optimizer,
            groups.rank,
            layout.world_size,
            wait=lambda: dist.barrier(group=groups.host_group),
            tell_all=lambda value: gather_values(value, groups.host_group),
        )
        facts = {
            "world_size": layout.world_size,
            "rows_per_step": batching.rows_per_step,
            "recipe": recipe.model_dump(mode="json"),
            "data": "made up",
        }
        self.saves = Saves(self.owner, Record(Path(run_dir), None, (), 1), habits or Habits(), facts, self.bad_steps)

    @property
    def losses(self) -> list[float]:
        return [result.loss for result in self.results]

    def read_weights(self) -> dict[str, torch.Tensor]:
        """Whole float32 weights of everything that is trained."""
        from deepspeed.utils import safe_get_full_fp32_param

        trained = [(name, p) for name, p in self.built.module.named_parameters() if p.requires_grad]
        return {name: safe_get_full_fp32_param(p).clone() for name, p in trained}
