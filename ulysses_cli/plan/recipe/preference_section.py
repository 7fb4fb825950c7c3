"""The recipe's `preference` section: which of two answers to one prompt is preferred is what the model learns."""

from __future__ import annotations

from typing import Literal

from ulysses_cli.plan.recipe.setting import Section, setting

LossName = Literal[
    "sigmoid", "robust", "hinge", "ipo", "sigmoid_norm", "apo_zero", "apo_down", "exo_pair", "nca_pair", "sppo_hard",
    "bco_pair", "discopop", "cpo", "simpo", "orpo", "kto",
]  # fmt: skip
SMOOTHED: tuple[LossName, ...] = ("robust", "exo_pair", "cpo", "simpo")
WITHOUT_REFERENCE: tuple[LossName, ...] = ("cpo", "simpo", "orpo")
UNPAIRED: tuple[LossName, ...] = ("kto",)


class Preference(Section):
    """Learn from pairs of answers, as DPO and its kin do, against the model as it is before step 1; cpo, simpo and orpo
    against nothing; kto from answers that have a label and no partner."""

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
        0.0, "share of labels that are wrong: robust, exo_pair, cpo and simpo", unit="share", ge=0, lt=0.5
    )
    discopop_tau: float = setting(0.05, "temperature of discopop", unit="x", gt=0, le=1000)
    gamma: float = setting(
        0.5, "simpo: the margin that rewards should have", unit="nats", aliases=("simpo_gamma",), ge=0, le=1000
    )
    desirable_weight: float = setting(1.0, "kto: weight of answers that are wanted", unit="x", gt=0, le=1000)
    undesirable_weight: float = setting(1.0, "kto: weight of answers that are not wanted", unit="x", gt=0, le=1000)
    share_prompts: bool | Literal["auto"] = setting(
        "auto",
        "both answers of a pair read one copy of their prompt; auto = unless the model has recurrent or convolution "
        "layers, or rotary frequencies that follow a document's length",
    )
    sft_weight: float | None = setting(
        None,
        "weight of the chosen answer's cross-entropy, a mean over its targets, in a pair's loss; left out: 1 for cpo, "
        "simpo and orpo, else 0",
        unit="x",
        aliases=("rpo_alpha", "cpo_alpha", "pref_ftx"),
        ge=0,
        le=1000,
    )
