"""Ulysses attention in a training loop of the user's own: transformers' Trainer, TRL's SFTTrainer, or plain torch.

The collator gives each rank its slice of a row, with shifted labels; the sampler gives the ranks of a group the same
rows; the loss is one sum over one count. Gradients are averaged over all ranks, as DDP, FSDP and ZeRO do.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import timedelta
from functools import partial
from itertools import groupby
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional

from ulysses_cli.plan.attention import BACK_ENDS, list_needs
from ulysses_cli.plan.layout import Layout
from ulysses_cli.plan.models.shape import ModelShape, read_model_shape
from ulysses_cli.plan.rows.packing import IGNORE_INDEX
from ulysses_cli.train.attention.documents import Documents, make_documents
from ulysses_cli.train.attention.interface import register_attention, serve_rotary
from ulysses_cli.train.attention.kernels.choice import BrokenDeviceError, choose_kernel, join_presence, read_presence
from ulysses_cli.train.attention.kernels.trial import KernelSearch
from ulysses_cli.train.processes.consistency import gather_values, share_seal
from ulysses_cli.train.processes.groups import Groups, SequenceAxis, make_groups

TIMEOUT = timedelta(minutes=30)


class SequenceParallel:
    """Groups of `sp_size` ranks that share rows. Give `attn_implementation` to from_pretrained, `collate` to the
    trainer as its data_collator, and the trainer to `adopt`; or the model to `serve`, for a loop without a trainer.

    Collective over all ranks; connects them if nothing has connected them yet.
    """

    def __init__(self, sp_size: int, attn_implementation: str = "auto") -> None:
        world_size = _connect()
        if sp_size < 1 or world_size % sp_size:
            raise ValueError(
                f"sp_size {sp_size} does not divide {world_size} processes; start them with "
                f"`torchrun --nproc-per-node {max(1, sp_size)} ...`"
            )
        self.groups: Groups | None = None
        self.axis = SequenceAxis(None, 1, 0)
        if world_size > 1:
            self.groups = make_groups(Layout(sp_size=sp_size, dp_shard_size=world_size // sp_size), TIMEOUT)
            self.axis = self.groups.sp_axis
        self._wanted = attn_implementation
        self._kernels: dict[int, str] = {}
        self.attn_implementation = register_attention(self.axis, self._kernels)

    def adopt(self, trainer: Any) -> None:
        """Prepares a transformers Trainer (or a trainer made from it, such as TRL's SFTTrainer) before its train()."""
        for obstacle, fix in _list_obstacles(trainer, self):
            raise ValueError(f"{obstacle}: {fix}")
        trainer.args.prediction_loss_only = True  # logits of slices are not gathered
        trainer.compute_loss = partial(_count_and_compute, trainer, trainer.compute_loss)
        trainer.gather_function = partial(_gather_rows, trainer.accelerator, self.axis.size)
        model = trainer.accelerator.unwrap_model(trainer.model)
        self.serve(model.get_base_model() if hasattr(model, "get_base_model") else model)
        for name, size in (
            ("_get_train_sampler", trainer.args.per_device_train_batch_size),
            ("_get_eval_sampler", trainer.args.per_device_eval_batch_size),
        ):
            setattr(trainer, name, self._repeat(getattr(trainer, name), size, trainer.args.seed))

    def serve(self, model: Any) -> None:
        """Checks that a model with this attention is exact on split rows, and prepares it: its loss, its positions and
        its kernel."""
        if model.config._attn_implementation != self.attn_implementation:
            raise ValueError(
                "the model has another attention: load it with attn_implementation=ulysses.attn_implementation"
            )
        shape = read_model_shape(model.config.to_dict(), model.config.name_or_path or "the model")
        if obstacle := find_obstacle(shape, self.axis.size):
            raise ValueError(f"{shape.name}: {obstacle}")
        device = next(model.parameters()).device
        self._kernels.update(self._choose_kernels(shape, next(model.parameters()).dtype, device))
        serve_rotary(model, self.axis)
        model.get_decoder().register_forward_pre_hook(_move_documents, with_kwargs=True, prepend=True)
        model.loss_function = self._compute_loss

    def collate(self, rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        """Returns this rank's slice of a batch of rows. A row has `input_ids`, and may have `labels` (not shifted, as
        transformers has them), and `seq_lengths` or `position_ids`, which tell packed documents apart."""
        lengths = [len(row["input_ids"]) for row in rows]
        size = math.ceil(max(lengths) / self.axis.size) * self.axis.size
        own = slice(self.axis.rank * size // self.axis.size, (self.axis.rank + 1) * size // self.axis.size)
        tokens = []
        positions = []
        labels = []
        documents = []
        for row in rows:
            pieces = _list_documents(row)
            padding = size - sum(pieces)
            tokens.append([*map(int, row["input_ids"]), *[0] * padding])
            labels.append([*_shift(row.get("labels", row["input_ids"]), pieces), *[IGNORE_INDEX] * padding])
            pieces += [padding] if padding else []  # a document of its own
            positions.append([position for piece in pieces for position in range(piece)])
            documents += pieces
        shifted = torch.tensor(labels)[:, own].contiguous()
        return {
            "input_ids": torch.tensor(tokens)[:, own].contiguous(),
            "position_ids": torch.tensor(positions)[:, own].contiguous(),
            "labels": shifted,
            "shift_labels": shifted,
            "documents": make_documents(documents),
        }

    def _compute_loss(
        self,
        logits: Tensor,
        labels: Tensor | None = None,
        vocab_size: int | None = None,
        num_items_in_batch: Tensor | int | None = None,
        shift_labels: Tensor | None = None,
        **_: Any,
    ) -> Tensor:
        """Takes the logits of this rank's slice. The value is the group's, the gradient this rank's part of it.

        With `num_items_in_batch`, the targets of all ranks, the mean over ranks is the loss times 1 / ranks, as
        transformers' Trainer expects; without, it is the mean over the group's targets. Collective over the group.
        """
        if shift_labels is None:
            raise ValueError("the model got no shift_labels: use the collator of SequenceParallel")
        losses = functional.cross_entropy(
            logits.flatten(0, 1).float(), shift_labels.flatten(), ignore_index=IGNORE_INDEX, reduction="sum"
        )
        facts = torch.stack([losses.detach(), (shift_labels != IGNORE_INDEX).sum().to(losses.dtype)])
        if self.axis.group is not None:
            dist.all_reduce(facts, group=self.axis.group)
        total, count = facts.unbind()
        if num_items_in_batch is None:
            own, value = losses * self.axis.size / count.clamp(min=1), total / count.clamp(min=1)
        else:
            own, value = losses / num_items_in_batch, total / num_items_in_batch / self.axis.size
        return own + (value - own.detach())

    def _choose_kernels(self, shape: ModelShape, dtype: torch.dtype, device: torch.device) -> dict[int, str]:
        """Collective over all ranks: all use rank 0's choice, of the kernels that all have."""
        needs = list_needs(shape, "bfloat16" if dtype == torch.bfloat16 else "float32")
        window = min(shape.windows) if shape.windows else None
        names, problem = list(BACK_ENDS), ""
        chosen = torch.zeros(len(needs), dtype=torch.int64)
        presences = [read_presence(device)]
        if self.groups is not None:
            host_group = self.groups.host_group
            presences = gather_values(presences[0], host_group, share_seal(host_group))
        presence = join_presence(presences)
        if self.groups is None or self.groups.is_first:
            try:
                searches = [KernelSearch(need, device, window) for need in needs]
                found = [choose_kernel(self._wanted, search, presence).name for search in searches]
                chosen = torch.tensor([names.index(name) for name in found])
            except (ValueError, BrokenDeviceError) as error:
                chosen, problem = chosen - 1, str(error)
        if self.groups is not None:
            dist.broadcast(chosen, 0, group=self.groups.host_group)
        if min(chosen.tolist()) < 0:
            raise ValueError(problem or "no attention kernel serves the model on rank 0, which says why")
        return {need.head_dim: names[index] for need, index in zip(needs, chosen.tolist(), strict=True)}

    def _repeat(self, make_sampler: Callable[..., Any], batch_size: int, seed: int) -> Callable[..., Any]:
        def make(dataset: Any = None) -> Any:
            sampler = make_sampler() if dataset is None else make_sampler(dataset)
            sampler = torch.utils.data.SequentialSampler(dataset) if sampler is None else sampler
            return RepeatedBatches(sampler, batch_size, self.axis.size, seed)

        return make


class RepeatedBatches(torch.utils.data.Sampler[int]):
    """Yields each batch of another sampler `times` times in a row, so that ranks that take batches in turns give the
    ranks of a group the same one. Random order comes from the seed and the epoch: it is the same on all ranks. An
    incomplete last batch is filled from the beginning."""

    def __init__(self, sampler: Any, batch_size: int, times: int, seed: int) -> None:
        self.sampler = sampler
        self.batch_size = batch_size
        self.times = times
        self.seed = seed
        self.epoch = 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __len__(self) -> int:
        return math.ceil(len(self.sampler) / self.batch_size) * self.batch_size * self.times

    def __iter__(self) -> Iterator[int]:
        if isinstance(self.sampler, torch.utils.data.RandomSampler):
            generator = torch.Generator().manual_seed(self.seed + self.epoch)
            order = torch.randperm(len(self.sampler), generator=generator).tolist()
        else:
            order = list(self.sampler)
        missing = -len(order) % self.batch_size
        order += (order * math.ceil(missing / max(1, len(order))))[:missing]
        for start in range(0, len(order), self.batch_size):
            for _ in range(self.times):
                yield from order[start : start + self.batch_size]


def find_obstacle(shape: ModelShape, sp_size: int) -> str:
    """Why a model cannot run here on split rows, or ''."""
    if any(layer.attention is None for layer in shape.layers):
        return "it has recurrent or convolution layers, which need `ulysses train`"
    if sp_size > 1 and shape.inexact:
        return shape.inexact
    if sp_size not in shape.sp_sizes:
        return f"sp_size {sp_size} does not divide its heads: use {', '.join(map(str, shape.sp_sizes))}"
    return ""


def _count_and_compute(
    trainer: Any,
    compute: Callable[..., Any],
    model: Any,
    inputs: Any,
    return_outputs: bool = False,
    num_items_in_batch: Any = None,
) -> Any:
    """Collective over all ranks. A loss that is not told the number of targets would be a mean over this rank's."""
    if num_items_in_batch is None:
        num_items_in_batch = trainer._get_num_items_in_batch([inputs], trainer.args.device)
    return compute(model, inputs, return_outputs=return_outputs, num_items_in_batch=num_items_in_batch)


def _gather_rows(accelerator: Any, sp_size: int, losses: Tensor) -> Tensor:
    """Collective over all ranks. Takes a loss for each row of this rank, returns one for each row of the batch: the
    mean of its group, since a trainer may report a slice's on each rank. Rows that fill the last batch are left out."""
    losses = accelerator.gather(losses).view(accelerator.num_processes // sp_size, sp_size, -1).mean(1).flatten()
    state = accelerator.gradient_state
    if not state.end_of_dataloader:
        return losses
    return losses[: state.active_dataloader.total_dataset_length % len(losses) or len(losses)]


def _connect() -> int:
    """Returns the number of ranks."""
    if not dist.is_initialized() and int(os.environ.get("WORLD_SIZE", "1")) > 1:
        has_gpu = torch.cuda.is_available()
        if has_gpu:
            torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
        dist.init_process_group("nccl" if has_gpu else "gloo", timeout=TIMEOUT)
    return dist.get_world_size() if dist.is_initialized() else 1


def _list_obstacles(trainer: Any, ulysses: SequenceParallel) -> Iterator[tuple[str, str]]:
    """Yields what makes a trainer inexact on split rows, and what to change."""
    args = trainer.args
    if trainer.data_collator != ulysses.collate:
        yield "the trainer has another collator", "pass data_collator=ulysses.collate"
    if getattr(args, "label_smoothing_factor", 0):
        yield "label_smoothing_factor shifts labels that are shifted already", "leave it out"
    if trainer.compute_metrics is not None:
        yield "compute_metrics sees the logits of a slice of the row", "leave it out: evaluate reports the loss"
    if trainer.compute_loss_func is not None:
        yield "compute_loss_func sees a slice of the row", "leave it out, or use `ulysses train` with train.token_loss"
    if not args.average_tokens_across_devices:
        yield "average_tokens_across_devices is off", "ranks hold different numbers of targets: leave it on"
    if args.n_gpu > 1:
        yield "DataParallel splits batches itself", "start one process per GPU with torchrun"
    if getattr(trainer.accelerator, "parallelism_config", None) is not None:
        yield "parallelism_config splits rows as well", "leave it out"
    for dataset in (trainer.train_dataset, trainer.eval_dataset):
        if dataset is not None and not isinstance(dataset, dict) and not hasattr(dataset, "__len__"):
            yield "a data set without a length has no sampler", "use a data set with a length"


def _list_documents(row: Mapping[str, Any]) -> list[int]:
    """Returns the lengths of a row's documents. A position that does not follow its neighbour begins another one."""
    if row.get("seq_lengths") is not None:
        return [int(length) for length in row["seq_lengths"]]
    if row.get("position_ids") is not None:
        offsets = (int(position) - at for at, position in enumerate(row["position_ids"]))
        return [len(list(run)) for _, run in groupby(offsets)]
    return [len(row["input_ids"])]


def _shift(labels: Sequence[int], documents: Sequence[int]) -> list[int]:
    """Returns for each token the label of the next one in its document."""
    shifted = [*map(int, labels[1:]), IGNORE_INDEX]
    end = 0
    for length in documents:
        end += length
        shifted[end - 1] = IGNORE_INDEX
    return shifted


def _move_documents(
    _: nn.Module, args: tuple[Any, ...], options: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The collator runs on the host: bounds follow the tokens to their device."""
    documents, tokens = options.get("documents"), options.get("input_ids", options.get("inputs_embeds"))
    if isinstance(documents, Documents) and isinstance(tokens, Tensor) and documents.cu_seqlens.device != tokens.device:
        options = {**options, "documents": make_documents(documents.lengths, tokens.device)}
    return args, options
