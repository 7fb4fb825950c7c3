"""How many tokens a tile of the MLP or of the loss has. Read by the ledger and by the code that tiles, so that what is
predicted is what runs. Counts follow from lengths that all ranks share, never from what one rank happens to hold."""

from __future__ import annotations

import math

LOSS_TILE_BYTES = 256 << 20  # float32 logits of one tile
LOSS_TILE_MULTIPLE = 128


def compute_num_mlp_tiles(local_tokens: int, hidden_size: int) -> int:
    """Tiles of about hidden_size tokens: large enough for full speed, since each matrix then sees as many tokens as
    it has columns (the rule of ALST, arXiv 2506.13996, section 3.3.2). One tile would be the MLP as it is, which keeps
    its whole inside: a row a little longer, in two tiles, would take less memory. So two at least."""
    return max(2, math.ceil(local_tokens / hidden_size))


def compute_loss_tile_tokens(local_tokens: int, vocab_size: int) -> int:
    """Tokens whose float32 logits take at most LOSS_TILE_BYTES, whatever the length of the row."""
    tokens = LOSS_TILE_BYTES // (4 * vocab_size) // LOSS_TILE_MULTIPLE * LOSS_TILE_MULTIPLE
    return min(local_tokens, max(LOSS_TILE_MULTIPLE, tokens))
