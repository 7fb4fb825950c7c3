"""Tests on a GPU that operators compute more than 2^31 elements as they compute halves of them."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from support.large_rows import CASES, compare

pytestmark = pytest.mark.gpu
NEEDED_BYTES = 60 << 30  # logits: in bfloat16, and three times in float32


@pytest.fixture(scope="module")
def _alone(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """A world of one rank."""
    store: Path = tmp_path_factory.mktemp("store") / "store"
    dist.init_process_group("nccl", init_method=f"file://{store}", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.usefixtures("_alone")
@pytest.mark.parametrize("name", CASES)
def test_past_2_to_the_31_as_in_halves(name: str) -> None:
    if torch.cuda.mem_get_info()[0] < NEEDED_BYTES:
        pytest.skip(f"needs {NEEDED_BYTES >> 30} GiB of free GPU memory")
    case = CASES[name]
    assert compare(case, torch.device("cuda"), 2**31 // case.width + 3) <= 0.02
    torch.cuda.empty_cache()
