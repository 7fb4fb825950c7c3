"""Prints what a recipe may combine. Each pair of features is written into one recipe, and the rules judge it.

A pair combines where the recipe is valid at one of ZeRO's stages at least. Where it is not, the rules' own words stand.
"""

from collections import defaultdict
from functools import cache
from itertools import combinations

from ulysses_cli.hub import load_table
from ulysses_cli.plan.models.shape import ModelShape, read_model_shape
from ulysses_cli.plan.problem import Problem, RecipeError
from ulysses_cli.plan.recipe.loader import parse_recipe
from ulysses_cli.plan.rules.check import check_recipe

RECIPE = """\
model: {name_or_path: Qwen/Qwen3-8B}
data: {datasets: [{path: owner/texts}], max_length: 8Ki}
train: {max_steps: 10}
"""
STAGES = (3, 2, 1)
DISK = {"memory.nvme_path": "."}
ADAPTERS = {"lora.target_modules": "[o_proj]"}  # which each of the models has
PAIRS = {"data.datasets.0.type": "preference"}
Values = dict[str, str]  # by setting
TRAINED: dict[str, Values] = {  # feature: what it needs in a recipe
    "LoRA": ADAPTERS,
    "DoRA": {**ADAPTERS, "lora.use_dora": "true"},
    "base in nf4": {**ADAPTERS, "lora.quantize_base": "nf4"},
    "base in int8": {**ADAPTERS, "lora.quantize_base": "int8"},
    "8-bit AdamW": {"train.optim": "adamw_8bit"},
    "Muon": {"train.optim": "muon"},
    "DPO and its kin": {**PAIRS, "preference.loss": "sigmoid"},
    "KTO": {"data.datasets.0.type": "unpaired", "preference.loss": "kto"},
    "shared prompts": {**PAIRS, "preference.share_prompts": "true"},
    "rows cut from a stream": {"data.packing": "stream"},
    "one document a row": {"data.packing": "off"},
    "experts": {"model.name_or_path": "Qwen/Qwen3-30B-A3B"},
    "latent attention": {"model.name_or_path": "zai-org/GLM-4.7-Flash"},
    "delta nets": {"model.name_or_path": "Qwen/Qwen3.5-9B"},
    "Mamba2": {"model.name_or_path": "tiiuae/Falcon-H1-7B-Base"},
}
RUN: dict[str, Values] = {
    **{f"ZeRO {stage}": {"parallel.zero_stage": str(stage)} for stage in sorted(STAGES)},
    "copies (hpZ)": {"parallel.dp_replicate_size": "2", "parallel.dp_shard_size": "2"},
    "heads split": {"parallel.sp_size": "4", "parallel.ring_size": "1"},
    "ring": {"parallel.sp_size": "4", "parallel.ring_size": "4"},
    "optimizer on host": {"memory.offload_optimizer": "cpu"},
    "optimizer on disk": {**DISK, "memory.offload_optimizer": "nvme"},
    "weights on host": {"memory.offload_param": "cpu"},
    "weights on disk": {**DISK, "memory.offload_param": "nvme"},
    "activations on host": {"memory.activation_offloading": "true", "memory.activation_offload_device": "cpu"},
    "tiles": {"memory.tiled_mlp": "true", "memory.tiled_loss": "true"},
    "head chunks": {"memory.attention_head_chunks": "2"},
}


@cache
def explain(one: str, other: str) -> str:
    """Returns why two features do not combine, '' where they do or are two values of one setting."""
    values, others = ({**TRAINED, **RUN}[name] for name in (one, other))
    if any(values[key] != others[key] for key in values.keys() & others.keys()):
        return ""
    said = [_check({"parallel.zero_stage": str(stage), **values, **others}) for stage in STAGES]
    problem = min(said, key=len)[:1]
    return f"`{problem[0].key}`: {problem[0].message}" if problem else ""


def list_refused() -> dict[str, dict[str, list[str]]]:
    """Returns, by a rule's words, each feature with the later ones that the rule refuses beside it."""
    refused: dict[str, dict[str, list[str]]] = defaultdict(lambda: defaultdict(list))
    for one, other in combinations([*TRAINED, *RUN], 2):
        if why := explain(one, other):
            refused[why][one].append(other)
    return refused


def _check(values: Values) -> list[Problem]:
    try:
        loaded = parse_recipe(RECIPE, "recipe.yaml", [f"{key}={value}" for key, value in values.items()])
    except RecipeError as error:
        return list(error.problems)
    return check_recipe(loaded, _find_shape(str(loaded.recipe.model.name_or_path)))


@cache
def _find_shape(name: str) -> ModelShape:
    return read_model_shape(load_table()[name.lower()]["config"], name)
