"""Runs operators of a step on more than 2^31 elements and on halves of them: a case for each operator of the census
that may see so many (plan/rows/indexing.py)."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional

from ulysses_cli.train.elementwise import operators
from ulysses_cli.train.loss import HeadRule, compute_token_losses
from ulysses_cli.train.memory.tiled_loss import make_tiled_loss
from ulysses_cli.train.memory.tiled_mlp import TiledBlock, run_in_pieces

WIDTH, VOCABULARY = 4096, 128256
NUM_EMBEDDED = 1024  # tokens of the embedding; sums of its gradient are of any size
PAST = 2**31 // WIDTH + 3  # rows of WIDTH elements

# Takes rows [N, width] and, where it needs one, a gradient; returns tensors of N rows, then sums over rows.
RowFunction = Callable[..., tuple[list[Tensor], list[Tensor]]]


@dataclass(frozen=True)
class LargeCase:
    """`make_function` takes the device. `width`: of a row. `cpu_dtype`: in which a CPU runs it past 2^31 elements with
    12 GiB; None: in none."""

    make_function: Callable[[torch.device], RowFunction]
    width: int = WIDTH
    cpu_dtype: torch.dtype | None = None
    takes_indices: bool = False


def compare(case: LargeCase, device: torch.device, num_rows: int, dtype: torch.dtype = torch.bfloat16) -> float:
    """Returns the largest difference between the whole and its halves. Elements differ from row to row, and each half
    is computed by itself."""
    function = case.make_function(device)
    if case.takes_indices:
        rows = torch.arange(num_rows, device=device) * 7919 % NUM_EMBEDDED
    else:
        rows = torch.empty(num_rows, case.width, device=device, dtype=dtype)
        for part in rows.split(1 << 14):
            part.uniform_(-1, 1) if dtype.is_floating_point else part.random_(-8, 8)
    whole, sums = function(rows)
    totals = [torch.zeros_like(total, dtype=torch.float64) for total in sums]
    worst = 0.0
    for half in (slice(0, num_rows // 2), slice(num_rows // 2, num_rows)):
        results, parts = function(rows[half])
        for one, other in zip(whole, results, strict=True):
            for start in range(0, other.size(0), 1 << 14):
                end = min(start + (1 << 14), other.size(0))
                own = one[half.start + start : half.start + end].float()
                worst = max(worst, (own - other[start:end].float()).abs().max().item())
        for total, part in zip(totals, parts, strict=True):
            total += part
        del results, parts
    for total, own in zip(totals, sums, strict=True):
        worst = max(worst, ((own - total).abs().max() / total.abs().max().clamp(min=1)).item())
    return worst


def differentiate(function: Callable[[Tensor], Tensor], module: nn.Module | None = None) -> RowFunction:
    """With gradients of the rows, if they have one, and of the module's weights. The output's gradient is the output's
    sign: it differs from row to row, so that one read from another row is seen, and sums of it are exact."""

    def run(rows: Tensor) -> tuple[list[Tensor], list[Tensor]]:
        leaf = rows.detach().requires_grad_(rows.is_floating_point())
        out = function(leaf)
        out.backward(out.detach().sign())
        sums = []
        for weight in module.parameters() if module is not None else ():
            if weight.grad is not None:
                sums.append(weight.grad.double())
                weight.grad = None
        return [out.detach(), *([leaf.grad] if leaf.grad is not None else [])], sums

    return run


def _make_linear(device: torch.device) -> RowFunction:
    width = WIDTH if device.type == "cuda" else 8
    model = nn.Sequential(nn.Linear(WIDTH, width, bias=True)).to(device, torch.bfloat16)
    run_in_pieces(model, PAST, torch.bfloat16)
    return differentiate(model, model)


def _make_embedding(device: torch.device) -> RowFunction:
    model = nn.Sequential(nn.Embedding(NUM_EMBEDDED, WIDTH)).to(device, torch.bfloat16)
    run_in_pieces(model, PAST, torch.bfloat16)
    return differentiate(model, model)


def _make_layer_norm(device: torch.device) -> RowFunction:
    model = nn.Sequential(nn.LayerNorm(WIDTH)).to(device, torch.bfloat16)
    run_in_pieces(model, PAST, torch.bfloat16)
    return differentiate(model, model)


def _make_norm(device: torch.device, implementation: str = "torch") -> RowFunction:
    weight = torch.rand(WIDTH, device=device, dtype=torch.bfloat16)
    implementation = implementation if device.type == "cuda" else "blocks"

    def run(rows: Tensor) -> tuple[list[Tensor], list[Tensor]]:
        out, rstd = operators.normalize(rows, weight, 1e-5, "rounded", implementation)
        drows, dweight = operators.normalize_backward(out.sign(), rows, weight, rstd, "rounded", implementation)
        return [out, rstd, drows], [dweight.double()]

    return run


def _make_mlp(device: torch.device) -> RowFunction:
    class Mlp(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.gate_proj, self.down_proj = nn.Linear(WIDTH, 32, bias=False), nn.Linear(32, WIDTH, bias=False)

        def forward(self, hidden: Tensor) -> Tensor:
            return self.down_proj(functional.silu(self.gate_proj(hidden)))

    model = Mlp().to(device, torch.bfloat16)
    TiledBlock(model, lambda num_tokens: max(2, num_tokens // WIDTH))
    return differentiate(lambda rows: model(rows[None])[0], model)


def _make_tiled_loss(device: torch.device) -> RowFunction:
    head = nn.Linear(WIDTH, 64, bias=False).to(device, torch.bfloat16)
    loss = make_tiled_loss(head, HeadRule(), WIDTH, implementation="torch")

    def run(rows: Tensor) -> tuple[list[Tensor], list[Tensor]]:
        leaf = rows.detach().requires_grad_()
        total = loss(leaf[None], torch.full((1, rows.size(0)), 17, device=device))
        total.backward()
        assert leaf.grad is not None
        assert head.weight.grad is not None
        grad, head.weight.grad = head.weight.grad, None
        return [leaf.grad], [grad.double(), total.detach().double()[None]]

    return run


def _make_loss(device: torch.device) -> RowFunction:
    def compute(logits: Tensor) -> Tensor:
        return compute_token_losses(logits, torch.full(logits.shape[:1], 17, device=device), HeadRule())

    return differentiate(compute)


def _lose_rows(scores: Tensor) -> Tensor:
    labels = torch.full(scores.shape[:1], 17, device=scores.device)
    return functional.nll_loss(scores, labels, reduction="none")


def _make_gate(device: torch.device) -> RowFunction:
    how = "compiled" if device.type == "cuda" else "blocks"
    return lambda rows: ([operators.gate(rows, rows, how), *operators.gate_backward(rows, rows, rows, how)], [])


def _make_rotation(device: torch.device) -> RowFunction:
    """Of heads that are 128 wide; each row has its own angles."""
    implementation = "compiled" if device.type == "cuda" else "blocks"

    def run(rows: Tensor) -> tuple[list[Tensor], list[Tensor]]:
        heads = rows.view(1, rows.size(0), -1, 128).transpose(1, 2)
        angles = rows[None, :, :128].float()
        out = operators.rotate(heads, angles.cos().to(rows.dtype), angles.sin().to(rows.dtype), implementation)
        return [out.transpose(1, 2).reshape(rows.shape)], []

    return run


def _travel(rows: Tensor) -> tuple[list[Tensor], list[Tensor]]:
    """To the host and back, through memory that a GPU reads by itself where there is one."""
    host = torch.empty(rows.shape, dtype=rows.dtype, pin_memory=rows.is_cuda)
    host.copy_(rows)
    return [torch.empty_like(rows).copy_(host)], []


def _gather_chunk(rows: Tensor) -> tuple[list[Tensor], list[Tensor]]:
    """A chunk of heads, which lie as far apart as all of them."""
    return [rows.unflatten(1, (8, -1))[:, 5:7].contiguous().flatten(1)], []


def _exchange(rows: Tensor) -> tuple[list[Tensor], list[Tensor]]:
    received = torch.empty_like(rows)
    dist.all_to_all_single(received.view(-1), rows.contiguous().view(-1))  # of one rank
    return [received], []


def _drop(rows: Tensor) -> tuple[list[Tensor], list[Tensor]]:
    """Draws differ from run to run; the number of zeros hardly does."""
    dropped = torch.native_dropout(rows.abs().add_(1), 0.5, True)[0]
    return [], [(dropped == 0).sum(0).sum(dtype=torch.float64)[None]]


# By the census's names; further cases of an operator have a word behind a colon.
CASES: dict[str, LargeCase] = {
    "embedding": LargeCase(_make_embedding, cpu_dtype=torch.bfloat16, takes_indices=True),
    "embedding_backward": LargeCase(_make_embedding, takes_indices=True),
    "fused_rms_norm": LargeCase(_make_norm),
    "fused_rms_norm_backward": LargeCase(_make_norm),
    "layer_norm": LargeCase(_make_layer_norm),
    "layer_norm_backward": LargeCase(_make_layer_norm),
    "linear": LargeCase(_make_linear, cpu_dtype=torch.bfloat16),
    "linear_backward": LargeCase(_make_linear),
    "mlp": LargeCase(_make_mlp),
    "tiled_loss": LargeCase(_make_tiled_loss),
    "elementwise": LargeCase(lambda _: lambda rows: ([torch.add(rows, rows, alpha=2)], []), cpu_dtype=torch.int8),
    "elementwise: backward": LargeCase(lambda _: differentiate(functional.silu)),
    "reduction": LargeCase(
        lambda _: lambda rows: ([rows.sum(1)], [rows.sum(0).double()]),  # a CPU would copy them into another dtype
        cpu_dtype=torch.bfloat16,
    ),
    "compiled": LargeCase(_make_gate),
    "compiled: norm": LargeCase(partial(_make_norm, implementation="compiled")),
    "compiled: rotation": LargeCase(_make_rotation),
    "copy": LargeCase(
        lambda _: lambda rows: ([rows.unflatten(1, (8, -1)).transpose(1, 2).contiguous()], []), cpu_dtype=torch.int8
    ),
    "copy: a chunk of heads": LargeCase(lambda _: _gather_chunk, cpu_dtype=torch.int8),
    "copy: to the host and back": LargeCase(lambda _: _travel, cpu_dtype=torch.int8),
    "all_to_all": LargeCase(lambda _: _exchange, cpu_dtype=torch.int8),
    "concatenation": LargeCase(
        lambda _: lambda rows: ([torch.cat([rows[:, 1:], rows[:, :1]], 1)], []), cpu_dtype=torch.int8
    ),
    "log_softmax": LargeCase(lambda _: differentiate(partial(torch.log_softmax, dim=1)), VOCABULARY),
    "nll_loss": LargeCase(lambda _: differentiate(_lose_rows), VOCABULARY),
    "nll_loss: of an untiled loss": LargeCase(_make_loss, VOCABULARY),
    "dropout": LargeCase(lambda _: _drop),
}
