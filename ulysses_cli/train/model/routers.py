"""The routers of a mixture of experts: finds them, names their layers for adapters to leave out, freezes them, and adds
their losses to that of the tokens. Takes a model and no recipe."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from ulysses_cli.data.steps import MicroBatch, Numbers
from ulysses_cli.train.loss import Loss, NextToken, Places

ROUTER_NAMES = ("gate", "router")  # a gate that is no router stands beside no experts


def find_routers(model: nn.Module) -> dict[str, nn.Module]:
    """By name, in the order of layers: transformers puts a router beside the experts that it chooses from."""
    found: dict[str, nn.Module] = {}
    for path, block in model.named_modules():
        children = dict(block.named_children())
        if "experts" in children:
            found |= {f"{path}.{name}": children[name] for name in ROUTER_NAMES if name in children}
    return found


def list_router_layers(model: nn.Module) -> list[str]:
    """The linear layers of all routers, as peft names layers that take no adapter: by the last two parts of a path."""
    found = {
        ".".join(f"{path}.{name}".rstrip(".").split(".")[-2:])
        for path, router in find_routers(model).items()
        for name, layer in router.named_modules()
        if isinstance(layer, nn.Linear)
    }
    return sorted(found)


def list_router_weights(model: nn.Module) -> list[nn.Parameter]:
    return [weight for router in find_routers(model).values() for weight in router.parameters() if weight.requires_grad]


def freeze_routers(weights: Iterable[nn.Parameter]) -> None:
    """Their gradients become zero, before anything sums them or measures their norm. They stay among the trained
    weights, so that checkpoints and exports hold them, in a group of the optimizer whose learning rate is 0."""
    for weight in weights:
        weight.register_hook(torch.zeros_like)


class Counts(NamedTuple):
    """What `load` returns for a micro-step: which of this rank's tokens are real, and the step's targets per token."""

    is_real: Tensor  # [B S]
    targets_per_token: float
    weights: Tensor | None = None  # of its targets


class RouterLosses(NextToken):
    """The loss of the next token and two of the routers, as means over the step's micro-steps, weighted by tokens.

    Balance of a layer: E sum_e f_e P_e, with f_e the share of tokens that are sent to expert e and P_e its mean score,
    over all real tokens of the micro-step on all ranks, and the mean over layers; k where experts are balanced.
    `is_pooled`: f and P are those of all layers together, by softmax, as transformers computes them. The z-loss is the
    mean square of the logits' log-normalizer. No token's score changes f. So the forward counts, one sum over all ranks
    follows, and each router adds its gradient when the backward reaches it, at once or tile by tile."""

    names: tuple[str, ...] = ("router_aux_loss", "router_z_loss")

    def __init__(
        self, model: nn.Module, aux_coef: float, z_coef: float, *, by_sigmoid: bool = False, is_pooled: bool = False
    ) -> None:
        self.aux_coef, self.z_coef = aux_coef, z_coef
        self.by_sigmoid, self.is_pooled = by_sigmoid and not is_pooled, is_pooled
        self.sizes: list[int] = []  # experts of each layer
        self.is_counting = False
        self.counts: Counts | None = None
        self.scale: Tensor | None = None  # of the sum of losses, in its backward
        for layer, (path, router) in enumerate(find_routers(model).items()):
            experts: Any = model.get_submodule(path.rpartition(".")[0]).experts
            self.sizes.append(int(experts.num_experts))
            router.register_forward_hook(partial(self._watch, layer))
        if is_pooled and len(set(self.sizes)) > 1:
            raise ValueError("layers have different numbers of experts, which cannot be pooled")

    def load(self, batch: MicroBatch, places: Numbers, send: Callable[[Any], Tensor]) -> Counts:
        assert batch.members is not None, "a rank's rows tell their padding"
        weights = super().load(batch, places, send)
        return Counts(send(batch.members.ravel() >= 0), batch.targets_per_token, weights)

    def begin(self, answers: Counts) -> None:
        self.counts, self.is_counting = answers, True
        self.places = [0] * len(self.sizes)  # the next token of each layer: tiles come in order, each time anew
        shape, device = (len(self.sizes), max(self.sizes)), answers.is_real.device
        self.loads, self.scores = (torch.zeros(shape, dtype=torch.float64, device=device) for _ in range(2))
        self.squares = torch.zeros(shape[0], dtype=torch.float64, device=device)

    def compute(self, loss: Loss, hidden: Tensor, labels: Tensor, places: Places | None, answers: Counts) -> Tensor:
        """Collective over all ranks: each calls it in every micro-step, also without a real token."""
        self.is_counting = False
        own = torch.cat([self.loads, self.scores, self.squares[:, None]], 1)
        sums = torch.cat([own.flatten(), answers.is_real.sum()[None].double()])
        world_size = dist.get_world_size() if dist.is_initialized() else 1
        if world_size > 1:
            dist.all_reduce(sums)
        num_layers, width = self.loads.shape
        num_tokens = sums[-1].clamp_min(1.0)
        loads, scores, squares = (sums[:-1].view(num_layers, -1) / num_tokens).split([width, width, 1], 1)
        if self.is_pooled:
            loads, scores = loads.mean(0, keepdim=True).expand_as(loads), scores.mean(0, keepdim=True)
        sizes = sums.new_tensor(self.sizes)[:, None]
        balance, square = (sizes * loads * scores).sum(1).mean(), squares.mean()
        targets = answers.targets_per_token
        # the derivative of what is minimized by a token's score, and by the square of its log-normalizer
        self.score_slopes = self.aux_coef * targets / num_layers * sizes * loads
        self.square_slope = self.z_coef * targets / num_layers
        share = sums[-1] * targets / world_size
        total = super().compute(loss, hidden, labels, places, answers.weights)[0]
        measured = torch.stack([balance, square]).mul(share).to(total.dtype)
        total = _Sum.apply(total, self.aux_coef * measured[0] + self.z_coef * measured[1], self)
        return torch.cat([total[None], measured])

    def _watch(self, layer: int, _: nn.Module, args: Any, output: tuple[Tensor, ...]) -> tuple[Tensor, ...] | None:
        """A router returns logits, the weights of the experts that it chose, and their numbers. In a recomputation
        nothing is counted; what runs without gradients then, or outside of a micro-step, is none of its tokens."""
        if self.counts is None or not (self.is_counting or torch.is_grad_enabled()):
            return None
        logits, weights, chosen = output[0].flatten(0, -2), output[1], output[2]
        start = self.places[layer]
        is_real = self.counts.is_real[start : start + len(logits)]
        self.places[layer] = (start + len(logits)) % len(self.counts.is_real)
        if self.is_counting:
            self._count(layer, logits.detach(), chosen, is_real)
        if not torch.is_grad_enabled() or not logits.requires_grad:
            return None
        return output[0], _Router.apply(weights, logits, self, layer, is_real), *output[2:]

    def _count(self, layer: int, logits: Tensor, chosen: Tensor, is_real: Tensor) -> None:
        size = logits.size(1)
        chosen = chosen.view(len(logits), -1).long()
        self.loads[layer].scatter_add_(0, chosen.flatten(), is_real[:, None].expand_as(chosen).flatten().double())
        scores, squares = self._score(logits)
        self.scores[layer, :size] += torch.where(is_real[:, None], scores, 0.0).sum(0, dtype=torch.float64)
        self.squares[layer] += torch.where(is_real, squares, 0.0).sum(dtype=torch.float64)

    def _score(self, logits: Tensor) -> tuple[Tensor, Tensor]:
        """The experts' scores, which sum to 1, and the square of the log-normalizer, in float32 or better."""
        logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
        if not self.by_sigmoid:
            return logits.softmax(-1), logits.logsumexp(-1).square()
        scores = logits.sigmoid()
        return scores / scores.sum(-1, keepdim=True).clamp_min(1e-20), logits.logsumexp(-1).square()

    def differentiate(self, layer: int, logits: Tensor, is_real: Tensor) -> Tensor:
        """The gradient of what is minimized by these tokens' logits."""
        assert self.scale is not None, "a backward begins at the sum of losses"
        with torch.enable_grad():
            own = logits.detach().requires_grad_()
            scores, squares = self._score(own)
            slopes = self.score_slopes[layer, : logits.size(1)].to(scores.dtype)
            sums = torch.where(is_real, scores @ slopes + self.square_slope * squares, 0.0).sum()
            (grad,) = torch.autograd.grad(sums, own, self.scale.to(sums.dtype))
        return grad


class _Sum(torch.autograd.Function):
    """Adds the routers' losses to the tokens'. Its backward runs before that of any layer, and keeps the factor by
    which the sum is scaled."""

    @staticmethod
    def forward(ctx: Any, loss: Tensor, others: Tensor, losses: RouterLosses) -> Tensor:
        ctx.losses = losses
        return loss + others

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dsum: Tensor) -> tuple[Tensor, None, None]:
        ctx.losses.scale = dsum
        return dsum, None, None


class _Router(torch.autograd.Function):
    """Passes on a router's weights. Its backward gives the logits the gradient of the routers' losses."""

    @staticmethod
    def forward(ctx: Any, weights: Tensor, logits: Tensor, losses: RouterLosses, layer: int, is_real: Tensor) -> Tensor:
        ctx.losses, ctx.layer, ctx.is_real = losses, layer, is_real
        ctx.save_for_backward(logits)
        return weights.view_as(weights)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dweights: Tensor) -> tuple[Tensor | None, ...]:
        (logits,) = ctx.saved_tensors
        return dweights, ctx.losses.differentiate(ctx.layer, logits, ctx.is_real), None, None, None
