"""Tests each rule with a recipe that breaks it and the full message, and with one that keeps it."""

import json
from pathlib import Path

import pytest
from support.recipes import VALID, check, load, make_shape

from ulysses_cli.plan.files import take_lock
from ulysses_cli.plan.layout import compute_kv_heads
from ulysses_cli.plan.models.families import UNSERVED
from ulysses_cli.plan.problem import RecipeError
from ulysses_cli.plan.recipe.recipe import compute_recipe_hash
from ulysses_cli.plan.resolved import resolve
from ulysses_cli.plan.rules import check as check_module
from ulysses_cli.plan.rules import files as check_files
from ulysses_cli.plan.rules import model as check_model
from ulysses_cli.plan.rules import training as check_training

RANDOM = {"model_type": "llama", "hidden_size": 8}


def only(*overrides: str, num_processes: int | None = None, text: str = VALID, **changes: object) -> str:
    problems = check(*overrides, num_processes=num_processes, text=text, **changes)
    assert len(problems) == 1, [str(problem) for problem in problems]
    return str(problems[0]).strip()


def test_a_valid_recipe_has_no_problem() -> None:
    assert check(num_processes=4) == []


def test_every_rule_is_tested_here() -> None:
    tested = Path(__file__).read_text()
    of_model = (*check_model.MODEL_RULES, *check_model.ADAPTER_RULES, *check_model.POSITION_RULES)
    for rule in (*check_module.RULES, *of_model, *check_training.TRAINING_RULES, *check_files.RULES):
        assert f"def test_{rule.__name__}" in tested, rule.__name__


def test_check_process_count() -> None:
    assert only(num_processes=8) == (
        "r.yaml:4:3: parallel: dp_replicate_size x dp_shard_size x sp_size = 1 x 1 x 4 = 4, but the run has 8 processes"
        "\n\nhint: one of: --num-processes 4; parallel.dp_shard_size: 2; parallel.sp_size: 8; "
        "parallel.dp_replicate_size: 2"
    )
    assert check("parallel.dp_shard_size=2", num_processes=8) == []
    # 3 x 4 ranks: sp 12 would not divide the heads, so it is not suggested
    assert "sp_size: 12" not in only(num_processes=12)


def test_check_heads() -> None:
    assert only("parallel.sp_size=64", "parallel.ring_size=1") == (
        "command line: parallel.sp_size: 64 does not divide the 32 attention heads of owner/model"
        "\n\nhint: use 1, 2, 4, 8, 16 or 32; 32 is nearest, or ring_size: 2"
    )
    assert check("parallel.sp_size=32") == []  # more ranks than key/value heads are allowed
    assert check("parallel.sp_size=64") == []  # and, on a ring, more than query heads


def test_check_index_bounds_of_a_quantized_base() -> None:
    """The MLP's 14,336 numbers per token are in tiles where they may be."""
    words = ("lora.quantize_base=nf4", "parallel.sp_size=1", "data.max_length=256Ki", "model.rope_scaling={type: yarn}",
             "parallel.zero_stage=2")  # fmt: skip
    assert check(*words) == []
    assert only(*words, "memory.tiled_mlp=false") == (
        "command line: memory.tiled_mlp: activations of quantized layers of a rank would have 3,758,096,384 elements, "
        "past the 2^31 that kernels of this kind (quantized_linear) index safely\n\nhint: use memory.tiled_mlp: auto, "
        "or shorter or fewer rows"
    )
    long = only(*words, "memory.tiled_mlp=false", "data.max_length=512Ki")
    assert long.startswith("command line: data.max_length: activations of quantized layers")
    assert long.endswith("hint: use a larger sp_size, or shorter or fewer rows")


def test_check_index_bounds_of_lengths_beside_adapters() -> None:
    """peft multiplies by the base's weight outside of its layer, where no piece can be made."""
    words = ("lora.use_dora=true", "parallel.sp_size=1", "data.max_length=512Ki", "model.rope_scaling={type: yarn}",
             "parallel.zero_stage=2", "memory.attention_head_chunks=32")  # fmt: skip
    assert only(*words) == (
        "command line: data.max_length: activations of adapters with DoRA of a rank would have 2,147,483,648 elements, "
        "past the 2^31 that kernels of this kind (dora) index safely\n\nhint: use a larger sp_size, or shorter or "
        "fewer rows"
    )
    assert check(*words, "parallel.sp_size=2", "memory.attention_head_chunks=16") == []


def test_check_rings() -> None:
    assert only("parallel.ring_size=3") == (
        "command line: parallel.ring_size: 3 does not divide sp_size 4\n\nhint: use auto, 1, 2 or 4"
    )
    assert only("parallel.sp_size=24", "data.max_length=24Ki", "parallel.ring_size=2") == (
        "command line: parallel.ring_size: 2 leaves 12 ranks to exchange heads, which do not divide the 32 attention "
        "heads of owner/model\n\nhint: use auto, 3, 6, 12 or 24"
    )
    assert check("parallel.ring_size=2") == check("parallel.ring_size=4") == []
    long = ("parallel.sp_size=8", "parallel.ring_size=8", "data.max_length=4Mi", "memory.attention_head_chunks=1")
    assert any("one call of attention" in str(problem) for problem in check(*long))
    assert not any("elements" in str(problem) for problem in check(*long[:-1]))
    assert only("parallel.ring_size=2", "model.attn_implementation=cudnn").splitlines()[0] == (
        "command line: model.attn_implementation: cudnn takes as many keys as queries, and the ranks of a ring "
        "(parallel.ring_size) have more keys"
    )


def test_questions_of_a_run_on_a_ring_are_allowed() -> None:
    asked = ('run.sample_prompts=["Once upon a time"]', "run.eval_suite=[vt]")
    assert check(*asked, "parallel.sp_size=64") == check(*asked, "parallel.ring_size=2") == []


def test_check_row_length() -> None:
    assert only("data.max_length=8190") == (
        "command line: data.max_length: 8190 is not a multiple of sp_size 4\n\nhint: use 8188 or 8192"
    )
    assert only("data.pad_to_multiple_of=6") == (
        "command line: data.pad_to_multiple_of: 6 is not a multiple of sp_size 4\n\nhint: use auto, 4 or 512"
    )
    assert only("data.pad_to_multiple_of=12") == (
        "command line: data.pad_to_multiple_of: padding to a multiple of 12 makes rows longer than max_length 8192"
        "\n\nhint: use auto, or a number that divides data.max_length"
    )


def test_check_long_documents() -> None:
    assert only("data.packing=stream", "data.excess_length_strategy=drop") == (
        "command line: data.excess_length_strategy: drop is not used: packing: stream cuts documents wherever a row "
        "ends\n\nhint: leave it out, or set data.packing: documents"
    )
    assert check("data.packing=stream") == []


def test_check_fixed_length() -> None:
    fixed = "parallel.sp_seq_length_is_variable=false"
    assert only(fixed) == (
        "r.yaml:4:3: parallel.sp_seq_length: required when sp_seq_length_is_variable is false"
        "\n\nhint: write sp_seq_length: 8192"
    )
    assert only(fixed, "parallel.sp_seq_length=8191") == (
        "command line: parallel.sp_seq_length: 8191 is not a multiple of sp_size 4"
        "\n\nhint: write sp_seq_length: 8192, which is data.max_length"
    )
    assert only(fixed, "parallel.sp_seq_length=4096") == (
        "command line: parallel.sp_seq_length: 4096 is not data.max_length 8192; rows that do not vary have that length"
        "\n\nhint: write sp_seq_length: 8192"
    )
    assert only("parallel.sp_seq_length=8192") == (
        "command line: parallel.sp_seq_length: is 8192, but sp_seq_length_is_variable is true, so it would not be used"
        "\n\nhint: set parallel.sp_seq_length_is_variable: false, or leave sp_seq_length out"
    )
    assert check(fixed, "parallel.sp_seq_length=8192") == []


