"""Every rule that a recipe must keep, run at once: what no single field can tell.

Each rule is one function from a Case to Problems; this file holds those that need the recipe alone, check_model.py
those that need the model's shape, check_files.py those that look at the disk.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

from ulysses_cli.plan import check_files, check_model
from ulysses_cli.plan.ds_config import find_contradictions, make_ds_config
from ulysses_cli.plan.load import Loaded
from ulysses_cli.plan.model_shape import ModelShape
from ulysses_cli.plan.problem import Problem
from ulysses_cli.plan.recipe import Recipe
from ulysses_cli.plan.resolved import make_layout

BYTES_VOCABULARY = 259  # 256 bytes, begin, end, padding


@dataclass(frozen=True)
class Case:
    """What the rules look at. `shape` is None when the model's config could not be had: a problem of its own."""

    recipe: Recipe
    shape: ModelShape | None = None
    num_processes: int | None = None


Found = Iterator[Problem]


def check_process_count(case: Case) -> Found:
    """dp_replicate_size x dp_shard_size x sp_size is the number of processes."""
    parallel, layout = case.recipe.parallel, make_layout(case.recipe)
    wanted = case.num_processes
    if wanted is None or wanted == layout.world_size:
        return
    product = f"{parallel.dp_replicate_size} x {parallel.dp_shard_size} x {parallel.sp_size} = {layout.world_size}"
    fixes = [f"--num-processes {layout.world_size}"]
    for name, size in (
        ("dp_shard_size", parallel.dp_shard_size),
        ("sp_size", parallel.sp_size),
        ("dp_replicate_size", parallel.dp_replicate_size),
    ):
        others = layout.world_size // size
        fits_heads = name != "sp_size" or case.shape is None or case.shape.num_heads % (wanted // others or 1) == 0
        if wanted % others == 0 and fits_heads:
            fixes.append(f"parallel.{name}: {wanted // others}")
    yield Problem(
        "parallel",
        f"dp_replicate_size x dp_shard_size x sp_size = {product}, but there are {wanted} processes",
        "one of: " + "; ".join(fixes),
    )


def check_row_length(case: Case) -> Found:
    """Every rank of a row holds the same number of tokens."""
    data, sp_size = case.recipe.data, case.recipe.parallel.sp_size
    if case.shape is not None and case.shape.num_heads % sp_size:
        return  # a length that suits a size which cannot stay would mislead
    if data.max_length % sp_size:
        below = data.max_length // sp_size * sp_size
        near = [str(n) for n in (below, below + sp_size) if n >= 2]
        yield Problem(
            "data.max_length", f"{data.max_length} is not a multiple of sp_size {sp_size}", f"use {' or '.join(near)}"
        )
        return
    pad = data.pad_to_multiple_of
    if pad == "auto":
        return
    if pad % sp_size:
        yield Problem(
            "data.pad_to_multiple_of",
            f"{pad} is not a multiple of sp_size {sp_size}",
            f"use auto, {sp_size} or {sp_size * 128}",
        )
    elif data.max_length % pad:
        yield Problem(
            "data.pad_to_multiple_of",
            f"padding to a multiple of {pad} makes rows longer than max_length {data.max_length}",
            "use auto, or a number that divides data.max_length",
        )


def check_fixed_length(case: Case) -> Found:
    """A length that is not variable must be given, and be the rows' own."""
    parallel, max_length = case.recipe.parallel, case.recipe.data.max_length
    length = parallel.sp_seq_length
    if parallel.sp_seq_length_is_variable:
        if length is not None:
            yield Problem(
                "parallel.sp_seq_length",
                f"is {length}, but sp_seq_length_is_variable is true, so it would not be used",
                "set parallel.sp_seq_length_is_variable: false, or leave sp_seq_length out",
            )
    elif length is None:
        yield Problem(
            "parallel.sp_seq_length",
            "required when sp_seq_length_is_variable is false",
            f"write sp_seq_length: {max_length}",
        )
    elif length % parallel.sp_size:
        near = (length // parallel.sp_size + 1) * parallel.sp_size
        yield Problem(
            "parallel.sp_seq_length", f"{length} is not a multiple of sp_size {parallel.sp_size}", f"use {near}"
        )
    elif length != max_length:
        yield Problem(
            "parallel.sp_seq_length",
            f"{length} is not data.max_length {max_length}; rows that do not vary have that length",
            f"write sp_seq_length: {max_length}",
        )


def check_zero_stage(case: Case) -> Found:
    """What each ZeRO stage can shard and offload."""
    parallel, memory = case.recipe.parallel, case.recipe.memory
    stage = parallel.zero_stage
    if parallel.dp_replicate_size > 1 and stage < 3:
        size = parallel.dp_replicate_size * parallel.dp_shard_size
        yield Problem(
            "parallel.dp_replicate_size",
            f"{parallel.dp_replicate_size} copies need ZeRO stage 3; at stage {stage} every rank holds all parameters",
            f"set parallel.zero_stage: 3, or dp_replicate_size: 1 and dp_shard_size: {size}",
        )
    if memory.offload_param != "none" and stage < 3:
        yield Problem(
            "memory.offload_param",
            f"{memory.offload_param} needs ZeRO stage 3; stage {stage} does not shard parameters",
            "set parallel.zero_stage: 3, or memory.offload_param: none",
        )
    if memory.offload_optimizer == "nvme" and stage < 3:
        yield Problem(
            "memory.offload_optimizer",
            f"nvme needs ZeRO stage 3; stage {stage} can offload to cpu only",
            "set parallel.zero_stage: 3, or memory.offload_optimizer: cpu",
        )
    if "nvme" in (memory.offload_param, memory.offload_optimizer) and memory.nvme_path is None:
        yield Problem(
            "memory.nvme_path", "required when something is offloaded to nvme", "name a folder on a local disk"
        )
    if memory.offload_param == "nvme" and memory.offload_optimizer not in ("nvme", "auto"):
        yield Problem(
            "memory.offload_param",
            f"parameters on nvme with the optimizer on {memory.offload_optimizer} is not served by DeepSpeed",
            "set memory.offload_optimizer: nvme",
        )


def check_optimizer(case: Case) -> Found:
    """8-bit AdamW lives on the GPU."""
    if case.recipe.train.optim != "adamw_8bit":
        return
    offload = case.recipe.memory.offload_optimizer
    if offload in ("cpu", "nvme"):
        yield Problem(
            "train.optim",
            f"adamw_8bit computes on the GPU, but memory.offload_optimizer is {offload}",
            "use train.optim: adamw, or memory.offload_optimizer: none",
        )
    if case.recipe.run.device == "cpu":
        yield Problem("train.optim", "adamw_8bit needs a GPU, but run.device is cpu", "use train.optim: adamw")


def check_steps(case: Case) -> Found:
    """The length of the run and its schedule have one meaning."""
    train = case.recipe.train
    if train.max_steps is not None and train.num_train_epochs is not None:
        yield Problem(
            "train.num_train_epochs",
            f"{train.num_train_epochs:g} epochs and max_steps {train.max_steps} both say how long the run is",
            "keep one of the two",
        )
    if train.warmup_steps and train.warmup_ratio:
        yield Problem(
            "train.warmup_ratio",
            f"{train.warmup_ratio:g} and warmup_steps {train.warmup_steps} both say how long the warm-up is",
            "keep one of the two",
        )
    if train.max_steps is not None and train.warmup_steps >= train.max_steps and train.warmup_steps:
        yield Problem(
            "train.warmup_steps",
            f"{train.warmup_steps} leaves no step at the full learning rate: max_steps is {train.max_steps}",
            f"use fewer than {train.max_steps}",
        )
    needed = {"cosine_with_min_lr": ("min_lr", "min_lr_rate"), "warmup_stable_decay": ("num_decay_steps",)}
    wanted = needed.get(train.lr_scheduler_type, ())
    if wanted and not any(name in train.lr_scheduler_kwargs for name in wanted):
        yield Problem(
            "train.lr_scheduler_kwargs",
            f"{train.lr_scheduler_type} needs {' or '.join(wanted)}",
            f"write lr_scheduler_kwargs: {{{wanted[-1]}: ...}}",
        )


def check_evaluation(case: Case) -> Found:
    """Evaluation needs data, from one place."""
    data, run = case.recipe.data, case.recipe.run
    if run.eval_steps is not None and not data.eval_datasets and not data.eval_split:
        yield Problem(
            "run.eval_steps",
            f"evaluates every {run.eval_steps} steps, but there is nothing to evaluate on",
            "write data.eval_split: 0.01 or data.eval_datasets",
        )
    if data.eval_datasets and data.eval_split:
        yield Problem("data.eval_split", "and eval_datasets both say what is evaluated", "keep one of the two")


def check_money(case: Case) -> Found:
    """A limit on cost needs a price."""
    run = case.recipe.run
    if run.max_cost is not None and run.price_per_gpu_hour is None:
        yield Problem(
            "run.max_cost",
            "cannot be kept without a price",
            "write run.price_per_gpu_hour, in USD for one GPU and hour",
        )


def check_model_source(case: Case) -> Found:
    """Exactly one origin of weights, and a tokenizer for it."""
    model = case.recipe.model
    if model.name_or_path is None and model.config is None:
        yield Problem(
            "model.name_or_path",
            "no model is named",
            "write a hub name or a local folder, or model.config for random weights",
        )
    if model.name_or_path is not None and model.config is not None:
        yield Problem(
            "model.config", "starts from random weights, but name_or_path names a trained model", "keep one of the two"
        )
    if model.config is not None and model.name_or_path is None and model.tokenizer is None:
        yield Problem(
            "model.tokenizer", "required with model.config: a random model brings none", "write tokenizer: bytes"
        )
    if model.tokenizer == "bytes" and case.shape is not None and case.shape.vocab_size < BYTES_VOCABULARY:
        yield Problem(
            "model.tokenizer",
            f"bytes needs a vocabulary of {BYTES_VOCABULARY}, the model has {case.shape.vocab_size}",
            f"set vocab_size: {BYTES_VOCABULARY} or more in model.config",
        )


def check_deepspeed_section(case: Case) -> Found:
    """The free section may add to the recipe, not contradict it."""
    offload = case.recipe.memory.offload_optimizer
    made = make_ds_config(case.recipe, make_layout(case.recipe), "none" if offload == "auto" else offload)
    for key, message, hint in find_contradictions(made, case.recipe.deepspeed):
        yield Problem(f"deepspeed.{key}", message, hint)


RULES: tuple[Callable[[Case], Found], ...] = (
    check_process_count,
    check_row_length,
    check_fixed_length,
    check_zero_stage,
    check_optimizer,
    check_steps,
    check_evaluation,
    check_money,
    check_model_source,
    check_deepspeed_section,
)


def check_recipe(loaded: Loaded, shape: ModelShape | None, num_processes: int | None = None) -> list[Problem]:
    """Every broken rule, each at its place in the recipe."""
    case = Case(loaded.recipe, shape, num_processes)
    found = [problem for rule in RULES for problem in rule(case)]
    if shape is not None:
        found += [problem for rule in check_model.RULES for problem in rule(loaded.recipe, shape)]
    found += [problem for rule in check_files.RULES for problem in rule(loaded.recipe)]
    placed = [replace(problem, where=loaded.locate(problem.key)) for problem in found]
    return sorted(placed, key=lambda problem: problem.where)
