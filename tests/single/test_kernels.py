"""Kernels on one process: the chooser, refusals, shapes under fake tensors, and what the counters see."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from attention import Problem, compute_reference, make_tensors
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.flop_counter import FlopCounterMode

from ulysses_cli.plan.attention import BACK_ENDS, Need, list_able
from ulysses_cli.train import kernels, torch_kernels
from ulysses_cli.train.documents import make_documents
from ulysses_cli.train.exchange import make_axis
from ulysses_cli.train.kernel_choice import choose_kernel
from ulysses_cli.train.torch_kernels import Rule
from ulysses_cli.train.ulysses import ulysses_attention

CPU = torch.device("cpu")
NEEDS = [
    Need(64, dtype="float32"),
    Need(128, has_window=True),
    Need(256, has_window=True, has_softcap=True),
    Need(64, has_window=True, has_sinks=True, dtype="float32"),
]


@pytest.mark.parametrize("need", NEEDS, ids=str)
def test_auto_proves_what_it_takes(need: Need) -> None:
    choice = choose_kernel("auto", need, CPU)
    assert (choice.name, choice.reason) == ("sdpa", "the only one that runs on a CPU")
    assert choose_kernel("sdpa", need, CPU).reason == "as the recipe says"


def test_what_a_kernel_cannot_do_names_those_that_can() -> None:
    with pytest.raises(
        ValueError, match="attention cudnn runs on cuda only; for this model and device there are: sdpa"
    ):
        choose_kernel("cudnn", Need(64), CPU)


@pytest.mark.parametrize("fault", ["window", "bounds", "nan", "crash"])
def test_a_kernel_that_is_wrong_is_not_taken(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The probe must see a lost window, lost bounds, NaN and a crash."""
    right = kernels.KERNELS["sdpa"]

    def forward(q: Any, k: Any, v: Any, documents: Any, rule: Rule) -> Any:
        if fault == "crash":
            raise RuntimeError("no kernel image is available")
        if fault == "window":
            rule = Rule(rule.scale, rule.window_tokens and rule.window_tokens + 1, rule.softcap)
        if fault == "bounds":
            documents = make_documents((documents.num_tokens,))
        out, lse = right.forward(q, k, v, documents, rule)
        return (out * torch.nan if fault == "nan" else out), lse

    monkeypatch.setitem(kernels.KERNELS, "sdpa", kernels.Kernel(forward, right.backward))
    with pytest.raises(ValueError, match=r"no attention kernel is exact here: sdpa (differs|failed)"):
        choose_kernel("auto", Need(64, has_window=True, dtype="float32"), CPU)


def test_every_back_end_has_a_kernel_and_sdpa_serves_all() -> None:
    assert kernels.KERNELS.keys() == BACK_ENDS.keys()
    for need in NEEDS:
        assert list_able(need, "cpu") == ["sdpa"]
        assert "sdpa" in list_able(need, "cuda")


@pytest.mark.parametrize("rule", [Rule(0.3), Rule(0.3, 100), Rule(0.3, None, 2.0), Rule(0.3, 700, 2.0)], ids=str)
@pytest.mark.parametrize("heads", [(4, 4), (4, 2), (6, 1)], ids=str)
def test_long_documents_cross_blocks(rule: Rule, heads: tuple[int, int]) -> None:
    """Documents longer than a block of the blockwise kernel, in float64."""
    problem = Problem(
        *heads, lengths=(700, 1, 130, 1100), window=rule.window_tokens, softcap=rule.softcap, scale=rule.scale
    )
    tensors = make_tensors(problem)
    expected = compute_reference(problem, tensors)
    leaves = [tensors[name].clone().requires_grad_() for name in "qkv"]
    out = ulysses_attention(*leaves, make_documents(problem.lengths), rule, axis=make_axis(None), kernel="sdpa")
    grads = torch.autograd.grad(out, leaves, tensors["dout"])
    for name, found in zip(("out", "dq", "dk", "dv"), (out, *grads), strict=True):
        torch.testing.assert_close(found, expected[name], rtol=1e-10, atol=1e-12)


def test_memory_grows_with_tokens_not_with_their_square() -> None:
    """The largest tensor of a windowed, capped forward and backward over 4 times the tokens is 4 times as large."""
    from torch.utils._python_dispatch import TorchDispatchMode

    class Largest(TorchDispatchMode):
        numel = 0

        def __torch_dispatch__(self, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            found = op(*args, **(kwargs or {}))
            for leaf in torch.utils._pytree.tree_leaves(found):
                if isinstance(leaf, torch.Tensor):
                    self.numel = max(self.numel, leaf.numel())
            return found

    sizes = []
    for tokens in (4096, 16384):
        q = torch.randn(tokens, 1, 4)
        with Largest() as seen:
            out, lse = torch_kernels.forward_blocks(q, q, q, Rule(0.5, 64, 2.0))
            torch_kernels.backward_blocks(out, q, q, q, out, lse, Rule(0.5, 64, 2.0))
        sizes.append(seen.numel)
    assert sizes[0] <= max(4096 * 4, torch_kernels.BLOCK_TOKENS**2)
    assert sizes[1] <= max(16384 * 4, torch_kernels.BLOCK_TOKENS**2)


def test_shapes_are_known_without_data() -> None:
    with FakeTensorMode():
        q, k = torch.empty(10, 4, 8, requires_grad=False), torch.empty(10, 2, 8)
        bounds = torch.empty(2, dtype=torch.int32)
        row = (bounds, (10,), "sdpa", 0.3, None, None)
        out, lse = kernels.attend(q, k, k, None, *row)
        grads = kernels.attend_backward(out, q, k, k, out, lse, *row)
    assert (out.shape, lse.shape, lse.dtype) == ((10, 4, 8), (4, 10), torch.float32)
    assert [grad.shape for grad in grads] == [(10, 4, 8), (10, 2, 8), (10, 2, 8)]


@pytest.mark.parametrize("window", [None, 1, 3, 100])
def test_flops_count_what_is_looked_at(window: int | None) -> None:
    """4 FLOPs for each head_dim element of each visible pair forward, 10 backward; masked pairs are not work."""
    lengths = (5, 9, 1)
    q = torch.randn(1, 15, 4, 8, requires_grad=True)
    k = torch.randn(1, 15, 2, 8, requires_grad=True)
    pairs = sum(min(at + 1, window or length) for length in lengths for at in range(length))
    with FlopCounterMode(display=False) as counter:
        out = ulysses_attention(
            q, k, k, make_documents(lengths), Rule(0.3, window), axis=make_axis(None), kernel="sdpa"
        )
        forward = counter.get_total_flops()
        out.sum().backward()
    assert forward == 4 * pairs * 4 * 8
    assert counter.get_total_flops() - forward == 10 * pairs * 4 * 8


def test_documents_are_checked() -> None:
    with pytest.raises(ValueError, match="must be positive"):
        make_documents((3, 0))
    with pytest.raises(ValueError, match="must be positive"):
        make_documents(())
    with pytest.raises(ValueError, match="32-bit"):
        make_documents((2**31,))
