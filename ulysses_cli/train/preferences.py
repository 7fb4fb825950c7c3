"""Losses of pairs of answers, from log-probabilities of whole answers, and the objective that sums these over ranks.

Formulas, defaults and names are those of TRL 1.16 (trainer/dpo_trainer.py, trainer/kto_trainer.py, experimental/cpo
and orpo);
benchmarks/preferences.py stores what TRL's own code returns. A loss is per pair; the caller adds them up and divides
once.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.functional import logsigmoid

from ulysses_cli.data.steps import MicroBatch, Numbers, StepPlan
from ulysses_cli.data.store import WANTED
from ulysses_cli.train.loss import Loss, Places
from ulysses_cli.train.processes.groups import NO_AXIS, SequenceAxis


@dataclass(frozen=True, eq=False)
class AnswerPairs:
    """Of P pairs: sums of the log-probabilities of each answer's targets [P], how many targets these are, and the
    reference's sums, 0 for a loss without a reference."""

    chosen: Tensor
    rejected: Tensor
    chosen_targets: Tensor
    rejected_targets: Tensor
    reference_chosen: Tensor
    reference_rejected: Tensor

    def score(self, *, is_averaged: bool) -> tuple[Tensor, Tensor]:
        """What stands for the answers: log-probabilities over those of the reference, per target where averaged."""
        chosen, rejected = self.chosen - self.reference_chosen, self.rejected - self.reference_rejected
        if is_averaged:
            chosen, rejected = chosen / self.chosen_targets, rejected / self.rejected_targets
        return chosen, rejected


@dataclass(frozen=True)
class PreferenceSettings:
    loss: tuple[str, ...] = ("sigmoid",)
    loss_weights: tuple[float, ...] = ()  # of each loss; none: 1
    beta: float = 0.1
    label_smoothing: float = 0.0  # how often a label is wrong
    discopop_tau: float = 0.05
    desirable_weight: float = 1.0  # kto
    undesirable_weight: float = 1.0
    gamma: float = 0.5  # simpo: the margin that rewards should have
    sft_weight: float | None = None  # of the chosen answers' cross-entropy; None: the loss's own


PairFormula = Callable[[Tensor, Tensor, PreferenceSettings], Tensor]


@dataclass(frozen=True)
class PairLoss:
    """A formula of the scores of chosen and rejected answers, [P] each. `sft_weight`: what TRL gives by default to the
    chosen answer's mean cross-entropy."""

    compute: PairFormula
    is_averaged: bool = False
    has_reference: bool = True
    sft_weight: float = 0.0


def compute_nothing(chosen: Tensor, rejected: Tensor, settings: PreferenceSettings) -> Tensor:
    """Of sft, which is the chosen answer's cross-entropy alone."""
    return torch.zeros_like(chosen)


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
    "robust": PairLoss(compute_robust),
    "hinge": PairLoss(compute_hinge),
    "ipo": PairLoss(compute_ipo, is_averaged=True),
    "sigmoid_norm": PairLoss(compute_sigmoid, is_averaged=True),
    "apo_zero": PairLoss(compute_apo_zero),
    "apo_down": PairLoss(compute_apo_down),
    "exo_pair": PairLoss(compute_exo_pair),
    "nca_pair": PairLoss(compute_nca_pair),
    "sppo_hard": PairLoss(compute_sppo_hard),
    "bco_pair": PairLoss(compute_bco_pair),
    "discopop": PairLoss(compute_discopop),
    "sft": PairLoss(compute_nothing, sft_weight=1.0),
    "cpo": PairLoss(compute_smoothed, has_reference=False, sft_weight=1.0),
    "simpo": PairLoss(compute_simpo, is_averaged=True, has_reference=False, sft_weight=1.0),
    "orpo": PairLoss(compute_orpo, is_averaged=True, has_reference=False, sft_weight=1.0),
}


def compute_pair_losses(pairs: AnswerPairs, settings: PreferenceSettings) -> Tensor:
    """A loss for each pair, [P]. The chosen answer's own part is a mean over its targets, whatever other pairs there
    are."""
    losses, own = torch.zeros_like(pairs.chosen), find_sft_weight(settings)
    for loss, weight in list_losses(settings):
        losses = losses + weight * loss.compute(*pairs.score(is_averaged=loss.is_averaged), settings)
    return losses - own * pairs.chosen / pairs.chosen_targets if own else losses