def test_check_zero_stage() -> None:
    assert only("parallel.zero_stage=2", "parallel.dp_replicate_size=2") == (
        "command line: parallel.dp_replicate_size: 2 copies need ZeRO stage 3; at stage 2 every rank holds all "
        "parameters\n\nhint: set parallel.zero_stage: 3, or dp_replicate_size: 1 and dp_shard_size: 2"
    )
    assert only("parallel.zero_stage=1", "memory.offload_param=cpu") == (
        "command line: memory.offload_param: cpu needs ZeRO stage 3; stage 1 does not shard parameters"
        "\n\nhint: set parallel.zero_stage: 3, or memory.offload_param: none"
    )
    assert only("parallel.sp_size=1", "parallel.dp_replicate_size=8") == (
        "command line: parallel.dp_replicate_size: 8 copies of one rank each: DeepSpeed keeps no copies within a "
        "single rank\n\nhint: use dp_shard_size: 8 and dp_replicate_size: 1"
    )


def test_check_weights_on_disk(tmp_path: Path) -> None:
    swap = ("memory.offload_param=nvme", f"memory.nvme_path={tmp_path}")
    assert check(*swap) == []
    assert check(*swap, "memory.offload_optimizer=nvme") == []
    assert only(*swap, "parallel.sp_size=4", "parallel.dp_replicate_size=2") == (
        "command line: memory.offload_param: copies inside replicas (dp_replicate_size) stay in memory, which nvme is "
        "there to spare\n\nhint: set parallel.dp_replicate_size: 1, or memory.offload_param: cpu"
    )
    for name in ("prefetch_bucket_size", "max_reuse_distance"):
        key = f"deepspeed.zero_optimization.{name}"
        assert only(*swap, f"{key}=50000000") == (
            f"command line: {key}: must be 0 with memory.offload_param: nvme: DeepSpeed would update weights in memory "
            "and not in their file\n\nhint: leave it out"
        )
        assert check(*swap, f"{key}=0") == []
    key = "deepspeed.zero_optimization.param_persistence_threshold"
    assert only(*swap, f"{key}=1000000") == (
        f"command line: {key}: must not be above 100,000 with memory.offload_param: nvme: what has a file cannot stay "
        "on the GPU\n\nhint: leave it out"
    )
    assert check(*swap, f"{key}=0") == check(f"{key}=1000000") == []
    for name in ("buffer_count", "buffer_size", "max_in_cpu"):
        key = f"deepspeed.zero_optimization.offload_param.{name}"
        assert only(*swap, f"{key}=9") == (
            f"command line: {key}: is decided by memory.offload_param: nvme: buffers are sized by the model's weights"
            "\n\nhint: leave it out"
        )
    assert only(*swap, "parallel.sp_size=1", "data.packing=off", model_type="novel") == (
        "command line: memory.offload_param: nvme needs buffers of the size of the model's weights, and novel's "
        "are not known\n\nhint: use memory.offload_param: cpu"
    )


def test_check_disk(tmp_path: Path) -> None:
    for part in ("offload_optimizer", "offload_param", "activation_offload_device"):
        assert only(f"memory.{part}=nvme") == (
            f"command line: memory.nvme_path: required with memory.{part}: nvme"
            "\n\nhint: name a folder on a fast local disk"
        )
    assert check(f"memory.nvme_path={tmp_path}") == []  # auto may use it
    on_host = ("memory.offload_optimizer=cpu", "memory.activation_offload_device=cpu")
    assert only(f"memory.nvme_path={tmp_path}", *on_host) == (
        "command line: memory.nvme_path: is not used: nothing is on nvme"
        "\n\nhint: set memory.offload_optimizer: nvme, or leave it out"
    )
    still = ("memory.offload_optimizer=cpu", "memory.activation_offloading=0")  # and activation_offload_device: auto
    assert "memory.nvme_path: is not used: nothing is on nvme" in only(f"memory.nvme_path={tmp_path}", *still)
    assert check(f"memory.nvme_path={tmp_path}", still[0]) == check(f"memory.nvme_path={tmp_path}", still[1]) == []
    whole = ("memory.activation_offload_device=nvme", "memory.gradient_checkpointing=false")
    for words in (whole, (*whole, f"memory.nvme_path={tmp_path}")):
        assert only(*words) == (
            "command line: memory.activation_offload_device: nvme is not used: memory.gradient_checkpointing: false "
            "leaves nothing to move\n\nhint: leave one of the two out"
        )
    unused = (f"memory.nvme_path={tmp_path}", "memory.activation_offload_device=nvme")
    assert only(*unused, "memory.activation_offloading=false") == (
        "command line: memory.activation_offload_device: nvme is not used: memory.activation_offloading is off"
        "\n\nhint: leave one of the two out"
    )


def test_check_states_on_disk(tmp_path: Path) -> None:
    swap = ("memory.offload_optimizer=nvme", f"memory.nvme_path={tmp_path}")
    assert check(*swap) == []
    assert only(*swap, "parallel.zero_stage=2") == (
        "command line: memory.offload_optimizer: nvme needs ZeRO stage 3; DeepSpeed's stage 2 keeps its states in "
        "memory\n\nhint: set parallel.zero_stage: 3, or memory.offload_optimizer: cpu"
    )
    assert only(*swap, "run.async_save=true") == (
        "command line: run.async_save: copies states into host memory, which memory.offload_optimizer: nvme is there "
        "to spare\n\nhint: leave it out; a save then reads them from the disk, piece by piece"
    )
    for name in ("pipeline_read", "pipeline_write"):
        key = f"deepspeed.zero_optimization.offload_optimizer.{name}"
        assert only(*swap, f"{key}=true") == (
            f"command line: {key}: is not offered: only the plain swapper is proven to change no value"
            "\n\nhint: leave it out"
        )
    key = "deepspeed.zero_optimization.offload_optimizer.buffer_count"
    assert only(*swap, f"{key}=5") == (
        f"command line: {key}: is decided by memory.offload_optimizer: nvme: 4 buffers are what the ledger counts of "
        "the host\n\nhint: leave it out"
    )
    assert only(*swap, "deepspeed.aio.use_gds=true") == (
        "command line: deepspeed.aio.use_gds: is not offered: no GPU with GPUDirect storage has run it, and bytes that "
        "pass by the host are counted\n\nhint: leave it out"
    )
    assert check(*swap, "deepspeed.aio.use_gds=false") == []
    may_swap = f"memory.nvme_path={tmp_path}"  # and memory.offload_optimizer: auto
    section = "deepspeed.zero_optimization.offload_optimizer"
    refused = ("deepspeed.aio.use_gds=true", f"{section}.pipeline_write=true", f"{section}.buffer_count=9")
    for setting in refused:
        assert only(may_swap, setting) == only(*swap, setting)
    for other in ("run.async_save=true", "parallel.zero_stage=2", "train.optim=adamw_8bit"):  # auto leaves them there
        assert check(may_swap, other, *refused[1:]) == []
    assert check(*swap, "deepspeed.aio.intra_op_parallelism=4", "deepspeed.zero_optimization.sub_group_size=1000") == []


def test_check_world_size() -> None:
    assert only("parallel.dp_shard_size=65536", "parallel.dp_replicate_size=65536") == (
        "r.yaml:4:3: parallel: dp_replicate_size x dp_shard_size x sp_size makes 17,179,869,184 processes"
        "\n\nhint: use 1,048,576 or fewer"
    )


def test_check_optimizer() -> None:
    assert check("train.optim=adamw_8bit") == []
    assert only("train.optim=adamw_8bit", "memory.offload_optimizer=cpu") == (
        "command line: train.optim: adamw_8bit does not run with memory.offload_optimizer: cpu, whose Adam has float32 "
        "moments\n\nhint: use train.optim: adamw, or memory.offload_optimizer: none"
    )


