"""Tests that irrelevant messages of libraries do not reach the screen."""

import logging

import pytest

import ulysses_cli.train  # noqa: F401 - sets which messages are shown


def test_a_missing_kernel_that_no_run_uses_is_not_reported(caplog: pytest.LogCaptureFixture) -> None:
    ops = pytest.importorskip("bitsandbytes.backends.cpu.ops")
    assert isinstance(ops.logger, logging.Logger)
    ops.logger.warning("Failed to load CPU gemm_4bit_forward from kernels-community: %s.", "no module")
    assert not caplog.records
    ops.logger.error("what stops the library")
    assert [record.message for record in caplog.records] == ["what stops the library"]
