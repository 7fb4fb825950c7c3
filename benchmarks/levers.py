"""Compares memory levers with plain checkpointing and with DeepSpeed's own, on gloo ranks that share one row.

Nothing is timed. Counted are executed FLOPs (by torch's formulas and those of our operators), forward calls of
attention and MLP per layer, and bytes alive, split into what is saved from forward to backward, what is in use in
between, and the loss. Products and attention kernels are therefore computed only for one short row, whose losses are
compared. DeepSpeed's side is UlyssesSPAttentionHF, TiledMLP, TiledFusedLogitsLoss and reentrant checkpointing whose
hidden states wait in host memory, with the same numbers of tiles. Finished cases are read from the JSON file; --fresh
counts them again.

    python benchmarks/levers.py [--tokens 16384] [--fresh] [--json benchmarks/results/levers-cpu.json]
"""

from __future__ import annotations

import argparse
import json
import platform
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from metering import Meter, add_gates, register_cpu_flops
from support.rank_pool import run_on_ranks
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM

NUM_RANKS, HEADS, HEAD_DIM, KV_HEADS, HIDDEN, INTERMEDIATE, VOCABULARY = 2, 8, 64, 4, 512, 1408, 32768
LOSS_TILE = 512
CHECKED = 2048  # tokens of the one row that is computed


@dataclass(frozen=True)
class Variant:
    """Says which levers are on. `is_deepspeed` is side (b)."""

    checkpointing: str = "full"
    tiles_loss: bool = False
    tiles_mlp: bool = False
    offloads: bool = False
    chunks: int = 1
    is_deepspeed: bool = False


VARIANTS = {
    "(a) plain checkpointing": Variant(),
    "(b) DeepSpeed, all of its": Variant(is_deepspeed=True),
    "tiled loss": Variant(tiles_loss=True),
    "tiled MLP and norms": Variant(tiles_mlp=True),
    "attention kept": Variant("save_attention"),
    "offload": Variant("save_attention", offloads=True),
    "4 head chunks": Variant(chunks=4),
    "all": Variant("save_attention", tiles_loss=True, tiles_mlp=True, offloads=True),
    "all, 4 head chunks": Variant("save_attention", tiles_loss=True, tiles_mlp=True, offloads=True, chunks=4),
}

THEIRS, OURS = "(b) DeepSpeed, all of its", "all, 4 head chunks"


def build(variant: Variant, num_layers: int, local: int, meter: Meter) -> tuple[Any, Any]:
    """Returns a decoder, the same random model each time, and its loss as a function of hidden states and labels."""
    from ulysses_cli.train.attention.interface import register_attention
    from ulysses_cli.train.processes.groups import make_sequence_axis

    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=HIDDEN, intermediate_size=INTERMEDIATE, num_hidden_layers=num_layers, vocab_size=VOCABULARY,
        num_attention_heads=HEADS, num_key_value_heads=KV_HEADS, max_position_embeddings=2**20, use_cache=False,
    )  # fmt: skip
    if variant.is_deepspeed:
        name = register_deepspeed_attention(num_layers)
    else:
        name = register_attention(make_sequence_axis(dist.group.WORLD), "sdpa", variant.chunks)
    config._attn_implementation = add_gates(name, meter)
    model = LlamaForCausalLM(config).train()
    loss = use_deepspeed(model, local, meter) if variant.is_deepspeed else use_ours(model, variant, meter)
    return model.get_decoder(), loss


