"""How many tokens a tile of the MLP or of the loss has. The ledger and the tiling code both call this, so predictions
match runs. Counts follow only from lengths that all ranks share, never from one rank's data."""

from __future__ import annotations

import math

LOSS_TILE_BYTES = 256 << 20  # float32 logits of one tile
LOSS_TILE_MULTIPLE = 128


def compute_num_mlp_tiles(local_tokens: int, hidden_size: int) -> int:
    """Tiles of about hidden_size tokens: large enough for full speed, since each matrix then sees as many tokens as
    it has columns (the rule of ALST, arXiv 2506.13996, section 3.3.2). At least two: one tile would be the plain MLP,
    which saves its whole inside, and a slightly longer row in two tiles would then take less memory."""
    return max(2, math.ceil(local_tokens / hidden_size))


def compute_loss_tile_tokens(local_tokens: int, vocab_size: int) -> int:
    """Tokens whose float32 logits take at most LOSS_TILE_BYTES, for rows of any length."""
    tokens = LOSS_TILE_BYTES // (4 * vocab_size) // LOSS_TILE_MULTIPLE * LOSS_TILE_MULTIPLE
    return min(local_tokens, max(LOSS_TILE_MULTIPLE, tokens))
