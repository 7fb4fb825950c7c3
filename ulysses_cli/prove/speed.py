"""Times steps on a rank: those of the training loop, with the meter and clock of a real run, and those of the Hugging
Face Trainer with its own Ulysses sequence parallelism, on the same model, rows and ZeRO config. The Trainer is set
up as its documentation says; no code of this tool runs inside its steps. Turns measured steps into the rates that
the estimator then uses for this kind of GPU."""

from __future__ import annotations

import os
import resource
import statistics
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from transformers import Trainer, TrainerCallback, TrainingArguments, training_args

from ulysses_cli.data.steps import Rows
from ulysses_cli.plan.ds_config import make_ds_config, merge_user_config
from ulysses_cli.plan.flops import compute_model_flops
from ulysses_cli.plan.hardware import Gpu
from ulysses_cli.plan.ledger.job import Job
from ulysses_cli.plan.ledger.machine import compute_swap_need
from ulysses_cli.plan.levers import Levers
from ulysses_cli.plan.models.shape import ModelShape
from ulysses_cli.plan.recipe.recipe import Recipe
from ulysses_cli.plan.resolved import make_layout, resolve, settle
from ulysses_cli.plan.speed import compute_speed
from ulysses_cli.prove.ranks import Interleaving
from ulysses_cli.prove.rows import FullRows
from ulysses_cli.train.loop import train
from ulysses_cli.train.metrics import Meter
from ulysses_cli.train.model.adapters import make_adapter_config
from ulysses_cli.train.model.build import assemble_run, choose_objective
from ulysses_cli.train.model.loading import (
    ModelOptions,
    load_model_config,
    load_pretrained,
    start_from_random,
    stretch_positions,
)
from ulysses_cli.train.model.routers import list_router_layers
from ulysses_cli.train.optimizer.states import open_folder
from ulysses_cli.train.processes.consistency import gather_values
from ulysses_cli.train.processes.device import StartError
from ulysses_cli.train.processes.groups import make_groups
from ulysses_cli.train.reference import ReferencedRows

GROUP_TIMEOUT = timedelta(days=1)  # the process that started the ranks ends them at its own time limit


@dataclass(frozen=True)
class Timed:
    """Measurements of the timed steps; peaks are those of the fullest rank. `seconds`: of each timed step by its
    number; `parts`: seconds of the parts of one warm-up step; `first_loss`: before any update."""

    seconds: dict[int, float]
    tokens_per_step: int
    flops_per_step: float  # of the model, per rank; recomputed operations do not count
    peak_tflops: float | None
    peak_memory_bytes: int | None
    host_peak_memory_bytes: int
    first_loss: float
    parts: dict[str, float] = field(default_factory=dict)
    communication_share: float | None = None

    @property
    def step_seconds(self) -> float:
        return statistics.median(self.seconds.values())

    @property
    def seconds_per_token(self) -> dict[int, float]:
        return {step: seconds / self.tokens_per_step for step, seconds in self.seconds.items()}

    def get_share(self, part: str) -> float | None:
        total = sum(self.parts.values())
        return self.parts.get(part, 0.0) / total if total else None

    def describe(self) -> dict[str, Any]:
        tflops = self.flops_per_step / self.step_seconds / 1e12
        values: dict[str, Any] = {
            "tokens_per_second": self.tokens_per_step / self.step_seconds,
            "step_seconds": self.step_seconds,
            "slowest_seconds": max(self.seconds.values()),
            "tflops": tflops,
            "mfu": tflops / self.peak_tflops if self.peak_tflops else None,
            "peak_memory_bytes": self.peak_memory_bytes,
            "host_peak_memory_bytes": self.host_peak_memory_bytes,
            "communication_share": self.communication_share,
            "exchange_share": self.get_share("exchange"),
            "unhidden_offload_share": self.get_share("offload"),
            "first_loss": self.first_loss,
            "part_seconds": self.parts or None,
        }
        return {name: value for name, value in values.items() if value is not None}


