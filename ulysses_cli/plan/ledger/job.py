"""What goes into the ledger and what comes out: Job is one run with everything settled, as plain numbers, which the
speed model reads too; MemorySnapshot is a rank's memory at one time, as lines that add up. Neither reads a recipe."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Literal, NamedTuple

from ulysses_cli.plan.ds_config import make_ds_config, merge_user_config
from ulysses_cli.plan.layout import Layout, compute_kv_heads
from ulysses_cli.plan.levers import Levers
from ulysses_cli.plan.models.families import FAMILIES
from ulysses_cli.plan.models.family import Family
from ulysses_cli.plan.models.layers import DenseMlp, Layer
from ulysses_cli.plan.models.shape import ModelShape
from ulysses_cli.plan.problem import Problem, RecipeError
from ulysses_cli.plan.recipe.recipe import Recipe
from ulysses_cli.plan.recipe.sections import Lora
from ulysses_cli.plan.resolved import choose_layout, count_branches, make_layout
from ulysses_cli.plan.rows.indexing import RowSizes, list_excess
from ulysses_cli.plan.rows.ring import Ring

Lines = dict[str, int]


class MemorySnapshot(NamedTuple):
    """The phase, what happens in it, and every line alive."""

    phase: str
    name: str
    lines: Lines

    @property
    def num_bytes(self) -> int:
        return sum(self.lines.values())


BYTES = {"bfloat16": 2, "bf16": 2, "fp16": 2, "float32": 4, "fp32": 4}


@dataclass(frozen=True)
class EngineSettings:
    """DeepSpeed's settings that cost memory, in elements. Where the config does not set one: DeepSpeed's default
    (runtime/zero/config.py; runtime/engine.py: gradients travel in their own dtype unless the config sets another)."""

    reduce_bucket: int = 500_000_000
    prefetch_bucket: int | None = None  # None: as size_prefetch says (plan/ledger/weights.py)
    max_live: int | None = None
    max_reuse_distance: int = 1_000_000_000
    persistence_threshold: int = 100_000
    sub_group: int = 1_000_000_000
    communication_bytes: int = 2
    gradient_bytes: int = 2


def read_engine(config: Mapping[str, Any], dtype_bytes: int) -> EngineSettings:
    zero, communication = config.get("zero_optimization") or {}, config.get("communication_data_type")
    accumulated = (config.get("data_types") or {}).get("grad_accum_dtype")

    def find(name: str) -> int | None:
        value = zero.get(name, zero.get(f"stage3_{name}"))
        return int(value) if isinstance(value, int | float) and not isinstance(value, bool) else None

    def get(name: str, default: int) -> int:
        value = find(name)
        return default if value is None else value

    return EngineSettings(
        get("reduce_bucket_size", 500_000_000),
        find("prefetch_bucket_size"),
        find("max_live_parameters"),
        get("max_reuse_distance", 1_000_000_000),
        get("param_persistence_threshold", 100_000),
        get("sub_group_size", 1_000_000_000),
        BYTES.get(str(communication), dtype_bytes),
        BYTES.get(str(accumulated), dtype_bytes),
    )


@dataclass(frozen=True)
class Job:
    """One run. A micro-step is `batch` rows for each sp group."""

    shape: ModelShape
    layout: Layout
    max_length: int
    levers: Levers
    batch: int = 1
    accumulation: int = 1
    dtype_bytes: int = 2
    zero_stage: Literal[1, 2, 3] = 3
    optim: str = "adamw"
    quantized: str | None = None  # format of the frozen linear layers: nf4 or int8
    engine: EngineSettings = EngineSettings()
    gpus_per_node: int = 8
    evaluates: bool = True
    async_save: bool = False
    fused_norms: bool = False  # RMSNorm in one kernel (train/elementwise/, Liger): no float32 copies
    sums_in_product: bool = False  # gradients of tiles are added where a matrix product makes them
    spares_products: bool = False  # the last one of an MLP is not computed again (plan/work.py: count_spared)
    fused_gates: bool = False  # rotary embedding and gated activations in one kernel each
    lora: Lora | None = None
    is_on_cpu: bool = False
    kernel: str = "auto"  # decides the attention backward's workspace; auto: the larger one, FlashAttention 2's
    has_z_loss: bool = False
    has_disk: bool = False  # a folder on a local disk is named
    num_branches: int = 0  # documents that read the copy of what they begin with, at most
    document_tokens: int | None = None  # mean length of the documents in a row; None: one document fills it
    model: ModelShape | None = None  # the whole model's, in a view of one kind of layer
    shares_kv: bool = False  # in a view: an earlier layer's keys and values are used
    widest_window: int | None = None  # in a view: of these layers, in tokens

    def __hash__(self) -> int:
        """Cheap, because every ledger looks up caches by job."""
        return hash((self.shape, self.layout, self.max_length, self.levers, self.batch, self.model))

    def change(self, **changes: Any) -> Job:
        """As dataclasses.replace, with which a search would spend a fifth of its time."""
        assert changes.keys() <= self.__dataclass_fields__.keys(), changes
        own, other = vars(self), object.__new__(Job)
        vars(other).update({name: own[name] for name in self.__dataclass_fields__}, **changes)
        return other

    def with_levers(self, levers: Levers) -> Job:
        return self.change(levers=levers)

    @cached_property
    def family(self) -> Family:
        return FAMILIES[self.shape.model_type]

    def trains(self, part: str) -> bool:
        """Whether the embedding (embed_tokens), the head (lm_head) or all norms (norm) are trained."""
        return self.lora is None or part in self.lora.modules_to_save

    @cached_property
    def _views(self) -> dict[Layer, Job]:
        return {kind: self._view(kind) for kind in self.shape.layer_kinds}

    def view(self, kind: Layer) -> Job:
        """The same run as one kind of layer sees it: with that layer's heads and the width of its MLP."""
        return self._views[kind]

    def _view(self, kind: Layer) -> Job:
        shape, attention = self.shape, kind.attention
        sizes: dict[str, Any] = {"intermediate_size": kind.mlp.inner_size} if isinstance(kind.mlp, DenseMlp) else {}
        if attention is not None:
            heads = {"num_heads": attention.num_heads, "num_kv_heads": attention.num_kv_heads}
            sizes |= {**heads, "head_dim": attention.head_dim}
        borrows = attention is not None and attention.shares_kv
        window = shape.find_widest_window(kind) if self.layout.ring_size > 1 else None
        if all(getattr(shape, name) == size for name, size in sizes.items()) and not borrows:
            return self if window == self.widest_window else replace(self, widest_window=window)
        whole, shape = self.model or shape, replace(shape, **sizes)
        return replace(self, shape=shape, model=whole, shares_kv=borrows, widest_window=window)

    @cached_property
    def world_size(self) -> int:
        return self.layout.world_size

    @property
    def micro_step_tokens(self) -> int:
        """Tokens that an sp group takes in a micro-step."""
        return self.batch * self.max_length

    @cached_property
    def local_tokens(self) -> int:
        """Tokens of a micro-step on each rank."""
        return self.micro_step_tokens // self.layout.sp_size

    @property
    def query_width(self) -> int:
        return self.shape.num_heads * self.shape.head_dim

    @property
    def kv_width(self) -> int:
        return self.shape.num_kv_heads * self.shape.head_dim

    @property
    def own_kv_width(self) -> int:
        """Of the keys that a layer makes itself."""
        return 0 if self.shares_kv else self.kv_width

    @cached_property
    def chunk_kv_width(self) -> int:
        """The same for one chunk of heads: key/value heads do not shrink below one for each rank."""
        chunks, num_ranks = self.levers.head_chunks, self.layout.ulysses_size
        heads = compute_kv_heads(self.shape.num_heads, self.shape.num_kv_heads, num_ranks * chunks)
        return num_ranks * heads.num_local * self.shape.head_dim

    @property
    def exchanged_kv_width(self) -> int:
        """Keys that the exchanges of all chunks bring, per local token: each chunk brings those of its own heads."""
        return self.levers.head_chunks * self.chunk_kv_width

    def make_ring(self) -> Ring:
        return Ring(self.layout.ring_size, self.shape.window_counts)

    @property
    def num_nodes(self) -> int:
        return math.ceil(self.world_size / self.gpus_per_node)

    @property
    def ranks_per_node(self) -> int:
        return min(self.world_size, self.gpus_per_node)


