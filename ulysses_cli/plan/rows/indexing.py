"""How far a step's tensors reach where an operator's indices have 32 bits, by the census (census.py). Rules and the
planner refuse what a refused operator would see; ranks run in pieces what the census says is tiled."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise

from ulysses_cli.plan.layout import compute_kv_heads
from ulysses_cli.plan.models.layers import AttentionMixer, ExpertsMlp
from ulysses_cli.plan.models.shape import ModelShape
from ulysses_cli.plan.rows.census import get_verdict
from ulysses_cli.plan.rows.order import CHUNKS
from ulysses_cli.plan.rows.rounds import MAX_SHARES

INT32_LIMIT = 2**31
# Tensors of this size are computed in pieces where the census says tiled: in bfloat16 they have 2^31 elements, and an
# unsigned offset in bytes wraps there.
WRAP_BYTES = 2**32
PIECE_BYTES = 256 << 20  # large enough for full speed, and what a piece needs besides is small

# What a layer runs forward and backward: both get the pieces that one of them needs.
LINEAR, EMBEDDING = ("linear", "linear_backward"), ("embedding", "embedding_backward")
LAYER_NORM, RMS_NORM = ("layer_norm", "layer_norm_backward"), ("fused_rms_norm", "fused_rms_norm_backward")

TILED = "memory.tiled_mlp"
TILES = f"{TILED}: auto, or "

BLOCK_TOKENS = 128  # kernels round a document's tokens up, and begin each document after the first as many later
FLASH_3_WIDTHS = (64, 96, 128, 192, 256)  # heads are filled up to the next of these
ALWAYS_THERE = "torch_varlen"  # what `auto` can count on wherever it runs; others may not be installed


@dataclass(frozen=True)
class RowSizes:
    """What decides the largest tensors of a rank's micro-step. `tokens`: of its rows, before they are split."""

    tokens: int
    sp_size: int
    ring_size: int
    head_chunks: int
    tiled_mlp: bool
    is_quantized: bool
    uses_dora: bool = False
    num_rows: int = 1
    kernel: str = "auto"

    @property
    def local_tokens(self) -> int:
        return -(-self.tokens // self.sp_size)


@dataclass(frozen=True)
class Excess:
    """A tensor that a refused operator would see. `key`: the setting that is wrong. `remedy`: the one that makes it
    smaller, or ''."""

    operator: str
    name: str
    numel: int
    remedy: str = ""
    key: str = "data.max_length"


@dataclass(frozen=True)
class CallSize:
    """What one call of an attention kernel gets: tokens of `num_documents`, and heads filled up to one width."""

    queries: int
    keys: int
    heads: int
    kv_heads: int
    head_dim: int
    num_documents: int = 1


def count_indexed(kernel: str, call: CallSize) -> int:
    """The elements that a back end's 32-bit indices run over in this call; the census names the lines. Kernels may also
    address rows by their stride in 32 bits: those get no row that reaches farther (`wraps`)."""
    queries, keys = (_fill(tokens + BLOCK_TOKENS * (call.num_documents - 1)) for tokens in (call.queries, call.keys))
    width = _fill(call.head_dim, 32 if call.head_dim <= 128 else 64)
    if kernel == "flash_attention_3":
        width = next((each for each in FLASH_3_WIDTHS if each >= call.head_dim), width)
        return (max(queries, keys) + BLOCK_TOKENS) * width
    if kernel in ("flash_attention_2", "torch_varlen", "sdpa"):
        return queries * call.heads * width
    return max(queries * call.heads, keys * call.kv_heads) * width


def find_overrun(kernel: str, call: CallSize) -> str:
    """Why this back end's indices do not suffice for a call, or ''."""
    numel = count_indexed(kernel, call)
    if get_verdict(kernel) != "refused" or numel < INT32_LIMIT:
        return ""
    return f"would index {numel:,} elements of one call, past the 2^31 of its 32 bits"


def _fill(number: int, multiple: int = BLOCK_TOKENS) -> int:
    return -(-number // multiple) * multiple


def size_call(mixer: AttentionMixer, shape: ModelShape, sizes: RowSizes) -> CallSize:
    """The largest call of a layer on any rank."""
    ranks = sizes.sp_size // sizes.ring_size * sizes.head_chunks
    queries = -(-sizes.tokens // sizes.ring_size)  # tokens of the ranks that exchange heads
    return CallSize(
        queries=queries,
        keys=count_ring_keys(shape, sizes) if sizes.ring_size > 1 else queries,
        heads=max(1, mixer.num_heads // ranks),
        kv_heads=compute_kv_heads(mixer.num_heads, mixer.num_kv_heads, ranks).num_local,
        head_dim=max(mixer.head_dim, mixer.value_head_dim),
    )


def list_excess(shape: ModelShape, sizes: RowSizes) -> list[Excess]:
    """Tensors of 2^31 elements that one call of a refused operator would see."""
    return [
        excess
        for excess in _walk_tensors(shape, sizes)
        if excess.numel >= INT32_LIMIT and get_verdict(excess.operator) == "refused"
    ]


def _walk_tensors(shape: ModelShape, sizes: RowSizes) -> Iterator[Excess]:
    calls = [_measure_attention(mixer, shape, sizes) for mixer in shape.attentions]
    yield from sorted(calls, key=lambda excess: -excess.numel)[:1]
    for kind in shape.layer_kinds:
        if isinstance(kind.mlp, ExpertsMlp) and not sizes.tiled_mlp:
            width = kind.mlp.num_per_token * max(shape.hidden_size, 2 * kind.mlp.inner_size)
            yield Excess("experts", "tokens of experts", sizes.local_tokens * width, TILES, TILED)
        for mixer in kind.mixers:
            if not isinstance(mixer, AttentionMixer):
                name = "recurrent layers' tokens" if hasattr(mixer, "num_heads") else "convolutions' tokens"
                channels = getattr(mixer, "conv_channels", shape.hidden_size)
                operator = "recurrence" if hasattr(mixer, "num_heads") else "convolution"
                yield Excess(operator, name, sizes.local_tokens * channels, "a larger sp_size, or ")
    for operator, name in _list_wide_layers(sizes):
        numel = sizes.local_tokens * max(shape.hidden_size, shape.num_heads * shape.head_dim)
        if sizes.tiled_mlp or numel >= INT32_LIMIT:
            yield Excess(operator, name, numel, "a larger sp_size, or ")
        else:
            yield Excess(operator, name, sizes.local_tokens * shape.intermediate_size, TILES, TILED)


def _list_wide_layers(sizes: RowSizes) -> Iterator[tuple[str, str]]:
    """Kinds of linear layers that compute outside of a module's forward, so that they do not run in pieces."""
    if sizes.is_quantized:
        yield "quantized_linear", "activations of quantized layers"
    if sizes.uses_dora:
        yield "dora", "activations of adapters with DoRA"


def _measure_attention(mixer: AttentionMixer, shape: ModelShape, sizes: RowSizes) -> Excess:
    call = size_call(mixer, shape, sizes)
    kernel = ALWAYS_THERE if sizes.kernel == "auto" else sizes.kernel
    remedy = "more memory.attention_head_chunks, a larger sp_size, or " if call.heads > 1 else "a larger sp_size, or "
    if kernel != "flash_attention_3" and count_indexed("flash_attention_3", call) < INT32_LIMIT:
        remedy = f"{remedy.removesuffix('or ')}model.attn_implementation: flash_attention_3 on Hopper, or "
    return Excess(kernel, "one call of attention", count_indexed(kernel, call), remedy)


def count_ring_keys(shape: ModelShape, sizes: RowSizes) -> int:
    """No call of attention on a ring gets more keys. Those that a rank fetches at once are bounded by MAX_SHARES,
    others come in blocks of one rank's; under a window, keys before each piece of a rank's rows are fetched at once."""
    own = -(-sizes.tokens // sizes.ring_size)
    most = int(MAX_SHARES * own)
    for mixer in shape.attentions:
        if mixer.window_tokens is not None:
            most = max(most, own + sizes.num_rows * CHUNKS[-1] * (mixer.window_tokens - 1))
    return min(most, sizes.tokens)


def has_untried(shape: ModelShape, local_tokens: int, *, tiled_mlp: bool, tiled_loss: bool) -> bool:
    """Whether logits or an MLP outside tiles have 2^31 elements: by the census they may, but tiles cost next to nothing
    and no run on a GPU has shown it, so `auto` prefers tiles."""
    width = 0 if tiled_mlp else max(shape.intermediate_size, shape.moe_intermediate_size)
    return local_tokens * max(width, 0 if tiled_loss else shape.vocab_size) >= INT32_LIMIT


def wraps(num_rows: int, row_stride: int) -> bool:
    """Whether a kernel that addresses rows of a tensor in 32 bits would reach another element. What counts is the
    stride: a few heads of a wide buffer lie as far apart as all of them."""
    return num_rows * row_stride >= INT32_LIMIT


def runs_in_pieces(num_bytes: int, *operators: str) -> bool:
    """Whether operators of a step get a tensor of this size in pieces: where the census says that one is tiled."""
    return num_bytes >= WRAP_BYTES and any(get_verdict(operator) == "tiled" for operator in operators)


def split_rows(num_rows: int, num_bytes: int, *operators: str) -> list[slice]:
    """Pieces of the rows of a tensor of this size for these operators, nearly equal; one where no offset could wrap."""
    num_pieces = min(num_rows, -(-num_bytes // PIECE_BYTES)) if runs_in_pieces(num_bytes, *operators) else 1
    bounds = [num_rows * piece // num_pieces for piece in range(num_pieces + 1)]
    return [slice(start, stop) for start, stop in pairwise(bounds)]
