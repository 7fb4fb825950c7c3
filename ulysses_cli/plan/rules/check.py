"""Runs every rule across fields of a recipe, and holds the rules about processes, rows and the engine. A rule is one
function that yields Problems without a place in the file. training.py, model.py and files.py hold the others. Rules
for a single field are in the schema."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from ulysses_cli.plan.ds_config import MAX_PERSISTENT, WEIGHTS_ON_DISK, find_contradictions, make_ds_config
from ulysses_cli.plan.ledger.job import is_known
from ulysses_cli.plan.ledger.states import NUM_BUFFERS
from ulysses_cli.plan.models.model_files import TokenizerFacts
from ulysses_cli.plan.models.shape import ModelShape
from ulysses_cli.plan.problem import Problem, Problems
from ulysses_cli.plan.recipe.loader import Loaded
from ulysses_cli.plan.recipe.recipe import Recipe
from ulysses_cli.plan.resolved import make_layout
from ulysses_cli.plan.rules import adapters, files, model, training
from ulysses_cli.plan.rules.files import check_chats
from ulysses_cli.plan.units import format_count

MAX_PROCESSES = 1 << 20
BYTES_VOCABULARY = 259  # 256 bytes, begin, end, padding


@dataclass(frozen=True)
class RuleCase:
    """What the rules read. `shape` is None when the model's config could not be read, which is a problem of its own."""

    recipe: Recipe
    shape: ModelShape | None = None
    num_processes: int | None = None


