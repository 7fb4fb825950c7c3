"""Losses of preferences as pure functions of the log-probabilities of whole answers. A loss is per pair or per answer;
the caller adds them up and divides once.

Formulas, defaults and names are those of TRL 1.16 (trainer/dpo_trainer.py, trainer/kto_trainer.py, experimental/cpo,
experimental/orpo); benchmarks/preferences.py stores what TRL's own code returns.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid


@dataclass(frozen=True, eq=False)
class AnswerPairs:
    """Of P pairs: sums of the log-probabilities of each answer's targets [P], how many targets these are, and the
    reference's sums. None stands for a loss without a reference."""

    chosen: Tensor
    rejected: Tensor
    chosen_targets: Tensor
    rejected_targets: Tensor
    reference_chosen: Tensor | None = None
    reference_rejected: Tensor | None = None

    def score(self, *, is_averaged: bool) -> tuple[Tensor, Tensor]:
        """What stands for the answers: log-probabilities over those of the reference, per target where averaged."""
        chosen, rejected = self.chosen, self.rejected
        if self.reference_chosen is not None and self.reference_rejected is not None:
            chosen, rejected = chosen - self.reference_chosen, rejected - self.reference_rejected
        if is_averaged:
            chosen, rejected = chosen / self.chosen_targets, rejected / self.rejected_targets
        return chosen, rejected


@dataclass(frozen=True)
class PreferenceSettings:
    beta: float = 0.1
    label_smoothing: float = 0.0  # how often a label is wrong
    gamma: float = 0.5  # simpo: the margin that rewards should have
    discopop_tau: float = 0.05
    desirable_weight: float = 1.0  # kto
    undesirable_weight: float = 1.0


PairFormula = Callable[[Tensor, Tensor, PreferenceSettings], Tensor]


@dataclass(frozen=True)
class PairLoss:
    """A formula of the scores of chosen and rejected answers, [P] each. `sft_weight`: of the chosen answers' mean
    cross-entropy per token, which TRL adds; with `sft_on_prompt` that of the prompts too."""

    compute: PairFormula
    is_averaged: bool = False
    has_reference: bool = True
    has_smoothing: bool = False
    sft_weight: float = 0.0
    sft_on_prompt: bool = False


def compute_sigmoid(chosen: Tensor, rejected: Tensor, settings: PreferenceSettings) -> Tensor:
    return -logsigmoid(settings.beta * (chosen - rejected))


def compute_smoothed(chosen: Tensor, rejected: Tensor, settings: PreferenceSettings, sign: float = 1.0) -> Tensor:
    """With a sign of -1 the expected loss is what it would be without wrong labels, once divided (robust)."""
    margin, smoothing = settings.beta * (chosen - rejected), settings.label_smoothing
    return -logsigmoid(margin) * (1 - smoothing) - sign * logsigmoid(-margin) * smoothing


def compute_robust(chosen: Tensor, rejected: Tensor, settings: PreferenceSettings) -> Tensor:
    return compute_smoothed(chosen, rejected, settings, sign=-1.0) / (1 - 2 * settings.label_smoothing)


def compute_hinge(chosen: Tensor, rejected: Tensor, settings: PreferenceSettings) -> Tensor:
    return torch.relu(1 - settings.beta * (chosen - rejected))


def compute_ipo(chosen: Tensor, rejected: Tensor, settings: PreferenceSettings) -> Tensor:
    return (chosen - rejected - 1 / (2 * settings.beta)).square()


def compute_apo_zero(chosen: Tensor, rejected: Tensor, settings: PreferenceSettings) -> Tensor:
    return 1 - torch.sigmoid(settings.beta * chosen) + torch.sigmoid(settings.beta * rejected)


def compute_apo_down(chosen: Tensor, rejected: Tensor, settings: PreferenceSettings) -> Tensor:
    return torch.sigmoid(settings.beta * chosen) + 1 - torch.sigmoid(settings.beta * (chosen - rejected))


def compute_exo_pair(chosen: Tensor, rejected: Tensor, settings: PreferenceSettings) -> Tensor:
    """The divergence of the policy's preference from the labels' own, 1 - smoothing and smoothing."""
    margin, smoothing = settings.beta * (chosen - rejected), settings.label_smoothing
    wins = torch.sigmoid(margin) * (logsigmoid(margin) - math.log1p(-smoothing))
    return wins + torch.sigmoid(-margin) * (logsigmoid(-margin) - math.log(smoothing))


def compute_nca_pair(chosen: Tensor, rejected: Tensor, settings: PreferenceSettings) -> Tensor:
    chosen, rejected = settings.beta * chosen, settings.beta * rejected
    return -logsigmoid(chosen) - 0.5 * logsigmoid(-chosen) - 0.5 * logsigmoid(-rejected)


def compute_sppo_hard(chosen: Tensor, rejected: Tensor, settings: PreferenceSettings) -> Tensor:
    return (chosen - 0.5 / settings.beta).square() + (rejected + 0.5 / settings.beta).square()


def compute_bco_pair(chosen: Tensor, rejected: Tensor, settings: PreferenceSettings) -> Tensor:
    return -logsigmoid(settings.beta * chosen) - logsigmoid(-settings.beta * rejected)


def compute_discopop(chosen: Tensor, rejected: Tensor, settings: PreferenceSettings) -> Tensor:
    margin = settings.beta * (chosen - rejected)
    share = torch.sigmoid(margin / settings.discopop_tau)
    return -logsigmoid(margin) * (1 - share) + torch.exp(-margin) * share


def compute_simpo(chosen: Tensor, rejected: Tensor, settings: PreferenceSettings) -> Tensor:
    return compute_smoothed(chosen, rejected + settings.gamma / settings.beta, settings)


