"""The recipe's schema: every setting with one doc line, a unit and a bound. sections.py has the sections `data`,
`lora` and `preference`. A Recipe is never changed after loading; derived values are in resolved.py."""

from __future__ import annotations

import hashlib
import json
from typing import Annotated, Any, Literal

from pydantic import Field, field_validator

from ulysses_cli.plan.files import name_local_copy
from ulysses_cli.plan.recipe.sections import (
    MAX_TOKENS,
    ON_GPU,
    UNMOVED,
    Data,
    Lines,
    Lora,
    Place,
    Preference,
    Section,
    setting,
    text,
)


class RopeScaling(Section):
    """How positions beyond the pretrained range are encoded."""

    type: Literal["yarn", "linear", "dynamic", "llama3"] = setting(
        ..., "method, by transformers' name", aliases=("rope_type",)
    )
    factor: float | None = setting(
        None, "stretch; left out: max_length / original_max_position_embeddings", unit="x", ge=1, le=4096
    )
    original_max_position_embeddings: int | None = setting(
        None, "positions before the stretch; left out: the model's own", unit="tokens", ge=1, le=MAX_TOKENS
    )
    attention_factor: float | None = setting(None, "yarn: scale of the rotary tables", unit="x", gt=0, le=100)
    beta_fast: float | None = setting(None, "yarn: first dimension that is interpolated", unit="turns", gt=0, le=1e4)
    beta_slow: float | None = setting(None, "yarn: last dimension that is kept", unit="turns", gt=0, le=1e4)
    low_freq_factor: float | None = setting(None, "llama3: where interpolation is full", unit="x", gt=0, le=1e4)
    high_freq_factor: float | None = setting(None, "llama3: where interpolation ends", unit="x", gt=0, le=1e4)


AttentionName = Literal[
    "auto",
    "sdpa",
    "cudnn",
    "torch_varlen",
    "flex_attention",
    "flash_attention_2",
    "flash_attention_3",
    "flash_attention_4",
]


class Model(Section):
    """Which model, in which precision, with which attention."""

    name_or_path: str | None = text(
        None,
        "hub name, local folder, or s3://, gs:// or hf:// address that is downloaded once",
        aliases=("model_name_or_path", "base_model", "pretrained_model_name_or_path"),
    )
    revision: str | None = text(None, "hub branch, tag or commit")
    config: dict[str, Any] | None = setting(
        None,
        "Hugging Face config of a model to start from random weights, instead of name_or_path",
        unit="keys",
        min_length=1,
        max_length=1000,
    )
    tokenizer: str | None = text(
        None, "hub name, local folder, or `bytes` for the embedded one; left out: the model's own"
    )
    dtype: Literal["bfloat16", "float32"] = setting(
        "bfloat16",
        "precision of weights and activations; master weights are float32 in any case",
        aliases=("bf16", "torch_dtype"),
        spellings={"bf16": "bfloat16", "fp32": "float32"},
        spellings_by_alias={"bf16": {True: "bfloat16", False: "float32"}},
        refused={
            "float16": "float16 needs loss scaling, which skips steps silently; use bfloat16",
            "fp16": "float16 needs loss scaling, which skips steps silently; use bfloat16",
        },
    )
    attn_implementation: AttentionName = setting(
        "auto",
        "attention kernel; auto takes the fastest one that is exact for this model on this device",
        aliases=("sp_attn_implementation", "attention_implementation"),
        refused={"eager": "use auto; eager attention builds a [sequence, sequence] matrix per head: 512 GiB at 512Ki"},
    )
    experts_implementation: Literal["auto", "grouped_mm", "sonicmoe", "eager"] = setting(
        "auto",
        "how experts run; auto takes the fastest of transformers' implementations that is exact for this model on this "
        "device",
        refused={
            "deepgemm": "use auto; its kernels have no backward, so that experts would get no gradients",
            "batched_mm": "use auto; it copies an expert's weights for each of its tokens",
        },
    )
    fused_kernels: bool = setting(
        True,
        "norms, rotary embedding and gated activations in one pass each, where that is as exact and faster",
        aliases=("use_liger_kernel",),
    )
    rope_scaling: RopeScaling | None = setting(None, "stretch of the position encoding beyond the pretrained length")
    rope_theta: Annotated[float, Field(gt=1, le=1e12)] | Literal["auto"] | None = setting(
        None,
        "base of the rotary positions, so that longer rows are trained without rope_scaling or beside it; auto = the "
        "model's own x (max_length / its positions)^1.65; left out: the model's own",
        unit="base",
    )
    trust_remote_code: bool = setting(False, "run Python code that comes with the model")

    @field_validator("name_or_path", "tokenizer")
    @classmethod
    def name_copy(cls, name: str | None) -> str | None:
        """An address becomes the path of its copy, which train and prepare download."""
        return None if name is None else name_local_copy(name)


