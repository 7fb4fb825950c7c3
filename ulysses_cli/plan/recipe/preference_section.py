"""The recipe's `preference` section: which of two answers to one prompt is preferred is what the model learns."""

from __future__ import annotations

from typing import Literal

from ulysses_cli.plan.recipe.setting import Section, setting

LossName = Literal[
    "sigmoid", "robust", "hinge", "ipo", "sigmoid_norm", "apo_zero", "apo_down", "exo_pair", "nca_pair", "sppo_hard",
    "bco_pair", "discopop",
]  # fmt: skip
SMOOTHED: tuple[LossName, ...] = ("robust", "exo_pair")


class Preference(Section):
    """Learn from pairs of answers, as DPO and its kin do, against the model as it is before step 1."""

    loss: LossName = setting(
        "sigmoid",
        "loss of a pair, by TRL's name; sigmoid is DPO",
        aliases=("loss_type", "pref_loss"),
        spellings={"dpo": "sigmoid"},
    )
    beta: float = setting(
        0.1, "how much a log-probability over the reference's counts", unit="x", aliases=("pref_beta",), gt=0, le=1000
    )
    label_smoothing: float = setting(
        0.0, "share of labels that are wrong: robust and exo_pair", unit="share", ge=0, lt=0.5
    )
    discopop_tau: float = setting(0.05, "temperature of discopop", unit="x", gt=0, le=1000)
