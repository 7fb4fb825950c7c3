"""Runs training without its command: rows in memory, an engine on the ranks of a test, the real loop."""

from datetime import timedelta
from pathlib import Path
from typing import Any

import torch

from ulysses_cli.data.steps import make_eval_batching
from ulysses_cli.plan.hardware import Gpu
from ulysses_cli.plan.models.shape import ModelShape, read_model_shape
from ulysses_cli.plan.planner.lever_choice import choose_levers
from ulysses_cli.plan.recipe.recipe import Recipe
from ulysses_cli.plan.resolved import choose_layout, settle
from ulysses_cli.run.checkpoints import load_state
from ulysses_cli.run.resume import ResumePoint
from ulysses_cli.train.checkpoint.saves import SavePolicy, Saves
from ulysses_cli.train.evaluation import rehearse
from ulysses_cli.train.loop import StepResult, train
from ulysses_cli.train.metrics import BadSteps
from ulysses_cli.train.model.build import assemble_run, choose_objective
from ulysses_cli.train.model.loading import load_model_config
from ulysses_cli.train.processes.groups import make_groups
from ulysses_cli.train.record import Record


class RunHarness:
    """A train_state with the parts of a run that it needs."""

    def __init__(
        self,
        recipe: Recipe,
        rows: Any,
        num_steps: int,
        run_dir: str = "",
        device: torch.device | None = None,
        gpu: Gpu | None = None,
        policy: SavePolicy | None = None,
        shape: ModelShape | None = None,
    ) -> None:
        shape = shape or read_model_shape(load_model_config(recipe).to_dict(), "test")
        groups = make_groups(choose_layout(recipe, shape), timedelta(seconds=60))
        self.plan = plan = settle(recipe, shape, choose_levers(recipe, shape, gpu).levers)
        # a run's own folder, which inputs.py makes
        swap = Path(recipe.memory.nvme_path) if recipe.memory.nvme_path else None
        objective = choose_objective(recipe, groups)
        run = assemble_run(
            plan, groups, device or torch.device("cpu"), rows, num_steps, swap_folder=swap, objective=objective
        )
        self.built, self.train_state, self.context = run.built, run.state, run.context
        self.results: list[StepResult] = []
        self.warnings: list[str] = []
        self.bad_steps = BadSteps(recipe.run.max_bad_steps, self.warnings.append)
        self.train_state.post_step_hooks = (lambda _, result: self.results.append(result), self.bad_steps.check)
        facts = {
            "world_size": plan.layout.world_size,
            "rows_per_step": self.train_state.batching.rows_per_step,
            "recipe": recipe.model_dump(mode="json"),
            "data": "made up",
        }
        self.saves = Saves(self.context, Record(Path(run_dir)), policy or SavePolicy(), facts, self.bad_steps)

    @property
    def losses(self) -> list[float]:
        return [result.loss for result in self.results]

    def rehearse(self, scratch: Path) -> None:
        batching = make_eval_batching(self.plan.shape, self.plan.resolved)
        rehearse(self.train_state, None, batching, self.context, scratch, lambda _: None)

    def read_weights(self) -> dict[str, torch.Tensor]:
        """Returns whole float32 weights of everything that is trained."""
        from deepspeed.utils import safe_get_full_fp32_param

        trained = [(name, p) for name, p in self.built.module.named_parameters() if p.requires_grad]
        return {name: safe_get_full_fp32_param(p).clone() for name, p in trained}


def run_and_save(recipe: Recipe, rows: Any, folder: str, resumes_at: int | None, num_steps: int) -> list[float]:
    """The losses of a run of four steps that ends after `num_steps` with a checkpoint, and may go on from one."""
    harness = RunHarness(recipe, rows, 4, folder)
    if resumes_at is not None:
        path = Path(folder) / "checkpoints" / f"step-{resumes_at}"
        harness.saves.resume(harness.train_state, ResumePoint(path, load_state(path), True))
    harness.train_state.num_steps = num_steps
    train(harness.train_state)
    harness.saves.save_last(harness.train_state)
    return harness.losses