class Parallel(Section):
    """How ranks share the work: dp_replicate_size x dp_shard_size x sp_size processes, and sp_size = ring_size x the
    ranks that exchange heads."""

    sp_size: int = setting(
        1,
        "ranks that share one row, each with a slice of its tokens",
        unit="ranks",
        aliases=("sequence_parallel_size", "ulysses_size", "context_parallel_size"),
        ge=1,
        le=4096,
    )
    ring_size: Annotated[int, Field(ge=1, le=4096)] | Literal["auto"] = setting(
        "auto",
        "shares of a row's queries; the ranks of a share exchange heads and fetch keys and values from the others; "
        "auto = 1 where sp_size divides the heads and fits a machine of 8 GPUs, otherwise the smallest that does",
        unit="shares",
    )
    dp_shard_size: int = setting(
        1, "rows in flight per replica", unit="ranks", aliases=("data_parallel_shard_degree",), ge=1, le=65536
    )
    dp_replicate_size: int = setting(
        1,
        "copies of the parameters kept for gathering (ZeRO-3 secondary shards)",
        unit="copies",
        aliases=("data_parallel_replicate_degree",),
        ge=1,
        le=65536,
    )
    sp_backend: Literal["deepspeed"] = setting("deepspeed", "engine under sequence parallelism")
    sp_seq_length_is_variable: bool = setting(True, "rows may differ in length from step to step")
    sp_seq_length: int | None = setting(
        None, "the one length of every row, when it is not variable", unit="tokens", ge=1, le=MAX_TOKENS
    )
    zero_stage: Literal[1, 2, 3, "auto"] = setting(
        3,
        "what DeepSpeed shards: 1 optimizer, 2 and gradients, 3 and parameters; auto = 3, or less where the GPU would "
        "wait for the processor and has room for all weights, or for a base that stays whole",
        refused={"0": "stage 0 shards nothing; on one process stage 1 costs the same"},
    )


# Those of ulysses_cli/evaluate/suites.py that need no file, and calls of held-out chats.
EvalTask = Literal[
    "ruler", "niah", "graphs", "niah_single_1", "niah_single_2", "niah_single_3", "niah_multikey_1", "niah_multikey_2",
    "niah_multikey_3", "niah_multivalue", "niah_multiquery", "niah_none", "vt", "cwe", "fwe", "json_kv",
    "helmet-recall", "calls",
]  # fmt: skip
SchedulerName = Literal[
    "linear",
    "cosine",
    "cosine_with_min_lr",
    "constant",
    "constant_with_warmup",
    "polynomial",
    "inverse_sqrt",
    "warmup_stable_decay",
]