def test_check_overlap() -> None:
    early, on_host = "memory.overlap_optimizer=true", "memory.offload_optimizer=cpu"
    assert check(early, on_host) == []
    assert check(early) == []  # where offload_optimizer is auto, the optimizer may come to be on the host
    assert only(early, "memory.offload_optimizer=none") == (
        "command line: memory.overlap_optimizer: is not used: it needs the optimizer in host memory, and "
        "offload_optimizer is none\n\nhint: set memory.offload_optimizer: cpu, or leave it out"
    )
    assert only(early, on_host, "parallel.zero_stage=2") == (
        "command line: memory.overlap_optimizer: needs ZeRO stage 3; stage 2 steps all weights at once, when the "
        "backward is over\n\nhint: set parallel.zero_stage: 3, or leave it out"
    )

    assert only(early, "train.optim=adamw_8bit") == (
        "command line: memory.overlap_optimizer: is not used: it needs the optimizer in host memory, and adamw_8bit "
        "stays on the GPU\n\nhint: use train.optim: adamw, or leave it out"
    )


def test_check_tiles() -> None:
    large = ("memory.large_tiles=true", "memory.tiled_mlp=false")
    assert check(*large) == check(large[0]) == []
    assert only(*large, "memory.tiled_loss=false") == (
        "command line: memory.large_tiles: is not used: tiled_mlp and tiled_loss are false"
        "\n\nhint: set one of them to auto or true, or leave it out"
    )


def test_check_steps() -> None:
    assert only("train.num_train_epochs=2") == (
        "command line: train.num_train_epochs: 2 and max_steps 10 both say how long the run is"
        "\n\nhint: keep one; on the command line train.max_steps=null or train.num_train_epochs=null leaves one out"
    )
    assert only("train.warmup_steps=3", "train.warmup_ratio=0.1") == (
        "command line: train.warmup_ratio: 0.1 and warmup_steps 3 both say how long the warm-up is"
        "\n\nhint: keep one; on the command line train.warmup_steps=0 or train.warmup_ratio=0 leaves one out"
    )
    assert only("train.warmup_steps=10") == (
        "command line: train.warmup_steps: 10 leaves no step at the full learning rate: max_steps is 10"
        "\n\nhint: use 9 or fewer"
    )


def test_check_schedule() -> None:
    kind, numbers = "train.lr_scheduler_type=", "train.lr_scheduler_kwargs="
    assert only(f"{kind}cosine_with_min_lr") == (
        "r.yaml:10:3: train.lr_scheduler_kwargs: cosine_with_min_lr needs exactly one of min_lr and min_lr_rate"
        "\n\nhint: write lr_scheduler_kwargs: {min_lr_rate: ...}"
    )
    assert "exactly one of" in only(f"{kind}cosine_with_min_lr", numbers + "{min_lr: 1e-6, min_lr_rate: 0.1}")
    assert only(numbers + "{num_cycels: 1}") == (
        "command line: train.lr_scheduler_kwargs.num_cycels: is not part of cosine\n\nhint: cosine takes num_cycles"
    )
    assert only(f"{kind}constant", "train.warmup_steps=2") == (
        "command line: train.lr_scheduler_type: constant does not warm up"
        "\n\nhint: use constant_with_warmup, or leave the warm-up out"
    )
    assert "is not below learning_rate 1e-05" in only(f"{kind}polynomial", numbers + "{lr_end: 1.0}")
    assert "is not below learning_rate 1e-05" in only(f"{kind}cosine_with_min_lr", numbers + "{min_lr: 0.5}")
    assert "is not below the whole learning rate, 1" in only(f"{kind}cosine_with_min_lr", numbers + "{min_lr_rate: 1}")
    assert only(f"{kind}warmup_stable_decay", numbers + "{num_decay_steps: 9}", "train.warmup_steps=2") == (
        "command line: train.lr_scheduler_kwargs.num_decay_steps: decay (9) and warm-up (2) take more steps than "
        "max_steps 10\n\nhint: use 8 or fewer"
    )
    for fine in ("cosine_with_min_lr {min_lr_rate: 0.1}", "warmup_stable_decay {num_decay_steps: 3}", "linear {}"):
        name, _, given = fine.partition(" ")
        assert check(kind + name, numbers + given) == []


def test_check_evaluation() -> None:
    assert only("run.eval_steps=5") == (
        "command line: run.eval_steps: evaluates every 5 steps, but there is nothing to evaluate on"
        "\n\nhint: write data.eval_split: 0.01 or data.eval_datasets, or leave out run.eval_steps"
    )
    assert only("data.eval_split=0.1", "data.eval_datasets=[{path: owner/x}]") == (
        "command line: data.eval_split: 0.1 and eval_datasets both say what is evaluated\n\nhint: keep one of the two"
    )


def test_check_quantized_base() -> None:
    quantized = "lora.quantize_base=nf4"
    assert only(quantized).endswith(
        "parallel.zero_stage: 3 shards the base's weights, and with lora.quantize_base: nf4 each GPU holds all of them"
        "\n\nhint: write parallel.zero_stage: 2"
    )
    assert check(quantized, "parallel.zero_stage=2") == []
    with pytest.raises(RecipeError, match="nf4 takes the same memory and is closer"):
        check("lora.quantize_base=fp4")


def test_check_whole_parts() -> None:
    assert check("lora.modules_to_save=[embed_tokens,lm_head,norm]") == []
    assert only("lora.modules_to_save=[norm,norm]").endswith("names a part twice\n\nhint: name each part once")
    assert only("lora.modules_to_save=[norm]", model_type="olmo").endswith(
        "have no weights to train\n\nhint: leave norm out"
    )
    with pytest.raises(RecipeError, match="'wte' is not `embed_tokens`, `lm_head` or `norm`"):
        check("lora.modules_to_save=[wte]")


def test_check_dora() -> None:
    dora = "lora.use_dora=true"
    assert check(dora, "parallel.zero_stage=2") == []
    assert only(dora).endswith("hint: write parallel.zero_stage: 2, or use lora.use_rslora")
    assert "are those of rounded weights" in only(dora, "parallel.zero_stage=2", "lora.quantize_base=nf4")


def test_layers_that_share_a_block_have_no_formula_for_dora_or_a_quantized_base() -> None:
    shared = {"model_type": "zamba2", "layers_block_type": ["mamba", "hybrid"] * 8, "num_hidden_layers": 16}
    assert check("lora.r=8", **shared) == []
    below = ("lora.r=8", "parallel.zero_stage=2")
    assert "share the weights of a block: there is no memory formula" in only(*below, "lora.use_dora=true", **shared)
    assert "has other layers" in only(*below, "lora.quantize_base=nf4", **shared)


def test_a_score_needs_its_questions() -> None:
    missing = only("run.keep_best=score")
    assert missing.endswith("hint: write run.eval_suite: [niah_single_1] and run.eval_suite_steps: 100")
    asked = ("run.eval_suite=[vt]", "run.eval_suite_steps=10", "run.eval_suite_lengths=[2Ki]")
    by_score = ("run.keep_best=eval_suite", "run.early_stopping_patience=2", *asked)
    assert check(*by_score) == check(*by_score, "run.early_stopping_threshold=0.99") == []
    assert only(*by_score, "run.early_stopping_threshold=1") == (
        "command line: run.early_stopping_threshold: no score rises by more than 1: scores are shares from 0 to 1"
        "\n\nhint: write a share below 1, such as 0.01"
    )


def test_check_model_choice() -> None:
    hint = "\n\nhint: write run.eval_steps, and data.eval_split: 0.01"
    for wish in ("run.keep_best=eval_loss", "run.early_stopping_patience=3"):
        key = wish.partition("=")[0]
        assert only(wish) == f"command line: {key}: needs evaluations during the run{hint}"
    evaluated = ("run.eval_steps=5", "data.eval_split=0.1")
    assert check("run.keep_best=true", "run.export_best=true", "run.early_stopping_patience=1", *evaluated) == []
    assert only("run.export_best=true", *evaluated) == (
        "command line: run.export_best: needs the best checkpoint to be kept\n\nhint: write run.keep_best: eval_loss"
    )
    assert "0.1 is not used without early_stopping_patience" in only("run.early_stopping_threshold=0.1", *evaluated)


