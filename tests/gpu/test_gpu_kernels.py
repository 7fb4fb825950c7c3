"""Tests every attention kernel that this GPU has against plain attention in float64, forward and backward.

Documents must not mix. Ulysses also runs on several ranks that share the GPU, each with an NCCL host id of its own.
"""

from pathlib import Path

import pytest
import torch
from support.attention import Problem, compute_reference, make_tensors
from support.shared_gpu import run_sharing_ranks

from ulysses_cli.plan.attention import BACK_ENDS, Need
from ulysses_cli.train.attention.documents import make_documents
from ulysses_cli.train.attention.kernels.choice import choose_kernel
from ulysses_cli.train.attention.kernels.native import Rule
from ulysses_cli.train.attention.kernels.operators import KERNELS
from ulysses_cli.train.attention.kernels.trial import KernelSearch
from ulysses_cli.train.attention.ulysses import ulysses_attention
from ulysses_cli.train.processes.groups import make_sequence_axis

pytestmark = pytest.mark.gpu
KINDS = {
    "plain": Problem(8, 2, 64, (700, 1, 130, 193), dtype=torch.bfloat16, scale=0.125),
    "one document": Problem(8, 8, 128, (1024,), dtype=torch.bfloat16, scale=0.09),
    "window": Problem(8, 2, 64, (700, 1, 130, 193), window=100, dtype=torch.bfloat16, scale=0.125),
    "softcap": Problem(8, 4, 64, (500, 524), softcap=3.0, dtype=torch.bfloat16, scale=0.125),
    "sinks": Problem(8, 4, 64, (500, 524), has_sinks=True, window=64, dtype=torch.bfloat16, scale=0.125),
    "heads of 256": Problem(4, 2, 256, (700, 1, 130, 193), window=100, dtype=torch.bfloat16, scale=0.0625),
    "heads of 512": Problem(4, 1, 512, (700, 1, 130, 193), dtype=torch.bfloat16, scale=0.04),
    "latent": Problem(8, 8, 192, (700, 1, 130, 193), value_dim=128, dtype=torch.bfloat16, scale=0.07),
}
FLEX = "flex_attention"
TOLERANCE = 0.03  # of the largest value; bfloat16 has 8 bits


def attend(kernel: str, problem: Problem, *rows: torch.Tensor, sinks: torch.Tensor | None = None) -> torch.Tensor:
    documents, rule = make_documents(problem.lengths, "cuda"), Rule(problem.scale, problem.window, problem.softcap)
    return ulysses_attention(*rows, documents, rule, axis=make_sequence_axis(None), kernel=kernel, sinks=sinks)


def run(kernel: str, problem: Problem, tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    leaves = {name: tensors[name].cuda().requires_grad_() for name in "qkv"}
    sinks = tensors["sinks"].cuda().requires_grad_() if problem.has_sinks else None
    out = attend(kernel, problem, *leaves.values(), sinks=sinks)
    out.backward(tensors["dout"].cuda())
    results = {"out": out.detach(), **{f"d{name}": leaf.grad for name, leaf in leaves.items()}}
    if sinks is not None:
        results["dsinks"] = sinks.grad
    return {name: tensor.cpu() for name, tensor in results.items() if tensor is not None}


def skip_unless_served(kernel: str, problem: Problem) -> None:
    need = Need(problem.dim, problem.window is not None, problem.softcap is not None, problem.has_sinks)
    obstacle = BACK_ENDS[kernel].find_obstacle(need, "cuda", torch.cuda.get_device_capability())
    obstacle = obstacle or KERNELS[kernel].find_missing()
    if obstacle:
        pytest.skip(f"{kernel} {obstacle}")


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("kernel", BACK_ENDS)
def test_a_kernel_is_exact(kernel: str, kind: str) -> None:
    problem = KINDS[kind]
    skip_unless_served(kernel, problem)
    tensors = make_tensors(problem)
    expected, result = compute_reference(problem, tensors), run(kernel, problem, tensors)
    for name, value in expected.items():
        error = (result[name].double() - value).abs().max() / value.abs().max()
        assert error < TOLERANCE, name


@pytest.mark.parametrize("kernel", BACK_ENDS)
def test_values_may_be_the_keys(kernel: str) -> None:
    """As in the full layers of Gemma 4: one tensor, whose gradient is the sum of both."""
    problem = KINDS["heads of 512"]
    skip_unless_served(kernel, problem)
    tensors = make_tensors(problem)
    expected = compute_reference(problem, {**tensors, "v": tensors["k"]})
    q, k = (tensors[name].cuda().requires_grad_() for name in "qk")
    out = attend(kernel, problem, q, k, k)
    results = [out, *torch.autograd.grad(out, (q, k), tensors["dout"].cuda())]
    for result, value in zip(results, (expected["out"], expected["dq"], expected["dk"] + expected["dv"]), strict=True):
        assert (result.cpu().double() - value).abs().max() / value.abs().max() < TOLERANCE


@pytest.mark.parametrize("kernel", BACK_ENDS)
def test_documents_never_mix(kernel: str) -> None:
    problem = KINDS["plain"]
    skip_unless_served(kernel, problem)
    tensors, other = make_tensors(problem), make_tensors(problem, seed=1)
    for name in ("q", "k", "v", "dout"):
        other[name][:, 700:] = tensors[name][:, 700:]  # only the first document changes
    torch.use_deterministic_algorithms(True)
    try:
        before, after = run(kernel, problem, tensors), run(kernel, problem, other)
    finally:
        torch.use_deterministic_algorithms(False)
    for name in ("out", "dq", "dk", "dv"):
        assert torch.equal(before[name][:, 700:], after[name][:, 700:]), name
    assert not torch.equal(before["out"][:, :700], after["out"][:, :700])


def test_auto_chooses_a_kernel_and_says_why() -> None:
    choice = choose_kernel("auto", KernelSearch(Need(128), torch.device("cuda")))
    assert choice.name in BACK_ENDS
    assert "exact here" in choice.reason


@pytest.mark.parametrize("kernel", BACK_ENDS)
def test_no_call_waits_for_the_device(kernel: str) -> None:
    problem = KINDS["plain"]
    skip_unless_served(kernel, problem)
    tensors = make_tensors(problem)
    run(kernel, problem, tensors)  # the first call compiles, loads and plans
    q, k, v = (tensors[name].cuda().requires_grad_() for name in "qkv")
    dout = tensors["dout"].cuda()
    torch.cuda.set_sync_debug_mode("error")
    try:
        attend(kernel, problem, q, k, v).backward(dout)
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("compiled", [False, True], ids=["other kernels", FLEX])
@pytest.mark.parametrize("num_ranks", [2, 4])
def test_ranks_that_share_a_gpu(num_ranks: int, compiled: bool) -> None:
    """Checks values; ranks that share a GPU say nothing about speed. Each rank compiles flex by itself."""
    kernels = [kernel for kernel in BACK_ENDS if (kernel == FLEX) == compiled]
    run_sharing_ranks(Path(__file__).with_name("nccl_rank.py"), num_ranks, kernels)