def compute_orpo(chosen: Tensor, rejected: Tensor, settings: PreferenceSettings) -> Tensor:
    return -settings.beta * logsigmoid(compute_log_odds(chosen, rejected))


def compute_log_odds(chosen: Tensor, rejected: Tensor) -> Tensor:
    """Of answers whose tokens have these log-probabilities on average."""
    return (chosen - rejected) - (_log1mexp(chosen) - _log1mexp(rejected))


def _log1mexp(value: Tensor) -> Tensor:
    """log(1 - exp(x)) of negative numbers. Each branch gets only what it can compute: the gradient of the other one
    would be NaN."""
    is_small = value < -0.6931471805599453  # -log 2
    far, near = torch.where(is_small, value, -1.0), torch.where(is_small, -0.5, value)
    return torch.where(is_small, torch.log1p(-torch.exp(far)), torch.log(-torch.expm1(near)))


PAIR_LOSSES: Mapping[str, PairLoss] = {
    "sigmoid": PairLoss(compute_sigmoid),
    "robust": PairLoss(compute_robust, has_smoothing=True),
    "hinge": PairLoss(compute_hinge),
    "ipo": PairLoss(compute_ipo, is_averaged=True),
    "sigmoid_norm": PairLoss(compute_sigmoid, is_averaged=True),
    "apo_zero": PairLoss(compute_apo_zero),
    "apo_down": PairLoss(compute_apo_down),
    "exo_pair": PairLoss(compute_exo_pair, has_smoothing=True),
    "nca_pair": PairLoss(compute_nca_pair),
    "sppo_hard": PairLoss(compute_sppo_hard),
    "bco_pair": PairLoss(compute_bco_pair),
    "discopop": PairLoss(compute_discopop),
    "cpo": PairLoss(compute_smoothed, has_reference=False, has_smoothing=True, sft_weight=1.0),
    "simpo": PairLoss(compute_simpo, is_averaged=True, has_reference=False, has_smoothing=True, sft_weight=1.0),
    "orpo": PairLoss(compute_orpo, is_averaged=True, has_reference=False, sft_weight=1.0, sft_on_prompt=True),
}


def check_settings(names: Mapping[str, float], settings: PreferenceSettings) -> None:
    """Raises ValueError for a setting that a loss does not have, or that it cannot be computed with."""
    smoothing = settings.label_smoothing
    for name in names:
        if name not in PAIR_LOSSES:
            raise ValueError(f"{name} is no loss of pairs: {', '.join(PAIR_LOSSES)}")
    if smoothing and not any(PAIR_LOSSES[name].has_smoothing for name in names):
        able = ", ".join(name for name, loss in PAIR_LOSSES.items() if loss.has_smoothing)
        raise ValueError(f"{' and '.join(names)} cannot smooth labels; losses that can: {able}")
    if not 0 <= smoothing < 0.5:
        raise ValueError(f"label_smoothing is {smoothing}: less than half of the labels can be wrong")
    if "exo_pair" in names and not smoothing:
        raise ValueError("exo_pair needs label_smoothing above 0, such as 0.001: it takes the logarithm")
    if len({PAIR_LOSSES[name].has_reference for name in names}) > 1:
        raise ValueError(f"{' and '.join(names)} do not mix: some have a reference, others none")


def compute_pair_losses(pairs: AnswerPairs, weights: Mapping[str, float], settings: PreferenceSettings) -> Tensor:
    """A loss for each pair, [P]: the sum of losses by name, each times its weight."""
    total = torch.zeros_like(pairs.chosen)
    for name, weight in weights.items():
        loss = PAIR_LOSSES[name]
        if loss.has_reference != (pairs.reference_chosen is not None):
            raise ValueError(f"{name} has {'a' if loss.has_reference else 'no'} reference")
        total = total + weight * loss.compute(*pairs.score(is_averaged=loss.is_averaged), settings)
    return total


@torch.no_grad()
def measure_pairs(pairs: AnswerPairs, name: str, settings: PreferenceSettings) -> dict[str, Tensor]:
    """What is logged for each pair, [P] each, by TRL's names. Rewards are those of whole answers where there is a
    reference, else those that the loss compares."""
    loss = PAIR_LOSSES[name]
    is_averaged = loss.is_averaged and not loss.has_reference
    scores = pairs.score(is_averaged=is_averaged)
    chosen, rejected = (settings.beta * score for score in scores)
    measures = {
        "rewards/chosen": chosen,
        "rewards/rejected": rejected,
        "rewards/accuracies": (chosen > rejected).to(chosen.dtype),
        "rewards/margins": chosen - rejected,
        "logps/chosen": scores[0] if is_averaged else pairs.chosen,
        "logps/rejected": scores[1] if is_averaged else pairs.rejected,
    }
    if name == "orpo":
        log_odds = compute_log_odds(*scores)
        measures |= {"log_odds_chosen": log_odds, "log_odds_ratio": logsigmoid(log_odds)}
    return measures


def compute_kl(ratio_sum: Tensor, number: int) -> Tensor:
    """What kto holds rewards against: the mean log-probability of answers to other prompts over the reference's, from
    their sum over all ranks. It is a constant of the loss and never negative."""
    return (ratio_sum.detach() / max(1, number)).clamp(min=0)


def compute_kto_losses(ratios: Tensor, is_chosen: Tensor, kl: Tensor, settings: PreferenceSettings) -> Tensor:
    """A loss for each answer, [A], from its log-probability over the reference's. Answers need no partner."""
    signs = torch.where(is_chosen, 1.0, -1.0).to(ratios.dtype)
    weights = torch.full_like(ratios, settings.desirable_weight).where(is_chosen, settings.undesirable_weight)
    return weights * (1 - torch.sigmoid(settings.beta * signs * (ratios - kl)))
