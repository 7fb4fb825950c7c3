"""A list of every operator of a step that may see 2^31 elements or more, and of how wide its indices are in its source.
Rules and the planner refuse what a refused operator would see; ranks run in pieces what the list says is tiled.

Sources: torch 2.13, FlashAttention 2.8 and their neighbours as installed; files of CUDA that no wheel holds are named
by their place in the project's repository.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from typing import Literal

from ulysses_cli.plan.models.layers import AttentionMixer, ExpertsMlp
from ulysses_cli.plan.models.shape import ModelShape
from ulysses_cli.plan.rows.order import CHUNKS
from ulysses_cli.plan.rows.rounds import MAX_SHARES

INT32_LIMIT = 2**31
# Tensors of this size are computed in pieces where the census says tiled: in bfloat16 they have 2^31 elements, and an
# unsigned offset in bytes wraps there.
WRAP_BYTES = 2**32
PIECE_BYTES = 256 << 20  # large enough for full speed, and what a piece needs besides is small

TILED = "memory.tiled_mlp"
TILES = f"{TILED}: auto, or "

Verdict = Literal["safe", "tiled", "refused"]


@dataclass(frozen=True)
class IndexedOperator:
    """`index`: the type of an element's index. `source`: file and line of it, and after a bar the text that stands
    there. safe: indices have 64 bits, or the operator splits itself. tiled: a call gets pieces of fewer than 2^31
    elements. refused: a tensor of 2^31 elements in one call is refused."""

    name: str
    where: str
    index: str
    source: str
    verdict: Verdict


OPERATORS: tuple[IndexedOperator, ...] = (
    IndexedOperator(
        "embedding",
        "the rows' tokens become hidden states",
        "unsigned 32 bits, of bytes, times the row's size",
        "aten/src/ATen/native/cuda/IndexKernelUtils.cu:20|out + blockIdx.x * (int32_t)out_stride + off",
        "tiled",
    ),
    IndexedOperator(
        "embedding_backward",
        "gradient of the embedding's weight",
        "int, of threads: one for each element of the gradient",
        "aten/src/ATen/native/cuda/EmbeddingBackwardKernel.cu|const int gid = blockIdx.x * blockDim.x + threadIdx.x",
        "tiled",
    ),
    IndexedOperator(
        "fused_rms_norm",
        "norms of one pass",
        "unsigned 32 bits: block times width",
        "aten/src/ATen/native/cuda/layer_norm_kernel.cu|const T * block_row = X + i1 * N",
        "tiled",
    ),
    IndexedOperator(
        "fused_rms_norm_backward",
        "norms of one pass",
        "int: row times width",
        "aten/src/ATen/native/cuda/layer_norm_kernel.cu|int load_idx = i1*N+i2",
        "tiled",
    ),
    IndexedOperator(
        "linear",
        "projections of queries, keys, values and output; the head of an untiled loss; adapters",
        "unknown: cuBLAS is closed; sizes are int, offsets are not documented",
        "aten/src/ATen/cuda/CUDABlas.cpp|CUDABLAS_GEMM_ARGTYPES",
        "tiled",
    ),
    IndexedOperator(
        "linear_backward",
        "gradients of the same; the weight's sums over tokens",
        "unknown: cuBLAS is closed",
        "aten/src/ATen/cuda/CUDABlas.cpp|CUDABLAS_GEMM_ARGTYPES",
        "tiled",
    ),
    IndexedOperator(
        "mlp",
        "MLPs and norms in tiles of tokens (memory.tiled_mlp)",
        "any: a tile has about as many tokens as the model is wide",
        "ulysses_cli/plan/tiles.py:20|def compute_num_mlp_tiles",
        "tiled",
    ),
    IndexedOperator(
        "tiled_loss",
        "head and cross-entropy in tiles (memory.tiled_loss)",
        "any: a tile's float32 logits take 256 MiB",
        "ulysses_cli/plan/tiles.py:9|LOSS_TILE_BYTES = 256 << 20",
        "tiled",
    ),
    IndexedOperator(
        "elementwise",
        "residuals, activations, casts, softcaps, masks, rotary embedding of transformers",
        "splits itself into parts of 32-bit indices",
        "torch/include/ATen/native/cuda/Loops.cuh:129|for (auto& sub_iter : iter.with_32bit_indexing())",
        "safe",
    ),
    IndexedOperator(
        "reduction",
        "gradients of biases, sinks and transformers' norms; sums of losses",
        "splits itself into parts of 32-bit indices",
        "torch/include/ATen/native/cuda/Reduce.cuh:1237|for (auto& sub_iter : iter.with_32bit_indexing())",
        "safe",
    ),
    IndexedOperator(
        "compiled",
        "rotary embedding and gated activations of one pass",
        "64 bits where a size does not fit 32, with a guard on the size",
        "torch/_inductor/codegen/simd.py:2969|def can_use_32bit_indexing",
        "safe",
    ),
    IndexedOperator(
        "copy",
        "exchange buffers, slices of heads, contiguous copies, copies to the host and back",
        "bytes in size_t where both are contiguous, else as elementwise",
        "torch/include/ATen/native/cuda/Loops.cuh:129|for (auto& sub_iter : iter.with_32bit_indexing())",
        "safe",
    ),
    IndexedOperator(
        "all_to_all",
        "exchange of heads, keys of a ring, edges of convolutions",
        "size_t counts, in torch and in NCCL",
        "torch/include/torch/csrc/distributed/c10d/Utils.hpp:625|size_t computeLengthsAndOffsets",
        "safe",
    ),
    IndexedOperator(
        "concatenation",
        "rotary embedding of transformers, joined losses of tiles",
        "32 bits only where every input fits, else a copy for each input",
        "aten/src/ATen/native/cuda/Shape.cu|const bool all32BitIndexable",
        "safe",
    ),
    IndexedOperator(
        "log_softmax",
        "an untiled loss, forward and backward",
        "int64_t: block times classes",
        "aten/src/ATen/native/cuda/SoftMax.cu:708|input += static_cast<int64_t>(blockIdx.x) * classes",
        "safe",
    ),
    IndexedOperator(
        "nll_loss",
        "an untiled loss, forward and backward",
        "64-bit accessor",
        "aten/src/ATen/native/cuda/Loss.cu|PackedTensorAccessor64<scalar_t, 2> input",
        "safe",
    ),
    IndexedOperator(
        "dropout",
        "dropout of adapters",
        "uint64_t where 32 bits do not suffice",
        "aten/src/ATen/native/cuda/Dropout.cu|cuda::detail::canUse32BitIndexMath(self)",
        "safe",
    ),
    IndexedOperator(
        "attention",
        "attention kernels of every back end, forward and backward: one call gets a chunk of the heads",
        "FlashAttention 2: int in the accumulator of dq, in releases up to 2.8.3 (fixed by #2260); cuDNN is closed",
        "csrc/flash_attn/src/flash_bwd_kernel.h|params.seqlen_q_rounded * params.h * params.d_rounded",
        "refused",
    ),
    IndexedOperator(
        "experts",
        "matrices of experts outside tiles (memory.tiled_mlp: false)",
        "int32_t: sizes and offsets of groups",
        "torch/include/ATen/native/cuda/GroupMMCommon.cuh:34|const int32_t* offs",
        "refused",
    ),
    IndexedOperator(
        "convolution",
        "short convolutions, forward and backward",
        "32-bit accessors in torch, uint32_t in causal-conv1d; cuDNN is closed",
        "aten/src/ATen/native/cuda/DepthwiseConv2d.cu|PackedTensorAccessor32<scalar_t, 4, DefaultPtrTraits> input",
        "refused",
    ),
    IndexedOperator(
        "recurrence",
        "delta nets and scans",
        "32 bits in Triton's kernels unless they cast",
        "mamba_ssm/ops/triton/ssd_chunk_scan.py|pid_bc = tl.program_id(axis=1)",
        "refused",
    ),
    IndexedOperator(
        "quantized_linear",
        "linear layers of a base in 4 or 8 bits",
        "int: rows and columns of the activations",
        "bitsandbytes/backends/cuda/ops.py:58|[ct.c_void_p] * 3 + [ct.c_float, ct.c_int32, ct.c_int32, ct.c_void_p]",
        "refused",
    ),
)


@dataclass(frozen=True)
class RowSizes:
    """What decides the largest tensors of a rank's micro-step. `tokens`: of its rows, before they are split."""

    tokens: int
    sp_size: int
    ring_size: int
    head_chunks: int
    kv_heads: int  # on a rank, in a chunk
    tiled_mlp: bool
    is_quantized: bool
    num_rows: int = 1

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