def time_steps(
    device: torch.device,
    interleaving: Interleaving,
    recipe: Recipe,
    shape: ModelShape,
    levers: Levers,
    peak_tflops: float | None,
    num_warmup: int,
    num_steps: int,
    swap_folder: Path | None = None,
) -> Timed:
    """Collective over all ranks. `swap_folder`: made here where levers use a disk; the caller removes it when all ranks
    have ended."""
    plan = settle(recipe, shape, levers)
    groups = make_groups(plan.layout, GROUP_TIMEOUT)
    if swap_folder is not None:
        problem = open_folder(swap_folder, Path(recipe.run.output_dir), *compute_swap_need(recipe, shape, levers))
        if problem := next(filter(None, gather_values(problem, groups.host_group)), ""):
            raise StartError(problem)
    rows: Rows = FullRows(recipe, shape)
    if recipe.preference is not None and recipe.preference.has_reference:
        rows = ReferencedRows(rows)  # whatever the reference is, a step takes as long
    more: dict[str, Any] = {"swap_folder": swap_folder, "objective": choose_objective(recipe, groups)}
    state = assemble_run(plan, groups, device, rows, num_warmup + num_steps, **more).state
    lines: list[dict[str, Any]] = []
    meter = Meter(partial(compute_model_flops, shape), peak_tflops, lines.append)
    state.pre_step_hooks = (lambda _: interleaving.wait_for_turn(groups.host_group), meter.start)
    state.post_step_hooks = (meter.record, lambda *_: interleaving.pass_turn())
    train(state)
    clocked = next((line for line in lines if "step_parts" in line), {})
    return Timed(
        seconds={line["step"]: line["step_seconds"] for line in lines[num_warmup:] if "step_parts" not in line},
        tokens_per_step=lines[-1]["tokens"],
        flops_per_step=lines[-1]["tflops"] * lines[-1]["step_seconds"] * 1e12,
        peak_tflops=peak_tflops,
        peak_memory_bytes=max((line["peak_memory_bytes"] or 0 for line in lines), default=0) or None,
        host_peak_memory_bytes=max(line["host_peak_memory_bytes"] for line in lines),
        first_loss=lines[0]["loss"],
        parts=clocked.get("step_parts", {}),
        communication_share=clocked.get("communication_share"),
    )


# The parts of a step that each rate is derived from; a rate is a share of the datasheet's number.
PARTS_OF_RATE = {
    "matmul": ("projections", "mlp", "head_loss"),
    "memory": ("other",),
    "link": ("exchange",),
}
LEAST_SHARE, LEAST_SECONDS = 0.02, 1e-4


def calibrate(measured: Sequence[tuple[Job, Timed]], gpu: Gpu) -> dict[str, Any]:
    """A table in the form of hardware.yaml that overrides the rates of this kind of GPU; {} when nothing was measured.
    Each rate is the median over the measured steps."""
    rates: dict[str, Any] = {}
    shares = {}
    for rate, parts in PARTS_OF_RATE.items():
        ratio = _find_ratio(measured, gpu, parts)
        if ratio is not None:
            shares[rate] = _bound(getattr(gpu.efficiency, rate) * ratio)
    if shares:
        rates["efficiency"] = shares
    ratio = _find_ratio(measured, gpu, ("attention",))
    if ratio is not None:
        rates["attention"] = [_bound(gpu.attention_forward * ratio), _bound(gpu.attention_backward * ratio)]
    return {"gpus": {gpu.key: rates}} if rates else {}


def _find_ratio(measured: Sequence[tuple[Job, Timed]], gpu: Gpu, parts: Sequence[str]) -> float | None:
    """Median of predicted / measured seconds; None where no step spent long enough in these parts."""
    ratios = []
    for job, timed in measured:
        predicted = compute_speed(job, gpu).parts
        expected, seconds = sum(predicted[part] for part in parts), sum(timed.parts.get(part, 0.0) for part in parts)
        if expected > LEAST_SECONDS and seconds > LEAST_SECONDS:
            ratios.append(expected / seconds)
    return statistics.median(ratios) if ratios else None


def _bound(share: float) -> float:
    return round(min(1.0, max(LEAST_SHARE, share)), 4)


OPTIMIZERS = {"adamw": "adamw_torch_fused", "adamw_8bit": "adamw_bnb_8bit"}


class _StepTimer(TrainerCallback):
    """Interleaves steps with the other side, and times each step."""

    def __init__(self, interleaving: Interleaving, group: Any) -> None:
        self.interleaving, self.group = interleaving, group
        self.seconds: list[float] = []
        self.losses: list[float] = []
        self.start_time = 0.0

    def on_step_begin(self, *_: Any, **__: Any) -> None:
        self.interleaving.wait_for_turn(self.group)
        _synchronize()
        self.start_time = time.perf_counter()

    def on_step_end(self, *_: Any, **__: Any) -> None:
        _synchronize()
        self.seconds.append(time.perf_counter() - self.start_time)
        self.interleaving.pass_turn()

    def on_log(self, *_: Any, logs: dict[str, Any] | None = None, **__: Any) -> None:
        if logs and "loss" in logs:
            self.losses.append(float(logs["loss"]))