def list_losses(settings: PreferenceSettings) -> list[tuple[PairLoss, float]]:
    """Each loss with its weight."""
    weights = settings.loss_weights or (1.0,) * len(settings.loss)
    return list(zip((PAIR_LOSSES[name] for name in settings.loss), weights, strict=True))


def find_sft_weight(settings: PreferenceSettings) -> float:
    own = sum(weight * loss.sft_weight for loss, weight in list_losses(settings))
    return own if settings.sft_weight is None else settings.sft_weight


@torch.no_grad()
def measure_pairs(pairs: AnswerPairs, settings: PreferenceSettings) -> dict[str, Tensor]:
    """What is logged for each pair, [P] each, by TRL's names. Rewards are those of whole answers where there is a
    reference, else those that the loss compares."""
    is_averaged = any(loss.is_averaged and not loss.has_reference for loss, _ in list_losses(settings))
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
    if find_sft_weight(settings):
        measures["nll_loss"] = -pairs.chosen / pairs.chosen_targets
    if "orpo" in settings.loss:
        log_odds = compute_log_odds(*scores)
        measures |= {"log_odds_chosen": log_odds, "log_odds_ratio": logsigmoid(log_odds)}
    return measures


# sums over targets, each divided by the number of its own; the last two are the numbers
TOKEN_SUMS = ("entropy", "logits/chosen", "logits/rejected", "mean_token_accuracy", "chosen_tokens", "rejected_tokens")


def sum_tokens(measures: Tensor, sides: Tensor) -> Tensor:
    """Takes what `measure_logits` returns of this slice's targets [3, N], and which are of chosen answers and which of
    rejected ones [2, N]. Returns TOKEN_SUMS in float64."""
    sides = sides.double()
    (entropy, logits, likeliest), numbers = (sides[:, None] * measures.double()).sum(-1).unbind(1), sides.sum(-1)
    return torch.cat([entropy.sum()[None], logits, likeliest[:1], numbers])


def describe_tokens(sums: dict[str, float]) -> dict[str, float | None]:
    """TRL's means: of all answers' targets, of chosen and of rejected ones. None where there is none. Takes its own out
    of `sums`."""
    entropy, chosen_logits, rejected_logits, accuracy, chosen, rejected = (sums.pop(name) for name in TOKEN_SUMS)
    parts = ((entropy, chosen + rejected), (chosen_logits, chosen), (rejected_logits, rejected), (accuracy, chosen))
    return {name: part / number if number else None for name, (part, number) in zip(TOKEN_SUMS, parts, strict=False)}


@dataclass(frozen=True, eq=False)
class Answers:
    """The answers of a micro-batch, chosen and rejected ones in turn. `runs`: the answer and the number of targets of
    each run of this slice's targets, in order, and whether its label wants it. `reference` [number]. `sides` [2, N]:
    which targets are of chosen answers, and which of rejected ones."""

    number: int
    runs: Sequence[tuple[int, int, bool]]
    reference: Tensor
    sides: Tensor


@dataclass(frozen=True, eq=False)
class AnswerSums:
    """Of each answer [number], over all ranks of the row: log-probability, number of targets, whether it is wanted."""

    log_probs: Tensor
    targets: Tensor
    is_wanted: Tensor


