"""Draws random recipes from a seed, and predicts and traces the bytes of each phase.

Families, sizes, levers, layouts, stages, adapters and engine settings are drawn. A recipe is used when it passes every
rule of the checks.
"""

import json
import math
import random
import traceback
from collections.abc import Iterable, Iterator, Mapping
from copy import deepcopy
from dataclasses import dataclass
from functools import cache
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from typing import Any

import yaml

from support.paths import ROOT
from ulysses_cli.plan.layout import list_divisors
from ulysses_cli.plan.ledger.job import Job, make_job
from ulysses_cli.plan.ledger.moments import find_fullest_ranks, join
from ulysses_cli.plan.ledger.weights import list_linear_modules
from ulysses_cli.plan.levers import explain_no_leaves, explain_no_overlap
from ulysses_cli.plan.models.family import Trait
from ulysses_cli.plan.models.shape import ModelShape, read_model_shape
from ulysses_cli.plan.planner.lever_choice import read_levers
from ulysses_cli.plan.recipe.loader import parse_recipe
from ulysses_cli.plan.recipe.recipe import Recipe
from ulysses_cli.plan.resolved import find_ring_size
from ulysses_cli.plan.rules.check import check_recipe
from ulysses_cli.prove.ranks import start_process
from ulysses_cli.prove.trace.trace import join_ranks, list_ranks, prepare_process, trace

# The families of which every size can be drawn.
DRAWN = (
    *("gemma2", "gemma3_text", "gpt_oss", "granite", "llama", "mistral", "mixtral", "olmo2", "phi3", "qwen2", "qwen3"),
    *("qwen3_moe", "smollm3"),
)
YARDSTICK = ROOT / "benchmarks" / "results" / "yardstick.json"  # the other families' sizes are of its recipes
OF_ATTENTION = {"q_proj", "q_a_proj", "q_b_proj", "k_proj", "v_proj", "qkv_proj", "o_proj", "out_proj", "kv_b_proj"}
WINDOWED = set(DRAWN) - {"llama", "granite", "olmo2"}

TRACE_SECONDS = 900
MAX_DRAWS = 1000


@dataclass(frozen=True)
class DrawnRecipe:
    """A recipe and its origin: the same seed and number give it again."""

    settings: dict[str, Any]
    recipe: Recipe
    command: str = ""

    @property
    def config(self) -> dict[str, Any]:
        """Returns the content of config.json."""
        return dict(self.settings["model"]["config"])

    @property
    def family(self) -> str:
        return str(self.settings["model"]["config"]["model_type"])

    def describe(self) -> str:
        return yaml.safe_dump(self.settings, default_flow_style=None, sort_keys=False, width=10_000)


def read_recipe(settings: dict[str, Any]) -> DrawnRecipe:
    return DrawnRecipe(settings, parse_recipe(json.dumps(settings), "a saved recipe", []).recipe)


def draw_recipes(seed: int, num: int, start: int = 0) -> Iterator[DrawnRecipe]:
    for number in range(start, start + num):
        yield draw_recipe(seed, number)


def draw_recipe(seed: int, number: int) -> DrawnRecipe:
    """Draws a recipe. As many consecutive recipes as there are families cover all families."""
    order = sorted({*DRAWN, *read_saved_configs()})
    random.Random(f"families {seed} {number // len(order)}").shuffle(order)
    dice = random.Random(f"recipe {seed} {number}")
    for _ in range(MAX_DRAWS):
        settings = _draw_settings(dice, order[number % len(order)])
        _write_into(settings, _draw_flags(seed, number, settings))
        _write_into(settings, _draw_disk(seed, number, settings))
        loaded = parse_recipe(json.dumps(settings), f"recipe {number} of seed {seed}", [])
        if not check_recipe(loaded, read_model_shape(settings["model"]["config"], "the drawn model")):
            command = f"python benchmarks/yardstick.py --draw 1 --seed {seed} --first {number}"
            return DrawnRecipe(settings, loaded.recipe, command)
    raise AssertionError(f"no recipe {number} of seed {seed} in {MAX_DRAWS} draws")


def _write_into(settings: dict[str, Any], words: Iterable[str]) -> None:
    for word in words:
        key, _, value = word.partition("=")
        section, _, name = key.partition(".")
        settings[section][name] = yaml.safe_load(value)


