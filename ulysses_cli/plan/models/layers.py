"""What a decoder layer is made of: mixers, which read other tokens, and an MLP, with the sizes that memory, operations
and legal sp sizes depend on.

Plain values; config_layers.py reads them from config.json.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from typing import Literal


@dataclass(frozen=True)
class Latent:
    """Multi-head latent attention (MLA): keys and values are made from `kv_rank` numbers per token, queries from
    `query_rank` (None: from the hidden state). The last `rope_dim` numbers of a key are the same in all heads."""

    query_rank: int | None
    kv_rank: int
    rope_dim: int


@dataclass(frozen=True)
class Biases:
    """Which layers have a bias beside their matrix: those that make queries, keys and values, and attention's last one;
    an MLP's; the first and the last of a Mamba2 mixer; convolutions, with the layers around short ones."""

    qkv: bool = False
    out: bool = False
    mlp: bool = False
    scan: bool = False
    scan_out: bool = False
    convolution: bool = False


NO_BIASES = Biases()


@dataclass(frozen=True)
class AttentionMixer:
    """Softmax attention. `window_tokens`: None reaches back to the document's start. `keys_are_values`: one projection
    makes both. `borrows_kv`: an earlier layer's keys and values are used. `gate_width`: outputs are multiplied with
    this many gates per token, made by a projection of their own. `num_inputs`: queries, keys and values are made from
    as many vectors of the hidden size, 2 where the embedding stands beside the hidden state."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    value_head_dim: int
    window_tokens: int | None = None
    has_sinks: bool = False
    keys_are_values: bool = False
    borrows_kv: bool = False
    gate_width: int = 0
    latent: Latent | None = None
    num_inputs: int = 1

    @property
    def num_made(self) -> int:
        """Projections that make its keys and values."""
        return 0 if self.borrows_kv else 2 - self.keys_are_values


@dataclass(frozen=True)
class DeltaNetMixer:
    """Gated delta net: a convolution over queries, keys and values, then a state [key_head_dim, value_head_dim] for
    each value head."""

    num_key_heads: int
    num_heads: int
    key_head_dim: int
    value_head_dim: int
    conv_tokens: int

    @property
    def conv_channels(self) -> int:
        return 2 * self.num_key_heads * self.key_head_dim + self.num_heads * self.value_head_dim


@dataclass(frozen=True)
class KimiDeltaMixer:
    """Kimi delta attention: a delta net whose state decays by a factor of its own in each key channel."""

    num_heads: int
    head_dim: int
    conv_tokens: int

    @property
    def conv_channels(self) -> int:
        return 3 * self.num_heads * self.head_dim


@dataclass(frozen=True)
class Mamba2Mixer:
    """Mamba2: a convolution, then a scan with a state [head_dim, state_dim] for each head. `num_groups` groups of heads
    share what writes and reads the state (B and C). `gating`: the result is gated, then normed, or
    the other way round, or there is no norm."""

    num_heads: int
    head_dim: int
    num_groups: int
    state_dim: int
    conv_tokens: int
    chunk_tokens: int
    gating: Literal["before norm", "after norm", "alone"] = "before norm"

    @property
    def conv_channels(self) -> int:
        return self.num_heads * self.head_dim + 2 * self.num_groups * self.state_dim


@dataclass(frozen=True)
class ConvolutionMixer:
    """A short convolution over `conv_channels` channels. It has no heads, so that any sp size serves."""

    conv_channels: int
    conv_tokens: int


@dataclass(frozen=True)
class TokenVectors:
    """A vector of `size` numbers that each layer has for each token, from an embedding of its own and from the model's,
    which is projected to all of them at once."""

    size: int
    num_layers: int
    vocab_size: int

    @property
    def width(self) -> int:
        """Numbers per token for all layers."""
        return self.num_layers * self.size


Mixer = AttentionMixer | DeltaNetMixer | KimiDeltaMixer | Mamba2Mixer | ConvolutionMixer


@dataclass(frozen=True)
class DenseMlp:
    """`is_gated`: three matrices instead of two."""

    inner_size: int
    is_gated: bool = True


@dataclass(frozen=True)
class ExpertsMlp:
    """`shared_size`: the inner size of the expert that every token goes to; 0: there is none."""

    num_experts: int
    num_per_token: int
    inner_size: int
    shared_size: int = 0
    is_gated: bool = True


@dataclass(frozen=True)
class SharedBlock:
    """Attention and an MLP whose weights several layers use, before a mixer of their own (Zamba2). Block `number` of
    the model. Each of these layers has narrow adapters, of `rank`, beside the MLP's first matrix and, where
    `adapts_attention`, beside queries, keys and values."""

    number: int
    rank: int
    adapts_attention: bool


@dataclass(frozen=True)
class Layer:
    """One decoder layer. Most have one mixer and an MLP; Falcon-H1 has two mixers side by side, Nemotron-H either a
    mixer or an MLP. `shared`: its attention and MLP are a block that other layers use too, and run before its other
    mixer."""

    mixers: tuple[Mixer, ...]
    mlp: DenseMlp | ExpertsMlp | None
    num_parameters: int = 0
    shared: SharedBlock | None = None

    def __hash__(self) -> int:
        """Cheap, because every ledger looks up sizes by kind of layer, and a model has few kinds."""
        return hash((len(self.mixers), self.num_parameters))

    @cached_property
    def attention(self) -> AttentionMixer | None:
        return next((mixer for mixer in self.mixers if isinstance(mixer, AttentionMixer)), None)

    @property
    def window_tokens(self) -> int | None:
        """Tokens that its attention reaches back; None: to the document's start."""
        return self.attention.window_tokens if self.attention else None

    @property
    def num_experts(self) -> int:
        return self.mlp.num_experts if isinstance(self.mlp, ExpertsMlp) else 0

    def without_window(self) -> Layer:
        """The same layer as far as memory is concerned."""
        mixers = (
            replace(mixer, window_tokens=None) if isinstance(mixer, AttentionMixer) else mixer for mixer in self.mixers
        )
        return replace(self, mixers=tuple(mixers))