def use_ours(model: Any, variant: Variant, meter: Meter) -> Any:
    from ulysses_cli.train.loss import HeadRule
    from ulysses_cli.train.memory.checkpointing import checkpoint_layers
    from ulysses_cli.train.memory.offload import Offloader
    from ulysses_cli.train.memory.tiled_loss import make_tiled_loss
    from ulysses_cli.train.memory.tiled_mlp import tile_mlps
    from ulysses_cli.train.memory.tiling import tile_norms

    if variant.tiles_mlp:
        for tile in (tile_mlps, tile_norms):
            tile(model, lambda tokens: -(-tokens // HIDDEN))
    make_storage = None
    if variant.offloads:
        offloader = Offloader(torch.device("cpu"), len(model.model.layers))
        offloader.pool.take = meter.mark_host(offloader.pool.take)  # type: ignore[method-assign]
        make_storage = offloader.make_storage
    checkpoint_layers(model, variant.checkpointing, make_storage)  # type: ignore[arg-type]
    if variant.tiles_loss:
        return make_tiled_loss(model.lm_head, HeadRule(), LOSS_TILE)
    return lambda hidden, labels: nn.functional.cross_entropy(
        model.lm_head(hidden).flatten(0, 1).float(), labels.flatten(), reduction="sum"
    )


def register_deepspeed_attention(num_layers: int) -> str:
    import deepspeed
    from deepspeed.runtime.sequence_parallel.ulysses_sp import UlyssesSPAttentionHF
    from transformers import AttentionInterface
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    if not deepspeed.comm.is_initialized():
        deepspeed.init_distributed(dist_backend="gloo")
    attention = UlyssesSPAttentionHF(
        sdpa_attention_forward, batch_size=1, attn_head_count=HEADS, attn_head_size=HEAD_DIM,
        kv_head_count=KV_HEADS, num_hidden_layers=num_layers, process_group=dist.group.WORLD,
        seq_length_is_variable=True,
    )  # fmt: skip
    attention.core_attn_implementation = "sdpa"

    def attend(module: Any, *args: Any, documents: Any = None, **kwargs: Any) -> Any:
        return attention(module, *args, **kwargs)

    AttentionInterface.register("deepspeed_ulysses", attend)
    return "deepspeed_ulysses"


def use_deepspeed(model: Any, local: int, meter: Meter) -> Any:
    from deepspeed.runtime.sequence_parallel.ulysses_sp import TiledFusedLogitsLoss, TiledMLP

    def run_mlp(mlp: Any, x: Tensor) -> Tensor:
        return mlp.down_proj(mlp.act_fn(mlp.gate_proj(x)) * mlp.up_proj(x))

    def make_forward(mlp: Any) -> Any:
        weights = [mlp.down_proj.weight, mlp.gate_proj.weight, mlp.up_proj.weight]
        return lambda x: TiledMLP.apply(run_mlp, mlp, x, -(-x.size(1) // HIDDEN), weights)

    for layer in model.model.layers:
        layer.mlp.forward = make_forward(layer.mlp)
        layer.gradient_checkpointing = True
        layer._gradient_checkpointing_func = lambda function, hidden: _HostCheckpoint.apply(hidden, function, meter)

    def find_loss(_: Any, x: Tensor, y: Tensor) -> Tensor:
        return nn.functional.cross_entropy(model.lm_head(x).float(), y, reduction="sum")

    shards = -(-local // LOSS_TILE)
    return lambda hidden, labels: TiledFusedLogitsLoss.apply(
        find_loss, model, hidden, labels, None, shards, [model.lm_head.weight], "sum"
    )


class _HostCheckpoint(torch.autograd.Function):
    """Reentrant checkpointing with the hidden states in host memory, as in DeepSpeed's guide to long sequences."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, function: Any, meter: Meter) -> Tensor:
        ctx.function, ctx.waiting = function, meter.mark_host(hidden.detach().clone)()
        with torch.no_grad():
            return function(hidden)

    @staticmethod
    def backward(ctx: Any, dout: Tensor) -> tuple[Tensor | None, ...]:
        hidden = ctx.waiting.clone().requires_grad_()
        ctx.waiting = None
        with torch.enable_grad():
            out = ctx.function(hidden)
        torch.autograd.backward(out, dout)
        return hidden.grad, None, None


def measure(variant: Variant, tokens: int, num_layers: int, is_computing: bool) -> dict[str, float]:
    """Meters one forward and backward on one rank."""
    from ulysses_cli.train.attention.documents import make_documents

    register_cpu_flops()
    local, rank = tokens // NUM_RANKS, dist.get_rank()
    meter = Meter(is_computing=is_computing)
    decoder, loss = build(variant, num_layers, local, meter)
    down = [0]
    for layer in decoder.layers:
        layer.mlp.down_proj.register_forward_pre_hook(lambda _, args: down.__setitem__(0, down[0] + args[0].numel()))
    ids = torch.randint(0, VOCABULARY, (1, tokens), generator=torch.Generator().manual_seed(1))
    labels, positions = ids.roll(-1, 1), torch.arange(tokens)[None]
    ids, labels, positions = (whole.chunk(NUM_RANKS, 1)[rank].contiguous() for whole in (ids, labels, positions))
    meter.ignore(*decoder.parameters(), ids, labels, positions)
    with meter:
        result = decoder(input_ids=ids, position_ids=positions, use_cache=False, documents=make_documents((tokens,)))
        hidden = meter.enter_loss(result.last_hidden_state)
        del result
        total = loss(hidden, labels)
        del hidden
        total.backward()
    attention_calls = meter.calls["_scaled_dot_product_flash_attention_for_cpu"] / variant.chunks
    gemm = 6 * (num_layers * count_layer_weights() + VOCABULARY * HIDDEN) * local
    kernel = 14 * num_layers * (HEADS // NUM_RANKS) * HEAD_DIM * (tokens * (tokens + 1) // 2)
    return {
        "executed / model FLOPs": sum(meter.flops.values()) / (gemm + kernel),
        "GFLOPs without head": (sum(meter.flops.values()) - meter.flops["loss"]) / 1e9,
        "attention / layer": attention_calls / num_layers,
        "MLP / layer": down[0] / (num_layers * local * INTERMEDIATE),
        **{name: size / 2**20 for name, size in meter.compute_peaks().items()},
        "loss": total.item(),
    }


def count_layer_weights() -> int:
    return 2 * HIDDEN * HEADS * HEAD_DIM + 2 * HIDDEN * KV_HEADS * HEAD_DIM + 3 * HIDDEN * INTERMEDIATE


def collect(options: argparse.Namespace) -> dict[str, Any]:
    """Adds every case that the file lacks and writes it after each, so that a long run can be resumed."""
    known: dict[str, Any] = {}
    if options.json.exists() and not options.fresh:
        known = json.loads(options.json.read_text())["cases"]
        print(f"{len(known)} cases are remembered in {options.json.name}; --fresh counts anew", file=sys.stderr)
    full = options.tokens
    cases = [(name, tokens, 4) for tokens in (full, CHECKED) for name in VARIANTS]
    cases += [(name, tokens, 4) for tokens in (full // 2, 2 * full, 4 * full) for name in (THEIRS, OURS)]
    cases += [(OURS, full, layers) for layers in (2, 8)]
    for name, tokens, num_layers in cases:
        key = f"{name}, {tokens} tokens, {num_layers} layers"
        if known.get(key, {}).get("variant") != asdict(VARIANTS[name]):
            print(f"counting {key} ...", file=sys.stderr, flush=True)
            case = (VARIANTS[name], tokens, num_layers, tokens == CHECKED)
            results = run_on_ranks(NUM_RANKS, measure, *case, time_limit=3600)
            known[key] = {
                **{field: min(rank[field] for rank in results) for field in results[0]},
                "variant": asdict(VARIANTS[name]),
                "loss": sum(rank["loss"] for rank in results),
            }
        options.json.parent.mkdir(exist_ok=True)
        machine = {"python": platform.python_version(), "torch": torch.__version__, "machine": platform.machine()}
        options.json.write_text(json.dumps({"machine": machine, "ranks": NUM_RANKS, "cases": known}, indent=1) + "\n")
    return known


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=16384)
    parser.add_argument("--fresh", action="store_true")
    parser.add_argument("--json", type=Path, default=Path(__file__).parent / "results" / "levers-cpu.json")
    options = parser.parse_args()
    cases = collect(options)

    def get(name: str, tokens: int = options.tokens, layers: int = 4) -> dict[str, float]:
        return cases[f"{name}, {tokens} tokens, {layers} layers"]

    fields = [field for field in get("all") if field not in ("variant", "loss")]
    print(f"{NUM_RANKS} ranks, {options.tokens} tokens, 4 layers; bytes in MiB of one rank, weights left out")
    print(f"{'':<27}" + "".join(f"{field:>24}" for field in fields))
    for name in VARIANTS:
        print(f"{name:<27}" + "".join(f"{get(name)[field]:>24.4g}" for field in fields))
    return int(not meets_bars(get, options.tokens))


def meets_bars(get: Any, tokens: int) -> bool:
    ours, whole, reference = get(OURS), get("all"), get(THEIRS)
    lengths = (tokens // 2, tokens, 2 * tokens, 4 * tokens)
    shares = [get(OURS, n)["GFLOPs without head"] / get(THEIRS, n)["GFLOPs without head"] for n in lengths]
    attention = ours["attention's own"] / reference["attention's own"]
    losses = [get(OURS, n)["loss tiles"] for n in lengths]
    kept = [get(OURS, tokens, layers)["kept on device"] for layers in (2, 4, 8)]
    values = [get(name, CHECKED)["loss"] for name in VARIANTS]
    bars = {
        "attention's forward runs once per layer": ours["attention / layer"] == whole["attention / layer"] == 1,
        "the MLP's forward at most twice": max(ours["MLP / layer"], whole["MLP / layer"]) <= 2,
        f"FLOPs without head {shares[1]:.3f} of (b)'s, at most 0.85": shares[1] <= 0.85,
        f"and falling towards 7/9: {', '.join(f'{s:.3f}' for s in shares)}": shares == sorted(shares, reverse=True),
        f"peak {whole['peak'] / reference['peak']:.3f} of (b)'s, in chunks {ours['peak'] / reference['peak']:.3f}": max(
            ours["peak"], whole["peak"]
        )
        <= reference["peak"],
        f"attention's own bytes in 4 chunks {attention:.3f} of (b)'s, at most 0.6": attention <= 0.6,
        f"loss tiles do not grow with the row: {', '.join(f'{size:.2f}' for size in losses)} MiB": max(losses)
        <= 1.001 * min(losses),
        f"kept on device does not grow with layers: {', '.join(f'{k:.2f}' for k in kept)} MiB": max(kept)
        <= 1.001 * min(kept),
        f"losses agree over {CHECKED} tokens": max(values) - min(values) <= 1e-5 * max(values),
    }
    for name, is_met in bars.items():
        print(f"  {'met   ' if is_met else 'SHORT '} {name}")
    return all(bars.values())


if __name__ == "__main__":
    sys.exit(main())