class Train(Section):
    """Steps, batch and optimizer."""

    per_device_train_batch_size: int = setting(
        1, "rows per sp group and micro-step", unit="rows", aliases=("micro_batch_size",), ge=1, le=65536
    )
    gradient_accumulation_steps: int = setting(1, "micro-steps per optimizer step", unit="micro-steps", ge=1, le=65536)
    max_steps: int | None = setting(
        None, "optimizer steps; instead of num_train_epochs", unit="steps", ge=1, le=MAX_TOKENS
    )
    num_train_epochs: float | None = setting(
        None, "passes over the data; 1 when max_steps is left out", unit="epochs", aliases=("num_epochs",), gt=0, le=1e6
    )
    learning_rate: float = setting(1e-5, "peak learning rate", unit="per step", gt=0, le=10)
    lr_scheduler_type: SchedulerName = setting(
        "cosine", "course of the learning rate, by transformers' name", aliases=("lr_scheduler",)
    )
    lr_scheduler_kwargs: dict[str, float] = setting(
        {}, "extra numbers for the schedule, such as min_lr_rate", unit="keys", max_length=16
    )
    warmup_steps: int = setting(0, "steps of rising learning rate", unit="steps", ge=0, le=MAX_TOKENS)
    warmup_ratio: float = setting(0.0, "the same as a share of all steps", unit="share", ge=0, lt=1)
    weight_decay: float = setting(0.0, "decoupled decay, not on norms and biases", unit="per step", ge=0, le=10)
    max_grad_norm: float = setting(1.0, "gradient norm is clipped to this; 0 = not clipped", unit="norm", ge=0, le=1e9)
    optim: Literal["adamw", "adamw_8bit", "muon"] = setting(
        "adamw",
        "optimizer; adamw is fused on GPU and DeepSpeed's CPU Adam under offload; adamw_8bit is bitsandbytes'; muon "
        "steps layers' matrices, and AdamW the rest",
        aliases=("optimizer",),
        spellings={"adamw_torch": "adamw", "adamw_torch_fused": "adamw", "adamw_bnb_8bit": "adamw_8bit"},
    )
    adam_beta1: float = setting(0.9, "decay of the first moment", unit="share", ge=0, lt=1)
    adam_beta2: float = setting(0.999, "decay of the second moment", unit="share", ge=0, lt=1)
    adam_epsilon: float = setting(1e-8, "added to the root of the second moment", unit="number", gt=0, le=1)
    freeze_router: bool = setting(False, "the weights of routers stay as they are; the experts are trained")
    router_aux_loss_coef: float = setting(
        0.0,
        "weight of the loss that balances experts, the mean over layers, k where k experts of a token are balanced",
        unit="x",
        aliases=("moe_aux_loss_coef", "moe_aux_loss_coeff", "router_aux_loss_weight"),
        ge=0,
        le=10,
    )
    router_aux_loss_scope: Literal["layer", "model"] = setting(
        "layer", "layer: each layer balances its experts; model: all layers together, as transformers computes it"
    )
    router_z_loss_coef: float = setting(
        0.0,
        "weight of the routers' squared log-normalizer, the mean over layers",
        unit="x",
        aliases=("moe_z_loss_coef", "moe_z_loss_coeff", "router_z_loss_weight"),
        ge=0,
        le=10,
    )
    z_loss_weight: float = setting(0.0, "weight of the squared log-normalizer in the loss", unit="x", ge=0, le=1)
    token_loss: str | None = text(
        None, "Python function that turns the targets' cross-entropies into their losses: FILE.py:NAME or MODULE:NAME"
    )

    @property
    def rows_per_group(self) -> int:
        """Rows that an sp group takes in an optimizer step."""
        return self.per_device_train_batch_size * self.gradient_accumulation_steps