def test_check_suite() -> None:
    assert only("run.eval_suite_steps=5") == (
        "command line: run.eval_suite_steps: is not used without eval_suite"
        "\n\nhint: write run.eval_suite: [niah_single_1]"
    )
    assert check("run.eval_suite=[niah_single_1]", "run.eval_suite_steps=5") == []


def test_check_samples() -> None:
    assert only("run.sample_steps=5") == (
        "command line: run.sample_steps: is not used without sample_prompts"
        '\n\nhint: write run.sample_prompts: ["Once upon"]'
    )
    assert "sample_prompts.1: is empty" in only('run.sample_prompts=["a", " "]')
    assert "has 20,001 letters" in only(f"run.sample_prompts=[{'a' * 20_001}]")
    assert check("run.sample_prompts=[a]", "run.sample_steps=5", "run.sample_as_chat=true") == []


def test_check_money() -> None:
    assert only("run.max_cost=5") == (
        "command line: run.max_cost: cannot be kept without a price"
        "\n\nhint: write run.price_per_gpu_hour, in USD for one GPU and hour"
    )


def test_check_model_source() -> None:
    assert only("model.name_or_path=null") == (
        "command line: model.name_or_path: no model is named"
        "\n\nhint: write a hub name or a local folder, or model.config for random weights"
    )
    assert only("model.config.model_type=llama") == (
        "command line: model.config: starts from random weights, but name_or_path names a trained model"
        "\n\nhint: keep one of the two"
    )
    assert only("model.config.model_type=llama", "model.name_or_path=null") == (
        "r.yaml:2:3: model.tokenizer: required with model.config: a random model brings none"
        "\n\nhint: write tokenizer: bytes"
    )
    assert only("model.tokenizer=bytes", vocab_size=100) == (
        "command line: model.tokenizer: bytes needs a vocabulary of 259, the model has 100"
        "\n\nhint: set vocab_size: 259 or more in model.config"
    )


def test_check_deepspeed_section() -> None:
    assert only("deepspeed.zero_optimization.stage=2") == (
        "command line: deepspeed.zero_optimization.stage: is 2, but parallel.zero_stage is 3"
        "\n\nhint: change parallel.zero_stage and leave zero_optimization.stage out"
    )
    assert only("deepspeed.zero_optimization.offload_param.device=cpu") == (
        'command line: deepspeed.zero_optimization.offload_param.device: is "cpu", but memory.offload_param is auto'
        "\n\nhint: change memory.offload_param and leave zero_optimization.offload_param.device out"
    )
    assert only("deepspeed.optimizer.type=Adam") == (
        "command line: deepspeed.optimizer: is the recipe's to decide"
        "\n\nhint: the optimizer is made from train.optim, train.learning_rate and train.adam_*"
    )
    for override, words in {
        "zero_optimization.stage=auto": "is auto, which DeepSpeed alone takes for its own default",
        "zero_optimization=false": "is false, which would remove everything that the recipe sets there",
        "bf16.enabled=auto": "is auto",
        "zero_optimization.cpu_offload=true": "is DeepSpeed's old name\n\nhint: use memory.offload_optimizer: cpu",
        "zero_optimization.reduce_bucket_sizee=3": "did you mean zero_optimization.reduce_bucket_size?",
        "zero_optimisation.stage=2": "did you mean zero_optimization.stage?",
        "train_batch_size=auto": "is the recipe's to decide",
        "sequence_parallel_size=4": "is the recipe's to decide\n\nhint: use parallel.sp_size",
    }.items():
        assert words in only(f"deepspeed.{override}"), override
    for fine in (
        "zero_optimization.stage=3",
        "zero_optimization.reduce_bucket_size=1e8",
        "communication_data_type=bf16",
    ):
        assert check(f"deepspeed.{fine}") == []
    assert check("deepspeed.zero_optimization.offload_param.device=none") == []


def test_check_head_chunks() -> None:
    assert only("memory.attention_head_chunks=3") == (
        "command line: memory.attention_head_chunks: 3 does not divide the 8 heads of a rank (32 / 4)"
        "\n\nhint: use auto, 1, 2, 4 or 8"
    )


def test_check_offloading() -> None:
    assert only("memory.activation_offloading=5", num_hidden_layers=4) == (
        "command line: memory.activation_offloading: 5 is more than the 4 layers of owner/model"
        "\n\nhint: use true, auto, or fewer layers"
    )
    nothing_kept = (
        "command line: memory.activation_offloading: moves what recomputation starts from, and "
        "memory.gradient_checkpointing: false recomputes nothing\n\nhint: set memory.gradient_checkpointing: true, or "
        "memory.activation_offloading: false"
    )
    for asked in ("true", "2"):
        result = only(f"memory.activation_offloading={asked}", "memory.gradient_checkpointing=false")
        assert result == nothing_kept
    for fine in ("4", "1", "0", "true", "auto", "false"):
        assert check(f"memory.activation_offloading={fine}", num_hidden_layers=4) == []
    assert check("memory.activation_offloading=false", "memory.gradient_checkpointing=false") == []


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"kv_lora_rank": 512}, "multi-head latent attention (MLA) shares one compressed key among heads"),
        (
            {"layer_types": ["linear_attention", "full_attention"]},
            "linear attention carries a state from token to token",
        ),
        ({"layer_types": ["conv", "full_attention"]}, "convolution layers read their neighbours' tokens"),
        ({"mamba_d_state": 16}, "mamba layers carry a state from token to token"),
        ({"attention_chunk_size": 8192}, "chunked attention cuts the row at positions of its own"),
        ({"use_bidirectional_attention": True}, "attention looks ahead as well as back"),
        ({"model_type": "qwen33"}, "model type qwen33 is not on the list of those proven exact: did you mean qwen3?"),
        ({"model_type": "novel"}, "model type novel is not on the list of those proven exact"),
    ],
)
def test_check_exactness(changes: dict[str, object], reason: str) -> None:
    assert only(**changes) == (
        f"r.yaml:4:12: parallel.sp_size: owner/model cannot be split over 4 ranks exactly: {reason}\n\n"
        "hint: use sp_size: 1, or a model with plain, grouped or sliding-window attention in every layer"
    )
    if reason in UNSERVED:
        assert only("parallel.sp_size=1", **changes) == (
            f"r.yaml:2:17: model.name_or_path: owner/model cannot be trained here: {reason}\n\nhint: use another model"
        )
    else:
        assert check("parallel.sp_size=1", "data.packing=off", **changes) == []


HYBRID: dict[str, object] = {
    "model_type": "qwen3_5_text",
    "num_hidden_layers": 4,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 48,
    "num_attention_heads": 24,
    "num_key_value_heads": 4,
    "head_dim": 256,
}


def test_check_heads_of_every_kind() -> None:
    assert only("parallel.sp_size=32", "data.max_length=32Ki", **HYBRID) == (
        "command line: parallel.sp_size: 32 does not divide the 48 linear attention heads and 24 attention heads of "
        "owner/model\n\nhint: use 1, 2, 3, 4, 6, 8, 12 or 24; 24 is nearest; no ring is possible, since "
        "linear attention layers need the tokens of a row in order"
    )
    assert only("parallel.sp_size=4", "parallel.ring_size=2", **HYBRID) == (
        "command line: parallel.ring_size: 2 deals the tokens of a row to ranks in another order, and linear attention "
        "layers need the tokens of a row in order: owner/model cannot be trained on a ring"
        "\n\nhint: use ring_size: 1 with sp_size 1, 2, 3, 4, 6, 8, 12 or 24"
    )
    assert check("parallel.sp_size=8", **HYBRID) == []


