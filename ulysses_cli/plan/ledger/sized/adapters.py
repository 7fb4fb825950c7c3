"""peft's adapters on sizes: what a linear layer with LoRA or DoRA computes (peft: tuners/lora/layer.py, dora.py)."""

from __future__ import annotations

from typing import Any

from ulysses_cli.plan.ledger.sized.quantized import LinearNf4, QuantizedLinear
from ulysses_cli.plan.recipe.lora_section import Lora
from ulysses_cli.plan.sizes import reductions
from ulysses_cli.plan.sizes.nn import Dropout, Identity, Linear, ModuleDict, Parameter, SizedModule
from ulysses_cli.plan.sizes.tensor import make

NAME = "default"


def add_adapters(model: Any, lora: Lora) -> None:
    """Freezes the model, and puts an adapted layer in the place of each layer that the recipe names."""
    model.requires_grad_(False)
    head, targets = model.get_output_embeddings(), lora.target_modules
    for path, layer in list(model.named_modules()):
        is_named = layer is not head if isinstance(targets, str) else path.endswith(_list_ends(path, targets))
        if isinstance(layer, Linear) and is_named:
            parent, _, name = path.rpartition(".")
            setattr(model.get_submodule(parent), name, LoraLinear(layer, lora))
    for name in lora.modules_to_save:
        for path, part in model.named_modules():
            if path.endswith(name):
                part.requires_grad_(True)


def _list_ends(path: str, targets: tuple[str, ...]) -> tuple[str, ...]:
    return tuple(target if target == path else f".{target}" for target in targets)


class LoraLinear(SizedModule):
    def __init__(self, base: Linear, lora: Lora) -> None:
        super().__init__()
        self.base_layer, self.in_features, self.out_features = base, base.in_features, base.out_features
        dtype = base.dtype if isinstance(base, QuantizedLinear) else base.weight.dtype
        drop = Dropout(lora.dropout) if lora.dropout else Identity()
        self.lora_dropout = ModuleDict({NAME: drop})
        self.lora_A = ModuleDict({NAME: Linear(base.in_features, lora.r, bias=False, dtype=dtype)})
        self.lora_B = ModuleDict({NAME: Linear(lora.r, base.out_features, bias=False, dtype=dtype)})
        self.lora_magnitude_vector = ModuleDict({NAME: Lengths(base)} if lora.use_dora else {})

    @property
    def weight(self) -> Parameter:
        return self.base_layer.weight

    @property
    def bias(self) -> Any:
        return self.base_layer.bias

    def forward(self, t: Any) -> Any:
        result = self.base_layer(t)
        if isinstance(self.base_layer, LinearNf4):
            result = result.clone()
        first, second, drop = (each[NAME] for each in (self.lora_A, self.lora_B, self.lora_dropout))
        t = t.to(first.weight.dtype)
        if NAME not in self.lora_magnitude_vector:
            return result + second(first(drop(t))) * 1.0
        base_result = result
        if self.training and isinstance(drop, Dropout):
            t, base_result = drop(t), None
        return result + self.lora_magnitude_vector[NAME](t, first, second, self.base_layer, base_result)


class Lengths(SizedModule):
    """DoraLinearLayer: the length of each row of the adapted weight is trained too."""

    def __init__(self, base: Linear) -> None:
        super().__init__()
        self.weight = Parameter(make((base.out_features,), base.weight.dtype))

    def forward(self, t: Any, first: Linear, second: Linear, base: Linear, base_result: Any) -> Any:
        identity = make((first.weight.shape[1],) * 2, first.weight.dtype)
        product = second(first(identity)).T
        del identity
        lengths: Any = self.weight
        weight: Any = base.weight
        norm = reductions.norm(weight + product.detach() * 1.0, dim=1).detach()
        scale = (lengths / norm).view(1, -1)
        result = second(first(t))
        if base_result is None:
            base_result = Linear.compute(t, weight, None)
        elif base.bias is not None:
            base_result = base_result - base.bias
        return (scale - 1) * base_result + scale * result * 1.0