class Memory(Section):
    """Levers that trade time or host memory for GPU memory. Results differ by float rounding at most."""

    gradient_checkpointing: bool | Literal["auto", "full"] = setting(
        "auto",
        "recompute layers in the backward; true keeps attention's result, full keeps only each layer's input, auto = "
        "false where the GPU has room for all, else true where that fits",
        aliases=("activation_checkpointing",),
    )
    saved_layers: Annotated[int, Field(ge=0, le=10_000)] | Literal["auto"] = setting(
        "auto",
        "where layers are recomputed, as many of the last ones save all and are not; auto = as many as the GPU has "
        "room for",
        unit="layers",
        spellings={False: 0},
    )
    attention_head_chunks: Annotated[int, Field(ge=1, le=1024)] | Literal["auto"] = setting(
        "auto", "attention runs over this many groups of heads, one after another", unit="chunks"
    )
    activation_offloading: bool | Annotated[int, Field(ge=0, le=10_000)] | Literal["auto"] = setting(
        "auto",
        "layers, from the first, whose saved tensors are held in pinned host memory; true = all but the last two, "
        "auto = as few as needed",
        unit="layers",
        aliases=("activation_checkpoint_cpu_offload",),
    )
    activation_offload_device: Literal["auto", "cpu", "nvme"] = setting(
        "auto", "where what these layers save waits: host memory or a disk; auto = cpu where the host has room"
    )
    tiled_mlp: bool | Literal["auto"] = setting(
        "auto", "MLPs and norms in tiles of tokens", aliases=("tiled_mlp_compute",)
    )
    tiled_loss: bool | Literal["auto"] = setting("auto", "head and loss in tiles of tokens")
    offload_optimizer: Place = setting(
        "auto", "where optimizer states are kept if not on the GPU", spellings=UNMOVED, refused=ON_GPU
    )
    offload_param: Place = setting(
        "auto", "where parameters are kept if not on the GPU", spellings=UNMOVED, refused=ON_GPU
    )
    large_tiles: bool | Literal["auto"] = setting(
        "auto", "tiles of at least 2,048 tokens, 4,096 for small models; auto = where the GPU has room"
    )
    leaf_layers: bool | Literal["auto"] = setting(
        "auto",
        "gather a layer's weights at once, which spares most of ZeRO-3's hooks; auto = where the GPU would wait for "
        "the processor and has room for a layer's gradients",
    )
    overlap_exchange: bool | Literal["auto"] = setting(
        "auto",
        "with chunks of attention heads, exchange the next one while one attends; auto = where the exchange would take "
        "more than 3 % of a step and the GPU has room for the chunks under way, in as many chunks as save most time",
    )
    overlap_optimizer: bool | Annotated[int, Field(ge=0, le=10_000)] | Literal["auto"] = setting(
        "auto",
        "with offload_optimizer: cpu, groups of 125 million weights that are updated while the backward goes on; each "
        "takes 1.4 GiB more of host memory; true = all, auto = as many as the host has room for",
        unit="groups",
    )
    nvme_path: str | None = text(None, "folder on a fast local disk, for nvme; auto may use it too", unit="path")


