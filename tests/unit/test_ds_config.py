"""Tests the DeepSpeed config that a recipe makes, and what a user may set in it."""

from support.recipes import load

from ulysses_cli.plan.ds_config import find_contradictions, make_ds_config, merge_user_config
from ulysses_cli.plan.resolved import make_layout


def make(*overrides: str, offload_optimizer: str = "none", offload_param: str = "none") -> dict[str, object]:
    recipe = load(*overrides).recipe
    return make_ds_config(recipe, make_layout(recipe), offload_optimizer, offload_param)


def test_for_deepspeed_every_rank_is_data_parallel() -> None:
    made = make("parallel.dp_shard_size=3", "train.gradient_accumulation_steps=5", "train.micro_batch_size=2")
    assert made["train_micro_batch_size_per_gpu"] == 2
    assert made["train_batch_size"] == 2 * 5 * (3 * 4)
    assert "sequence_parallel_size" not in made


def test_gradients_travel_and_are_summed_in_float32() -> None:
    twice = "train.gradient_accumulation_steps=2"
    assert make(twice)["data_types"] == {"grad_accum_dtype": "fp32"}
    for other in ("model.dtype=float32", "parallel.zero_stage=1"):
        assert "data_types" not in make(twice, other)


def test_bfloat16_gradients_travel_where_a_sum_is_rounded_once() -> None:
    def travels(sp_size: int, *overrides: str) -> object:
        return make(f"parallel.sp_size={sp_size}", *overrides)["communication_data_type"]

    twice, keeps_more = "train.gradient_accumulation_steps=2", "deepspeed.data_types.grad_accum_dtype=fp32"
    assert {travels(1), travels(2), travels(1, twice), travels(1, keeps_more)} == {"bf16"}
    in_more = (twice, "parallel.dp_shard_size=2", keeps_more, "model.dtype=float32", "parallel.zero_stage=2")
    assert {travels(4), *(travels(2, each) for each in in_more)} == {"fp32"}
    assert travels(1, "deepspeed.gradient_predivide_factor=3") == "fp32"


def test_copies_and_offload() -> None:
    made = make("parallel.dp_replicate_size=2", offload_optimizer="cpu", offload_param="cpu")
    zero = made["zero_optimization"]
    assert zero["zero_hpz_partition_size"] == 4
    assert zero["offload_param"] == {"device": "cpu", "pin_memory": True}
    assert zero["offload_optimizer"] == {"device": "cpu", "pin_memory": True}
    assert "zero_hpz_partition_size" not in make()["zero_optimization"]


def test_a_users_keys_are_merged_and_the_recipes_win() -> None:
    made = make()
    given = ("deepspeed.zero_optimization.reduce_bucket_size=7", "deepspeed.wall_clock_breakdown=true")
    recipe = load(*given).recipe
    assert list(find_contradictions(recipe, made)) == []
    merged = merge_user_config(made, recipe.deepspeed)
    assert merged["zero_optimization"] == {**made["zero_optimization"], "reduce_bucket_size": 7}
    assert merged["wall_clock_breakdown"] is True
    assert "wall_clock_breakdown" not in made