class PreferenceObjective:
    """The mean loss of the pairs of a step. Both answers of a pair are documents of one row, which the ranks of `axis`
    share: these add up each answer's log-probability before any loss is computed."""

    is_measured = True

    def __init__(self, settings: PreferenceSettings, axis: SequenceAxis = NO_AXIS) -> None:
        self.settings, self.axis = settings, axis
        self.has_reference = any(loss.has_reference for loss, _ in list_losses(settings))
        certain = -torch.ones(1)
        self.names = (*measure_pairs(AnswerPairs(*(certain,) * 6), settings), *TOKEN_SUMS)
        self.eval_names = ("loss", *self.names)

    def load(self, batch: MicroBatch, places: Numbers, send: Callable[[Any], Tensor]) -> Answers:
        reference = batch.reference if self.has_reference else np.zeros(batch.num_members)
        if batch.members is None or reference is None or batch.num_members % 2:
            raise AssertionError("rows of pairs have two documents for each pair, and numbers of a reference")
        members = batch.members.flatten()[places]
        starts = np.flatnonzero(np.diff(members, prepend=-1))
        lengths = np.diff(starts, append=len(members))
        codes = np.zeros(batch.members.shape, np.int64) if batch.classes is None else batch.classes
        wanted = (codes.flatten()[places][starts] & WANTED) > 0
        runs = list(zip(members[starts].tolist(), lengths.tolist(), wanted.tolist(), strict=True))
        is_wanted = np.repeat(wanted, lengths).astype(bool)
        sides = send(np.stack(self.find_sides(members, is_wanted)))
        return Answers(batch.num_members, runs, send(reference), sides)

    def find_sides(self, members: Numbers, is_wanted: NDArray[np.bool_]) -> list[NDArray[np.bool_]]:
        """Which targets are of chosen answers, and which of rejected ones, from the answer of each."""
        return [members % 2 == side for side in (0, 1)]

    def begin(self, answers: Answers) -> None:
        pass

    def compute(self, loss: Loss, hidden: Tensor, labels: Tensor, places: Places | None, answers: Answers) -> Tensor:
        return self._judge(loss.per_token(hidden, labels, places, is_measured=True), answers)

    @torch.no_grad()
    def measure(self, losses: Tensor, answers: Answers) -> Tensor:
        return self._judge(losses, answers)

    def count(self, plan: StepPlan) -> float:
        return sum(map(len, plan.lengths)) // 2

    def describe(self, means: Sequence[float]) -> dict[str, Any]:
        sums = dict(zip(self.names, means, strict=True))
        tokens = describe_tokens(sums)
        return {**sums, **tokens}

    def sum_answers(self, losses: Tensor, answers: Answers) -> AnswerSums:
        """Collective over the row's ranks, which all have the same number of answers; ranks without a row have none.
        Takes the losses of this slice's targets [N]. Sums are in float64; the gradient is that of this rank's own
        targets."""
        # one sum for each run: index_add's order, and so its result, is another one each time on a GPU
        sums = [losses[:0].sum().double()] * answers.number
        counts, wanted = [0] * answers.number, [0] * answers.number
        for (answer, length, is_wanted), part in zip(answers.runs, _split(losses.double(), answers.runs), strict=True):
            sums[answer] = sums[answer] - part.sum()
            counts[answer] += length
            wanted[answer] += int(is_wanted)
        own = torch.stack(sums)
        whole = torch.stack([own.detach(), own.new_tensor(counts), own.new_tensor(wanted)])
        if self.axis.group is not None:
            dist.all_reduce(whole, group=self.axis.group)
        return AnswerSums(whole[0] + (own - own.detach()), whole[1], whole[2] > 0)

    def _judge(self, losses: Tensor, answers: Answers) -> Tensor:
        """This rank's share of the sums over the row's pairs. The first is part of the graph with the whole loss.
        Takes measured losses [4, N]."""
        losses, measured = losses[0], losses[1:].detach()
        if not answers.number:
            return losses[:0].sum().double().expand(len(self.eval_names))
        sums = self.sum_answers(losses, answers)
        parts = (sums.log_probs, sums.targets, answers.reference)
        (chosen, rejected), numbers, references = ((part[0::2], part[1::2]) for part in parts)
        pairs = AnswerPairs(chosen, rejected, *numbers, *references)
        total = compute_pair_losses(pairs, self.settings).sum()
        measures = [measure.sum() for measure in measure_pairs(pairs, self.settings).values()]
        return self._share(total, measures, sum_tokens(measured, answers.sides))

    def _share(self, total: Tensor, measures: Sequence[Tensor], own: Tensor) -> Tensor:
        """All ranks of the row have computed the whole loss: each has its gradient, and reports its share. `own`: sums
        over this rank's targets."""
        shares = torch.stack([total.detach(), *measures]) / self.axis.size
        return torch.cat([(shares[0] + (total - total.detach()))[None], shares[1:], own])


