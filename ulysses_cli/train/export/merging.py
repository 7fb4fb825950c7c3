"""Merges adapters into their base model, one tensor of the base's files after another: host memory holds one shard.

peft computes each adapter's delta in float32; it is split as the weight is that it is added to. No module of the
base is made, and experts need no rule of their own.
"""

from __future__ import annotations

import copy
import hashlib
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor

from ulysses_cli.plan.units import format_count
from ulysses_cli.run.checkpoints import CheckpointError
from ulysses_cli.train.export.base_model import NOTHING, BaseModel, Carried, FileLayout, find_carried, list_buffer_names
from ulysses_cli.train.export.weights import (
    MAX_SHARD_BYTES,
    MEMORY_SHARE,
    PREFIX,
    CheckpointWeights,
    ProbedModel,
    ShardWriter,
    load_text_model,
)
from ulysses_cli.train.model.adapters import choose_layers, train_whole_parts
from ulysses_cli.train.model.loading import find_key_mapping, grow_embeddings, grow_rows
from ulysses_cli.train.processes.host import count_free_bytes
from ulysses_cli.train.tensor_file import WORDS, is_finite

A, B = ".lora_A.default.weight", ".lora_B.default.weight"
LENGTHS = ".lora_magnitude_vector.default.weight"  # of DoRA: one for each row of the weight
TEXT_PART = "language_model."  # the name of the text model inside multimodal models


@dataclass(frozen=True, eq=False)
class Adapter:
    """peft's module of one adapter, its name in the checkpoint and the parameter it changes."""

    module: Any
    layer: str
    parameter: str


