"""Tests what is counted beside memory: FLOPs by hand, generation, families without a formula, and what a rank asks."""

from dataclasses import replace
from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st
from support.families import make_config
from support.model_shapes import get_shape
from support.recipes import load

from ulysses_cli.hardware_table import load_hardware
from ulysses_cli.hub import find_model_shape
from ulysses_cli.plan.flops import (
    compute_layers_flops,
    compute_model_flops,
    compute_pair_flops,
)
from ulysses_cli.plan.ledger.job import check_known, is_known, make_job
from ulysses_cli.plan.ledger.ledger import weigh_ledger
from ulysses_cli.plan.ledger.products import count_products
from ulysses_cli.plan.ledger.weights import read_weights
from ulysses_cli.plan.levers import Levers
from ulysses_cli.plan.models.shape import read_model_shape
from ulysses_cli.plan.planner.estimate import explain_memory
from ulysses_cli.plan.planner.generation import (
    CHUNK_BYTES,
    choose_head_chunks,
    count_prefill_bytes,
    count_read_weights,
    predict_seconds,
)
from ulysses_cli.plan.planner.lever_choice import choose_levers
from ulysses_cli.plan.problem import RecipeError
from ulysses_cli.plan.rows.ring import count_pairs

CONFIG = {
    "model_type": "llama", "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 128,
}  # fmt: skip


@given(st.integers(1, 60), st.none() | st.integers(1, 80))
def test_pairs_are_counted_within_a_causal_window(length: int, window: int | None) -> None:
    pairs = sum(1 for q in range(length) for k in range(q + 1) if window is None or q - k < window)
    assert count_pairs(length, window) == pairs


def test_a_small_model_by_hand() -> None:
    shape = read_model_shape(CONFIG, "test")
    per_layer = 64 * 64 + 2 * 64 * 32 + 64 * 64 + 3 * 64 * 96  # q, k and v, out, MLP
    tokens, pairs = 10 + 3, 55 + 6
    forward = 2 * tokens * (2 * per_layer + 64 * 128) + 2 * 4 * 4 * 16 * pairs
    assert compute_model_flops(shape, [10, 3]) == 3 * forward
    saved = compute_model_flops(shape, [10, 3]) - compute_model_flops(shape, [10, 3], 4)
    assert saved == 9 * 6 * shape.hidden_size * shape.vocab_size  # the head of 9 tokens that are no targets
    assert compute_layers_flops(shape, [10, 3]) == forward - 2 * tokens * 64 * 128
    assert compute_pair_flops(shape) == 3 * 2 * 4 * 4 * 16


def test_only_experts_that_a_token_reaches_count() -> None:
    experts = {"num_local_experts": 8, "num_experts_per_tok": 2}
    shape = read_model_shape({**CONFIG, "model_type": "mixtral", **experts, "head_dim": 16}, "test")
    dense = read_model_shape(CONFIG, "test")
    more = 3 * 2 * 2 * (3 * 64 * 96 + 64 * 8)  # forward and backward, two layers, one more expert and the router
    assert compute_model_flops(shape, [1]) - compute_model_flops(dense, [1]) == more


@pytest.mark.parametrize("experts", [{}, {"num_local_experts": 8, "num_experts_per_tok": 2}])
def test_a_model_whose_file_does_not_run_on_sizes_counts_as_one_of_its_widths(experts: dict[str, int]) -> None:
    """It is not listed, and may train on one rank for each row."""
    config = {**CONFIG, **experts, "head_dim": 16, "max_position_embeddings": 64}
    other = read_model_shape({**config, "model_type": "novel"}, "x")
    shape = read_model_shape({**config, "model_type": "mixtral" if experts else "llama"}, "x")
    assert count_products(other) == count_products(shape)._replace(norms_heads=False)
    assert compute_model_flops(other, [10, 3]) == compute_model_flops(shape, [10, 3])


