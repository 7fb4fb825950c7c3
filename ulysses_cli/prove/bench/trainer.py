"""Times the Hugging Face Trainer with its own Ulysses sequence parallelism (accelerate's ParallelismConfig), on the
same model, rows and ZeRO config. It is set up as its documentation says; no code of this tool runs inside its steps.
"""

from __future__ import annotations

import os
import resource
import tempfile
import time
from typing import Any

import torch
import torch.distributed as dist
from transformers import Trainer, TrainerCallback, TrainingArguments, training_args

from ulysses_cli.plan.ds_config import make_ds_config, merge_user_config
from ulysses_cli.plan.flops import compute_model_flops
from ulysses_cli.plan.levers import Levers
from ulysses_cli.plan.models.shape import ModelShape
from ulysses_cli.plan.recipe.recipe import Recipe
from ulysses_cli.plan.resolved import make_layout, resolve
from ulysses_cli.prove.bench.speed import GROUP_TIMEOUT, Timed
from ulysses_cli.prove.ranks.interleaving import Interleaving
from ulysses_cli.prove.rows import FullRows
from ulysses_cli.train.assembly.adapters import make_adapter_config
from ulysses_cli.train.assembly.loading import ModelOptions, load_pretrained, start_from_random
from ulysses_cli.train.assembly.model_config import load_model_config, stretch_positions
from ulysses_cli.train.processes.groups import make_groups

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
    layout, train = make_layout(recipe), recipe.train
    total = num_warmup + num_steps
    rows_per_step = train.gradient_accumulation_steps * train.per_device_train_batch_size * layout.dp_size
    row = FullRows(recipe.data.max_length, shape.vocab_size).read(0, 0, recipe.data.max_length)
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

    return get_peft_model(model, make_adapter_config(recipe), autocast_adapter_dtype=False)


def _stack(samples: list[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    return {name: torch.stack([sample[name] for sample in samples]) for name in samples[0]}


def make_peer_config(recipe: Recipe, levers: Levers) -> dict[str, Any]:
    """The same ZeRO config; the Trainer fills in the batch sizes."""
    own_config = make_ds_config(recipe, make_layout(recipe), levers.offload_optimizer, levers.offload_param)
    config = merge_user_config(own_config, recipe.deepspeed)
    for name in ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps"):
        config[name] = "auto"
    return {**config, "zero_force_ds_cpu_optimizer": False}
