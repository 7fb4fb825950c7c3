"""Tests memory levers on a GPU: tensors that travel to host memory and back on side streams keep their values, every
step."""

import pytest
import torch
from support.levers import LENGTHS, Case, Levers, make_loss_model, make_row
from torch import Tensor

from ulysses_cli.train.attention.documents import make_documents
from ulysses_cli.train.memory.checkpointing import checkpoint_layers
from ulysses_cli.train.memory.offload import Offloader
from ulysses_cli.train.memory.tiling import WeightSums, adds_in_product
from ulysses_cli.train.processes.groups import make_sequence_axis

pytestmark = pytest.mark.gpu
SHAPE = {"num_hidden_layers": 6, "hidden_size": 256, "intermediate_size": 512}


def run(levers: Levers, offloaded: int | None, steps: int) -> list[list[Tensor]]:
    """Returns the gradients of each step."""
    model = make_loss_model(Case("llama", levers, dtype=torch.bfloat16, changes=SHAPE), make_sequence_axis(None)).cuda()
    offloader = None
    if offloaded is not None:
        offloader = Offloader(torch.device("cuda"), offloaded)
        checkpoint_layers(model.model, "save_attention", offloader.make_storage)
    results = []
    for _ in range(steps):
        batch = {name: tensor.cuda().repeat(1, 16) for name, tensor in make_row(LENGTHS).items()}
        model(**batch, documents=make_documents(LENGTHS * 16, "cuda")).backward()
        results.append([p.grad for p in model.parameters()])
        model.zero_grad(set_to_none=True)
    if offloader is not None:
        torch.cuda.synchronize()
        assert offloader.pool.num_bytes > 0
        offloader.pool.close()
        assert offloader.pool.num_bytes == 0
    return results


@pytest.mark.parametrize("offloaded", [1, 5, 6])
def test_offload_changes_no_value(offloaded: int) -> None:
    levers = Levers(loss_tile=64, mlp_tiles=3, checkpointing="save_attention")
    expected = run(levers, None, 1)[0]
    for grads in run(levers, offloaded, 4):
        for ours, reference in zip(grads, expected, strict=True):
            torch.testing.assert_close(ours, reference, rtol=0.02, atol=0.02 * reference.abs().max().item())


def test_saved_bytes_do_not_grow_with_layers() -> None:
    held = []
    for num_layers in (3, 9):
        case = Case("llama", dtype=torch.bfloat16, changes={**SHAPE, "num_hidden_layers": num_layers})
        model = make_loss_model(case, make_sequence_axis(None)).cuda()
        offloader = Offloader(torch.device("cuda"), num_layers)
        checkpoint_layers(model.model, "save_attention", offloader.make_storage)
        batch = {name: tensor.cuda().repeat(1, 64) for name, tensor in make_row(LENGTHS).items()}
        before = torch.cuda.memory_allocated()
        loss = model(**batch, documents=make_documents(LENGTHS * 64, "cuda"))
        offloader.release_all()
        held.append(torch.cuda.memory_allocated() - before)
        loss.backward()
    assert held[1] <= 1.05 * held[0]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_a_gpu_adds_products_to_float32_sums(dtype: torch.dtype) -> None:
    """In bfloat16 the sum of 32 tiles keeps float32's precision."""
    torch.manual_seed(0)
    linear = torch.nn.Linear(64, 48, bias=False, device="cuda", dtype=dtype)
    assert adds_in_product(linear.weight.device, dtype)
    sums, total = WeightSums(linear), torch.zeros(48, 64, device="cuda", dtype=torch.float64)
    with sums.collect():
        for _ in range(32):
            rows = torch.randn(128, 64, device="cuda", dtype=dtype, requires_grad=True)
            dout = torch.randn(128, 48, device="cuda", dtype=dtype)
            linear(rows).backward(dout)
            total += dout.double().mT @ rows.detach().double()
    torch.testing.assert_close(sums.take_sums()[0].double(), total, rtol=1e-3, atol=1e-3 * total.abs().max().item())
