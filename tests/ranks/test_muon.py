"""Tests muon on ranks: steps of an independent reference in float64, checkpoints, steps that are left out, memory."""

import math
from pathlib import Path

import pytest
import torch
from support.rank_pool import run_on_ranks
from support.real_steps import ZERO, make_case, trace_bytes
from support.run_harness import ROWS, RunHarness, is_same, resume, train_and_save
from support.training import MemoryRows, make_recipe
from torch import Tensor

from ulysses_cli.plan.ledger.job import Job, make_job
from ulysses_cli.plan.ledger.ledger import measure_ledger
from ulysses_cli.plan.ledger.states import compute_adam
from ulysses_cli.plan.models.shape import read_model_shape
from ulysses_cli.plan.planner.lever_choice import choose_levers
from ulysses_cli.plan.recipe.recipe import Recipe
from ulysses_cli.report.ledger import list_predicted
from ulysses_cli.run.checkpoints import CheckpointError, find_damage
from ulysses_cli.train.optimizer.muon import orthogonalize

COMMON = ("train.optim=muon", "train.learning_rate=0.01", "train.lr_scheduler_type=constant")
GROUPS = "deepspeed.zero_optimization.sub_group_size=5000"  # several groups, of which rounds are not full
NUM_STEPS, BAD_STEP, SAVED = 4, 2, 2


def orthogonalize_slowly(matrix: Tensor) -> Tensor:
    """By the singular values, each of which passes through the polynomial a x + b x^3 + c x^5 five times."""
    left, values, right = torch.linalg.svd(matrix / (matrix.norm() + 1e-7), full_matrices=False)
    for _ in range(5):
        values = 3.4445 * values - 4.7750 * values**3 + 2.0315 * values**5
    return left @ torch.diag(values) @ right


class Reference:
    """Muon and AdamW in float64, written from their papers."""

    def __init__(self, weights: dict[str, Tensor], recipe: Recipe) -> None:
        self.weights = {name: weight.double() for name, weight in weights.items()}
        self.train, self.num_steps = recipe.train, 0
        self.first = {name: torch.zeros_like(weight) for name, weight in self.weights.items()}
        self.second = {name: torch.zeros_like(weight) for name, weight in self.weights.items()}

    def step(self, gradients: dict[str, Tensor]) -> float:
        """Returns the norm of all gradients before they are clipped."""
        train = self.train
        gradients = {name: gradient.double() for name, gradient in gradients.items()}
        norm = math.sqrt(sum(float((gradient**2).sum()) for gradient in gradients.values()))
        scale = min(1.0, train.max_grad_norm / (norm + 1e-6)) if train.max_grad_norm else 1.0
        self.num_steps += 1
        for name, weight in self.weights.items():
            gradient, first, second = gradients[name] * scale, self.first[name], self.second[name]
            if weight.dim() == 2:
                weight *= 1 - train.learning_rate * train.weight_decay
            if weight.dim() == 2 and "embed_tokens" not in name and "lm_head" not in name:
                first *= 0.95
                first += 0.05 * gradient
                update = orthogonalize_slowly(0.05 * gradient + 0.95 * first)
                weight -= train.learning_rate * 0.2 * math.sqrt(max(weight.shape)) * update
            else:
                first *= train.adam_beta1
                first += (1 - train.adam_beta1) * gradient
                second *= train.adam_beta2
                second += (1 - train.adam_beta2) * gradient**2
                root = (second / (1 - train.adam_beta2**self.num_steps)).sqrt() + train.adam_epsilon
                weight -= train.learning_rate * first / (1 - train.adam_beta1**self.num_steps) / root
        return norm


def step_beside_reference(recipe: Recipe) -> list[float]:
    """The largest difference from the reference in each step, of a weight to its largest, and of the norm."""
    harness = RunHarness(recipe, MemoryRows(ROWS), NUM_STEPS)
    gradients, reference = harness.collect_grads(), Reference(harness.read_plain_weights(), recipe)
    differences: list[float] = []
    for number in range(1, NUM_STEPS + 1):
        harness.train_until(number)
        norm = reference.step(gradients[-1])
        differences.append(abs(harness.results[-1].update.grad_norm / norm - 1))
        for name, weight in harness.read_plain_weights().items():
            right = reference.weights[name]
            differences.append(float((weight.double() - right).abs().max() / right.abs().max()))
    return differences


CASES = {
    "one rank": (1, ()),
    "two ranks": (2, ("parallel.sp_size=2", GROUPS)),
    "clipped": (2, ("parallel.sp_size=2", "train.max_grad_norm=0.3")),
    "not clipped": (2, ("parallel.sp_size=2", "train.max_grad_norm=0")),
    "two micro-steps": (2, ("parallel.dp_shard_size=2", "train.gradient_accumulation_steps=2", GROUPS)),
    "three ranks": (3, ("parallel.dp_shard_size=3", GROUPS)),
    "two replicas": (4, ("parallel.sp_size=2", "parallel.dp_replicate_size=2", GROUPS)),
}
TELLING = ("two ranks", "clipped")