def _synchronize() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def time_trainer(
    device: torch.device,
    interleaving: Interleaving,
    recipe: Recipe,
    shape: ModelShape,
    levers: Levers,
    num_warmup: int,
    num_steps: int,
) -> Timed:
    """Collective over all ranks."""
    layout, total = make_layout(recipe), num_warmup + num_steps
    rows_per_step = recipe.train.rows_per_group * layout.dp_size
    row = FullRows(recipe, shape).read(0, 0, recipe.data.max_length)
    tokens, places = torch.from_numpy(row.input_ids), torch.from_numpy(row.positions)
    rows: Any = [{"input_ids": tokens, "labels": tokens, "position_ids": places}] * (total * rows_per_step)
    timer = _StepTimer(interleaving, make_groups(layout, GROUP_TIMEOUT).host_group)
    with tempfile.TemporaryDirectory() as folder:
        arguments = make_arguments(folder, recipe, levers, total, device)
        model = make_model(recipe, shape, device)
        trainer = Trainer(model=model, args=arguments, train_dataset=rows, callbacks=[timer], data_collator=_stack)
        trainer.train()
    flops = compute_model_flops(shape, [recipe.data.max_length]) * rows_per_step / layout.world_size
    on_gpu = torch.cuda.max_memory_allocated(device) if device.type == "cuda" else 0
    on_host = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    peaks = torch.tensor([on_gpu, on_host], device=device)
    dist.all_reduce(peaks, dist.ReduceOp.MAX)
    return Timed(
        seconds={step: timer.seconds[step - 1] for step in range(num_warmup + 1, total + 1)},
        tokens_per_step=rows_per_step * recipe.data.max_length,
        flops_per_step=flops,
        peak_tflops=None,
        peak_memory_bytes=int(peaks[0]) or None,
        host_peak_memory_bytes=int(peaks[1]),
        first_loss=timer.losses[0] if timer.losses else float("nan"),
    )


def make_arguments(folder: str, recipe: Recipe, levers: Levers, num_steps: int, device: torch.device) -> Any:
    from accelerate import PartialState
    from accelerate.parallelism_config import ParallelismConfig
    from accelerate.utils import DeepSpeedSequenceParallelConfig

    layout, train = make_layout(recipe), recipe.train
    handler = DeepSpeedSequenceParallelConfig(sp_seq_length_is_variable=True, sp_attn_implementation="sdpa")
    parallelism = ParallelismConfig(sp_backend="deepspeed", sp_size=layout.sp_size, sp_handler=handler)
    if device.type == "cpu":
        # use_cpu=True would switch DeepSpeed off, and without use_cpu accelerate does not start a world of CPU ranks
        os.environ["ACCELERATE_USE_DEEPSPEED"] = "true"
        PartialState(backend="gloo")
        training_args.is_torch_bf16_gpu_available = lambda: True  # called wherever use_cpu is not set
    return TrainingArguments(
        output_dir=folder,
        accelerator_config={"use_configured_state": True} if device.type == "cpu" else None,
        max_steps=num_steps,
        per_device_train_batch_size=train.per_device_train_batch_size,
        gradient_accumulation_steps=train.gradient_accumulation_steps,
        learning_rate=train.learning_rate,
        lr_scheduler_type="constant",
        optim=OPTIMIZERS.get(train.optim, "adamw_torch"),
        weight_decay=train.weight_decay,
        adam_beta1=train.adam_beta1,
        adam_beta2=train.adam_beta2,
        adam_epsilon=train.adam_epsilon,
        max_grad_norm=train.max_grad_norm or 0.0,
        seed=recipe.run.seed,
        bf16=recipe.model.dtype == "bfloat16",
        gradient_checkpointing=levers.gradient_checkpointing is not False,
        gradient_checkpointing_kwargs={"use_reentrant": False},
        deepspeed=make_peer_config(recipe, levers),
        parallelism_config=parallelism if layout.sp_size > 1 else None,
        logging_steps=1,
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
        dataloader_pin_memory=device.type == "cuda",
        remove_unused_columns=False,
    )


def make_model(recipe: Recipe, shape: ModelShape, device: torch.device) -> Any:
    """The same weights as our side's, from the files or drawn with the same seed. Making the Trainer's arguments has
    already switched transformers to ZeRO-3."""
    config = load_model_config(recipe)
    stretch_positions(config, recipe, resolve(recipe, shape))
    options = ModelOptions(config, getattr(torch, recipe.model.dtype), "sdpa", recipe.model.trust_remote_code)
    if recipe.model.config is not None:
        model = start_from_random(options, recipe.run.seed, device)
    else:
        model = load_pretrained(options, os.path.expanduser(str(recipe.model.name_or_path)), recipe.model.revision)
    if recipe.lora is None:
        return model
    from peft import get_peft_model

    settings = make_adapter_config(recipe, shape)
    settings.exclude_modules = list_router_layers(model) or None
    return get_peft_model(model, settings, autocast_adapter_dtype=False)


def _stack(samples: list[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    return {name: torch.stack([sample[name] for sample in samples]) for name in samples[0]}


def make_peer_config(recipe: Recipe, levers: Levers) -> dict[str, Any]:
    """The same ZeRO config; the Trainer fills in the batch sizes."""
    own_config = make_ds_config(recipe, make_layout(recipe), levers.offload_optimizer, levers.offload_param)
    config = merge_user_config(own_config, recipe.deepspeed)
    for name in ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps"):
        config[name] = "auto"
    return {**config, "zero_force_ds_cpu_optimizer": False}