def is_indexable(job: Job) -> bool:
    """No call of an operator that counts in 32 bits sees a tensor of 2^31 elements (plan/rows/indexing.py)."""
    sizes = RowSizes(
        tokens=job.micro_step_tokens,
        sp_size=job.layout.sp_size,
        ring_size=job.layout.ring_size,
        head_chunks=job.levers.head_chunks,
        tiled_mlp=job.levers.tiled_mlp,
        is_quantized=job.quantized is not None,
        uses_dora=job.lora is not None and job.lora.use_dora,
        num_rows=job.batch,
        kernel=job.kernel,
    )
    return not list_excess(job.shape, sizes)


def is_known(shape: ModelShape) -> bool:
    """Whether its row says what a run on sizes cannot, such as whether rows are split exactly."""
    return shape.family is not None


def check_known(shape: ModelShape, key: str = "model.name_or_path") -> None:
    """Raises RecipeError for a model that no run would train: a plan for one would look like an answer."""
    if is_known(shape):
        return
    why = f": {shape.inexact}" if shape.inexact and "not on the list" not in shape.inexact else ""
    message = f"{shape.name} is a model of type {shape.model_type}, which is not served{why}"
    hint = "estimate-memory says what a GPU would need; `ulysses models` lists what is served"
    raise RecipeError([Problem(key, message, hint)])