class Run(Section):
    """Where results go, when to save, when to stop."""

    output_dir: str = text("runs/default", "run directory", unit="path")
    run_name: str | None = text(None, "name in reports and trackers; left out: the run directory's")
    device: Literal["auto", "cuda", "cpu"] = setting(
        "auto", "where ranks compute; auto = cuda", spellings={"gpu": "cuda"}
    )
    seed: int = setting(0, "seed of data order, dropout and random weights", unit="number", ge=0, lt=2**32)
    logging_steps: int = setting(1, "a metrics line every so many steps", unit="steps", ge=1, le=MAX_TOKENS)
    eval_steps: int | None = setting(
        None, "evaluate every so many steps; left out: at the end", unit="steps", ge=1, le=MAX_TOKENS
    )
    eval_on_start: bool = setting(True, "also evaluate before step 1: the loss of the base model, as step 0")
    save_steps: int | None = setting(
        None, "checkpoint every so many steps; left out: at the end", unit="steps", ge=1, le=MAX_TOKENS
    )
    save_total_limit: int | None = setting(
        2, "checkpoints kept; null = all; the newest valid one is never deleted", unit="checkpoints", ge=1, le=1_000_000
    )
    keep_best: Literal["eval_loss", "eval_suite", "eval_rewards/accuracies", "eval_rewards/margins"] | None = setting(
        None,
        "also save after the best evaluation so far, by lowest loss, by highest mean score of eval_suite or by the "
        "highest of a metric of pairs, and keep that checkpoint",
        unit="measure",
        aliases=("metric_for_best_model",),
        spellings={
            **{True: "eval_loss", False: None, "none": None, "loss": "eval_loss", "score": "eval_suite"},
            **{name: f"eval_{name}" for name in ("rewards/accuracies", "rewards/margins")},
        },
    )
    export_best: bool = setting(
        False, "the model is that of the best evaluation, not of the last step", aliases=("load_best_model_at_end",)
    )
    early_stopping_patience: int | None = setting(
        None, "end the run when what keep_best names (left out: its loss) is no better for so many evaluations",
        unit="evaluations",
        ge=1, le=1_000_000,
    )  # fmt: skip
    early_stopping_threshold: float = setting(
        0.0,
        "by how much an evaluation must be better than the best one to count as better",
        unit="nats or score",
        ge=0,
        le=1000,
    )
    sample_prompts: tuple[Lines, ...] = setting(
        (), "texts that the model continues greedily, at the end and every sample_steps", unit="texts", max_length=16
    )
    sample_steps: int | None = setting(
        None, "continue sample_prompts every so many steps; left out: at the end", unit="steps", ge=1, le=MAX_TOKENS
    )
    sample_max_new_tokens: int = setting(64, "tokens of a continuation", unit="tokens", ge=1, le=4096)
    sample_as_chat: bool = setting(False, "a sample prompt is what a user says, in the chat template")
    eval_suite: tuple[EvalTask, ...] = setting(
        (),
        "questions from a seed, as ulysses evaluate asks them; calls: whether held-out chats' calls of tools are made",
        unit="suites or tasks",
        max_length=16,
    )
    eval_suite_steps: int | None = setting(
        None, "ask the questions of eval_suite every so many steps; left out: at the end", unit="steps", ge=1,
        le=MAX_TOKENS,
    )  # fmt: skip
    eval_suite_lengths: tuple[Annotated[int, Field(ge=256, le=MAX_TOKENS)], ...] = setting(
        (), "lengths of prompts of eval_suite; left out: data.max_length", unit="tokens", max_length=16
    )
    eval_suite_samples: int = setting(5, "questions per task and length of eval_suite", unit="questions", ge=1, le=1000)
    short_check: str | None = text(
        None,
        "file or folder of short texts that are not trained on: what they lose by other positions and by training, at "
        "the end and every eval_steps",
        unit="path",
    )
    async_save: bool = setting(False, "write checkpoints while steps go on")
    checkpoint_uri: str | None = text(
        None,
        "where checkpoints and the model are uploaded too, beside the steps: s3://, gs://, hf:// or file://; keys come "
        "from the environment",
        unit="address",
    )
    on_save_error: Literal["stop", "continue"] = setting("stop", "what follows when a checkpoint cannot be written")
    resume_from_checkpoint: str | None = text(
        None, "checkpoint folder, or `auto` for the newest valid one", unit="path"
    )
    start_from: str | None = text(
        None,
        "run or checkpoint whose weights step 1 starts from, such as one of shorter rows; schedule and data begin anew",
        unit="path",
    )
    start_moments: bool = setting(True, "start_from also gives the optimizer's moments; false: they begin at zero")
    report_to: tuple[Literal["tensorboard", "wandb", "mlflow", "trackio"], ...] = setting(
        (), "trackers in addition to metrics.jsonl", unit="names", max_length=4, spellings={"none": ()}
    )
    push_to_hub: bool = setting(False, "publish the model on the Hugging Face hub when the run is complete")
    hub_model_id: str | None = text(None, "repository on the hub; left out: the run's name, in your own account")
    hub_private_repo: bool = setting(False, "make a repository that only you can see")
    notify_command: str | None = text(
        None, "program with arguments, run at the end, after an early stop and a failure; facts as JSON on stdin"
    )
    notify_webhook: str | None = text(
        None,
        "https:// address that gets the same facts, or $NAME of a variable; masked like a password",
        unit="address",
    )
    rehearsal: bool = setting(True, "one step, evaluation and save at the longest row before step 1, without effect")
    gpu: str | None = text(None, "kind of GPU that the recipe is for, which estimates and `launch` take", unit="kind")
    price_per_gpu_hour: float | None = setting(
        None, "price of one GPU for an hour; the run then shows its cost", unit="USD", ge=0, le=10_000
    )
    max_hours: float | None = setting(None, "stop with a checkpoint after this time", unit="hours", gt=0, le=100_000)
    max_cost: float | None = setting(None, "stop with a checkpoint at this cost", unit="USD", gt=0, le=1e9)
    max_bad_steps: int = setting(
        3,
        "steps with a NaN or infinite loss or gradient that the whole run allows; one more stops it",
        unit="steps",
        ge=0,
        le=1_000_000,
    )
    max_restarts: int = setting(
        0, "restarts from the newest checkpoint after a lost rank", unit="restarts", ge=0, le=10_000
    )
    stop_exit_code: int | None = setting(
        None,
        "exit code of a run that stopped early with a checkpoint; left out: 75 under a scheduler, else 0",
        unit="number",
        ge=0,
        le=255,
    )
    step_timeout: float = setting(
        1800.0, "a step that takes longer counts as a hang, and a save that does not move on for so long",
        unit="seconds", gt=0, le=1e6,
    )  # fmt: skip
    stop_timeout: float = setting(
        60.0,
        "from a signal to the end of the run, its last save included; with a step_timeout that is less, that",
        unit="seconds",
        gt=0,
        le=1e6,
    )
    join_timeout: float = setting(
        600.0,
        "how long machines wait for each other; number 0 downloads and prepares data before it listens",
        unit="seconds",
        gt=0,
        le=1e6,
    )