class Merging:
    """Merges one checkpoint's adapters. `adapter_config`: peft's own. `trained_dtype`: dtype of the base's weights
    during training. `num_own_tokens`: rows of the base's embedding in its files, where the run has added some."""

    def __init__(
        self,
        checkpoint: Path,
        files: list[Path],
        adapter_config: Any,
        trained_dtype: torch.dtype,
        dtype: torch.dtype,
        num_own_tokens: int | None = None,
        base: BaseModel | None = None,
        shard_bytes: int = MAX_SHARD_BYTES,
    ) -> None:
        self.shard_bytes = shard_bytes
        self.base, self.wrapper = base, base.wrapper if base is not None else None
        self.files, self.adapter_config, self.num_own_tokens = files, adapter_config, num_own_tokens
        self.trained_dtype, self.dtype = trained_dtype, dtype
        self.weights = CheckpointWeights(checkpoint)

    def write(self, to: Path, skeleton: Any, carried: Carried = NOTHING) -> list[str]:
        """Writes the merged weights. Returns the names written: those that the base model's files have.
        `skeleton`: the model on the meta device. `carried`: tensors that are not the trained model's."""
        layout, state = FileLayout(skeleton, self.files[0].parent), skeleton.state_dict()
        wanted = layout.name_in_files(dict(state))
        if skeleton.config.tie_word_embeddings:
            wanted.pop("lm_head.weight", None)
        adapters = self._find_adapters(skeleton)
        names_of = [tuple(layout.name_in_files({each.parameter: state[each.parameter]})) for each in adapters]
        adapter_of = {name: index for index, names in enumerate(names_of) for name in names}
        if missing := sorted(adapter_of.keys() - wanted.keys()):
            raise CheckpointError(f"the adapters of {missing[0]} have no weight of their own in the base model's files")
        whole = self._find_whole_parts(skeleton, layout)
        tables = layout.name_in_files(_find_tables(skeleton))
        buffers = layout.name_in_files({name: state[name] for name in list_buffer_names(skeleton)}).keys()
        in_files = self.wrapper.name_in_files if self.wrapper else str
        writer = ShardWriter(to, "model", self.dtype, self.shard_bytes)
        for file in self.files:
            with safe_open(file, "pt") as opened:
                names = [(target, name) for name in opened.keys() if (target := _match(name, wanted))]  # noqa: SIM118
                names.sort(key=lambda pair: (adapter_of.get(pair[0], -1), pair[0]))  # groups an adapter's tensors
                current, deltas, lengths = -1, {}, None
                for target, name in names:
                    tensor = opened.get_tensor(name)
                    if not is_finite(tensor):
                        raise CheckpointError(f"{file} holds {WORDS} in {name}")
                    if target in whole:
                        tensor = self.weights.read(whole[target])
                    elif target in tables and len(tensor) == self.num_own_tokens:
                        tensor = grow_rows(tensor.to(self.trained_dtype), len(wanted[target]))
                    if tensor.shape != wanted[target].shape:
                        shapes = f"{tuple(tensor.shape)}, the model has it as {tuple(wanted[target].shape)}"
                        raise CheckpointError(f"{file} holds {name} as {shapes}")
                    if target in adapter_of:
                        if adapter_of[target] != current:
                            current = adapter_of[target]
                            adapter = adapters[current]
                            deltas = layout.name_in_files({adapter.parameter: self._compute_delta(adapter)})
                            lengths = self._read_lengths(adapter)
                            if lengths is not None and len(deltas) != 1:
                                several = "is several tensors in files: DoRA cannot be merged into them"
                                raise CheckpointError(f"{adapter.parameter} {several}")
                        tensor = self._merge(tensor, deltas[target], lengths)
                    write = writer.add_unchanged if target in buffers else writer.add
                    write(in_files(target), tensor)
        for name, tensor in carried.read():
            writer.add_unchanged(name, tensor)
        written = writer.finish()
        copies = layout.name_in_files({name: state[name] for name in _find_copies(skeleton)}).keys()
        if missing := sorted({in_files(name) for name in wanted.keys() - copies} - set(written)):
            raise CheckpointError(f"the base model's files lack {', '.join(missing[:3])}")
        return written

    def _merge(self, weight: Tensor, delta: Tensor, lengths: Tensor | None) -> Tensor:
        """The merged weight in float32: what is written is rounded once. `weight`: of the base, in any dtype."""
        merged = weight.to(self.trained_dtype).float() + delta
        return merged if lengths is None else merged * (lengths / merged.norm(dim=1))[:, None]

    def _find_adapters(self, skeleton: Any) -> list[Adapter]:
        """The adapters in the order of the model's layers."""
        adapted = copy.deepcopy(skeleton)
        add_adapters(adapted, self.adapter_config)
        adapters, parameters = list(_list_adapters(adapted)), dict(skeleton.named_parameters(remove_duplicate=False))
        ends = (A, B, LENGTHS) if self.adapter_config.use_dora else (A, B)
        expected = {adapter.layer + end for adapter in adapters for end in ends}
        if self.adapter_config.modules_to_save:
            train_whole_parts(adapted, self.adapter_config.modules_to_save)
            expected |= {PREFIX + name for name, value in adapted.named_parameters() if value.requires_grad}
        if unmatched := sorted(expected ^ self.weights.shapes.keys()):
            raise CheckpointError(f"the adapters do not fit the base model: {', '.join(unmatched[:3])}")
        of_weight: dict[int, str] = {}
        for adapter in adapters:
            other = of_weight.setdefault(id(parameters[adapter.parameter]), adapter.parameter)
            if other != adapter.parameter:
                raise CheckpointError(
                    f"{other} and {adapter.parameter} are one weight with an adapter for each layer: no merged weight "
                    "has both; export the adapters alone"
                )
        return adapters

    def _find_whole_parts(self, skeleton: Any, layout: FileLayout) -> dict[str, str]:
        """The weights that were trained whole: names in the checkpoint, by those in files."""
        own = dict(skeleton.named_parameters())
        names = {name.removeprefix(PREFIX): name for name in self.weights.shapes if ".lora_" not in name}
        return {
            file_name: full for name, full in names.items() for file_name in layout.name_in_files({name: own[name]})
        }

    def _read_lengths(self, adapter: Adapter) -> Tensor | None:
        """The trained length of each row of the merged weight, under DoRA."""
        if not self.adapter_config.use_dora:
            return None
        return self.weights.read(adapter.layer + LENGTHS).float()

    def _compute_delta(self, adapter: Adapter) -> Tensor:
        """What one adapter adds to the base. The module keeps its own weights."""
        module, originals = adapter.module, []
        for part, end in ((module.lora_A, A), (module.lora_B, B)):
            originals.append((part["default"], part["default"].weight))
            value = self.weights.read(adapter.layer + end)
            part["default"].weight = torch.nn.Parameter(value, requires_grad=False)
        module.get_param = lambda: torch.empty(0)  # peft reads the device and dtype of an expert's delta from it
        delta: Tensor = module.get_delta_weight("default")
        for linear, weight in originals:
            linear.weight = weight
        del module.get_param
        return delta

    def check(self, folder: Path, config: Any, probe: Tensor) -> str:
        """Proves the merged folder, loaded as a user would, against base and adapters as they were trained: every
        weight is W + BA, rounded once, bit for bit; and what rounding explains is all by which its logits differ. Loads
        one model after the other."""
        with torch.device("meta"):
            from transformers import AutoModelForCausalLM

            numel = sum(each.numel() for each in AutoModelForCausalLM.from_config(config).parameters())
        num_bytes = numel * max(self.trained_dtype.itemsize, self.dtype.itemsize)
        if num_bytes > MEMORY_SHARE * count_free_bytes():
            return "not reloaded: host memory is too small for the model"
        base = self._load_trained(config)
        wanted = self._hash_merged(base)
        for parameter in base.parameters():
            parameter.data = parameter.data.to(self.dtype)
        trained = ProbedModel(base, probe)
        del base
        merged = load_text_model(folder, self.base, dtype=self.dtype, attn_implementation="eager")
        found = {name: _hash(value, self.dtype) for name, value in merged.named_parameters()}
        if wrong := [name for name in {**wanted, **found} if found.get(name) != wanted.get(name)]:
            raise CheckpointError(f"{folder} was not exported correctly: {wrong[0]} is not base plus adapters")
        find_carried(merged, self.base).check(folder)
        named = format_count(len(wanted), "tensor")
        return f"{named} equal base plus adapters, rounded once; {trained.compare(merged, folder)}"

    def _load_trained(self, config: Any) -> Any:
        """The base with its adapters, as transformers and peft load them."""
        from transformers import AutoModelForCausalLM

        there, base_config = self.files[0].parent, copy.deepcopy(config)
        base_config.vocab_size = self.num_own_tokens or config.vocab_size
        base = AutoModelForCausalLM.from_pretrained(
            there, config=base_config, key_mapping=find_key_mapping(str(there)), dtype=self.trained_dtype,
            attn_implementation="eager",
        )  # fmt: skip
        if base_config.vocab_size < config.vocab_size:
            grow_embeddings(base, config.vocab_size)
        add_adapters(base, self.adapter_config)
        named = ((PREFIX + name, value) for name, value in base.named_parameters())
        trained = {name: value for name, value in named if ".lora_" in name or name in self.weights.shapes}
        if trained.keys() != self.weights.shapes.keys():
            raise CheckpointError(f"the adapters do not fit: {sorted(trained.keys() ^ self.weights.shapes.keys())[:3]}")
        for name, value in trained.items():
            value.data.copy_(self.weights.read(name))
        return base

    def _hash_merged(self, base: Any) -> dict[str, bytes]:
        """Hashes of the weights that the merged model must have, by name. One is computed after the other."""
        adapters = {adapter.parameter: adapter for adapter in _list_adapters(base)}
        hashes = {}
        for full, value in base.named_parameters():
            if ".lora_" in full:
                continue
            name, weight = full.replace(".base_layer", ""), value.data
            if PREFIX + full in self.weights.shapes:  # a part that was trained whole
                weight = self.weights.read(PREFIX + full)
            elif name in adapters:
                weight = self._merge(weight, self._compute_delta(adapters[name]), self._read_lengths(adapters[name]))
            hashes[name] = _hash(weight, self.dtype)
        return hashes


