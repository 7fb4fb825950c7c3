"""How far a step's tensors reach where an operator's indices have 32 bits, by a census of every operator that may see
2^31 elements. Rules and the planner refuse what a refused operator would see; ranks run the tiled ones in pieces.
Sources: what is installed, own files without a line, or PROJECT@TAG/FILE:LINE of a repository. Runs no operator."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from typing import Literal

from ulysses_cli.plan.layout import compute_kv_heads
from ulysses_cli.plan.models.layers import AttentionMixer, ExpertsMlp
from ulysses_cli.plan.models.shape import ModelShape
from ulysses_cli.plan.rows.ring import CHUNKS, MAX_SHARES

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
        "layer_norm",
        "torch's own layer_norm (Starcoder 2, Jais 2, OLMo), outside tiles",
        "unsigned 32 bits: block times width",
        "aten/src/ATen/native/cuda/layer_norm_kernel.cu|const T * block_row = X + i1 * N",
        "tiled",
    ),
    IndexedOperator(
        "layer_norm_backward",
        "the same",
        "int: row times width; unsigned 32 bits in the gradient of the input",
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
        "ulysses_cli/plan/levers.py|def compute_num_mlp_tiles",
        "tiled",
    ),
    IndexedOperator(
        "tiled_loss",
        "head and cross-entropy in tiles (memory.tiled_loss)",
        "any: a tile's float32 logits take 256 MiB",
        "ulysses_cli/plan/levers.py|LOSS_TILE_BYTES = 256 << 20",
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
        "size_t counts, in torch and in NCCL (nccl@v2.30.7-1/src/nccl.h.in:589)",
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
        "flash_attention_2",
        "attention: the queries' heads, filled up to multiples of 32 or 64 numbers; strides of rows have 64 bits",
        "int in the accumulator of dq up to 2.7.4, 64 bits in 2.8 (flash-attention@v2.8.3/csrc/flash_attn/src/"
        "flash_bwd_kernel.h:121: 128ll); the hub's build is of no known release",
        "flash-attention@v2.7.4/csrc/flash_attn/src/flash_bwd_kernel.h:121|* kBlockM + (params.cu_seqlens_q == nullptr "
        "? 0 : 128 * bidb)) * params.h * params.d_rounded",
        "refused",
    ),
    IndexedOperator(
        "flash_attention_3",
        "attention: one head, filled up to 64, 96, 128, 192 or 256 numbers; strides of rows and heads have 64 bits",
        "int in the accumulators of one head",
        "flash-attention@v2.8.3/hopper/flash_bwd_preprocess_kernel.h:233|seqlen_info.offset_padded * kHeadDim",
        "refused",
    ),
    IndexedOperator(
        "flash_attention_4",
        "attention: all heads of a call, and rows by their stride",
        "Int32 offsets of documents; the product with a stride is made by CuTe, which wrapped (flash-attention#2611)",
        "flash-attention@fa4-v4.0.0.beta27/flash_attn/cute/seqlen_info.py:60|off = multiple * (self.offset",
        "refused",
    ),
    IndexedOperator(
        "torch_varlen",
        "attention: as FlashAttention 2",
        "unknown: torch 2.13 holds FlashAttention 2 of a commit that no wheel names; counted as 2.7.4, the last change "
        "of it that could be read (pytorch#148147)",
        "flash-attention@v2.7.4/csrc/flash_attn/src/flash_bwd_kernel.h:121|* kBlockM + (params.cu_seqlens_q == nullptr "
        "? 0 : 128 * bidb)) * params.h * params.d_rounded",
        "refused",
    ),
    IndexedOperator(
        "cudnn",
        "attention: all heads of a call, and rows by their stride",
        "unknown: cuDNN is closed",
        "aten/src/ATen/native/cudnn/MHA.cpp|run_cudnn_SDP_fprop",
        "refused",
    ),
    IndexedOperator(
        "flex_attention",
        "attention: all heads of a call, and rows by their stride",
        "32 bits for blocks of keys, whatever the tensors' size",
        "torch/_inductor/kernel/flex/templates/flex_attention.py.jinja:142|"
        "kv_start = tl.load(kv_indices) * SPARSE_KV_BLOCK_SIZE",
        "refused",
    ),
    IndexedOperator(
        "sdpa",
        "attention: torch_varlen where that serves, else plain torch in blocks of 512 tokens",
        "as torch_varlen",
        "ulysses_cli/train/attention/kernels/native.py|def forward_sdpa",
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
        "uint32_t in causal-conv1d, 32-bit accessors in torch (DepthwiseConv2d.cu); cuDNN is closed",
        "causal-conv1d@v1.6.1.post4/csrc/causal_conv1d.h:10|using index_t = uint32_t;",
        "refused",
    ),
    IndexedOperator(
        "recurrence",
        "delta nets and scans",
        "32 bits in Triton's kernels unless they cast",
        "mamba@v2.3.2.post1/mamba_ssm/ops/triton/ssd_chunk_scan.py:76|pid_bc = tl.program_id(axis=1)",
        "refused",
    ),
    IndexedOperator(
        "quantized_linear",
        "linear layers of a base in 4 or 8 bits",
        "int: rows and columns of the activations",
        "bitsandbytes/backends/cuda/ops.py:58|[ct.c_void_p] * 3 + [ct.c_float, ct.c_int32, ct.c_int32, ct.c_void_p]",
        "refused",
    ),
    IndexedOperator(
        "dora",
        "adapters with lora.use_dora: peft multiplies by the base's weight outside of the base's layer",
        "unknown: cuBLAS is closed, and no layer is called that could run in pieces",
        "peft/tuners/lora/dora.py:163|base_result = F.linear(x, transpose(weight, self.fan_in_fan_out))",
        "refused",
    ),
)
_VERDICTS = {operator.name: operator.verdict for operator in OPERATORS}


def get_verdict(name: str) -> Verdict:
    """What rules and ranks go by."""
    return _VERDICTS[name]


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
