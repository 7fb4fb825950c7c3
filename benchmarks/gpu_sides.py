"""The two sides of gpu_levers.py: a slice of an 8B model with the levers of this tool, or with those of DeepSpeed.

At full scale on a GPU, or in miniature on a CPU, where nothing is measured.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from gpu_device import Gpu, Rehearsal
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM, MistralConfig, MistralForCausalLM

from ulysses_cli.plan.levers import compute_loss_tile_tokens, compute_num_mlp_tiles
from ulysses_cli.train.attention.documents import make_documents
from ulysses_cli.train.attention.interface import register_attention
from ulysses_cli.train.elementwise.choice import CPU_IMPLEMENTATIONS, GPU_IMPLEMENTATIONS
from ulysses_cli.train.elementwise.interface import Implementations, serve_elementwise
from ulysses_cli.train.elementwise.operators import Implementation
from ulysses_cli.train.loss import HeadRule
from ulysses_cli.train.memory.checkpointing import checkpoint_layers
from ulysses_cli.train.memory.offload import MAX_LEAVING, Offloader
from ulysses_cli.train.memory.tiled_loss import make_tiled_loss
from ulysses_cli.train.memory.tiled_mlp import run_in_pieces, tile_mlps
from ulysses_cli.train.memory.tiling import tile_norms
from ulysses_cli.train.processes.groups import make_sequence_axis

SHAPE: dict[str, Any] = {
    "hidden_size": 4096, "intermediate_size": 14336, "num_attention_heads": 32, "num_key_value_heads": 8,
    "vocab_size": 128256, "max_position_embeddings": 2**23, "rope_theta": 5e5, "use_cache": False,
}  # fmt: skip


@dataclass(frozen=True)
class Scale:
    """What is measured, and where. `short_row` and `step_tokens` are for the search of the longest row."""

    device: Gpu | Rehearsal
    shape: Mapping[str, Any]
    num_layers: int
    window: int
    window_kernel: str
    implementations: Implementations
    dtype: torch.dtype
    short_row: int
    step_tokens: int
    cap_gb: float

    @property
    def head_dim(self) -> int:
        return int(self.shape["hidden_size"] // self.shape["num_attention_heads"])

    @property
    def loss_tile(self) -> int:
        """The product's own where a GPU has room, on both sides."""
        return compute_loss_tile_tokens(1 << 30, self.shape["vocab_size"], self.shape["hidden_size"], is_large=True)


FULL = Scale(Gpu(), SHAPE, 8, 1024, "torch_varlen", GPU_IMPLEMENTATIONS, torch.bfloat16, 2**16, 2**14, 80.0)
SMALL_SHAPE = {
    **SHAPE, "hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4, "num_key_value_heads": 2,
    "vocab_size": 512,
}  # fmt: skip
MINIATURE = Scale(Rehearsal(), SMALL_SHAPE, 4, 32, "sdpa", CPU_IMPLEMENTATIONS, torch.float32, 128, 64, 0.5)