def add_adapters(model: Any, adapter_config: Any) -> Any:
    """Adds adapters to the model, which stays frozen. Returns peft's config with the values that peft has filled
    in."""
    from peft import get_peft_model

    adapted = get_peft_model(model, choose_layers(adapter_config, model), autocast_adapter_dtype=False)
    filled = adapted.peft_config["default"]
    filled.modules_to_save = adapter_config.modules_to_save
    return filled


def _list_adapters(adapted: Any) -> Iterator[Adapter]:
    """The adapters of a model that peft has changed."""
    for name, module in adapted.named_modules():
        if "default" in getattr(module, "lora_A", {}):
            part = getattr(module, "parameter_name", "weight")  # an expert's adapter names its parameter
            yield Adapter(module, PREFIX + name, f"{name.replace('.base_layer', '')}.{part}")


def _hash(tensor: Tensor, dtype: torch.dtype) -> bytes:
    """Of the values, rounded to the dtype."""
    values = tensor.detach().to(dtype).contiguous().view(-1)
    return hashlib.blake2b(values.view(torch.uint8).numpy().data, digest_size=16).digest()


def _find_tables(skeleton: Any) -> dict[str, Tensor]:
    """The parameters with one row for each token."""
    tables = [part.weight for part in (skeleton.get_input_embeddings(), skeleton.get_output_embeddings())]
    named = skeleton.named_parameters(remove_duplicate=False)
    return {name: value for name, value in named if any(value is table for table in tables)}


def _find_copies(skeleton: Any) -> list[str]:
    """Further names of parameters that layers share. Files need not hold them."""
    first = {name for name, _ in skeleton.named_parameters()}
    return [name for name, _ in skeleton.named_parameters(remove_duplicate=False) if name not in first]


def _match(name: str, wanted: Collection[str]) -> str:
    """The wanted name of a tensor, or ''. A multimodal model's files hold the text model under a prefix; tensors of its
    other parts are left out."""
    if name in wanted:
        return name
    before, mark, rest = name.partition(TEXT_PART)
    candidates = (before + rest, rest, f"model.{rest}") if mark else ()
    return next((candidate for candidate in candidates if candidate in wanted), "")
