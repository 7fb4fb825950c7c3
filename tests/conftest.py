"""Which tests run where: grids on request, GPU tests where there is a GPU."""

import os

import pytest
from hypothesis import HealthCheck, settings

settings.register_profile(
    "ulysses", deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large]
)
settings.load_profile("ulysses")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if "full" in item.keywords and not os.environ.get("ULYSSES_FULL"):
            item.add_marker(pytest.mark.skip(reason="whole grid: make test-full"))
        if "gpu" in item.keywords and not _has_gpu():
            item.add_marker(pytest.mark.skip(reason="needs a GPU"))


def _has_gpu() -> bool:
    import torch

    return torch.cuda.is_available()