class Recipe(Section):
    """Everything about a run. The loader replaces `extends` by what it names."""

    extends: str | None = text(
        None,
        "another recipe, by a path relative to this file; what stands here is laid over it",
        unit="path",
        exclude=True,
    )
    model: Model = setting(..., "which model, precision, attention")
    parallel: Parallel = setting(Parallel(), "how ranks share the work")
    data: Data = setting(..., "from documents to rows of tokens")
    train: Train = setting(Train(), "steps, batch, optimizer")
    memory: Memory = setting(Memory(), "levers that trade time or host memory for GPU memory")
    lora: Lora | None = setting(None, "adapters instead of full fine-tuning")
    preference: Preference | None = setting(None, "pairs of answers instead of texts: DPO and its kin")
    run: Run = setting(Run(), "where results go, when to save, when to stop")
    deepspeed: dict[str, Any] = setting(
        {},
        "merged last into the DeepSpeed config; a key that contradicts the recipe is an error",
        unit="keys",
        max_length=1000,
    )

    @property
    def zero_stage(self) -> Literal[1, 2, 3]:
        """Where it is `auto`, the most that can be sharded; `choose_levers` may then take a lower one."""
        written = self.parallel.zero_stage
        if written != "auto":
            return written
        return 2 if self.lora is not None and (self.lora.quantize_base or self.lora.use_dora) else 3

    @property
    def micro_step_tokens(self) -> int:
        """Tokens that an sp group takes in a micro-step."""
        return self.train.per_device_train_batch_size * self.data.max_length


def compute_recipe_hash(recipe: Recipe) -> str:
    """Hash of the settings that decide a run's values: the sections model, data, train, lora and preference, and the
    seed. Memory levers, bookkeeping and the layout are left out: a run may continue with others if its rows per step
    stay."""
    deciding = recipe.model_dump(mode="json", include={"model", "data", "train", "lora"})
    deciding["data"] = {k: v for k, v in deciding["data"].items() if k not in ("store_dir", "num_workers")}
    deciding["seed"] = recipe.run.seed
    if recipe.run.start_from is not None:
        deciding["start"] = [recipe.run.start_from, recipe.run.start_moments]
    if recipe.preference is not None:  # earlier versions have no such section
        deciding["preference"] = recipe.preference.model_dump(mode="json")
    return hashlib.sha256(json.dumps(deciding, sort_keys=True).encode()).hexdigest()[:16]