@pytest.mark.parametrize(
    "case", [pytest.param(name, marks=pytest.mark.check if name in TELLING else pytest.mark.full) for name in CASES]
)
def test_steps_are_those_of_a_reference_in_float64(case: str) -> None:
    num_ranks, words = CASES[case]
    for differences in run_on_ranks(num_ranks, step_beside_reference, make_recipe(*COMMON, *words)):
        assert max(differences) < 5e-6


def test_newton_schulz_in_bfloat16_is_near() -> None:
    """What a model in bfloat16 has: each matrix is off by that much of its norm."""
    torch.manual_seed(0)
    for shape in ((64, 64), (200, 48), (48, 200)):
        matrix = torch.randn(shape)
        right = orthogonalize_slowly(matrix.double())
        assert float((orthogonalize(matrix) - right).norm() / right.norm()) < 2e-6
        narrow = orthogonalize(matrix.bfloat16())
        assert narrow.dtype == torch.bfloat16
        assert 1e-3 < float((narrow.double() - right).norm() / right.norm()) < 0.02


def train_with_a_bad_step(recipe: Recipe) -> list[bool]:
    """Whether each step changed a matrix's weights, and its momentum."""
    harness, changed = RunHarness(recipe, MemoryRows(ROWS), NUM_STEPS), []
    harness.spoil_gradient(BAD_STEP)
    before = harness.read_states()
    for number in range(1, NUM_STEPS + 1):
        harness.train_until(number)
        now = harness.read_states()
        changed.append(any(not torch.equal(*pair) for pair in zip(now, before, strict=True)))
        before = now
    return changed


def test_a_bad_step_changes_nothing() -> None:
    recipe = make_recipe(*COMMON, "parallel.sp_size=2")
    expected = [step != BAD_STEP for step in range(NUM_STEPS)]
    assert run_on_ranks(2, train_with_a_bad_step, recipe) == [expected] * 2


@pytest.mark.check
def test_a_resumed_run_has_the_same_bits_and_another_layout_the_same_losses(tmp_path: Path) -> None:
    recipe = make_recipe(*COMMON, "parallel.sp_size=2", GROUPS)
    given = (MemoryRows(ROWS), str(tmp_path), SAVED, NUM_STEPS)
    expected = run_on_ranks(2, train_and_save, recipe, *given)
    assert find_damage(tmp_path / "checkpoints" / f"step-{SAVED}") == ""
    assert all(map(is_same, run_on_ranks(2, resume, recipe, *given, True), expected))
    alone = make_recipe(*COMMON, "parallel.sp_size=1", "train.gradient_accumulation_steps=1")
    assert run_on_ranks(1, resume, alone, *given, True)[0].losses == pytest.approx(expected[0].losses, rel=1e-4)


def start_with_adamw(folder: str) -> str:
    harness = RunHarness(make_recipe("parallel.sp_size=2"), MemoryRows(ROWS), NUM_STEPS, folder)
    with pytest.raises(CheckpointError) as raised:
        harness.saves.start_from(harness.train_state, folder, with_moments=True)
    harness.saves.start_from(harness.train_state, folder, with_moments=False)
    return str(raised.value)


@pytest.mark.full
def test_adamw_starts_from_weights_alone(tmp_path: Path) -> None:
    recipe = make_recipe(*COMMON, "parallel.sp_size=2")
    run_on_ranks(2, train_and_save, recipe, MemoryRows(ROWS), str(tmp_path), SAVED, NUM_STEPS)
    for message in run_on_ranks(2, start_with_adamw, str(tmp_path)):
        assert "exp_avg_sq: another train.optim" in message
        assert message.endswith("run.start_moments: false")


@pytest.mark.full
@pytest.mark.parametrize("words", [(), ("model.dtype=bfloat16",)])
def test_the_ledger_counts_a_step_of_muon(words: tuple[str, ...]) -> None:
    sizes, small = {"vocab_size": 64, "hidden_size": 512, "intermediate_size": 1536}, f"{ZERO}.sub_group_size=1000"
    recipe = make_case(sizes, "train.optim=muon", "parallel.sp_size=2", "run.device=cuda", small, *words)
    traced, formula = trace_bytes(recipe)["device"], list_predicted(measure_ledger(make_own_job(recipe)))
    assert {phase: formula[phase] for phase in traced} == pytest.approx(traced, rel=0.001)
    adamw = recipe.model_copy(update={"train": recipe.train.model_copy(update={"optim": "adamw"})})
    states = [compute_adam(make_own_job(each)) for each in (recipe, adamw)]
    assert states[0] == pytest.approx(states[1] / 2, rel=0.02), "one moment in place of two"


def make_own_job(recipe: Recipe) -> Job:
    shape = read_model_shape(recipe.model.config, "test")
    return make_job(recipe, shape, choose_levers(recipe, shape, None).levers)
