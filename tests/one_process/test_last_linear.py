"""Tests that a recomputation stops before a layer's last product under ZeRO-3's linear layer, with the same values to
the last bit. Under DeepSpeed's engine tests/ranks/test_levers_on_ranks.py compares values with the plain model's."""

from collections import Counter
from typing import Any

import pytest
import torch
from support.levers import LENGTHS, SHARDED, Case, Levers, make_loss_model, make_row
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from ulysses_cli.train.attention.documents import make_documents
from ulysses_cli.train.memory import tiled_mlp
from ulysses_cli.train.processes.groups import make_sequence_axis

CHECKPOINTED = Case("llama", Levers(checkpointing="save_attention"), changes={"intermediate_size": 40})
INNER = 40


class CountedProducts(TorchDispatchMode):
    """Counts matrix products by the number of elements that each sums up."""

    def __init__(self) -> None:
        super().__init__()
        self.widths: Counter[int] = Counter()

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function in (torch.ops.aten.mm.default, torch.ops.aten.addmm.default):
            self.widths[args[-2].size(-1)] += 1
        return function(*args, **(kwargs or {}))


def run(case: Case) -> tuple[dict[str, Tensor], Counter[int], int]:
    """Returns loss and gradients, the products of a step, and the number of layers."""
    model = make_loss_model(case, make_sequence_axis(None))
    with CountedProducts() as counted:
        loss = model(**make_row(LENGTHS), documents=make_documents(LENGTHS))
        loss.backward()
    grads = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    return {"loss": loss.detach(), **grads}, counted.widths, model.model.config.num_hidden_layers


@pytest.mark.parametrize("lora", [(), ("o_proj",), ("down_proj",)], ids=["full", "adapters", "adapted last"])
@pytest.mark.parametrize("kind", ["llama", "gemma2", "phi3"])
def test_values_are_those_of_deepspeeds_linear_layer(
    kind: str, lora: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(nn.functional, "linear", SHARDED.replacement)
    case = Case(kind, CHECKPOINTED.levers, lora=lora)
    ours, *_ = run(case)
    monkeypatch.setattr("support.levers.save_before_last_products", lambda *_: 0)
    expected, *_ = run(case)
    assert ours.keys() == expected.keys()
    for name, right in expected.items():
        assert torch.equal(ours[name], right), name


def test_a_recomputation_leaves_out_the_last_product(monkeypatch: pytest.MonkeyPatch) -> None:
    """Products that sum over the MLP's inner width: the last linear layer's in the forward and in the recomputation,
    and in the backward those of the two first layers for their input's gradient."""
    monkeypatch.setattr(nn.functional, "linear", SHARDED.replacement)
    _, widths, num_layers = run(CHECKPOINTED)
    assert widths[INNER] == (1 + 2) * num_layers
    monkeypatch.setattr("support.levers.save_before_last_products", lambda *_: 0)
    _, widths, _ = run(CHECKPOINTED)
    assert widths[INNER] == (2 + 2) * num_layers


def test_torchs_own_linear_layer_needs_no_help() -> None:
    _, widths, num_layers = run(CHECKPOINTED)
    assert widths[INNER] == (1 + 2) * num_layers


def test_a_layer_whose_forward_is_replaced_stays_as_it_is() -> None:
    model = make_loss_model(Case(), make_sequence_axis(None)).model
    down = model.model.layers[0].mlp.down_proj
    down.forward = forward = lambda wide: wide
    assert tiled_mlp.save_before_last_products(model, SHARDED) == model.config.num_hidden_layers - 1
    assert down.forward is forward
