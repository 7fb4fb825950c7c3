"""The resolved plan: every value that follows from a recipe and its model. Printed before anything starts. A command
resolves it once; the processes that it starts read what it wrote."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Container, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from ulysses_cli.plan.attention import BACK_ENDS
from ulysses_cli.plan.layout import GPUS_PER_NODE, KvHeads, Layout, compute_kv_heads
from ulysses_cli.plan.levers import Levers
from ulysses_cli.plan.models.layers import ExpertsMlp
from ulysses_cli.plan.models.shape import ModelShape
from ulysses_cli.plan.problem import Problem, RecipeError, Where
from ulysses_cli.plan.recipe.loader import Loaded
from ulysses_cli.plan.recipe.recipe import Recipe, compute_recipe_hash
from ulysses_cli.plan.recipe.schema import format_value, walk_settings
from ulysses_cli.plan.recipe.sections import Lora
from ulysses_cli.plan.rows.ring import MAX_BRANCHES

USUAL_SIZES = (2, 4, 8, 16, 32)  # of sp groups
THETA_POWER = 1.65  # published extensions took powers of the stretch from 1.3 to 1.8
HINT_ON_PLAN = "start the run again; its command writes this file, and nothing else may"
PAD_TOKENS = 128  # kernels work on tiles of this many tokens; a row that is a multiple wastes none


@dataclass(frozen=True)
class Resolved:
    """Every value that is derived from a recipe."""

    layout: Layout
    ring_reason: str
    recipe_hash: str
    pad_to_multiple_of: int
    max_length: int
    local_tokens: int
    rows_per_step: int
    tokens_per_step: int
    num_local_heads: int
    kv_heads: KvHeads
    original_positions: int  # what a stretch of positions starts from
    rope_factor: float | None
    rope_theta: float | None  # None: the model's own
    is_rotary: bool
    shares_prompts: bool  # answers to a prompt, and texts of a split chat, read one copy of what they begin with
    sharing_obstacle: str  # why they could not, or ''
    defaults: tuple[str, ...]


@dataclass(frozen=True)
class ResolvedRecipe:
    """What a command hands to the processes that it starts: the recipe as it has read it, and what follows from it."""

    loaded: Loaded
    resolved: Resolved

    def dump(self) -> str:
        """As JSON. Holds the recipe's secrets."""
        recipe = self.loaded.recipe.model_dump(mode="json")
        return json.dumps({"loaded": {**asdict(self.loaded), "recipe": recipe}, "resolved": asdict(self.resolved)})


def hash_plan(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:32]


def parse_plan(text: str) -> ResolvedRecipe:
    """Takes what `dump` returns."""
    content = json.loads(text)
    loaded, resolved = content["loaded"], content["resolved"]
    places = {key: Where(**place) for key, place in loaded["places"].items()}
    recipe = Recipe.model_validate(_make_tuples(loaded["recipe"]))
    layout, kv_heads = Layout(**resolved["layout"]), KvHeads(**resolved["kv_heads"])
    return ResolvedRecipe(
        Loaded(recipe, loaded["file"], places, tuple(loaded["notes"])),
        Resolved(**{**resolved, "layout": layout, "kv_heads": kv_heads, "defaults": tuple(resolved["defaults"])}),
    )


def read_plan(file: Path, wanted: str) -> ResolvedRecipe:
    """`wanted`: the hash of the plan that the command wrote. Raises RecipeError for any other content."""
    try:
        text = file.read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        raise RecipeError([Problem("", f"cannot be read: {error}", HINT_ON_PLAN, Where(str(file)))]) from None
    if hash_plan(text) != wanted:
        what = "was written for another recipe, or has been changed"
        raise RecipeError([Problem("", what, HINT_ON_PLAN, Where(str(file)))])
    return parse_plan(text)


def _make_tuples(value: Any) -> Any:
    """Sequences of a recipe are tuples, as the loader makes them."""
    if isinstance(value, dict):
        return {name: _make_tuples(item) for name, item in value.items()}
    return tuple(map(_make_tuples, value)) if isinstance(value, list) else value


@dataclass(frozen=True)
class RunPlan:
    """One run with everything settled, from which ranks are built. No value in it is derived a second time."""

    recipe: Recipe
    shape: ModelShape
    resolved: Resolved
    levers: Levers

    @property
    def layout(self) -> Layout:
        return self.resolved.layout


def make_layout(recipe: Recipe) -> Layout:
    """The sizes of the axes, which need no model. A ring that the recipe leaves open is not chosen yet."""
    parallel = recipe.parallel
    return Layout(parallel.dp_replicate_size, parallel.dp_shard_size, parallel.sp_size)


