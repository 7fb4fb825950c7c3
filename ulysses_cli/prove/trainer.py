"""The peer: the Hugging Face Trainer's own Ulysses path, by accelerate's ParallelismConfig, with the same model, rows
and ZeRO config. Used as its makers document it; nothing of this tool runs inside it.
"""

from __future__ import annotations

import os
import resource
import statistics
import tempfile
import time
from typing import Any

import torch
import torch.distributed as dist
from transformers import AutoModelForCausalLM, Trainer, TrainerCallback, TrainingArguments

from ulysses_cli.plan.ds_config import make_ds_config
from ulysses_cli.plan.flops import compute_model_flops
from ulysses_cli.plan.model_shape import ModelShape
from ulysses_cli.plan.recipe import Recipe
from ulysses_cli.plan.resolved import make_layout
from ulysses_cli.prove.rows import FullRows
from ulysses_cli.prove.speed import Timed
from ulysses_cli.train.build import load_model_config, stretch_positions


class _StepTimer(TrainerCallback):
    def __init__(self) -> None:
        self.seconds: list[float] = []
        self.losses: list[float] = []
        self.begun = 0.0

    def on_step_begin(self, *_: Any, **__: Any) -> None:
        _synchronize()
        self.begun = time.perf_counter()

    def on_step_end(self, *_: Any, **__: Any) -> None:
        _synchronize()
        self.seconds.append(time.perf_counter() - self.begun)

    def on_log(self, *_: Any, logs: dict[str, Any] | None = None, **__: Any) -> None:
        if logs and "loss" in logs:
            self.losses.append(float(logs["loss"]))


def _synchronize() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def time_trainer(device: torch.device, recipe: Recipe, shape: ModelShape, num_warmup: int, num_steps: int) -> Timed:
    """Collective over all ranks."""
    from accelerate import PartialState
    from accelerate.parallelism_config import ParallelismConfig
    from accelerate.utils import DeepSpeedSequenceParallelConfig

    layout, train = make_layout(recipe), recipe.train
    total = num_warmup + num_steps
    handler = DeepSpeedSequenceParallelConfig(sp_seq_length_is_variable=True, sp_attn_implementation="sdpa")
    parallelism = ParallelismConfig(sp_backend="deepspeed", sp_size=layout.sp_size, sp_handler=handler)
    if device.type == "cpu":
        # use_cpu=True would switch DeepSpeed off, and without it CPU ranks are no world to accelerate
        os.environ["ACCELERATE_USE_DEEPSPEED"] = "true"
        PartialState(backend="gloo")
    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(
            output_dir=folder,
            accelerator_config={"use_configured_state": True} if device.type == "cpu" else None,
            max_steps=total,
            per_device_train_batch_size=train.per_device_train_batch_size,
            gradient_accumulation_steps=train.gradient_accumulation_steps,
            learning_rate=train.learning_rate,
            lr_scheduler_type="constant",
            bf16=recipe.model.dtype == "bfloat16",
            gradient_checkpointing=recipe.memory.gradient_checkpointing is not False,
            gradient_checkpointing_kwargs={"use_reentrant": False},
            deepspeed=make_peer_config(recipe),
            parallelism_config=parallelism if layout.sp_size > 1 else None,
            logging_steps=1,
            save_strategy="no",
            report_to=[],
            disable_tqdm=True,
            dataloader_pin_memory=device.type == "cuda",
            remove_unused_columns=False,
        )
        config = load_model_config(recipe)
        stretch_positions(config, recipe, shape)
        torch.manual_seed(recipe.run.seed)
        dtype = getattr(torch, recipe.model.dtype)
        model = AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation="sdpa")
        timer = _StepTimer()
        row = FullRows(recipe.data.max_length, shape.vocab_size).read(0, 0, recipe.data.max_length)
        tokens, places = torch.from_numpy(row.input_ids), torch.from_numpy(row.positions)
        sample = {"input_ids": tokens, "labels": tokens, "position_ids": places}
        rows_needed = total * train.gradient_accumulation_steps * train.per_device_train_batch_size * layout.dp_size
        rows: Any = [sample] * rows_needed
        Trainer(model=model, args=arguments, train_dataset=rows, callbacks=[timer], data_collator=_stack).train()
    seconds = statistics.median(timer.seconds[num_warmup:])
    tokens_per_step = rows_needed // total * recipe.data.max_length
    flops = compute_model_flops(shape, [recipe.data.max_length]) * rows_needed / total
    peaks = torch.tensor(
        [
            torch.cuda.max_memory_allocated(device) if device.type == "cuda" else 0,
            resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
        ],
        device=device,
    )
    dist.all_reduce(peaks, dist.ReduceOp.MAX)
    return Timed(
        step_seconds=seconds,
        fastest_seconds=min(timer.seconds[num_warmup:]),
        slowest_seconds=max(timer.seconds[num_warmup:]),
        tokens_per_second=tokens_per_step / seconds,
        tflops=flops / seconds / layout.world_size / 1e12,
        mfu=None,
        peak_memory_bytes=int(peaks[0]) or None,
        host_peak_memory_bytes=int(peaks[1]),
        loss=timer.losses[-1] if timer.losses else float("nan"),
    )


def _stack(samples: list[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    return {name: torch.stack([sample[name] for sample in samples]) for name in samples[0]}


def make_peer_config(recipe: Recipe) -> dict[str, Any]:
    """The same ZeRO config; batch sizes and clipping are the Trainer's to fill in."""
    config = make_ds_config(recipe, make_layout(recipe))
    for name in ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps"):
        config[name] = "auto"
    config["gradient_clipping"] = recipe.train.max_grad_norm
    return config
