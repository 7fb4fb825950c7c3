"""Memory levers on one GPU against DeepSpeed's own, in the same run: an 8-layer slice of Llama-3.1-8B's shape in
bfloat16, one rank, forward and backward without an optimizer.

Tokens/s, model FLOPs per second and MFU, peak memory and the share of offload that compute does not hide, by length;
the longest row under a cap; a picture of copies against compute. (b) is TiledMLP, TiledFusedLogitsLoss and reentrant
checkpointing with hidden states in host memory, around the same attention kernel.

    python benchmarks/gpu_levers.py [--lengths 32Ki,64Ki,128Ki,256Ki] [--cap-gb 80] [--json FILE]
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import statistics
import sys
import time
from pathlib import Path
from typing import Any

os.environ.setdefault("PYTORCH_ALLOC_CONF", "expandable_segments:True")  # as the launcher sets it, for both sides

import torch
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM, MistralConfig, MistralForCausalLM

from ulysses_cli.plan.attention import Need
from ulysses_cli.train.documents import make_documents
from ulysses_cli.train.exchange import make_axis
from ulysses_cli.train.interface import register_attention
from ulysses_cli.train.kernel_choice import choose_kernel
from ulysses_cli.train.loss import HeadRule
from ulysses_cli.train.offload import MAX_LEAVING, Offloader
from ulysses_cli.train.recompute import recompute_layers
from ulysses_cli.train.tiled_loss import make_tiled_loss
from ulysses_cli.train.tiled_mlp import tile_mlps
from ulysses_cli.train.tiled_norm import tile_norms

SHAPE = {
    "hidden_size": 4096, "intermediate_size": 14336, "num_attention_heads": 32, "num_key_value_heads": 8,
    "vocab_size": 128256, "max_position_embeddings": 2**23, "rope_theta": 5e5, "use_cache": False,
}  # fmt: skip
HEAD_DIM, LOSS_TILE, WINDOW = 128, 4096, 1024
PEAK_TFLOPS = {"H100": 989, "H200": 989, "A100": 312, "B200": 2250, "L40S": 362}  # dense bfloat16, by the maker


class Run:
    """A model with one side's levers, and its forward and backward."""

    def __init__(
        self, kernel: str, *, is_ours: bool, num_layers: int, offloads: bool, chunks: int, window: bool
    ) -> None:
        name = register_attention(make_axis(None), kernel, chunks if is_ours else 1)
        kinds: Any = (MistralConfig, MistralForCausalLM) if window else (LlamaConfig, LlamaForCausalLM)
        extra = {"sliding_window": WINDOW} if window else {}
        config = kinds[0](num_hidden_layers=num_layers, attn_implementation=name, **SHAPE, **extra)
        torch.manual_seed(0)
        torch.set_default_dtype(torch.bfloat16)
        with torch.device("cuda"):
            self.model = kinds[1](config).train()
        torch.set_default_dtype(torch.float32)
        self.num_layers, self.window = num_layers, window
        self.offloader = (
            Offloader(torch.device("cuda"), max(1, num_layers - MAX_LEAVING)) if is_ours and offloads else None
        )
        self.loss = self.use_ours() if is_ours else self.use_deepspeed(offloads)

    def use_ours(self) -> Any:
        for tile in (tile_mlps, tile_norms):
            tile(self.model, lambda tokens: -(-tokens // SHAPE["hidden_size"]))  # type: ignore[operator]
        recompute_layers(self.model, "keep_attention", self.offloader and self.offloader.make_shelf)
        return make_tiled_loss(self.model.lm_head, HeadRule(), LOSS_TILE)

    def use_deepspeed(self, offloads: bool) -> Any:
        from deepspeed.runtime.sequence_parallel.ulysses_sp import TiledFusedLogitsLoss, TiledMLP

        def run_mlp(mlp: Any, x: Tensor) -> Tensor:
            return mlp.down_proj(mlp.act_fn(mlp.gate_proj(x)) * mlp.up_proj(x))

        def make_forward(mlp: Any) -> Any:
            weights = [mlp.down_proj.weight, mlp.gate_proj.weight, mlp.up_proj.weight]
            return lambda x: TiledMLP.apply(run_mlp, mlp, x, -(-x.size(1) // SHAPE["hidden_size"]), weights)

        for layer in self.model.model.layers:
            layer.mlp.forward = make_forward(layer.mlp)
            layer.gradient_checkpointing = True
            layer._gradient_checkpointing_func = lambda function, x: _HostCheckpoint.apply(x, function, offloads)
        head = self.model.lm_head

        def find_loss(_: Any, x: Tensor, y: Tensor) -> Tensor:
            return nn.functional.cross_entropy(head(x).float(), y, reduction="sum")

        return lambda hidden, labels: TiledFusedLogitsLoss.apply(
            find_loss, self.model, hidden, labels, None, -(-labels.numel() // LOSS_TILE), [head.weight], "sum"
        )

    def step(self, tokens: int) -> float:
        """Seconds."""
        ids = torch.randint(0, 128000, (1, tokens), device="cuda", generator=torch.Generator("cuda").manual_seed(1))
        torch.cuda.synchronize()
        start = time.perf_counter()
        hidden = self.model.get_decoder()(
            input_ids=ids,
            position_ids=torch.arange(tokens, device="cuda")[None],
            documents=make_documents((tokens,), "cuda"),
        ).last_hidden_state
        total = self.loss(hidden, ids.roll(-1, 1))
        del hidden
        (total / tokens).backward()
        torch.cuda.synchronize()
        seconds = time.perf_counter() - start
        self.model.zero_grad(set_to_none=True)
        return seconds

    def compute_model_flops(self, tokens: int) -> float:
        weights = sum(p.numel() for p in self.model.parameters()) - self.model.model.embed_tokens.weight.numel()
        return 6.0 * weights * tokens + 12.0 * self.num_layers * 32 * HEAD_DIM * tokens * (tokens + 1) / 2

    def close(self) -> None:
        offloader, self.offloader = self.offloader, None
        self.model = self.loss = None
        gc.collect()
        if offloader is not None:
            offloader.pool.close()
        torch.cuda.empty_cache()


class _HostCheckpoint(torch.autograd.Function):
    """Reentrant checkpointing whose hidden states are copied to host memory, as DeepSpeed's guide to long sequences has
    it: the copy is waited for."""

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


def measure_speed(kernel: str, lengths: list[int], deadline: float, peak: float | None) -> list[dict[str, Any]]:
    rows = []
    for tokens in lengths:
        for side, is_ours, offloads in (("ours", True, True), ("ours, no offload", True, False), ("(b)", False, True)):
            if time.monotonic() > deadline:
                print(f"out of time before {side} at {tokens} tokens", file=sys.stderr)
                return rows
            row: dict[str, Any] = {"tokens": tokens, "side": side}
            run = Run(kernel, is_ours=is_ours, num_layers=8, offloads=offloads, chunks=1, window=False)
            try:
                run.step(tokens)  # kernels are chosen, buffers made
                torch.cuda.reset_peak_memory_stats()
                row["seconds"] = statistics.median(run.step(tokens) for _ in range(3 if tokens <= 2**16 else 1))
                row["tokens_per_second"] = tokens / row["seconds"]
                row["model_tflops"] = run.compute_model_flops(tokens) / row["seconds"] / 1e12
                row["mfu"] = row["model_tflops"] / peak if peak else None
                row["peak_gb"] = torch.cuda.max_memory_allocated() / 1e9
                row["host_gb"] = run.offloader.pool.num_bytes / 1e9 if run.offloader else None
            except torch.cuda.OutOfMemoryError:
                row["out_of_memory"] = True
            run.close()
            rows.append(row)
            print(
                "  ".join(
                    f"{key} {value:.4g}" if isinstance(value, float) else f"{value}" for key, value in row.items()
                )
            )
    return rows


def measure_link(num_bytes: int = 2**30) -> float:
    """Bytes per second from the device to page-locked memory, one way."""
    device = torch.empty(num_bytes, dtype=torch.uint8, device="cuda")
    host = torch.empty(num_bytes, dtype=torch.uint8, pin_memory=True)
    for is_timed in (False, True):
        torch.cuda.synchronize()
        start = time.perf_counter()
        host.copy_(device, non_blocking=True)
        torch.cuda.synchronize()
        if is_timed:
            return num_bytes / (time.perf_counter() - start)
    raise AssertionError


def find_exposed_shares(rows: list[dict[str, Any]], link: float) -> dict[int, float]:
    """Of the time that copies out and back take, what a step with offload is longer by."""
    found = {}
    by_key = {(row["tokens"], row["side"]): row for row in rows if "seconds" in row}
    for tokens in {row["tokens"] for row in rows}:
        on, off = by_key.get((tokens, "ours")), by_key.get((tokens, "ours, no offload"))
        if on and off:
            found[tokens] = max(0.0, on["seconds"] - off["seconds"]) / (2 * on["host_gb"] * 1e9 / link)
    return found


def find_longest(kernel: str, *, is_ours: bool, deadline: float) -> int:
    """Tokens of the longest row that runs, to 16Ki: 2 layers, all offloaded but one, and a small window, so that time
    is linear and memory that of a deep model."""
    low, high = 0, 2**22
    while high - low > 2**14 and time.monotonic() < deadline:
        tokens = (low + high) // 2 if low else 2**18 if high > 2**18 else high // 2
        tokens -= tokens % 2**14
        run = Run(kernel, is_ours=is_ours, num_layers=2, offloads=True, chunks=4, window=True)
        try:
            run.step(tokens)
            low = tokens
        except (torch.cuda.OutOfMemoryError, ValueError) as error:
            high = tokens
            print(f"{tokens} tokens: {type(error).__name__}", file=sys.stderr)
        run.close()
    return low


def draw_copies(kernel: str, tokens: int, path: Path) -> None:
    """Compute and copies of one step as bars over time, from the profiler."""
    from torch.profiler import ProfilerActivity, profile

    run = Run(kernel, is_ours=True, num_layers=8, offloads=True, chunks=1, window=False)
    run.step(tokens)
    with profile(activities=[ProfilerActivity.CUDA]) as seen:
        run.step(tokens)
    run.close()
    lanes: dict[str, list[tuple[float, float]]] = {"compute": [], "to host": [], "from host": []}
    for event in seen.events():
        if event.device_type == torch.autograd.DeviceType.CUDA:
            name = event.name.lower()
            lane = "to host" if "dtoh" in name else "from host" if "htod" in name else "compute"
            lanes[lane].append((event.time_range.start, event.time_range.end))
    first = min(start for lane in lanes.values() for start, _ in lane)
    last = max(end for lane in lanes.values() for _, end in lane)
    scale = 1000 / (last - first)
    parts = ['<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 1100 110" font-family="sans-serif" font-size="12">']
    for at, (name, spans) in enumerate(lanes.items()):
        parts.append(f'<text x="2" y="{28 + 30 * at}">{name}</text>')
        parts += [
            f'<rect x="{80 + (start - first) * scale:.2f}" y="{14 + 30 * at}" height="20" fill="#36c" '
            f'width="{max(0.1, (end - start) * scale):.2f}"/>'
            for start, end in spans
        ]
    path.write_text("".join([*parts, "</svg>\n"]))


def parse_length(text: str) -> int:
    return int(text[:-2]) * 1024 if text.endswith("Ki") else int(text)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--lengths", default="32Ki,64Ki,128Ki,256Ki")
    parser.add_argument("--cap-gb", type=float, default=80.0)
    parser.add_argument("--minutes", type=float, default=9.0)
    parser.add_argument("--json", type=Path, default=Path(__file__).parent / "results" / "levers-gpu.json")
    options = parser.parse_args()
    if not torch.cuda.is_available():
        print("this benchmark needs a GPU; benchmarks/levers.py counts without one", file=sys.stderr)
        return 2
    start, total = time.monotonic(), torch.cuda.get_device_properties(0).total_memory
    name = torch.cuda.get_device_name(0)
    peak = next((value for key, value in PEAK_TFLOPS.items() if key in name), None)
    choice = choose_kernel("auto", Need(HEAD_DIM, False, False, False), torch.device("cuda"))
    windowed = choose_kernel("auto", Need(HEAD_DIM, True, False, False), torch.device("cuda"), WINDOW)
    link = measure_link()
    torch.cuda.set_per_process_memory_fraction(min(1.0, options.cap_gb * 1e9 / total))
    lengths = [parse_length(text) for text in options.lengths.split(",")]
    rows = measure_speed(choice.name, lengths, start + 0.6 * 60 * options.minutes, peak)
    draw_copies(choice.name, lengths[0], options.json.with_suffix(".svg"))
    longest = {
        side: find_longest(windowed.name, is_ours=is_ours, deadline=start + share * 60 * options.minutes)
        for side, is_ours, share in (("ours", True, 0.82), ("(b)", False, 1.0))
    }
    report = {
        "machine": {"gpu": name, "memory_gb": total / 1e9, "torch": torch.__version__, "cuda": torch.version.cuda,
                    "host_link_gb_per_second": link / 1e9, "cap_gb": options.cap_gb},
        "kernel": {"name": choice.name, "why": choice.reason},
        "speed": rows,
        "offload_not_hidden": find_exposed_shares(rows, link),
        "longest_row_tokens": longest,
    }  # fmt: skip
    options.json.write_text(json.dumps(report, indent=1) + "\n")
    print(f"longest row: {longest}")
    return int(not meets_targets(rows, longest))


def meets_targets(rows: list[dict[str, Any]], longest: dict[str, int]) -> bool:
    by_key = {(row["tokens"], row["side"]): row for row in rows if "seconds" in row}
    bars = {"longest row at least 1.4x (b)'s": longest["ours"] >= 1.4 * longest["(b)"]}
    for tokens in sorted({row["tokens"] for row in rows if row["tokens"] >= 2**17}):
        ours, theirs = by_key.get((tokens, "ours")), by_key.get((tokens, "(b)"))
        if ours is None:
            bars[f"{tokens} tokens run"] = False
            continue
        if theirs is not None:
            bars[f"{tokens} tokens: at least 1.2x (b)'s speed"] = ours["seconds"] <= theirs["seconds"] / 1.2
        if ours["mfu"] is not None:
            bars[f"{tokens} tokens: at least 40 % of peak"] = ours["mfu"] >= 0.4
    for name, is_met in bars.items():
        print(f"  {'met   ' if is_met else 'SHORT '} {name}")
    return all(bars.values())


if __name__ == "__main__":
    sys.exit(main())
