"""The module that DeepSpeed wraps: computes the objective on a slice of a row by the model's own decoder and a
given loss, or the logits of a few tokens, for generation."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from ulysses_cli.train.attention.documents import Documents
from ulysses_cli.train.loss import Loss, Places, apply_rule
from ulysses_cli.train.objective import NextToken, Objective
from ulysses_cli.train.telemetry.clock import part_of_step, watch_backward


class LossModel(nn.Module):
    """Takes the tokens of a slice, the places of its targets and what the objective has loaded (`answers`), returns the
    objective's sums. The decoder is the
    model's own; the loss applies the head."""

    def __init__(self, model: nn.Module, loss: Loss, objective: Objective | None = None) -> None:
        super().__init__()
        self.model = model
        self.loss = loss  # holds the head, which stays registered under the model alone
        self.objective = objective or NextToken()

    def forward(
        self,
        input_ids: Tensor,
        positions: Tensor,
        labels: Tensor | None = None,
        documents: Documents | None = None,
        per_token: bool = False,
        generation: Any = None,
        wanted: tuple[Tensor, Tensor] | None = None,
        places: Places | None = None,
        answers: Any = None,
    ) -> Tensor:
        if wanted is not None:
            return self.compute_logits(input_ids, positions, wanted, generation, documents)
        output: Any = self.model.get_decoder()(
            input_ids=input_ids, position_ids=positions, documents=documents, use_cache=False
        )
        assert labels is not None, "a loss has labels"
        hidden = output.last_hidden_state
        with part_of_step("head_loss"):
            if per_token:
                return self.loss.per_token(hidden, labels, places)
            sums = self.objective.compute(self.loss, hidden, labels, places, answers)
        watch_backward("head_loss", sums, hidden)
        return sums

    def compute_logits(
        self,
        input_ids: Tensor,
        positions: Tensor,
        wanted: tuple[Tensor, Tensor],
        generation: Any,
        documents: Documents | None,
    ) -> Tensor:
        """Returns logits [N, vocabulary] in float32 or better, of the tokens at `wanted`. The head runs even where none
        is wanted: under ZeRO-3 all ranks gather its weight."""
        output: Any = self.model.get_decoder()(
            input_ids=input_ids, position_ids=positions, documents=documents, generation=generation, use_cache=False
        )
        logits = self.model.get_output_embeddings()(output.last_hidden_state[wanted])
        return apply_rule(logits.to(torch.promote_types(logits.dtype, torch.float32)), self.loss.rule)
