"""Runs training without its command: rows in memory, an engine on the ranks of a test, the real loop."""

import math
from copy import deepcopy
from datetime import timedelta
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ulysses_cli.data.steps import make_eval_batching
from ulysses_cli.plan.hardware import Gpu
from ulysses_cli.plan.models.shape import ModelShape, read_model_shape
from ulysses_cli.plan.planner.lever_choice import choose_levers
from ulysses_cli.plan.recipe.recipe import Recipe
from ulysses_cli.plan.resolved import choose_layout, settle
from ulysses_cli.run.resume import ResumePoint
from ulysses_cli.train.checkpoint.saves import SavePolicy, Saves
from ulysses_cli.train.evaluation import rehearse
from ulysses_cli.train.loop import StepResult, train
from ulysses_cli.train.metrics import BadSteps
from ulysses_cli.train.model.build import assemble_run, choose_objective
from ulysses_cli.train.model.loading import load_model_config
from ulysses_cli.train.optimizer.states import list_flats
from ulysses_cli.train.processes.groups import make_groups
from ulysses_cli.train.record import Record
from ulysses_cli.train.tensor_file import get_tensor

# Documents are (length, first token that is a target).
ROWS = [[(40, 0), (20, 0)], [(64, 0)], [(5, 0), (9, 9), (3, 0), (20, 15)], [(50, 40)], [(30, 0), (30, 0)]]


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
        choice = choose_levers(recipe, shape, gpu)
        self.plan = plan = settle(choice.settle_stage(recipe), shape, choice.levers)
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

    @property
    def norms(self) -> list[float]:
        return [result.update.grad_norm for result in self.results]

    def rehearse(self, scratch: Path) -> None:
        batching = make_eval_batching(self.plan.shape, self.plan.resolved)
        rehearse(self.train_state, None, batching, self.context, scratch, lambda _: None)

    def train_until(self, step: int) -> None:
        self.train_state.num_steps = step
        train(self.train_state)

    def resume(self, run_dir: str, step: int) -> None:
        point = ResumePoint(Path(run_dir) / "checkpoints" / f"step-{step}", {}, is_own=True)
        self.saves.resume(self.train_state, point)

    def collect_grads(self) -> list[dict[str, Tensor]]:
        """Returns a list that gets the whole gradients of each step, with the names of transformers' own model."""
        from deepspeed.utils import safe_get_full_grad

        wrapped, grads = self.built.engine.wrapped, list[dict[str, Tensor]]()
        trained = {
            name.removeprefix("model."): p for name, p in self.built.module.named_parameters() if p.requires_grad
        }
        own_step = wrapped.step

        def step_and_collect() -> None:
            if wrapped.is_gradient_accumulation_boundary():
                grads.append({name: safe_get_full_grad(p).clone() for name, p in trained.items()})
            own_step()

        wrapped.step = step_and_collect
        return grads

    def read_states(self) -> list[Tensor]:
        """Returns all that the optimizer holds: weights and moments, their codes if they have some, counts of steps."""
        optimizer, states = self.built.engine.wrapped.optimizer, list[Tensor]()
        for flat in list_flats(optimizer):
            states += [get_tensor(flat.read(kind, 0, flat.numel)).clone() for kind in ("master", *flat.moments)]
            own = optimizer.optimizer.state[flat.master]  # type: ignore[attr-defined]
            kept = [own[name] for name in sorted(own) if name.endswith(("_codes", "_scales", "step"))]
            states += [torch.as_tensor(value).clone() for value in kept]
        return states

    def spoil_gradient(self, step: int) -> None:
        """After this step, the gradient of the first trained module, the last of all, is not a number."""

        def spoil(gradient: Tensor) -> Tensor:
            return gradient * math.nan if self.train_state.step == step else gradient

        def hook(_: Any, __: Any, output: Tensor) -> None:
            if output.requires_grad:
                output.register_hook(spoil)

        modules = self.built.module.model.modules()
        first = next(each for each in modules if any(p.requires_grad for p in each.parameters(recurse=False)))
        first.register_forward_hook(hook)

    def make_plain_model(self) -> Any:
        """Returns transformers' own model with the weights of training."""
        from transformers import AutoModelForCausalLM

        weights, config = self.read_plain_weights(), deepcopy(self.built.config)
        plain = AutoModelForCausalLM.from_config(config, attn_implementation="eager").float().eval()
        assert weights.keys() == dict(plain.named_parameters()).keys()
        plain.load_state_dict(weights, strict=False)  # weights that layers share have further names
        return plain

    def read_plain_weights(self) -> dict[str, Tensor]:
        """With the names of transformers' own model."""
        return {name.removeprefix("model."): weight for name, weight in self.read_weights().items()}

    def read_weights(self) -> dict[str, Tensor]:
        """Returns whole float32 weights of everything that is trained."""
        from deepspeed.utils import safe_get_full_fp32_param

        trained = [(name, p) for name, p in self.built.module.named_parameters() if p.requires_grad]
        return {name: safe_get_full_fp32_param(p).clone() for name, p in trained}


class Course(NamedTuple):
    """What a run did: the rows and losses of its steps, and what its optimizer held at the end."""

    rows: list[tuple[int, ...]]
    losses: list[float]
    states: list[Tensor]


def train_and_save(
    recipe: Recipe, rows: Any, folder: str, saved: int, num_steps: int, rehearses: bool = False, is_async: bool = False
) -> Course:
    """Trains without a stop, with a checkpoint after step `saved`. Returns what followed it."""
    harness = RunHarness(recipe, rows, num_steps, folder, policy=SavePolicy(is_async=is_async))
    if rehearses:
        harness.rehearse(Path(folder) / "rehearsal")
    harness.train_until(saved)
    harness.saves.save(harness.train_state)
    harness.train_until(num_steps)
    harness.saves.wait_for_pending()
    return _describe(harness, saved)


def resume(recipe: Recipe, rows: Any, folder: str, saved: int, num_steps: int, rehearses: bool = False) -> Course:
    """Goes on from that checkpoint."""
    harness = RunHarness(recipe, rows, num_steps, folder)
    if rehearses:
        harness.rehearse(Path(folder) / "rehearsal")
    harness.resume(folder, saved)
    train(harness.train_state)
    return _describe(harness, 0)


def train_alone(recipe: Recipe, rows: Any, num_steps: int) -> list[float]:
    """Returns the losses of a run with nothing between its steps."""
    harness = RunHarness(recipe, rows, num_steps)
    train(harness.train_state)
    return harness.losses


def _describe(harness: RunHarness, since: int) -> Course:
    rows = [tuple(result.plan.rows) for result in harness.results]
    return Course(rows[since:], harness.losses[since:], harness.read_states())


def is_same(ours: Course, right: Course) -> bool:
    """Whether they are equal to the last bit."""
    pairs = zip(ours.states, right.states, strict=True)
    return ours[:2] == right[:2] and all(torch.equal(own, other) for own, other in pairs)
