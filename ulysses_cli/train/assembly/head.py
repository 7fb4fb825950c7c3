"""The output head: the rule that a family applies to its logits, checked against the loaded model on a few tokens."""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.distributed as dist
from transformers import PretrainedConfig

from ulysses_cli.plan.models.shape import compute_logits_divisor
from ulysses_cli.plan.rows.order import Ring, deal_row
from ulysses_cli.train.assembly.loading import BuildError
from ulysses_cli.train.attention.documents import make_documents
from ulysses_cli.train.loss import HeadRule, TokenLoss, apply_rule
from ulysses_cli.train.processes.consistency import gather_values
from ulysses_cli.train.processes.groups import Groups

PROBE_TOKENS = 8
HEAD_TOLERANCE = 0.02  # bfloat16 keeps 8 bits; a lost scale or softcap costs far more


def read_head_rule(config: PretrainedConfig, z_loss_weight: float, token_loss: TokenLoss | None = None) -> HeadRule:
    """The rule of known families. check_head detects a model that does anything else."""
    softcap, scaling = getattr(config, "final_logit_softcapping", None), getattr(config, "logits_scaling", None)
    divisor = compute_logits_divisor(config.model_type, scaling, getattr(config, "logit_scale", None))
    return HeadRule(softcap, divisor, z_loss_weight, token_loss)


@torch.no_grad()
def check_head(model: Any, rule: HeadRule, groups: Groups, device: torch.device) -> None:
    """Collective over all ranks. The loss computes logits from hidden states; they are compared with the model's own
    logits on a few tokens."""
    axis, ring = groups.sp_axis, Ring(groups.ring_axis.size, windows=((1, 1),))  # equal work leaves tokens in order
    model.eval()
    lengths = (PROBE_TOKENS * axis.size,)
    # Spread over the vocabulary: the first ids are special tokens, whose rows are hardly trained.
    ids = torch.arange(1, PROBE_TOKENS + 1, device=device)[None] * model.config.vocab_size // (PROBE_TOKENS + 1)
    inputs = {
        "input_ids": ids,
        "position_ids": torch.arange(PROBE_TOKENS, device=device)[None] + axis.rank * PROBE_TOKENS,
        "documents": make_documents(lengths, device, order=deal_row(lengths, ring)),
        "use_cache": False,
    }
    expected = model(**inputs).logits.float()
    hidden = model.get_decoder()(**inputs).last_hidden_state
    logits = apply_rule(model.get_output_embeddings()(hidden).float(), rule)
    model.train()
    error = ((logits - expected).norm() / expected.norm()).item() if dist.get_backend() != "fake" else 0.0
    worst = max(gather_values(error, groups.host_group)) if dist.get_backend() != "fake" else error
    if math.isnan(worst):
        raise BuildError("the model's logits are not numbers: its weights hold NaN or infinity")
    if not worst <= HEAD_TOLERANCE:
        raise BuildError(
            f"{model.config.model_type} does more to its logits than head and softcap: they differ by {worst:.2g}, "
            "and so would its loss"
        )