def make_engine(recipe: Recipe, levers: Levers) -> EngineSettings:
    config = make_ds_config(recipe, make_layout(recipe), levers.offload_optimizer, levers.offload_param)
    return read_engine(merge_user_config(config, recipe.deepspeed), BYTES[recipe.model.dtype])


def make_job(
    recipe: Recipe, shape: ModelShape, levers: Levers, *, gpus_per_node: int = 8, needs_weights: bool = True
) -> Job:
    """For a recipe that passed its checks, with settled levers."""
    if needs_weights:
        check_known(shape)
    return Job(
        shape=shape,
        layout=choose_layout(recipe, shape),
        max_length=recipe.data.max_length,
        levers=levers,
        batch=recipe.train.per_device_train_batch_size,
        accumulation=recipe.train.gradient_accumulation_steps,
        dtype_bytes=BYTES[recipe.model.dtype],
        zero_stage=recipe.zero_stage,
        optim=recipe.train.optim,
        quantized=recipe.lora.quantize_base if recipe.lora is not None else None,
        engine=make_engine(recipe, levers),
        gpus_per_node=gpus_per_node,
        evaluates=bool(recipe.data.eval_datasets or recipe.data.eval_split),
        async_save=recipe.run.async_save,
        fused_norms=recipe.model.fused_kernels,
        fused_gates=recipe.model.fused_kernels,
        spares_products=True,
        sums_in_product=True,  # every GPU that torch has kernels for (train/memory/tiling.py: adds_in_product)
        lora=recipe.lora,
        is_on_cpu=recipe.run.device == "cpu",
        kernel=recipe.model.attn_implementation,
        has_z_loss=recipe.train.z_loss_weight > 0,
        has_disk=recipe.memory.nvme_path is not None,
        num_branches=count_branches(recipe, shape),
    )
