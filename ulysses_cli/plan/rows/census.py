"""A list of every operator of a step that may see 2^31 elements or more, and of how wide its indices are in its source.

Sources: what is installed, or PROJECT@TAG/FILE:LINE in a project's repository. Files of CUDA that no wheel of torch
holds are named by their place in its repository. What no source shows stays refused, and says so.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

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
        "ulysses_cli/train/attention/kernels/sdpa.py:17|def forward_sdpa",
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
