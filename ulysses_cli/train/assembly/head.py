"""The output head: what a family does to its logits, proven against the loaded model on a few tokens."""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.distributed as dist
from transformers import PretrainedConfig

from ulysses_cli.train.assembly.loading import BuildError
from ulysses_cli.train.attention.documents import make_documents
from ulysses_cli.train.loss import HeadRule, apply_rule
from ulysses_cli.train.processes.consistency import gather_values
from ulysses_cli.train.processes.groups import Groups

PROBE_TOKENS = 8
HEAD_TOLERANCE = 0.02  # bfloat16 keeps 8 bits; a lost scale or softcap costs far more


def read_head_rule(config: PretrainedConfig, z_loss_weight: float) -> HeadRule:
    """What the families do to their logits; what another model does is found by prove_head."""
    softcap, divisor = getattr(config, "final_logit_softcapping", None), getattr(config, "logits_scaling", None)
    return HeadRule(softcap, float(divisor or 1.0), z_loss_weight)


@torch.no_grad()
def prove_head(model: Any, rule: HeadRule, groups: Groups, device: torch.device) -> None:
    """The loss starts from hidden states: its logits are compared with the model's own, on a few tokens. Collective
    over all ranks."""
    axis = groups.sp_axis
    model.eval()
    ids = torch.arange(PROBE_TOKENS, device=device)[None] % model.config.vocab_size
    given = {
        "input_ids": ids,
        "position_ids": torch.arange(PROBE_TOKENS, device=device)[None] + axis.rank * PROBE_TOKENS,
        "documents": make_documents([PROBE_TOKENS * axis.size], device),
        "use_cache": False,
    }
    right = model(**given).logits.float()
    ours = apply_rule(model.get_output_embeddings()(model.get_decoder()(**given).last_hidden_state).float(), rule)
    model.train()
    share = ((ours - right).norm() / right.norm()).item() if dist.get_backend() != "fake" else 0.0
    worst = max(gather_values(share, groups.host_group)) if dist.get_backend() != "fake" else share
    if math.isnan(worst):
        raise BuildError("the model's logits are not numbers: its weights hold NaN or infinity")
    if not worst <= HEAD_TOLERANCE:
        raise BuildError(
            f"{model.config.model_type} does more to its logits than head and softcap: they differ by {worst:.2g}, "
            "and so would its loss"
        )