class Run:
    """A model with one side's levers, and its forward and backward."""

    def __init__(
        self,
        scale: Scale,
        kernel: str,
        *,
        is_ours: bool,
        offloads: bool,
        num_layers: int,
        chunks: int = 1,
        window: bool = False,
    ) -> None:
        self.scale, self.device = scale, scale.device.torch_device
        name = register_attention(make_sequence_axis(None), kernel, chunks if is_ours else 1)
        kinds: Any = (MistralConfig, MistralForCausalLM) if window else (LlamaConfig, LlamaForCausalLM)
        extra = {"sliding_window": scale.window} if window else {}
        config = kinds[0](num_hidden_layers=num_layers, attn_implementation=name, **scale.shape, **extra)
        torch.manual_seed(0)
        torch.set_default_dtype(scale.dtype)
        with self.device:
            self.model = kinds[1](config).train()
        torch.set_default_dtype(torch.float32)
        self.num_layers = num_layers
        self.offloader = Offloader(self.device, max(1, num_layers - MAX_LEAVING)) if is_ours and offloads else None
        self.loss = self.use_ours() if is_ours else self.use_deepspeed(offloads)

    def use_ours(self) -> Any:
        serve_elementwise(self.model, self.scale.implementations)
        hidden = self.scale.shape["hidden_size"]
        for tile in (tile_mlps, tile_norms):
            tile(self.model, lambda tokens: compute_num_mlp_tiles(tokens, hidden_size=hidden))  # type: ignore[operator]
        longest = self.scale.shape["max_position_embeddings"]
        run_in_pieces(self.model, longest, self.scale.dtype, in_tiles=[self.model.lm_head])
        checkpoint_layers(self.model, "save_attention", self.offloader and self.offloader.make_storage)
        way: Implementation = "blocks" if self.device.type == "cpu" else "torch"
        return make_tiled_loss(self.model.lm_head, HeadRule(), self.scale.loss_tile, implementation=way)

    def use_deepspeed(self, offloads: bool) -> Any:
        from deepspeed.runtime.sequence_parallel.ulysses_sp import TiledFusedLogitsLoss, TiledMLP

        def run_mlp(mlp: Any, x: Tensor) -> Tensor:
            return mlp.down_proj(mlp.act_fn(mlp.gate_proj(x)) * mlp.up_proj(x))

        def make_forward(mlp: Any) -> Any:
            weights = [mlp.down_proj.weight, mlp.gate_proj.weight, mlp.up_proj.weight]
            return lambda x: TiledMLP.apply(run_mlp, mlp, x, -(-x.size(1) // self.scale.shape["hidden_size"]), weights)

        for layer in self.model.model.layers:
            layer.mlp.forward = make_forward(layer.mlp)
            layer.gradient_checkpointing = True
            layer._gradient_checkpointing_func = lambda function, x: _HostCheckpoint.apply(x, function, offloads)
        head = self.model.lm_head

        def find_loss(_: Any, x: Tensor, y: Tensor) -> Tensor:
            return nn.functional.cross_entropy(head(x).float(), y, reduction="sum")

        return lambda hidden, labels: TiledFusedLogitsLoss.apply(
            find_loss,
            self.model,
            hidden,
            labels,
            None,
            -(-labels.numel() // self.scale.loss_tile),
            [head.weight],
            "sum",
        )

    def step(self, tokens: int, *, backward: bool = True) -> float:
        """Runs a step and returns its seconds."""
        generator = torch.Generator(self.device).manual_seed(1)
        ids = torch.randint(
            0, self.scale.shape["vocab_size"] - 256, (1, tokens), device=self.device, generator=generator
        )
        self.scale.device.begin_row(tokens)
        start = time.perf_counter()
        hidden = self.model.get_decoder()(
            input_ids=ids,
            position_ids=torch.arange(tokens, device=self.device)[None],
            documents=make_documents((tokens,), self.device),
        ).last_hidden_state
        total = self.loss(hidden, ids.roll(-1, 1))
        del hidden
        if backward:
            (total / tokens).backward()
        del total
        self.scale.device.synchronize()
        seconds = time.perf_counter() - start
        self.model.zero_grad(set_to_none=True)
        return seconds

    def compute_model_flops(self, tokens: int) -> float:
        weights = sum(p.numel() for p in self.model.parameters()) - self.model.model.embed_tokens.weight.numel()
        return (
            6.0 * weights * tokens
            + 12.0 * self.num_layers * self.scale.shape["hidden_size"] * tokens * (tokens + 1) / 2
        )

    def close(self) -> None:
        offloader, self.offloader = self.offloader, None
        self.model = self.loss = None
        gc.collect()
        if offloader is not None:
            offloader.pool.close()
        self.scale.device.free_cache()


class _HostCheckpoint(torch.autograd.Function):
    """Reentrant checkpointing whose hidden states are copied to host memory, as in DeepSpeed's guide to long sequences.
    The copy is synchronous."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, function: Any, offloads: bool) -> Tensor:
        ctx.function, ctx.waiting = function, hidden.detach().to("cpu") if offloads else hidden.detach()
        with torch.no_grad():
            return function(hidden)

    @staticmethod
    def backward(ctx: Any, dout: Tensor) -> tuple[Tensor | None, ...]:
        hidden = ctx.waiting.to(dout.device).detach().requires_grad_()
        ctx.waiting = None
        with torch.enable_grad():
            out = ctx.function(hidden)
        torch.autograd.backward(out, dout)
        return hidden.grad, None, None