class UnpairedObjective(PreferenceObjective):
    """kto: the mean loss of answers without a partner. Each is followed in its row by the same prompt with the answer
    to another one. How much likelier the model makes those than its reference, on average over a micro-step of all
    ranks, is what rewards are held against."""

    def __init__(self, settings: PreferenceSettings, axis: SequenceAxis = NO_AXIS, all_ranks: Any = None) -> None:
        self.settings, self.axis, self.all_ranks = settings, axis, all_ranks
        self.has_reference = True
        names = ("rewards/chosen", "rewards/rejected", "chosen", "logps/chosen", "logps/rejected", "kl")
        self.names = (*names, *TOKEN_SUMS)
        self.eval_names = ("loss", *self.names)

    def describe(self, means: Sequence[float]) -> dict[str, Any]:
        """Sums over wanted answers, and over unwanted ones, by how many there are of these."""
        sums = dict(zip(self.names, means, strict=True))
        tokens = describe_tokens(sums)
        shares = {"chosen": sums.pop("chosen")}
        shares["rejected"] = 1 - shares["chosen"]
        kl = sums.pop("kl")
        measures: dict[str, Any] = {
            name: value / shares[name.rpartition("/")[2]] if shares[name.rpartition("/")[2]] else None
            for name, value in sums.items()
        }
        rewards = measures["rewards/chosen"], measures["rewards/rejected"]
        margin = None if None in rewards else rewards[0] - rewards[1]
        return {**measures, "rewards/margins": margin, "kl": kl, **tokens}

    def find_sides(self, members: Numbers, is_wanted: NDArray[np.bool_]) -> list[NDArray[np.bool_]]:
        """Answers to other prompts are of no side."""
        return [(members % 2 == 0) & is_wanted, (members % 2 == 0) & ~is_wanted]

    def _judge(self, losses: Tensor, answers: Answers) -> Tensor:
        """Collective over all ranks, of which some may have no row in this micro-step. Takes measured losses."""
        losses, measured = losses[0], losses[1:].detach()
        ratios, is_wanted, log_probs = losses[:0].double(), losses.new_zeros(0, dtype=torch.bool), losses[:0].double()
        if answers.number:
            sums = self.sum_answers(losses, answers)
            ratios, is_wanted, log_probs = sums.log_probs - answers.reference, sums.is_wanted, sums.log_probs
        own = ratios[0::2]
        other = ratios[1::2].detach()
        is_wanted = is_wanted[0::2]
        log_probs = log_probs[0::2]
        held = torch.stack([other.sum(), other.new_tensor(len(other))]) / self.axis.size
        if self.all_ranks is not None:
            dist.all_reduce(held, group=self.all_ranks)
        kl = compute_kl(held[0], held[1])
        total = compute_kto_losses(own, is_wanted, kl, self.settings).sum()
        rewards, log_probs = self.settings.beta * own.detach(), log_probs.detach()
        measures = [rewards[is_wanted].sum(), rewards[~is_wanted].sum(), is_wanted.double().sum()]
        measures += [log_probs[is_wanted].sum(), log_probs[~is_wanted].sum(), kl * len(own)]
        return self._share(total, measures, sum_tokens(measured, answers.sides))


def compute_kl(ratio_sum: Tensor, number: Tensor) -> Tensor:
    """The mean log-probability of answers to other prompts over the reference's. It is a constant of the loss and never
    negative."""
    return (ratio_sum.detach() / number.clamp(min=1)).clamp(min=0)


def compute_kto_losses(ratios: Tensor, is_wanted: Tensor, kl: Tensor, settings: PreferenceSettings) -> Tensor:
    """A loss for each answer, [A], from its log-probability over the reference's."""
    signs = torch.where(is_wanted, 1.0, -1.0).to(ratios.dtype)
    weights = torch.full_like(ratios, settings.desirable_weight).where(is_wanted, settings.undesirable_weight)
    return weights * (1 - torch.sigmoid(settings.beta * signs * (ratios - kl)))


def _split(losses: Tensor, runs: Sequence[tuple[int, int, bool]]) -> Sequence[Tensor]:
    return losses.split([length for _, length, _ in runs]) if runs else ()