def check_process_count(case: RuleCase) -> Problems:
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
        if wanted % others == 0 and _may_be(case, name, wanted // others):
            fixes.append(f"parallel.{name}: {wanted // others}")
    yield Problem(
        "parallel",
        f"dp_replicate_size x dp_shard_size x sp_size = {product}, but the run has {format_count(wanted, 'process')}",
        ("one of: " if len(fixes) > 1 else "use ") + "; ".join(fixes),
    )


def _may_be(case: RuleCase, name: str, size: int) -> bool:
    """Whether a size suggested for an axis would pass the rules for that axis."""
    if name == "sp_size" and size > 1:
        fits = case.shape is None or (bool(case.shape.list_ring_sizes(size)) and not case.shape.inexact)
        return fits and case.recipe.data.max_length % size == 0
    return name != "dp_replicate_size" or size == 1 or case.recipe.zero_stage == 3


def check_world_size(case: RuleCase) -> Problems:
    """No more processes than anyone could have."""
    world_size = make_layout(case.recipe).world_size
    if world_size > MAX_PROCESSES:
        yield Problem(
            "parallel",
            f"dp_replicate_size x dp_shard_size x sp_size makes {format_count(world_size, 'process')}",
            f"use {MAX_PROCESSES:,} or fewer",
        )


def check_row_length(case: RuleCase) -> Problems:
    """Every rank of a row holds the same number of tokens."""
    data, sp_size = case.recipe.data, case.recipe.parallel.sp_size
    if case.shape is not None and not case.shape.list_ring_sizes(sp_size):
        return  # sp_size itself is wrong, so a length for it would mislead
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


def check_fixed_length(case: RuleCase) -> Problems:
    """A fixed length must be given and equal data.max_length."""
    parallel, max_length = case.recipe.parallel, case.recipe.data.max_length
    length = parallel.sp_seq_length
    if max_length % parallel.sp_size:
        return  # max_length itself is wrong, which check_row_length says
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
        yield Problem(
            "parallel.sp_seq_length",
            f"{length} is not a multiple of sp_size {parallel.sp_size}",
            f"write sp_seq_length: {max_length}, which is data.max_length",
        )
    elif length != max_length:
        yield Problem(
            "parallel.sp_seq_length",
            f"{length} is not data.max_length {max_length}; rows that do not vary have that length",
            f"write sp_seq_length: {max_length}",
        )


def check_long_documents(case: RuleCase) -> Problems:
    """A stream is cut where rows end, so there is nothing to do about long documents."""
    data = case.recipe.data
    if data.packing == "stream" and data.excess_length_strategy != "auto":
        yield Problem(
            "data.excess_length_strategy",
            f"{data.excess_length_strategy} is not used: packing: stream cuts documents wherever a row ends",
            "leave it out, or set data.packing: documents",
        )


def check_zero_stage(case: RuleCase) -> Problems:
    """What each ZeRO stage can shard and offload."""
    parallel, memory = case.recipe.parallel, case.recipe.memory
    stage = case.recipe.zero_stage
    if parallel.dp_replicate_size > 1 and stage < 3:
        size = parallel.dp_replicate_size * parallel.dp_shard_size
        yield Problem(
            "parallel.dp_replicate_size",
            f"{parallel.dp_replicate_size} copies need ZeRO stage 3; at stage {stage} every rank holds all parameters",
            f"set parallel.zero_stage: 3, or dp_replicate_size: 1 and dp_shard_size: {size}",
        )
    if parallel.dp_replicate_size > 1 and stage == 3 and make_layout(case.recipe).replica_size == 1:
        yield Problem(
            "parallel.dp_replicate_size",
            f"{parallel.dp_replicate_size} copies of one rank each: DeepSpeed keeps no copies within a single rank",
            f"use dp_shard_size: {parallel.dp_replicate_size} and dp_replicate_size: 1",
        )
    if memory.offload_param in ("cpu", "nvme") and stage < 3:
        yield Problem(
            "memory.offload_param",
            f"{memory.offload_param} needs ZeRO stage 3; stage {stage} does not shard parameters",
            "set parallel.zero_stage: 3, or memory.offload_param: none",
        )


def check_disk(case: RuleCase) -> Problems:
    """memory.nvme_path is given if something is offloaded there, or may be, and only then."""
    memory, key = case.recipe.memory, "memory.nvme_path"
    places = ("offload_optimizer", "offload_param", "activation_offload_device")
    still = _find_still_activations(case.recipe)
    on_disk = [name for name in places if getattr(memory, name) == "nvme" and not (still and name == places[-1])]
    aio = case.recipe.deepspeed.get("aio", {})
    if (on_disk or memory.nvme_path) and isinstance(aio, dict) and aio.get("use_gds"):
        what = "is not offered: no GPU with GPUDirect storage has run it, and bytes that pass by the host are counted"
        yield Problem("deepspeed.aio.use_gds", what, "leave it out")
    if on_disk and memory.nvme_path is None:
        yield Problem(key, f"required with memory.{on_disk[0]}: nvme", "name a folder on a fast local disk")
    if still and memory.activation_offload_device == "nvme":
        yield Problem("memory.activation_offload_device", f"nvme is not used: {still}", "leave one of the two out")
    may_use = _may_swap_states(case.recipe) or (not still and memory.activation_offload_device == "auto")
    if not on_disk and not may_use and memory.nvme_path is not None:
        what = "is not used: nothing is on nvme"
        yield Problem(key, what, "set memory.offload_optimizer: nvme, or leave it out")


def _find_still_activations(recipe: Recipe) -> str:
    """Why nothing of what layers save leaves the GPU, or ''."""
    if recipe.memory.activation_offloading in (False, 0):
        return "memory.activation_offloading is off"
    is_whole = recipe.memory.gradient_checkpointing is False
    return "memory.gradient_checkpointing: false leaves nothing to move" if is_whole else ""


def check_states_on_disk(case: RuleCase) -> Problems:
    """Settings that cannot be combined with optimizer states on a disk."""
    key, stage = "memory.offload_optimizer", case.recipe.zero_stage
    if not _may_swap_states(case.recipe):
        return
    if stage < 3:
        what = f"nvme needs ZeRO stage 3; DeepSpeed's stage {stage} keeps its states in memory"
        yield Problem(key, what, f"set parallel.zero_stage: 3, or {key}: cpu")
    if case.recipe.run.async_save:
        what = "copies states into host memory, which memory.offload_optimizer: nvme is there to spare"
        yield Problem("run.async_save", what, "leave it out; a save then reads them from the disk, piece by piece")
    user_section = case.recipe.deepspeed.get("zero_optimization", {}).get("offload_optimizer", {})
    for name in ("pipeline_read", "pipeline_write"):
        if isinstance(user_section, dict) and user_section.get(name):
            where = f"deepspeed.zero_optimization.offload_optimizer.{name}"
            yield Problem(where, "is not offered: only the plain swapper is proven to change no value", "leave it out")
    if isinstance(user_section, dict) and "buffer_count" in user_section:
        what = f"is decided by {key}: nvme: {NUM_BUFFERS} buffers are what the ledger counts of the host"
        yield Problem("deepspeed.zero_optimization.offload_optimizer.buffer_count", what, "leave it out")


def _may_swap_states(recipe: Recipe) -> bool:
    """Whether the optimizer's states are on a disk, or may be once `auto` is settled (list_last_measures in
    planner/lever_choice.py)."""
    if recipe.memory.offload_optimizer != "auto":
        return recipe.memory.offload_optimizer == "nvme"
    is_able = recipe.train.optim == "adamw" and recipe.zero_stage == 3 and not recipe.run.async_save
    return is_able and recipe.memory.nvme_path is not None


def check_weights_on_disk(case: RuleCase) -> Problems:
    """Settings that cannot be combined with weights on a disk."""
    key, shape = "memory.offload_param", case.shape
    if case.recipe.memory.offload_param != "nvme":
        return
    if shape is not None and not is_known(shape):
        what = f"nvme needs buffers of the size of the model's weights, and {shape.model_type}'s are not known"
        yield Problem(key, what, f"use {key}: cpu")
    if case.recipe.parallel.dp_replicate_size > 1:
        what = "copies inside replicas (dp_replicate_size) stay in memory, which nvme is there to spare"
        yield Problem(key, what, f"set parallel.dp_replicate_size: 1, or {key}: cpu")
    zero, user_zero = "deepspeed.zero_optimization", case.recipe.deepspeed.get("zero_optimization", {})
    if not isinstance(user_zero, dict):
        return
    for name in WEIGHTS_ON_DISK:
        if user_zero.get(name):
            what = f"must be 0 with {key}: nvme: DeepSpeed would update weights in memory and not in their file"
            yield Problem(f"{zero}.{name}", what, "leave it out")
    if user_zero.get("param_persistence_threshold", 0) > MAX_PERSISTENT:
        what = f"must not be above {MAX_PERSISTENT:,} with {key}: nvme: what has a file cannot stay on the GPU"
        yield Problem(f"{zero}.param_persistence_threshold", what, "leave it out")
    user_section = user_zero.get("offload_param")
    for name in ("buffer_count", "buffer_size", "max_in_cpu"):
        if isinstance(user_section, dict) and name in user_section:
            what = f"is decided by {key}: nvme: buffers are sized by the model's weights"
            yield Problem(f"{zero}.offload_param.{name}", what, "leave it out")


def check_model_source(case: RuleCase) -> Problems:
    """Exactly one source of weights, and a tokenizer for it."""
    source = case.recipe.model
    if source.name_or_path is None and source.config is None:
        yield Problem(
            "model.name_or_path",
            "no model is named",
            "write a hub name or a local folder, or model.config for random weights",
        )
    if source.name_or_path is not None and source.config is not None:
        yield Problem(
            "model.config", "starts from random weights, but name_or_path names a trained model", "keep one of the two"
        )
    if source.config is not None and source.name_or_path is None and source.tokenizer is None:
        yield Problem(
            "model.tokenizer", "required with model.config: a random model brings none", "write tokenizer: bytes"
        )
    if source.tokenizer == "bytes" and case.shape is not None and case.shape.vocab_size < BYTES_VOCABULARY:
        yield Problem(
            "model.tokenizer",
            f"bytes needs a vocabulary of {BYTES_VOCABULARY}, the model has {case.shape.vocab_size}",
            f"set vocab_size: {BYTES_VOCABULARY} or more in model.config",
        )


def check_deepspeed_section(case: RuleCase) -> Problems:
    """The deepspeed section may add to the recipe, and must not contradict it."""
    memory = case.recipe.memory
    devices = ("none" if device == "auto" else device for device in (memory.offload_optimizer, memory.offload_param))
    config = make_ds_config(case.recipe, make_layout(case.recipe), *devices)
    for key, message, hint in find_contradictions(case.recipe, config):
        yield Problem(f"deepspeed.{key}", message, hint)


RULES: tuple[Callable[[RuleCase], Problems], ...] = (
    check_process_count,
    check_world_size,
    check_row_length,
    check_fixed_length,
    check_long_documents,
    check_zero_stage,
    check_disk,
    check_states_on_disk,
    check_weights_on_disk,
    check_model_source,
    check_deepspeed_section,
)


def check_recipe(
    loaded: Loaded,
    shape: ModelShape | None,
    num_processes: int | None = None,
    tokenizer: TokenizerFacts | None = None,
) -> list[Problem]:
    """The problem of every broken rule, with its place in the recipe. `tokenizer`: None unless its files are on
    disk."""
    case = RuleCase(loaded.recipe, shape, num_processes)
    recipe = loaded.recipe
    problems = [problem for rule in RULES for problem in rule(case)]
    if shape is not None:
        shape_rules = (*model.MODEL_RULES, *adapters.ADAPTER_RULES, *model.POSITION_RULES)
        problems += [problem for rule in shape_rules for problem in rule(recipe, shape)]
    recipe_rules = (*training.TRAINING_RULES, *training.PREFERENCE_RULES, *files.RULES)
    problems += [problem for rule in recipe_rules for problem in rule(recipe)]
    problems += check_chats(recipe, tokenizer)
    placed = [replace(problem, where=loaded.locate(problem.key)) for problem in problems]
    return sorted(placed, key=lambda problem: problem.where)
