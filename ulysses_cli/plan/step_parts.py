"""The parts of a training step: one list for what is predicted, what is measured and what is shown."""

from __future__ import annotations

PARTS = (
    "projections",
    "attention",
    "recurrence",
    "mlp",
    "head_loss",
    "exchange",
    "gather_reduce",
    "offload",
    "optimizer",
    "data",
    "other",
)
HOST = "host"  # what the GPU waits for: predicted alone, since a clock finds it inside the other parts
COMMUNICATION = ("exchange", "gather_reduce")