def list_excess(shape: ModelShape, sizes: RowSizes) -> list[Excess]:
    """Tensors of 2^31 elements that one call of a refused operator would see."""
    return [excess for excess in _walk_tensors(shape, sizes) if excess.numel >= INT32_LIMIT]


def _walk_tensors(shape: ModelShape, sizes: RowSizes) -> Iterator[Excess]:
    heads = max(1, shape.num_heads * sizes.ring_size // sizes.sp_size // sizes.head_chunks)
    shared = -(-sizes.tokens // sizes.ring_size)  # tokens of the ranks that exchange heads
    chunks = "more memory.attention_head_chunks, a larger sp_size, or " if heads > 1 else "a larger sp_size, or "
    yield Excess("attention", "attention's queries", shared * heads * shape.head_dim, chunks)
    if sizes.ring_size > 1:
        yield Excess(
            "attention", "keys of a ring", count_ring_keys(shape, sizes) * sizes.kv_heads * shape.head_dim, chunks
        )
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
    if sizes.is_quantized:
        operator, name = "quantized_linear", "activations of quantized layers"
        numel = sizes.local_tokens * max(shape.hidden_size, shape.num_heads * shape.head_dim)
        if sizes.tiled_mlp or numel >= INT32_LIMIT:
            yield Excess(operator, name, numel, "a larger sp_size, or ")
        else:
            yield Excess(operator, name, sizes.local_tokens * shape.intermediate_size, TILES, TILED)


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


def count_widest(shape: ModelShape, *, tiled_mlp: bool, tiled_loss: bool) -> int:
    """Numbers per token in the widest tensor of a row that an embedding or a linear layer reads or writes."""
    widths = [shape.hidden_size, shape.num_heads * shape.head_dim]
    widths += [] if tiled_mlp else [shape.intermediate_size]
    widths += [] if tiled_loss else [shape.vocab_size]
    return 2 * max(widths)  # a family may join two projections in one


def runs_in_pieces(num_bytes: int) -> bool:
    """Whether an operator that the census calls tiled gets a tensor of this size in pieces."""
    return num_bytes >= WRAP_BYTES


def split_rows(num_rows: int, num_bytes: int) -> list[slice]:
    """Pieces of the rows of a tensor of this size, nearly equal; one piece where no offset could wrap."""
    num_pieces = min(num_rows, -(-num_bytes // PIECE_BYTES)) if runs_in_pieces(num_bytes) else 1
    bounds = [num_rows * piece // num_pieces for piece in range(num_pieces + 1)]
    return [slice(start, stop) for start, stop in pairwise(bounds)]
