"""Chooses how the experts of a model run: by one of transformers' implementations, or by torch's products. Each runs
on one block of the model's class, with its widths: uneven groups of tokens, and an expert without any. Its result and
all of its gradients must be there, and equal those of a loop over experts in float32."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

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

# transformers has two more (integrations/moe.py). batched_mm copies weights for each token. deepgemm has no backward
# and raises nothing: experts would get no gradients.
SPEED_CLASSES = {"grouped_mm": 0, "sonicmoe": 0, "eager": 1}  # eager waits for the GPU at each expert
FOREIGN = ("sonicmoe",)  # of packages, or from the hub
DISTRIBUTIONS = ("kernels", "nvidia-cutlass-dsl", "apache-tvm-ffi", "transformers", "triton")
TOLERANCE = {torch.bfloat16: 0.1, torch.float32: 1e-3}  # as for recurrences
NUM_COMPARED, MOST_TIMED, NUM_TIMED = 96, 4096, 3
MOST_ELEMENTS = 1 << 27  # of the block: experts beyond it are left out, but for those that a token needs
SOURCES = Path(__file__).parent


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
    ) -> None:
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
        block.num_experts = min(num_all, max(self.num_chosen + 2, MOST_ELEMENTS // num_elements))
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
    return choose_once(facts, SOURCES, choose, SPEED_CLASSES.__contains__)


def find_missing_package(device: torch.device) -> str:
    """Why SonicMoE's kernels, which the package `kernels` takes from the hub, cannot be loaded here, or ''."""
    if device.type != "cuda":
        return "needs a GPU"
    from transformers.integrations.sonicmoe import is_sonicmoe_loadable

    try:
        is_sonicmoe_loadable(raise_error=True)
    except ImportError as error:
        return describe_error(error).partition(". ")[0]  # then it says what to set in transformers
    return ""
