"""How experts that are stacked in one tensor run: by which of transformers' implementations, or torch's products, and
with LoRA. A candidate runs on one block of the model's class, with its widths: uneven groups of tokens, and an expert
without any. Its result and all of its gradients must be there, and equal those of a loop over experts in float32. No
recipe and no group."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional
from transformers.integrations.moe import _grouped_mm

from ulysses_cli.train.choosing import (
    Candidate,
    Choice,
    Outcome,
    choose_once,
    describe_error,
    measure_error,
    measure_seconds,
    try_candidates,
    try_in_child,
)
from ulysses_cli.train.memory.tiled_mlp import need_gradient

# transformers has two more (integrations/moe.py). batched_mm copies weights for each token. deepgemm has no backward
# and raises nothing: experts would get no gradients.
SPEED_CLASSES = {"grouped_mm": 0, "sonicmoe": 0, "eager": 1}  # eager waits for the GPU at each expert
FOREIGN = ("sonicmoe",)  # of packages, or from the hub
DISTRIBUTIONS = ("kernels", "nvidia-cutlass-dsl", "apache-tvm-ffi", "transformers", "triton")
TOLERANCE = {torch.bfloat16: 0.1, torch.float32: 1e-3}  # as for recurrences
NUM_COMPARED, MOST_TIMED, NUM_TIMED = 96, 4096, 3
MOST_ELEMENTS = 1 << 27  # of the block: experts beyond it are left out, but for those that a token needs


def find_experts(model: nn.Module) -> dict[str, nn.Module]:
    """The experts of each layer, by name. peft puts its layers around them, and they are `experts.base_layer` then."""
    return {
        name: module
        for name, module in model.named_modules()
        if [part for part in name.split(".") if part != "base_layer"][-1:] == ["experts"]
        and hasattr(module, "num_experts")
        and not hasattr(module, "base_layer")
    }


class Inputs(NamedTuple):
    hidden: Tensor
    chosen: Tensor
    shares: Tensor
    slopes: Tensor  # of the result


class ExpertsProbe:
    """One block of experts with values of its own. `num_chosen`: experts of a token; `num_tokens`: of a tile."""

    def __init__(
        self,
        experts_class: type[nn.Module],
        config: Any,
        num_chosen: int,
        device: torch.device,
        dtype: torch.dtype,
        num_tokens: int,
        most_elements: int = MOST_ELEMENTS,
    ) -> None:
        self.most_elements = most_elements
        self.experts_class, self.config, self.num_chosen = experts_class, config, num_chosen
        self.device, self.dtype, self.num_tokens = device, dtype, num_tokens

    def make_block(self) -> tuple[Any, float]:
        """Without the experts that would take too much memory, and the share of those that it has. Values are such that
        none is lost in another's noise."""
        config, generator = copy.deepcopy(self.config), torch.Generator(self.device).manual_seed(0)
        with torch.device("meta"):
            block: Any = self.experts_class(config)
        num_elements = sum(each.numel() for each in block.parameters()) // block.num_experts
        num_all = block.num_experts
        block.num_experts = min(num_all, max(self.num_chosen + 2, self.most_elements // num_elements))
        for module in block.modules():
            for name, weight in module.named_parameters(recurse=False):
                stacked = weight.size(0) == num_all
                shape = (block.num_experts, *weight.shape[1:]) if stacked else weight.shape
                scale = weight.size(1 if block.is_transposed else 2) ** -0.5 if weight.dim() == 3 else 0.1
                drawn = torch.randn(shape, generator=generator, device=self.device, dtype=self.dtype) * scale
                module.register_parameter(name, nn.Parameter(drawn))
        return block, block.num_experts / num_all

    def draw(self, block: Any, num_tokens: int, *, is_even: bool = False) -> Inputs:
        """Of the experts the later ones get fewer tokens, and the last one none, unless they are even."""
        generator, num = torch.Generator().manual_seed(1), block.num_experts
        width = block.down_proj.size(2 if block.is_transposed else 1)
        odds = torch.ones(num) if is_even else torch.arange(num - 1, -1, -1).float()
        chosen = torch.multinomial(odds.expand(num_tokens, -1), self.num_chosen, generator=generator)
        hidden, slopes = (torch.randn(num_tokens, width, generator=generator) for _ in range(2))
        shares = torch.rand(num_tokens, self.num_chosen, generator=generator) + 0.1
        hidden, slopes, shares = (each.to(self.device, self.dtype) for each in (hidden, slopes, shares))
        return Inputs(hidden, chosen.to(self.device), shares, slopes)

    def run(self, block: Any, name: str, inputs: Inputs) -> dict[str, Tensor | None]:
        """The result and all gradients; None for one that is not there."""
        block.config._experts_implementation = name
        leaves = {each: getattr(inputs, each).detach().requires_grad_() for each in ("hidden", "shares")}
        leaves |= dict(block.named_parameters())
        out = block(leaves["hidden"], inputs.chosen, leaves["shares"])
        grads: tuple[Tensor | None, ...] = (None,) * len(leaves)
        if out.requires_grad:
            grads = torch.autograd.grad(out, list(leaves.values()), inputs.slopes.to(out.dtype), allow_unused=True)
        return {"result": out.detach(), **dict(zip(leaves, grads, strict=True))}


def compute_in_loop(block: Any, inputs: Inputs) -> dict[str, Tensor]:
    """The same in float32: one expert after the other, each by plain products of its own tokens."""
    hidden, shares, slopes = inputs.hidden.float(), inputs.shares.float(), inputs.slopes.float()
    weights = dict(block.named_parameters())
    found = {"result": torch.zeros_like(hidden), "hidden": torch.zeros_like(hidden), "shares": torch.zeros_like(shares)}
    found |= {name: torch.zeros_like(weight, dtype=torch.float32) for name, weight in weights.items()}
    for number in range(block.num_experts):
        tokens, places = torch.where(inputs.chosen == number)
        leaves = {"hidden": hidden[tokens], "shares": shares[tokens, places]}
        leaves |= {name: weight.detach()[number].float() for name, weight in weights.items()}
        leaves = {name: leaf.requires_grad_() for name, leaf in leaves.items()}
        out = _compute_expert(block, leaves) * leaves["shares"][:, None]
        grads = dict(zip(leaves, torch.autograd.grad(out, list(leaves.values()), slopes[tokens]), strict=True))
        found["result"].index_add_(0, tokens, out.detach())
        found["hidden"].index_add_(0, tokens, grads["hidden"])
        found["shares"][tokens, places] = grads["shares"]
        for name in weights:
            found[name][number] = grads[name]
    return found


def _compute_expert(block: Any, leaves: Mapping[str, Tensor]) -> Tensor:
    def multiply(rows: Tensor, name: str) -> Tensor:
        product = rows @ (leaves[name] if block.is_transposed else leaves[name].T)
        return product + leaves[f"{name}_bias"] if block.has_bias else product

    inner = multiply(leaves["hidden"], "gate_up_proj" if block.has_gate else "up_proj")
    return multiply(block._apply_gate(inner) if block.has_gate else block.act_fn(inner), "down_proj")


def try_experts(probe: ExpertsProbe, name: str) -> Outcome:
    """On a CPU nothing is timed: the classes of speed say enough. A tile has so many tokens that each expert gets as
    many as among all experts."""
    block, share = probe.make_block()
    inputs = probe.draw(block, NUM_COMPARED)
    try:
        found = probe.run(block, name, inputs)
    except Exception as error:  # noqa: BLE001 - a foreign package may raise anything
        return Outcome(f"failed its probe: {describe_error(error)}")
    for each, right in compute_in_loop(block, inputs).items():
        value = found[each]
        if value is None or not value.any():
            return Outcome(f"gives no gradient of {each}", is_lasting=True)
        error_share = measure_error(value, right)
        if not error_share <= TOLERANCE[probe.dtype]:  # or not a number
            what = each if each == "result" else f"gradient of {each}"
            return Outcome(f"differs from a loop in float32 by {error_share:.2g} in its {what}", is_lasting=True)
    if probe.device.type != "cuda":
        return Outcome()
    tile = probe.draw(block, max(1, int(share * min(MOST_TIMED, probe.num_tokens))), is_even=True)
    return Outcome(seconds=measure_seconds(lambda: probe.run(block, name, tile), probe.device, NUM_TIMED))


def choose_experts(
    wanted: str,
    probe: ExpertsProbe,
    missing: Mapping[str, str],
    run_trial: Callable[[Callable[[], Outcome]], Outcome] = try_in_child,
) -> Choice[str]:
    """The named implementation, or for `auto` the fastest one that is exact. `missing`: why not all ranks have one.
    Raises ValueError where none is exact, or the named one is not."""
    names = tuple(SPEED_CLASSES) if wanted == "auto" else (wanted,)

    def choose() -> Choice[str]:
        trials = {name: partial(try_experts, probe, name) for name in names}
        tally = try_candidates(
            Candidate(
                name,
                partial(run_trial, trial) if name in FOREIGN else trial,
                missing.get(name, ""),
                SPEED_CLASSES[name],
            )
            for name, trial in trials.items()
        )
        best, notes = tally.find_best(), "; ".join(tally.notes)
        if best is None:
            raise ValueError(f"no implementation of experts is exact here: {notes}")
        if wanted != "auto":
            return Choice(best, "as the recipe says")
        timed = f", forward and backward of a tile: {tally.format_times()}" if len(tally.seconds) > 1 else ""
        return Choice(best, f"exact here{timed}{f'; passed over: {notes}' if notes else ''}", tally.is_lasting)

    if probe.device.type != "cuda":
        return choose()
    facts = {
        "wanted": wanted, "experts": probe.experts_class.__qualname__, "config": probe.config.to_dict(),
        "chosen": probe.num_chosen, "tokens": probe.num_tokens, "dtype": str(probe.dtype), "missing": dict(missing),
        "gpu": torch.cuda.get_device_name(probe.device), "torch": torch.__version__,
    }  # fmt: skip
    return choose_once(facts, Path(__file__), choose, SPEED_CLASSES.__contains__)


def find_missing_package(device: torch.device) -> str:
    """Why SonicMoE's kernels, which the package `kernels` takes from the hub, cannot be loaded here, or ''."""
    if device.type != "cuda":
        return "needs a GPU"
    try:
        from transformers.integrations.sonicmoe import is_sonicmoe_loadable

        is_sonicmoe_loadable(raise_error=True)
    except Exception as error:  # noqa: BLE001 - a rank that fails here would be alone
        return describe_error(error).partition(". ")[0]  # then it says what to set in transformers
    return ""


# --- LoRA. Tensors, names and files are peft's; the forward is not. peft adds s B A to all weights in every forward,
# and makes the gradient of that sum: both as large as the experts, once for each tile, and in bfloat16 the sum loses
# most of a small update. Here each expert multiplies its tokens by A, then by B.

ADAPTER = "default"  # peft's name of an adapter
MATRICES = ("gate_up_proj", "up_proj", "down_proj")
ALIGNED_BYTES = 16  # of each row that a grouped product reads


def serve_adapted_experts(model: nn.Module, gather_whole: Callable[[nn.Module], None] | None = None) -> int:
    """Replaces the forward of all experts that peft has put its layers around, one for each parameter. Returns how many
    there are. `gather_whole` is called with each outermost layer: no module runs by itself in it, and ZeRO-3 gathers
    all weights with that one."""
    adapters: dict[Any, dict[str, Any]] = {}
    for wrapper in [each for each in model.modules() if getattr(each, "parameter_name", None) in MATRICES]:
        if wrapper.get_base_layer() not in adapters and gather_whole is not None:
            gather_whole(wrapper)
            wrapper.register_forward_pre_hook(need_gradient)
        adapters.setdefault(wrapper.get_base_layer(), {})[wrapper.parameter_name] = wrapper
        wrapper.forward = _make_passing(wrapper.base_layer)
    for experts, own in adapters.items():
        experts.forward = AdaptedExperts(experts, own).run
    return len(adapters)


def _make_passing(module: Any) -> Callable[..., Any]:
    """An attribute of a module that is a module itself would be a part of it."""
    return lambda *inputs: module(*inputs)


class AdaptedExperts:
    """Computes experts with their adapters. S pairs of a token and one of its k experts are sorted by expert."""

    def __init__(self, experts: Any, adapters: Mapping[str, Any]) -> None:
        self.experts, self.adapters = experts, adapters

    def run(self, hidden: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
        """Takes tokens [N, H], the numbers of their experts and the weights of these [N, k]. Returns [N, H]."""
        experts, num_chosen = self.experts, chosen.size(-1)
        numbers, order = torch.sort(chosen.flatten())
        place = torch.empty_like(order)
        place[order] = torch.arange(order.size(0), device=order.device)
        own = torch.arange(experts.num_experts, device=numbers.device, dtype=numbers.dtype)
        ends = torch.searchsorted(numbers, own, right=True, out_int32=True)
        rows = _spread(hidden, order, place, num_chosen)
        inner = self.multiply("gate_up_proj" if experts.has_gate else "up_proj", rows, numbers, ends)
        inner = experts._apply_gate(inner) if experts.has_gate else experts.act_fn(inner)
        out = self.multiply("down_proj", inner, numbers, ends)
        if experts.has_post_expert_norm:
            out = experts.post_expert_norm(out)
        out = out * _spread(weights.reshape(-1, 1), order, place, 1)
        return _Sum.apply(out, order, place, num_chosen).to(hidden.dtype)

    def multiply(self, name: str, rows: Tensor, numbers: Tensor, ends: Tensor) -> Tensor:
        """[S, in] to [S, out], by each expert's weight of that name. `ends`: one for each expert."""
        experts = self.experts
        weight = getattr(experts, name)
        out = _grouped_mm(rows, weight if experts.is_transposed else weight.mT, ends)
        if experts.has_bias:
            out = out + getattr(experts, f"{name}_bias")[numbers]
        if name not in self.adapters:
            return out
        adapter = self.adapters[name]
        first, second = split_experts(
            adapter.lora_A[ADAPTER].weight, adapter.lora_B[ADAPTER].weight, experts.num_experts
        )
        update = _grouped_mm(_grouped_mm(rows, first.mT, ends), second, ends)
        return out.add_(update, alpha=adapter.scaling[ADAPTER])


def split_experts(first: Tensor, second: Tensor, num_experts: int) -> tuple[Tensor, Tensor]:
    """Each expert's A [E, r, in] and B [E, r, out] of peft's [E r, in] and [out, r E], with zeros behind the rank where
    a row of r numbers would not be aligned."""
    first = first.view(num_experts, -1, first.size(1))
    second = second.view(second.size(0), -1, num_experts).permute(2, 1, 0)
    if missing := -first.size(1) % (ALIGNED_BYTES // first.element_size()):
        first, second = (functional.pad(each, (0, 0, 0, missing)) for each in (first, second))
    return first, second.contiguous()


def _spread(rows: Tensor, order: Tensor, place: Tensor, num_copies: int) -> Tensor:
    spread: Tensor = _Copies.apply(rows, order, place, num_copies)
    return spread


class _Copies(torch.autograd.Function):
    """So many copies of each row, in another order. The gradient is a sum in a fixed order, not by atomics."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, order: Tensor, place: Tensor, num_copies: int) -> Tensor:
        ctx.num_copies = num_copies
        ctx.save_for_backward(order, place)
        return rows[order // num_copies]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dcopies: Tensor) -> tuple[Tensor | None, ...]:
        _, place = ctx.saved_tensors
        return _sum_copies(dcopies, place, ctx.num_copies), None, None, None


class _Sum(torch.autograd.Function):
    """The sum of so many rows that belong together: the other way round."""

    @staticmethod
    def forward(ctx: Any, copies: Tensor, order: Tensor, place: Tensor, num_copies: int) -> Tensor:
        ctx.num_copies = num_copies
        ctx.save_for_backward(order, place)
        return _sum_copies(copies, place, num_copies)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dsum: Tensor) -> tuple[Tensor | None, ...]:
        order, _ = ctx.saved_tensors
        return dsum[order // ctx.num_copies], None, None, None


def _sum_copies(copies: Tensor, place: Tensor, num_copies: int) -> Tensor:
    return copies[place].view(-1, num_copies, copies.size(-1)).sum(1)