def _draw_flags(seed: int, number: int, settings: Mapping[str, Any]) -> Iterator[str]:
    """Draws settings by dice of their own, each where it has an effect."""
    memory, parallel = settings["memory"], settings["parallel"]
    yield f"model.fused_kernels={_draw_flag('kernels', seed, number)}"
    if memory["tiled_mlp"] or memory["tiled_loss"]:
        yield f"memory.large_tiles={_draw_flag('large tiles', seed, number)}"
    if memory["offload_optimizer"] == "cpu" and parallel["zero_stage"] == 3:
        yield f"memory.overlap_optimizer={_draw_flag('early steps', seed, number)}"
    shape = read_model_shape(settings["model"]["config"], "the drawn model")
    if not explain_no_leaves(shape, parallel["zero_stage"], memory["offload_param"]):
        yield f"memory.leaf_layers={_draw_flag('leaves', seed, number)}"
    ring_size = parallel.get("ring_size") or find_ring_size(shape, parallel["sp_size"])
    ulysses_size = parallel["sp_size"] // ring_size
    if memory["attention_head_chunks"] > 1 and not explain_no_overlap(shape, ulysses_size):
        yield f"memory.overlap_exchange={_draw_flag('overlap', seed, number)}"


def _draw_disk(seed: int, number: int, settings: Mapping[str, Any]) -> Iterator[str]:
    """Draws what is on a local disk instead of host memory. Nothing is written there: any folder will do."""
    memory, places = settings["memory"], []
    if memory["activation_offloading"]:
        places.append(("activations on a disk", "memory.activation_offload_device=nvme"))
    if settings["parallel"]["zero_stage"] == 3:
        on_host = [name for name in ("offload_optimizer", "offload_param") if memory[name] == "cpu"]
        places += [(f"{name} on a disk", f"memory.{name}=nvme") for name in on_host]
    words = [word for name, word in places if _draw_flag(name, seed, number) == "true"]
    if "memory.offload_optimizer=nvme" in words:
        words.append("memory.overlap_optimizer=auto")  # states on a disk have no early steps
    yield from words
    if words:
        yield "memory.nvme_path=."


def _draw_flag(name: str, seed: int, number: int) -> str:
    return str(random.Random(f"{name} {seed} {number}").choice((False, True))).lower()


@cache
def read_saved_configs() -> dict[str, list[dict[str, Any]]]:
    """Returns the contents of config.json of saved recipes, by family."""
    configs: dict[str, list[dict[str, Any]]] = {}
    for row in json.loads(YARDSTICK.read_text())["rows"]:
        config = row["recipe"]["model"]["config"]
        configs.setdefault(config["model_type"], []).append(config)
    return configs


def _take_config(dice: random.Random, family: str) -> dict[str, Any]:
    """Takes a saved config.json with a vocabulary of another size."""
    config = deepcopy(dice.choice(read_saved_configs()[family]))
    return {**config, "vocab_size": round(_draw_size(dice, 1_000, 100_000)), "pad_token_id": 0}


