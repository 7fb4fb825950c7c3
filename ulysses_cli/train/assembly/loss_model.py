"""The module that DeepSpeed wraps: computes the loss of a slice of a row by the model's own decoder and a given
loss."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from ulysses_cli.train.attention.documents import Documents
from ulysses_cli.train.loss import Loss
from ulysses_cli.train.telemetry.clock import part_of_step, watch_backward


class LossModel(nn.Module):
    """Takes the tokens of a slice, returns its loss. The decoder is the model's own; the loss applies the head."""

    def __init__(self, model: nn.Module, loss: Loss) -> None:
        super().__init__()
        self.model = model
        self.loss = loss  # holds the head, which stays registered under the model alone

    def forward(
        self, input_ids: Tensor, positions: Tensor, labels: Tensor, documents: Documents, per_token: bool = False
    ) -> Tensor:
        output: Any = self.model.get_decoder()(
            input_ids=input_ids, position_ids=positions, documents=documents, use_cache=False
        )
        hidden = output.last_hidden_state
        with part_of_step("head_loss"):
            if per_token:
                return self.loss.per_token(hidden, labels)
            total = self.loss(hidden, labels)
        watch_backward("head_loss", total, hidden)
        return total