def test_check_convolutions() -> None:
    assert only("parallel.sp_size=4", "data.max_length=8", **HYBRID) == (
        "command line: data.max_length: a rank's 2 tokens are fewer than the 3 that the convolutions of owner/model "
        "read from the rank before\n\nhint: use 12 or more"
    )


def test_check_attention_kind() -> None:
    assert "chunked" in only("parallel.sp_size=1", attention_chunk_size=8192)
    assert "looks ahead" in only("parallel.sp_size=1", use_bidirectional_attention=True)


def test_check_packed_layers() -> None:
    assert only("parallel.sp_size=1", mamba_d_state=16) == (
        "r.yaml:6:3: data.packing: documents of one row would see each other in owner/model: mamba layers carry a "
        "state from token to token\n\nhint: use packing: off, one document per row"
    )
    for packing in ("stream", "off"):
        assert check("parallel.sp_size=1", f"data.packing={packing}", mamba_d_state=16) == []


def test_check_router_loss() -> None:
    assert only(model_type="mixtral", num_local_experts=8, num_experts_per_tok=2, output_router_logits=True) == (
        "r.yaml:2:17: model.name_or_path: the config of owner/model asks for a router loss (output_router_logits), "
        "which is not offered\n\nhint: set output_router_logits: false in a local copy of its config.json"
    )


def test_check_shared_prompts() -> None:
    pairs = ("preference.loss=sigmoid", "data.datasets.0.type=preference", "preference.share_prompts=true")
    assert check(*pairs) == []
    assert only(*pairs, "model.rope_scaling={type: dynamic, factor: 2}") == (
        "command line: preference.share_prompts: answers of owner/model cannot read one copy of their prompt: its "
        "rotary frequencies follow a document's length, and answers of one prompt have several\n\n"
        "hint: use auto: each answer then has a copy"
    )


def test_check_attention() -> None:
    assert only("model.attn_implementation=flash_attention_2", "run.device=cpu") == (
        "command line: model.attn_implementation: flash_attention_2 runs on cuda only\n\nhint: use auto, sdpa"
    )
    assert only("model.attn_implementation=flash_attention_3", head_dim=512).startswith(
        "command line: model.attn_implementation: flash_attention_3 takes head_dim up to 256, this model has 512"
    )
    assert only("model.attn_implementation=cudnn", model_type="mistral", sliding_window=4096) == (
        "command line: model.attn_implementation: cudnn has no sliding window, which this model uses\n\n"
        "hint: use auto, flash_attention_4, flash_attention_3, flash_attention_2, torch_varlen, flex_attention or sdpa"
    )
    softcap = {"model_type": "gemma2", "attn_logit_softcapping": 50.0, "max_position_embeddings": 8192}
    assert "has no softcap" in only("model.attn_implementation=torch_varlen", **softcap)
    assert "computes in bfloat16 only" in only("model.attn_implementation=flash_attention_2", "model.dtype=float32")


def test_check_positions() -> None:
    long = "data.max_length=1Mi"
    assert only(long) == (
        "command line: data.max_length: 1048576 is longer than the 131072 positions that owner/model was made for\n\n"
        "hint: write model.rope_scaling: {type: yarn, factor: 8, original_max_position_embeddings: 131072}"
    )
    assert only(long, "model.rope_scaling={type: yarn, factor: 4}") == (
        "command line: model.rope_scaling.factor: 4 x 131072 = 524288 positions do not cover max_length 1048576\n\n"
        "hint: write factor: 8, or leave it out"
    )
    assert only(long, "model.rope_scaling={type: yarn, original_max_position_embeddings: 1Mi}") == (
        "command line: model.rope_scaling.original_max_position_embeddings: 1048576 is more than the 131072 positions "
        "that owner/model was made for\n\nhint: write 131072, or leave it out"
    )
    assert check(long, "model.rope_scaling.type=yarn") == []
    assert check(long, "model.rope_scaling={type: yarn, factor: 8.0}") == []


def test_check_index_bounds() -> None:
    """Only operators that count in 32 bits bound a row: attention's kernels, for a chunk of heads, and experts."""
    long = ("model.rope_scaling.type=yarn", "parallel.sp_size=8", "data.max_length=5Mi")
    assert check(*long, "memory.tiled_mlp=false", "memory.tiled_loss=false") == []
    assert only(*long, "memory.attention_head_chunks=1") == (
        "command line: data.max_length: one call of attention of a rank would have 2,684,354,560 elements, past the "
        "2^31 that kernels of this kind (torch_varlen) index safely\n\nhint: use more memory.attention_head_chunks, a "
        "larger sp_size, model.attn_implementation: flash_attention_3 on Hopper, or shorter or fewer rows"
    )
    assert check(*long, "memory.attention_head_chunks=2") == []
    assert "one call of attention" in only(*long, "data.max_length=16Mi")
    assert check(*long, "memory.attention_head_chunks=1", "model.attn_implementation=flash_attention_3") == []
    experts = {"model_type": "mixtral", "num_local_experts": 8, "num_experts_per_tok": 2, "intermediate_size": 14336}
    assert check(*long, **experts) == []
    assert "tokens of experts" in only(*long, "memory.tiled_mlp=false", **experts)


def test_check_lora_targets() -> None:
    assert only("lora.target_modules=[q_proj, qkv_proj]") == (
        "command line: lora.target_modules: qkv_proj: no linear layer of owner/model that takes an adapter\n\n"
        "hint: use all-linear, or some of q_proj, k_proj, v_proj, o_proj, gate_proj, up_proj, down_proj"
    )
    assert check("lora.target_modules=[q_proj, down_proj]") == []
    assert "no linear layer" in only("lora.target_modules=[gate_proj]", model_type="mixtral", num_local_experts=8)
    assert only("lora.r=8", model_type="mixtral", num_local_experts=8) == (
        "command line: lora.target_modules: all-linear takes in the experts of mixtral models, whose adapters are "
        "added to all of their weights in every forward: nothing is saved\n\n"
        "hint: use [q_proj, k_proj, v_proj, o_proj]"
    )


def test_check_lora_targets_that_peft_refuses() -> None:
    pattern = {"model_type": "nemotron_h", "layers_block_type": ["mamba", "moe", "attention", "mamba"], "head_dim": 128}
    own = "q_proj, k_proj, v_proj, o_proj, up_proj, down_proj, in_proj"
    assert only("lora.r=8", **pattern) == (
        "command line: lora.target_modules: all-linear takes in out_proj of nemotron_h models, on which peft adds no "
        f"adapter\n\nhint: use [{own}]"
    )
    assert only("lora.target_modules=[out_proj]", **pattern) == (
        "command line: lora.target_modules: out_proj: no linear layer of owner/model that takes an adapter\n\n"
        f"hint: use some of {own}"
    )
    assert check(f"lora.target_modules=[{own}]", **pattern) == []


def test_check_lora_targets_that_are_numbers() -> None:
    """The adapters inside a shared block are called 0 and 1, as decoder layers are."""
    shared = {"model_type": "zamba2", "layers_block_type": ["mamba", "hybrid"] * 8, "num_hidden_layers": 16}
    assert only('lora.target_modules=["0", "1"]', **shared) == (
        "command line: lora.target_modules: 0, 1: no linear layer of owner/model that takes an adapter\n\n"
        "hint: use all-linear, or some of q_proj, k_proj, v_proj, o_proj, gate_up_proj, down_proj, in_proj, out_proj, "
        "linear"
    )


def test_check_dropout() -> None:
    assert only(attention_dropout=0.1) == (
        "r.yaml:2:17: model.name_or_path: the config of owner/model asks for attention_dropout 0.1, which is not "
        "offered\n\nhint: set attention_dropout: 0.0 in a local copy of its config.json"
    )
    assert check(attention_dropout=0.0) == []
    assert [problem.message.split("asks for ")[1] for problem in check(model_type="seed_oss")] == [
        "attention_dropout 0.1, which is not offered",
        "residual_dropout 0.1, which is not offered",
    ]