def choose_layout(recipe: Recipe, shape: ModelShape) -> Layout:
    """The layout with its ring, which depends on the model's heads where the recipe leaves it open."""
    layout, written = make_layout(recipe), recipe.parallel.ring_size
    return replace(layout, ring_size=find_ring_size(shape, layout.sp_size) if written == "auto" else written)


def find_ring_size(shape: ModelShape, sp_size: int, gpus_per_node: int = GPUS_PER_NODE) -> int:
    """The smallest ring whose inner ranks divide the heads. Where these would not fit a machine, a larger one, unless
    keys and values of a ring are more bytes between machines than the heads that all ranks exchange."""
    legal = shape.list_ring_sizes(sp_size) or (1,)
    inside = [size for size in legal if sp_size // size <= gpus_per_node]
    if not inside or inside[0] == legal[0]:
        return legal[0]
    heads, kv_heads = shape.num_heads, shape.num_kv_heads
    fetched = sp_size * compute_kv_heads(heads, kv_heads, sp_size // inside[0]).num_local
    exchanged = heads + sp_size * compute_kv_heads(heads, kv_heads, sp_size).num_local
    return inside[0] if legal[0] > 1 or fetched < exchanged else legal[0]


def list_auto_rings(shape: ModelShape) -> dict[int, int]:
    """The ring that `auto` takes, for each usual size of an sp group that is legal."""
    return {size: find_ring_size(shape, size) for size in USUAL_SIZES if shape.list_ring_sizes(size)}


def explain_ring(recipe: Recipe, shape: ModelShape, layout: Layout) -> str:
    """Why the ring has its size; '' where heads alone are exchanged, on one machine."""
    if recipe.parallel.ring_size != "auto":
        return "as the recipe says"
    if layout.ring_size == 1:
        if layout.sp_size <= GPUS_PER_NODE:
            return ""
        if shape.ring_obstacle:
            return f"no ring is possible: {shape.ring_obstacle}"
        return "a ring would send no fewer bytes between machines than heads are"
    return explain_heads(shape, layout) or (
        f"heads are exchanged inside a machine of {GPUS_PER_NODE} GPUs; only keys and values leave it"
    )


def explain_heads(shape: ModelShape, layout: Layout) -> str:
    """Why the heads need a ring; '' where they do not."""
    if layout.sp_size in shape.sp_sizes:
        return ""
    heads = " and ".join(f"{count} {kind} heads" for kind, count in shape.head_counts)
    inner = f"{layout.ulysses_size} do" if layout.ulysses_size > 1 else "so each holds all of them"
    return f"{layout.sp_size} ranks do not divide the {heads}, {inner}"


def compute_pad_multiple(recipe: Recipe) -> int:
    """auto: the largest of sp_size x 128, sp_size x 64, ... that divides max_length, so that no row exceeds it."""
    written, sp_size = recipe.data.pad_to_multiple_of, recipe.parallel.sp_size
    if written != "auto":
        return written
    tokens = PAD_TOKENS
    while tokens > 1 and recipe.data.max_length % (sp_size * tokens):
        tokens //= 2
    return sp_size * tokens


def compute_rope_factor(recipe: Recipe, shape: ModelShape) -> float | None:
    """How far positions are stretched: as written, or max_length over the pretrained length."""
    scaling = recipe.model.rope_scaling
    if scaling is None:
        return None
    return scaling.factor or max(1.0, recipe.data.max_length / get_original_positions(recipe, shape))


def compute_rope_theta(recipe: Recipe, shape: ModelShape) -> float | None:
    """The base of the positions: as written, or one that covers what positions and rope_scaling do not."""
    written, own = recipe.model.rope_theta, shape.rope_theta
    if written != "auto":
        return written
    covered = get_original_positions(recipe, shape) * (compute_rope_factor(recipe, shape) or 1.0)
    covered = covered if recipe.model.rope_scaling else shape.max_position_embeddings
    missing = max(1.0, recipe.data.max_length / covered)
    return None if own is None else float(f"{own * missing**THETA_POWER:.3g}")


def compute_least_theta(max_length: int) -> float:
    """The least base that lets a model of that length prefer similar tokens everywhere (arXiv 2405.14591, figure 1)."""
    return 0.0424 * math.pow(max_length, 1.628)


def rank_experts(lora: Lora | None, shape: ModelShape) -> dict[str, int]:
    """The ranks of the experts' adapters, by the names of parameters that peft finds them by (target_parameters). auto:
    a token's experts together have the rank of a linear layer's adapter."""
    mlp = next((layer.mlp for layer in shape.layers if isinstance(layer.mlp, ExpertsMlp)), None)
    if lora is None or mlp is None:
        return {}
    rank = max(1, lora.r // max(1, mlp.num_per_token)) if lora.expert_r == "auto" else lora.expert_r
    gates = shape.family is None or shape.family.gates_experts
    names = {"gate_up": "gate_up_proj" if gates else "up_proj", "down": "down_proj"}
    return {f"experts.{names[part]}": rank for part in lora.experts}


def changes_positions(model: Mapping[str, Any]) -> bool:
    """Whether a recipe's section `model` trains a model with other positions than its base has."""
    return any(model.get(name) is not None for name in ("rope_scaling", "rope_theta"))


def get_original_positions(recipe: Recipe, shape: ModelShape) -> int:
    """Positions that a stretch starts from: as written; else those before the model's own yarn; else all positions of
    the model. (llama3's own number says where its interpolation begins, not how far the model was trained.)"""
    scaling = recipe.model.rope_scaling
    if scaling is not None and scaling.original_max_position_embeddings is not None:
        return scaling.original_max_position_embeddings
    own = shape.rope_original_positions if shape.rope_type == "yarn" else None
    return own or shape.max_position_embeddings


def resolve(recipe: Recipe, shape: ModelShape, written: Container[str] = ()) -> Resolved:
    """For a recipe that passed its checks. `written` holds the keys that the user gave."""
    layout = choose_layout(recipe, shape)
    rows = recipe.train.rows_per_group * layout.dp_size
    max_length = recipe.data.max_length
    return Resolved(
        layout=layout,
        ring_reason=explain_ring(recipe, shape, layout),
        recipe_hash=compute_recipe_hash(recipe),
        pad_to_multiple_of=compute_pad_multiple(recipe),
        max_length=max_length,
        local_tokens=max_length // layout.sp_size,
        rows_per_step=rows,
        tokens_per_step=rows * max_length,
        num_local_heads=shape.num_heads // layout.ulysses_size,
        kv_heads=compute_kv_heads(shape.num_heads, shape.num_kv_heads, layout.ulysses_size),
        original_positions=get_original_positions(recipe, shape),
        rope_factor=compute_rope_factor(recipe, shape),
        rope_theta=compute_rope_theta(recipe, shape),
        is_rotary=bool(shape.rope_type),
        shares_prompts=shares_prompts(recipe, shape),
        sharing_obstacle=find_sharing_obstacle(recipe, shape),
        defaults=tuple(_list_defaults(recipe, written)),
    )


def find_sharing_obstacle(recipe: Recipe, shape: ModelShape) -> str:
    """Why several documents cannot read one copy of what they begin with, or ''."""
    stretch, kernel = recipe.model.rope_scaling, BACK_ENDS.get(recipe.model.attn_implementation)
    if shape.ring_obstacle:
        return shape.ring_obstacle
    if shape.rotary_follows_length or (stretch is not None and stretch.type == "dynamic"):
        return "its rotary frequencies follow a document's length, and answers of one prompt have several"
    if kernel is not None and not kernel.takes_more_keys:
        return f"{kernel.name} takes as many keys as queries"
    return ""


def shares_prompts(recipe: Recipe, shape: ModelShape) -> bool:
    return wants_shared_prompts(recipe) and not find_sharing_obstacle(recipe, shape)


def count_branches(recipe: Recipe, shape: ModelShape) -> int:
    """Of a row, for how many documents the keys of what they begin with are copied, at most: of a pair for one."""
    if not shares_prompts(recipe, shape):
        return 0
    return 1 if recipe.preference is not None else MAX_BRANCHES


def wants_shared_prompts(recipe: Recipe, *, splits: bool = False) -> bool:
    """Whether a row's documents begin alike, so that one copy of that is of use. `splits`: as if chats were split."""
    if recipe.preference is not None:
        return recipe.preference.share_prompts is not False
    data = recipe.data
    has_answers = any(dataset.type == "answers" for dataset in (*data.datasets, *data.eval_datasets))
    begin_alike = splits or data.on_rewritten_turns == "split" or has_answers
    return begin_alike and data.packing != "stream" and not data.attend_across_documents


def settle(recipe: Recipe, shape: ModelShape, levers: Levers) -> RunPlan:
    return RunPlan(recipe, shape, resolve(recipe, shape), levers)


def _list_defaults(recipe: Recipe, written: Container[str]) -> list[str]:
    """`key: value` for each setting that was left to its default, in the schema's order."""
    lines = []
    for setting in walk_settings():
        section, _, name = setting.key.rpartition(".")
        if setting.accepts.section or "[]" in setting.key or setting.key in written or section.count("."):
            continue
        holder = getattr(recipe, section, None) if section else recipe
        if holder is not None and setting.key != "extends":  # the recipe is whole
            lines.append(f"{setting.key}: {format_value(getattr(holder, name))}")
    return lines