def test_vectors_of_layers_and_keys_that_a_layer_makes_count() -> None:
    """Gemma 4: all matrices of its modules but the embeddings, which no token is multiplied with."""
    config = {
        **{"model_type": "gemma4_text", "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 4},
        **{"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "global_head_dim": 32},
        **{"layer_types": ["sliding_attention", "full_attention"] * 2, "num_kv_shared_layers": 2},
        **{"use_double_wide_mlp": True, "hidden_size_per_layer_input": 8, "vocab_size_per_layer_input": 50},
    }
    shape = read_model_shape(config, "test")
    makes = 2 * (2 * 64 * 64 + 2 * 64 * 128) + 2 * 64 * 32 + 2 * 64 * 64  # q and out of all, k and v of the first two
    mlps = 2 * 3 * 64 * (96 + 192)
    vectors = 64 * 4 * 8 + 4 * 2 * 64 * 8  # their projection; a gate and an output in each layer
    assert count_products(shape)[:2] == (mlps, makes + vectors)


def test_a_model_of_an_unknown_family_is_refused_by_name() -> None:
    shape = read_model_shape({**make_config("llama").to_dict(), "model_type": "other"}, "owner/model")
    with pytest.raises(RecipeError, match="a model of type other"):
        check_known(shape)


GEMMA_4: list[dict[str, Any]] = [
    {}, {"hidden_size_per_layer_input": 0},
    {"num_hidden_layers": 12, "num_kv_shared_layers": 6, "use_double_wide_mlp": True},
    {"enable_moe_block": True, "top_k_experts": 2, "hidden_size_per_layer_input": 0},
]  # fmt: skip


@pytest.mark.parametrize("changes", GEMMA_4)
def test_every_kind_of_gemma_4_is_known(changes: dict[str, Any]) -> None:
    """Vectors of single layers, keys that later layers borrow, MLPs twice as wide, experts beside the MLP."""
    assert is_known(read_model_shape(make_config("gemma4_text", **changes).to_dict(), "any"))


def test_activations_are_predicted_where_the_ledger_knows_the_layers() -> None:
    shape = get_shape("Qwen/Qwen3-8B")
    assert count_prefill_bytes(shape, 4096, 2, 2, 2)
    assert count_prefill_bytes(replace(shape, model_type="other"), 4096, 2, 2, 2) is None


@pytest.mark.parametrize(("num_sequences", "num_idle"), [(1, 120), (4, 96), (16, 0), (100, 0)])
def test_a_token_reads_the_experts_that_it_is_sent_to(num_sequences: int, num_idle: int) -> None:
    """48 layers of 128 experts, of which a token is sent to 8; the embedding is not the head."""
    shape = get_shape("Qwen/Qwen3-30B-A3B")
    expected = read_weights(shape, None).num_elements - 151_936 * 2048 - 48 * num_idle * 3 * 2048 * 768
    assert count_read_weights(shape, num_sequences) == expected


def test_experts_may_read_a_narrower_vector() -> None:
    """Nemotron 3 Super: 12 of 120 billion weights read a token."""
    shape = get_shape("nvidia/NVIDIA-Nemotron-3-Super-120B-A12B-BF16")
    assert read_weights(shape, None).num_elements == pytest.approx(120.7e9, rel=1e-3)
    assert count_read_weights(shape) == pytest.approx(12.2e9, rel=0.01)
    read = sum(count_products(shape)[:2]) + 2 * shape.vocab_size * shape.hidden_size
    assert read == pytest.approx(count_read_weights(shape) + shape.vocab_size * shape.hidden_size, rel=0.01)


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


HOST = 200 << 30


@pytest.mark.parametrize(
    ("name", "memory", "key", "is_known"),
    [
        ("NVIDIA H100 80GB HBM3", 85e9, "h100-80gb", True),
        ("NVIDIA H100 PCIe", 85e9, "h100-pcie", True),
        ("NVIDIA A100-SXM4-40GB", 42e9, "a100-40gb", True),
        ("NVIDIA A100-SXM4-80GB", 84e9, "a100-80gb", True),
        ("NVIDIA GeForce RTX 4090", 25e9, "rtx-4090", True),
        ("NVIDIA RTX 6000 Ada Generation", 50e9, "rtx-6000-ada", True),
        ("NVIDIA H200", 150e9, "h200", True),
        ("Tesla V100-SXM2-32GB", 34e9, "rtx-5090", False),  # the nearest in size gives its rates
    ],
)
def test_a_device_is_recognised_and_keeps_its_own_memory(name: str, memory: float, key: str, is_known: bool) -> None:
    gpu, known = load_hardware().recognise(name, int(memory), HOST)
    assert (gpu.key, known) == (key, is_known)
    assert (gpu.memory_bytes, gpu.host_bytes_per_gpu) == (int(memory), HOST)


@pytest.mark.full
def test_advice_after_out_of_memory_needs_less_memory() -> None:
    recipe = load("model.name_or_path=Qwen/Qwen3-4B", "data.max_length=128Ki", "parallel.sp_size=4").recipe
    shape = find_model_shape(recipe).shape
    gpu = load_hardware().get_gpu("h100-80gb")
    tried = Levers()
    head, _, change = explain_memory(recipe, shape, tried, gpu).partition("; this needs less:\n")
    assert head.startswith("largest in ")
    assert head.count(" GiB") == 3
    advice = yaml.safe_load(change)
    settings = [f"{section}.{name}={value}" for section, output in advice.items() for name, value in output.items()]
    better = load(
        "model.name_or_path=Qwen/Qwen3-4B", "data.max_length=128Ki", "parallel.sp_size=4",
        *(setting.replace("True", "true") for setting in settings),
    ).recipe  # fmt: skip
    chosen = choose_levers(better, shape, gpu).levers
    before, after = (
        weigh_ledger(make_job(each, shape, levers, gpus_per_node=8)).gpu_peak_bytes
        for each, levers in ((recipe, tried), (better, chosen))
    )
    assert after < 0.95 * before
    small = replace(gpu, memory_bytes=1 << 30)
    assert "no lever and no shorter row helps: use more GPUs" in explain_memory(recipe, shape, tried, small)