def test_check_weights() -> None:
    config = {"quantization_config": {"quant_method": "gptq"}}
    assert only(**config) == (
        "r.yaml:2:17: model.name_or_path: the weights of owner/model are quantized by gptq and cannot be trained\n\n"
        "hint: use the model's bfloat16 weights; lora with the levers of memory takes the least"
    )
    assert check(quantization_config={"quant_method": "mxfp4"}) == []


def test_check_rotary() -> None:
    assert check("model.rope_scaling.type=dynamic") == []
    assert check(rope_scaling={"type": "longrope"}) == []
    assert "has a stretch of its own (linear)" in only("model.rope_scaling.type=yarn", rope_scaling={"type": "linear"})


NOPE = {"model_type": "nemotron_h", "layers_block_type": ["mamba", "attention"], "head_dim": 128}


@pytest.mark.parametrize(
    ("changes", "is_rotary"),
    [
        (NOPE, False),
        ({"model_type": "granitemoehybrid", "position_embedding_type": "nope"}, False),
        ({"model_type": "granitemoehybrid", "position_embedding_type": "rope"}, True),
        ({"model_type": "olmo_hybrid", "rope_parameters": {"rope_theta": None, "rope_type": "default"}}, False),
        ({"model_type": "olmo_hybrid", "rope_theta": None}, False),
        ({"model_type": "olmo_hybrid"}, True),
    ],
)
def test_models_without_rotary_positions_are_not_told_to_stretch(changes: dict[str, object], is_rotary: bool) -> None:
    """Rows of any length pass, and a stretch that would do nothing is refused."""
    shape = make_shape(**{**changes, "rope_scaling": None})
    recipe, stretched = (
        load("data.max_length=1Mi", *words).recipe for words in ((), ("model.rope_scaling.type=yarn",))
    )
    long, refused = (
        list(check_model.check_positions(recipe, shape)),
        list(check_model.check_rotary(stretched, shape)),
    )
    assert (len(long), len(refused)) == ((1, 0) if is_rotary else (0, 1))
    if not is_rotary:
        assert "has no rotary positions, so a stretch would do nothing" in refused[0].message
        assert resolve(recipe, shape).is_rotary is False


def test_yarn_over_yarn_starts_from_the_original_length() -> None:
    own = {"rope_type": "yarn", "factor": 32.0, "original_max_position_embeddings": 4096}
    assert "{type: yarn, factor: 64, original_max_position_embeddings: 4096}" in only(
        "data.max_length=256Ki", rope_scaling=own
    )
    assert check("data.max_length=256Ki", "model.rope_scaling.type=yarn", rope_scaling=own) == []


def test_check_rope_theta() -> None:
    long, base = "data.max_length=512Ki", {"rope_theta": 5e5}
    assert check(long, "model.rope_theta=8e6", **base) == []
    assert "yarn, factor: 4, original_max_position_embeddings: 131072}, or model.rope_theta: auto" in only(long, **base)
    assert check(long, "model.rope_theta=auto", **base) == []
    assert check(long, "model.rope_theta=auto", "model.rope_scaling={type: yarn, factor: 2}", **base) == []
    assert only("model.rope_theta=1e5", **base) == (
        "command line: model.rope_theta: 100,000 is below the 500,000 of owner/model: far positions would turn further "
        "than it has seen\n\nhint: write auto, or a larger number"
    )
    llama3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
              "original_max_position_embeddings": 8192}  # fmt: skip
    assert only("model.rope_theta=8e6", rope_scaling=llama3, **base) == (
        "command line: model.rope_theta: the positions of owner/model are of the kind llama3, whose numbers were "
        "chosen for the model's own base\n\nhint: leave rope_theta out, or write model.rope_scaling: {type: yarn}"
    )
    assert check("model.rope_theta=8e6", "model.rope_scaling.type=yarn", rope_scaling=llama3, **base) == []
    assert "of model.rope_scaling are of the kind linear" in only(
        "model.rope_theta=8e6", "model.rope_scaling.type=linear", **base
    )
    assert only("model.rope_theta=auto") == (
        "command line: model.rope_theta: auto starts from the model's own base, and owner/model does not say it"
        "\n\nhint: write a number"
    )
    assert only("model.rope_theta=auto", "model.rope_scaling.type=yarn", **base) == (
        "command line: model.rope_theta: both auto and rope_scaling without a factor would cover the whole of "
        "max_length\n\nhint: write a number, or a factor in model.rope_scaling"
    )
    nope = list(check_model.check_rope_theta(load("model.rope_theta=8e6").recipe, make_shape(**NOPE)))
    assert [problem.message for problem in nope] == ["owner/model has no rotary positions, so a base would do nothing"]


def test_the_chosen_base_covers_what_the_rest_does_not() -> None:
    """The numbers are by hand: 5e5 x 8^1.65, and x 4^1.65 where yarn covers a half."""
    shape = make_shape(rope_theta=5e5, max_position_embeddings=8192)
    stretch = "model.rope_scaling={type: yarn, factor: 2}"
    words = [[], ["model.rope_theta=auto"], ["model.rope_theta=auto", stretch], ["model.rope_theta=8M"]]
    bases = [resolve(load("data.max_length=64Ki", *each).recipe, shape).rope_theta for each in words]
    assert bases == [None, 1.55e7, 4.92e6, 8e6]
    assert resolve(load("model.rope_theta=auto", "data.max_length=4Ki").recipe, shape).rope_theta == 5e5


def test_check_rope_numbers() -> None:
    llama3 = "type: llama3, factor: 8"
    problems = check(f"model.rope_scaling={{{llama3}}}")
    assert [problem.key.split(".")[-1] for problem in problems] == ["low_freq_factor", "high_freq_factor"]
    assert only(f"model.rope_scaling={{{llama3}, low_freq_factor: 4, high_freq_factor: 1}}") == (
        "command line: model.rope_scaling.low_freq_factor: 4 is not below high_freq_factor 1\n\nhint: exchange the two"
    )
    assert only("model.rope_scaling={type: linear, beta_fast: 3}") == (
        "command line: model.rope_scaling.beta_fast: is not part of linear\n\nhint: linear takes factor"
    )
    assert check("model.rope_scaling={type: yarn, beta_fast: 32, beta_slow: 1}") == []


