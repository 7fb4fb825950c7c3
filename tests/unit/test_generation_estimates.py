"""Tests what is predicted of generation: for which models, and the weights that a later token reads."""

from dataclasses import replace

import pytest
from support.model_shapes import get_shape

from ulysses_cli.hardware_table import load_hardware
from ulysses_cli.plan.planner.generation import (
    CHUNK_BYTES,
    choose_head_chunks,
    count_prefill_bytes,
    count_read_weights,
    predict_seconds,
)


def test_activations_are_predicted_where_the_ledger_knows_the_layers() -> None:
    shape = get_shape("Qwen/Qwen3-8B")
    assert count_prefill_bytes(shape, 4096, 2, 2, 2)
    assert count_prefill_bytes(replace(shape, num_parameters=None), 4096, 2, 2, 2) is None


@pytest.mark.parametrize(("num_sequences", "num_idle"), [(1, 120), (4, 96), (16, 0), (100, 0)])
def test_a_token_reads_the_experts_that_it_is_sent_to(num_sequences: int, num_idle: int) -> None:
    """48 layers of 128 experts, of which a token is sent to 8; the embedding is not the head."""
    shape = get_shape("Qwen/Qwen3-30B-A3B")
    assert shape.num_parameters is not None
    expected = shape.num_parameters - 151_936 * 2048 - 48 * num_idle * 3 * 2048 * 768
    assert count_read_weights(shape, num_sequences) == expected


def test_a_model_of_experts_answers_faster_than_a_dense_one() -> None:
    gpu = load_hardware().get_gpu("h100-80gb")
    seconds = [predict_seconds(get_shape(f"Qwen/{name}"), 4096, 1, 2, gpu) for name in ("Qwen3-30B-A3B", "Qwen3-32B")]
    experts, dense = (each[1] for each in seconds if each is not None)
    assert experts < dense / 5


def test_long_prompts_are_read_by_chunks_of_heads() -> None:
    """As few as hold a chunk's queries of the whole row to half a GiB on a rank, and no more than its heads allow."""
    shape = get_shape("Qwen/Qwen3-8B")  # 32 heads of 128
    for length, sp_size, expected in (
        (131072, 8, 1),
        (1 << 20, 8, 2),
        (1 << 22, 8, 4),
        (1 << 20, 1, 16),
        (65536, 1, 1),
    ):
        chunks = choose_head_chunks(shape, length, sp_size, 2)
        assert chunks == expected
        assert 2 * length * 128 * 32 // sp_size <= chunks * CHUNK_BYTES or chunks == 32 // sp_size