def _draw_settings(dice: random.Random, family: str) -> dict[str, Any]:
    sp_size = dice.choice((1, 1, 2, 2, 4, 8))
    config = _draw_config(dice, family) if family in DRAWN else _take_config(dice, family)
    heads, stage = config["num_attention_heads"], dice.choice((1, 2, 3, 3, 3))
    local_tokens = 2 * round(_draw_size(dice, 128, 16_384) / 2)
    max_length = local_tokens * sp_size
    config["max_position_embeddings"] = max_length
    settings: dict[str, Any] = {
        "model": {
            "config": config,
            "tokenizer": "bytes",
            "dtype": dice.choice(("bfloat16", "bfloat16", "bfloat16", "float32")),
            "attn_implementation": dice.choice(("auto", "auto", "sdpa", "flash_attention_2", "flash_attention_3")),
        },
        "parallel": {
            "sp_size": sp_size,
            "dp_shard_size": dice.choice((1, 1, 2, 3, 4)),
            "dp_replicate_size": dice.choice((1, 1, 1, 2)) if stage == 3 else 1,
            "zero_stage": stage,
        },
        "data": {
            "datasets": [{"type": "synthetic"}],
            "max_length": max_length,
            "packing": dice.choice(("documents", "stream", "off")),
            "eval_split": dice.choice((0.0, 0.1)),
        },
        "train": {
            "max_steps": 10,
            "per_device_train_batch_size": dice.choice((1, 1, 1, 2, 3)),
            "gradient_accumulation_steps": dice.choice((1, 1, 2, 4)),
            "optim": dice.choice(("adamw", "adamw", "adamw", "adamw_8bit")),
            "z_loss_weight": dice.choice((0.0, 0.0, 0.0, 1e-4)),
        },
        "memory": _draw_levers(dice, heads // sp_size, _count_layers(config), stage),
        "run": {"output_dir": "nowhere"},
        "deepspeed": {"zero_optimization": _draw_engine(dice, config, stage)},
    }
    if dice.random() < 0.5:
        settings["lora"] = _draw_adapters(dice, read_model_shape(config, "the drawn model"))
    if dice.random() < 0.3:
        settings["parallel"]["ring_size"] = dice.choice(list_divisors(settings["parallel"]["sp_size"]))
    if dice.random() < 0.15:
        settings["data"]["added_tokens"] = [f"<{number}>" for number in range(dice.choice((1, 40)))]
    if lora := settings.get("lora"):
        if settings["parallel"]["zero_stage"] < 3:  # with ZeRO-3 they are refused
            lora["use_dora"], lora["quantize_base"] = dice.choice(
                ((False, None), (True, None), (False, "nf4"), (False, "int8"))
            )
        lora["modules_to_save"] = dice.choice(([], [], ["norm"], ["embed_tokens"], ["lm_head", "norm"]))
    return settings


def _draw_size(dice: random.Random, low: float, high: float) -> float:
    """Draws a size; each doubling is equally likely."""
    return math.exp(dice.uniform(math.log(low), math.log(high)))


def _draw_config(dice: random.Random, family: str) -> dict[str, Any]:
    """Draws config.json's content: few layers, and widths in any ratio."""
    num_layers, heads = dice.randint(2, 4), dice.choice((4, 6, 8, 12, 16))
    num_layers = 4 if family == "olmo_hybrid" else num_layers  # its fourth attends, and transformers asks for one
    head_dim = dice.choice((32, 64, 64, 128))
    multiple = math.lcm(64, heads)
    hidden = dice.choice((heads * head_dim, multiple * math.ceil(_draw_size(dice, 256, 2048) / multiple)))
    config: dict[str, Any] = {
        "model_type": family,
        "hidden_size": hidden,
        "intermediate_size": 32 * round(hidden * _draw_size(dice, 1, 5) / 32),
        "num_hidden_layers": num_layers,
        "num_attention_heads": heads,
        "num_key_value_heads": dice.choice(list_divisors(heads)),
        "head_dim": head_dim,
        "vocab_size": round(_draw_size(dice, 1_000, 100_000)),
        "tie_word_embeddings": dice.choice((False, True)),
        "pad_token_id": 0,
    }
    if family in ("gemma2", "gemma3_text"):
        config["query_pre_attn_scalar"] = head_dim
    if family == "gemma2":
        config["final_logit_softcapping"] = dice.choice((30.0, 30.0, None))
        config["attn_logit_softcapping"] = dice.choice((50.0, None))
    if family == "granite":
        config["logits_scaling"] = dice.choice((1.0, 8.0))
    if family in WINDOWED:
        config["sliding_window"] = dice.choice((64, 512, 4096))
    if family in ("llama", "granite", "qwen3", "olmo2", "smollm3"):
        config["attention_bias"] = dice.choice((False, False, True))
    if family in ("llama", "granite", "smollm3"):
        config["mlp_bias"] = dice.choice((False, False, True))
    if family in ("mixtral", "qwen3_moe", "gpt_oss"):
        config |= _draw_experts(dice, family, hidden, num_layers)
    return config


def _draw_experts(dice: random.Random, family: str, hidden: int, num_layers: int) -> dict[str, Any]:
    num, inner = dice.choice((4, 8, 16)), 32 * round(hidden * _draw_size(dice, 0.3, 2) / 32)
    chosen = {"num_experts_per_tok": dice.choice((1, 2, 4))}
    if family != "qwen3_moe":
        return {**chosen, "num_local_experts": num, "intermediate_size": inner}
    dense = dice.choice(([], [], [0], [num_layers - 1]))
    return {**chosen, "num_experts": num, "moe_intermediate_size": inner, "mlp_only_layers": dense}


def _count_layers(config: dict[str, Any]) -> int:
    return int(config["num_hidden_layers"] if "num_hidden_layers" in config else len(config["layers_block_type"]))


def _draw_levers(dice: random.Random, local_heads: int, num_layers: int, stage: int) -> dict[str, Any]:
    on = (False, True)
    recomputes = dice.choice((True, True, "full", False))
    return {
        "gradient_checkpointing": recomputes,
        "attention_head_chunks": dice.choice((1, 1, *(n for n in (2, 3, 4) if not local_heads % n), local_heads or 1)),
        "activation_offloading": dice.choice((False, True, dice.randint(0, num_layers))) if recomputes else False,
        "tiled_mlp": dice.choice(on),
        "tiled_loss": dice.choice(on),
        "offload_optimizer": dice.choice(("none", "none", "cpu")),
        "offload_param": dice.choice(("none", "none", "cpu")) if stage == 3 else "none",
    }


def _draw_engine(dice: random.Random, config: dict[str, Any], stage: int) -> dict[str, int]:
    """Draws buckets as much smaller than DeepSpeed's as the model is smaller than usual ones, or the usual."""
    hidden, layers = config["hidden_size"], _count_layers(config)
    inner = config.get("intermediate_size")
    widest = max(hidden, inner) if isinstance(inner, int) else hidden
    about = hidden * (config["vocab_size"] + 7 * layers * widest)
    sizes = {"reduce_bucket_size": (0.02, 1.5)}
    if stage == 3:
        sizes |= {"prefetch_bucket_size": (0.003, 0.5), "sub_group_size": (0.05, 2), "max_live_parameters": (0.1, 3)}
        sizes |= {"max_reuse_distance": (0.1, 3), "param_persistence_threshold": (1e-5, 0.01)}
    drawn = {name: int(about * _draw_size(dice, *bounds)) for name, bounds in sizes.items()}
    return {name: size for name, size in drawn.items() if name == "reduce_bucket_size" or dice.random() < 0.8}


def _draw_adapters(dice: random.Random, shape: ModelShape) -> dict[str, Any]:
    able = list_linear_modules(shape)
    modules = [name for name in able if name in OF_ATTENTION] or able
    everything = list(modules) if Trait.EXPERTS_ADAPTED in shape.traits else "all-linear"
    return {
        "r": dice.choice((4, 8, 16, 64)),
        "dropout": dice.choice((0.0, 0.0, 0.05)),
        "target_modules": dice.choice((everything, everything, list(modules), [modules[0]])),
    }


def make_drawn_job(drawn: DrawnRecipe) -> Job:
    shape = read_model_shape(drawn.config, "the drawn model")
    return make_job(drawn.recipe, shape, read_levers(drawn.recipe, shape)[0])


def run_phases(drawn: DrawnRecipe) -> dict[str, int]:
    """Returns the bytes of a run on sizes, in each phase at its fullest."""
    job = make_drawn_job(drawn)
    steps = [join(job, rank).measure() for rank in find_fullest_ranks(job)]
    return {phase: max(step.get(phase, 0) for step in steps) for phase in steps[0]}


def measure_errors(predicted: Mapping[str, int], traced: Mapping[str, int]) -> dict[str, float]:
    """Returns how far a prediction is from a trace, at the peak and in each phase that is predicted."""
    phases = {phase: predicted[phase] / traced[phase] - 1 for phase in traced if phase in predicted}
    return {"peak": max(predicted.values()) / max(traced.values()) - 1, **phases}


def trace_phases(drawn: DrawnRecipe) -> dict[str, int]:
    return dict(start_trace(drawn)["device"])


def start_trace(drawn: DrawnRecipe) -> dict[str, Any]:
    """Traces each rank in a process of its own, forked from one that has torch and DeepSpeed loaded."""
    job = make_drawn_job(drawn)
    request = {
        "recipe": drawn.recipe.model_dump(mode="json"),
        "config": drawn.config,
        "levers": vars(job.levers),
        "world_size": job.world_size,
    }
    return join_ranks([_trace_rank(drawn, {**request, "rank": rank}) for rank in list_ranks(request)])


def _trace_rank(drawn: DrawnRecipe, request: dict[str, Any]) -> dict[str, Any]:
    ours, reference = Pipe()
    process = start_process(_send_trace, (request, reference))
    reference.close()
    try:
        if not ours.poll(TRACE_SECONDS):
            raise AssertionError(f"no trace within {TRACE_SECONDS} s")
        result = ours.recv()
    finally:
        process.kill()
        process.join()
    if isinstance(result, str):
        raise AssertionError(f"{drawn.describe()}\n{result}")
    return dict(result)


def _send_trace(request: dict[str, Any], pipe: Connection) -> None:
    try:
        prepare_process(request)
        pipe.send(trace(request))
    except BaseException:  # noqa: BLE001 - the caller gets it
        pipe.send(traceback.format_exc())