def test_check_datasets(tmp_path: Path) -> None:
    (tmp_path / "train.jsonl").write_text("{}\n")
    assert only(f"data.datasets.0.path={tmp_path}/trian.jsonl") == (
        f"command line: data.datasets.0.path: {tmp_path}/trian.jsonl does not exist\n\n"
        f"hint: {tmp_path} holds train.jsonl"
    )
    assert only(f"data.datasets.0.path={tmp_path}/no/such/x.jsonl") == (
        f"command line: data.datasets.0.path: {tmp_path}/no/such/x.jsonl does not exist\n\n"
        f"hint: the path is right as far as {tmp_path}"
    )
    assert only("data.datasets.0.join_files=false") == (
        "command line: data.datasets.0.join_files: is not used for type auto\n\nhint: set type: folder, or leave it out"
    )
    assert check(f"data.datasets=[{{path: {tmp_path}, type: folder, join_files: false}}]") == []
    assert only("data.eval_datasets=[{path: owner/texts, weight: 2}]") == (
        "command line: data.eval_datasets.0.weight: is not used: evaluation reads each document once"
        "\n\nhint: leave it out"
    )
    assert only(f"data.datasets=[{{path: {tmp_path}/train.jsonl, name: en}}]") == (
        "command line: data.datasets.0.name: is not used for files on disk"
        "\n\nhint: leave it out, or name a hub data set"
    )
    assert only("data.datasets=[{type: text}]") == (
        "command line: data.datasets.0.path: no source is named\n\nhint: write a file, a folder or a hub data set"
    )
    assert only(f"data.datasets=[{{path: {tmp_path}/train.jsonl, type: folder}}]") == (
        f"command line: data.datasets.0.path: {tmp_path}/train.jsonl is not a folder\n\n"
        "hint: use type: auto for a single file"
    )
    assert only(f"data.datasets=[{{path: {tmp_path}, data_files: [train.jsonl, b.jsonl]}}]") == (
        f"command line: data.datasets.0.data_files.1: {tmp_path}/b.jsonl does not exist\n\n"
        f"hint: {tmp_path} holds train.jsonl"
    )
    here = f"path: {tmp_path}/train.jsonl"
    for given, key in (
        (f"{here}, split: validation", "split"),
        (f"{here}, streaming: true", "streaming"),
        (f"path: {tmp_path}, type: folder, split: test", "split"),
        (f"path: {tmp_path}, type: folder, streaming: true", "streaming"),
        (f"path: {tmp_path}, type: folder, data_files: [train.jsonl]", "data_files"),
        ("type: synthetic, split: test", "split"),
    ):
        assert only(f"data.datasets=[{{{given}}}]").startswith(f"command line: data.datasets.0.{key}: is not used for ")
    (tmp_path / "saved").mkdir()
    (tmp_path / "saved" / "dataset_dict.json").touch()
    assert check(f"data.datasets=[{{path: {tmp_path}/saved, split: test}}]") == []
    assert check("data.datasets=[{path: owner/texts, split: test, streaming: true, data_files: [a]}]") == []
    for fine in (f"{{path: '{tmp_path}/*.jsonl'}}", "{type: synthetic}", f"{{data_files: [{tmp_path}/train.jsonl]}}"):
        assert check(f"data.datasets=[{fine}]") == []


def test_paths_that_are_not_names_on_the_hub(tmp_path: Path) -> None:
    for path in ("data/", "my data set", "a/b/c"):
        assert "does not exist" in only(f"data.datasets.0.path='{path}'")
    assert check("data.datasets.0.path=s3://bucket/x") == []
    assert "is of a kind that is not supported" in only("data.datasets.0.path=ftp://host/x")
    assert "has a pattern" in only("data.datasets.0.path='s3://bucket/*.jsonl'")
    assert "is not used" in only("data.datasets=[{type: synthetic, path: /nope}]")
    (tmp_path / "x[1].jsonl").write_text("{}")
    assert check(f"data.datasets.0.path='{tmp_path}/x[1].jsonl'") == []


def test_check_loss_mask() -> None:
    assert only("data.assistant_only_loss=true", "data.datasets.0.type=text") == (
        "command line: data.assistant_only_loss: needs chat data, but the sources are of type text\n\n"
        "hint: use data of type chat or conversations, or set data.assistant_only_loss: false"
    )
    assert check("data.assistant_only_loss=true", "data.datasets.0.type=chat") == []
    assert check("data.assistant_only_loss=true") == []  # auto is decided once rows are read


def test_check_turns() -> None:
    needs_mask = "chooses among what the assistant says, but every token of a chat is learned"
    for name, value in (("train_on_turns", "last"), ("thoughts", "mask"), ("on_rewritten_turns", "split")):
        problem = only(f"data.{name}={value}", "data.datasets.0.type=chat")
        assert f"data.{name}: {value} {needs_mask}" in problem
        assert problem.endswith("hint: set data.assistant_only_loss: true")
        assert check(f"data.{name}={value}", "data.assistant_only_loss=true") == []
    cut = ("data.train_on_turns=last", "data.assistant_only_loss=true", "data.excess_length_strategy=truncate")
    assert "truncate cuts off the end of a long chat, and only its last turn is a target" in only(*cut)
    crossing = ("data.on_rewritten_turns=split", "data.assistant_only_loss=true", "data.attend_across_documents=true")
    assert "a split chat repeats its turns" in only(*crossing)


def test_check_output_dir(tmp_path: Path) -> None:
    here = f"run.output_dir={tmp_path}"
    ours = compute_recipe_hash(load(here).recipe)
    (tmp_path / "run.json").write_text(json.dumps({"recipe_hash": ours}))
    assert check(here) == []
    other = json.dumps(
        {"recipe_hash": "another", "recipe": load(here, "train.max_steps=7").recipe.model_dump(mode="json")}
    )
    (tmp_path / "run.json").write_text(other)
    differs = "this recipe differs from its recipe in:\n  train.max_steps: was 7, is 30"
    changed = (here, "train.max_steps=30")
    assert only(*changed) == (
        f"command line: run.output_dir: {tmp_path} holds the run of another recipe, which has ended; {differs}"
        "\n\nhint: `ulysses train` with --resume auto continues it and names settings that must stay, with --overwrite "
        "replaces it; or choose another run.output_dir"
    )
    with open(tmp_path / "lock-0", "w") as lock:
        take_lock(lock.fileno(), shares=True)
        assert only(*changed) == (
            f"command line: run.output_dir: {tmp_path} holds the run of another recipe, and that run is still going on"
            f"; {differs}\n\nhint: choose another run.output_dir, or wait for that run to end: then `ulysses train` "
            "with --resume auto continues it, with --overwrite replaces it"
        )
    assert "which has ended" in only(*changed)
    (tmp_path / "lock-1").mkdir()  # cannot be opened, as another user's file
    assert "of another recipe; this" in only(*changed)
    assert check(here, "run.resume_from_checkpoint=auto") == []
    (tmp_path / "run.json").write_text("{")
    assert "cannot be read" in only(here)


def test_a_run_of_an_earlier_version_is_of_the_same_recipe(tmp_path: Path) -> None:
    """A setting that it did not know is no change, unless the recipe sets it."""
    here = f"run.output_dir={tmp_path}"
    old = load(here).recipe.model_dump(mode="json")
    del old["run"]["eval_on_start"], old["train"]["z_loss_weight"], old["data"]["datasets"][0]["columns"]
    (tmp_path / "run.json").write_text(json.dumps({"recipe_hash": "of other settings", "recipe": old}))
    assert check(here) == []
    assert "in:\n  run.eval_on_start: was true, is false\n" in only(here, "run.eval_on_start=false")


def test_check_resume(tmp_path: Path) -> None:
    assert only(f"run.resume_from_checkpoint={tmp_path}/step-9") == (
        f"command line: run.resume_from_checkpoint: {tmp_path}/step-9 is not a folder\n\n"
        "hint: use auto for the newest valid checkpoint"
    )
    assert check("run.resume_from_checkpoint=auto") == []
    assert f"{tmp_path} is not a checkpoint: manifest.json is missing" in only(f"run.resume_from_checkpoint={tmp_path}")
    (tmp_path / "manifest.json").touch()
    assert check(f"run.resume_from_checkpoint={tmp_path}") == []


def test_check_start(tmp_path: Path) -> None:
    run = tmp_path / "run"
    assert check(f"run.start_from={run}", "run.start_moments=false") == [], "it may be made later"
    assert only(f"run.start_from={run}", f"run.output_dir={run}/") == (
        f"command line: run.start_from: {run} is run.output_dir: a run does not start from itself\n\n"
        "hint: name another run.output_dir, or go on with `ulysses train --resume auto`"
    )
    assert only("run.start_moments=false") == (
        "command line: run.start_moments: is not used without run.start_from\n\nhint: leave it out"
    )
    adapters = tmp_path / "adapters"
    adapters.mkdir()
    (adapters / "adapter_config.json").touch()
    assert "run.start_from says already where adapters begin" in only(
        f"run.start_from={run}", f"lora.adapter_name_or_path={adapters}"
    )
    pairs = "data.datasets={path: owner/pairs, type: preference}"
    assert only(f"run.start_from={run}", "preference.loss=sigmoid", pairs) == (
        "command line: run.start_from: preference.loss: sigmoid compares with the model that model.name_or_path names"
        "\n\nhint: export the run, and name the exported folder as model.name_or_path"
    )
    assert check(f"run.start_from={run}", "preference.loss=orpo", pairs) == []


def test_check_mixture() -> None:
    def mix(*datasets: str) -> str:
        return f"data.datasets=[{', '.join(f'{{path: owner/d{n}, {text}}}' for n, text in enumerate(datasets))}]"

    assert check(mix("share: 0.6, min_tokens: 4Ki", "share: 0.4, max_tokens: 64Ki")) == []
    assert check(mix("share: 0.333", "share: 0.333", "share: 0.333")) == []
    assert only(mix("share: 0.6", "share: 0.6")) == (
        "command line: data.datasets.0.share: the shares add up to 1.2, not to 1\n\nhint: write 0.5, 0.5"
    )
    assert only(mix("share: 0.6", "weight: 1", "weight: 1")) == (
        "command line: data.datasets.1.share: required, since other sources have a share\n\nhint: write share: 0.2"
    )
    assert "data.datasets.0.weight: is not used beside share" in only(mix("share: 0.5, weight: 2", "share: 0.5"))
    assert only(mix("min_tokens: 8Ki, max_tokens: 4Ki")) == (
        "command line: data.datasets.0.min_tokens: 8,192 is more than max_tokens 4,096\n\nhint: exchange the two"
    )
    assert "data.eval_datasets.0.share: is not used: evaluation reads each document once" in only(
        "data.eval_datasets={path: owner/e, share: 1}"
    )


def test_check_checkpoint_uri() -> None:
    assert only("run.checkpoint_uri=ftp://host/runs") == (
        "command line: run.checkpoint_uri: ftp://host/runs is of a kind that is not supported\n\n"
        "hint: write s3://bucket/folder, gs://bucket/folder, hf://owner/model/folder or file:///folder; s3 and gs need "
        "pip install ulysses-cli[s3] or ulysses-cli[gs]"
    )
    keyed = only("run.checkpoint_uri=s3://AKIAabcdefghijk:verysecret@bucket/x")
    assert "holds a key or other options, which recipes must not" in keyed
    assert "verysecret" not in keyed
    assert check("run.checkpoint_uri=s3://bucket/x") == []


def test_check_notice() -> None:
    for address, fault in (
        ("hooks.example.org", "it does not start with https://"),
        ("ftp://hooks.example.org", "it does not start with https://"),
        ("https://", "its host or port is none"),
        ("https:///path", "its host or port is none"),
        ("https://host:0/", "its host or port is none"),
        ("https://host:port/", "its host or port is none"),
        ("https://host:99999/", "its host or port is none"),
        ("https://[::1/", "its host or port is none"),
        ("https://a..b/", "its host or port is none"),
        (f"https://{'x' * 70}/", "its host or port is none"),
        ("https://host/a b", "it holds a space or a letter that addresses encode"),
        ("https://host/\u00fc", "it holds a space or a letter that addresses encode"),
        ("https://me:word@host/", "its host or port is none"),
    ):
        assert only(f"run.notify_webhook={address}").startswith(
            f"command line: run.notify_webhook: is not a web address: {fault}\n\nhint: write one such as https://"
        )
    assert only("run.notify_command=sh 'notify.sh") == (
        "command line: run.notify_command: is not a command: it is empty, or a closing quote is missing\n\n"
        "hint: write a program and its arguments, such as: sh notify.sh"
    )
    assert check("run.notify_webhook=$MY_HOOK") == []
    assert check("run.notify_webhook=http://[::1]:8080/x?a=b") == []
    assert check("run.notify_webhook=https://hooks.example.org/x", "run.notify_command=sh notify.sh") == []


def test_check_hub_model() -> None:
    assert only("run.hub_model_id=a b") == (
        "command line: run.hub_model_id: a b is not the name of a repository\n\nhint: write owner/name"
    )
    assert check("run.hub_model_id=owner/name") == []


def test_check_token_loss(tmp_path: Path) -> None:
    assert only("train.token_loss=losses.focal") == (
        "command line: train.token_loss: losses.focal names no function\n\n"
        "hint: write FILE.py:NAME or MODULE:NAME, such as losses.py:focal"
    )
    assert only(f"train.token_loss={tmp_path}/losses.py:focal") == (
        f"command line: train.token_loss: {tmp_path}/losses.py is not a file\n\n"
        "hint: paths start in the folder of the command"
    )
    assert check("train.token_loss=torch:sqrt") == []


def test_check_folders(tmp_path: Path) -> None:
    assert only("model.tokenizer=./nope") == (
        "command line: model.tokenizer: ./nope is not a folder\n\nhint: name a hub model, a folder, or bytes"
    )
    assert only("memory.offload_optimizer=nvme", f"memory.nvme_path={tmp_path}/x") == (
        f"command line: memory.nvme_path: {tmp_path}/x is not a folder\n\nhint: make it, on a fast local disk"
    )
    assert check("model.tokenizer=owner/tokenizer") == []


def test_check_variables() -> None:
    hint = "hint: write the path itself, or give it on the command line, where a shell does: {}=..."
    for key, text, variable in (
        ("run.output_dir", "${HOME}/x", "${HOME}"),
        ("data.store_dir", "$SCRATCH/store", "$SCRATCH"),
        ("run.checkpoint_uri", "s3://$BUCKET/mine", "$BUCKET"),
    ):
        expected = f"command line: {key}: {variable} is not replaced in a recipe\n\n{hint.format(key)}"
        assert only(f"{key}={text}") == expected
    assert check("run.output_dir=runs/cost-5$") == []


def test_suggested_sizes_pass_the_rules() -> None:
    assert "sp_size" not in only("parallel.sp_size=1", num_processes=8, kv_lora_rank=512).partition("hint")[2]
    assert "dp_replicate" not in only("parallel.zero_stage=2", num_processes=8).partition("hint")[2]


def test_problems_come_in_the_order_of_the_file() -> None:
    problems = check("run.max_cost=5", text=VALID.replace("8Ki", "8191").replace("sp_size: 4", "sp_size: 2"))
    assert [problem.key for problem in problems] == ["run.max_cost", "data.max_length"]


@pytest.mark.parametrize(
    ("heads", "kv_heads", "sp_size", "local", "repeated"),
    [(32, 8, 4, 2, False), (32, 8, 16, 1, True), (12, 3, 2, 2, True), (24, 3, 4, 2, True), (8, 1, 8, 1, True)],
)
def test_kv_heads_of_a_rank(heads: int, kv_heads: int, sp_size: int, local: int, repeated: bool) -> None:
    needed = max(
        len({h * kv_heads // heads for h in range(r * heads // sp_size, (r + 1) * heads // sp_size)})
        for r in range(sp_size)
    )
    assert needed == local
    result = compute_kv_heads(heads, kv_heads, sp_size)
    assert (result.num_local, result.is_repeated) == (local, repeated)


@pytest.mark.parametrize(("length", "sp_size", "pad"), [(8192, 4, 512), (500_000, 1, 32), (500_000, 8, 32), (12, 4, 4)])
def test_resolved_lengths(length: int, sp_size: int, pad: int) -> None:
    loaded = load(f"data.max_length={length}", f"parallel.sp_size={sp_size}", "parallel.dp_shard_size=3")
    result = resolve(loaded.recipe, make_shape(), loaded.places)
    assert result.pad_to_multiple_of == pad
    assert length % pad == 0
    assert pad % sp_size == 0
    assert result.local_tokens * sp_size == result.max_length == length
    assert (result.rows_per_step, result.tokens_per_step) == (3, 3 * length)
    assert "parallel.zero_stage: 3" in result.defaults
    assert not any(line.startswith(("data.max_length", "parallel.sp_size:")) for line in result.defaults)
