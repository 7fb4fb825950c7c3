"""Merges adapters into their base model, one tensor of the base's files after another: host memory holds one shard.

peft computes each adapter's delta in float32; it is split as the weight is that it is added to.
"""

from __future__ import annotations

import copy
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor

from ulysses_cli.run_folder.archive import CheckpointError
from ulysses_cli.train.assembly.adapters import leave_whole_parts, train_whole_parts
from ulysses_cli.train.assembly.loading import grow_embeddings, grow_rows
from ulysses_cli.train.assembly.text_part import find_key_mapping
from ulysses_cli.train.checkpoint.format import index_sources
from ulysses_cli.train.export.buffers import list_buffer_names
from ulysses_cli.train.export.carried import NOTHING, Carried, find_carried
from ulysses_cli.train.export.check import MEMORY_SHARE, PROBE_TOKENS, load_text_model
from ulysses_cli.train.export.file_layout import FileLayout
from ulysses_cli.train.export.weights import PREFIX, ShardWriter, read_parameter
from ulysses_cli.train.export.wrapper import BaseModel
from ulysses_cli.train.finiteness import WORDS, is_finite
from ulysses_cli.train.processes.host_memory import count_free_bytes

A, B = ".lora_A.default.weight", ".lora_B.default.weight"
LENGTHS = ".lora_magnitude_vector.default.weight"  # of DoRA: one for each row of the weight
TEXT_PART = "language_model."  # the name of the text model inside multimodal models
TOLERANCES = {torch.float32: 1e-4, torch.bfloat16: 0.1, torch.float16: 0.02}  # of a probe's logits, by rounding alone


@dataclass(frozen=True, eq=False)
class Adapter:
    """peft's module of one adapter, its name in the checkpoint, the parameter it changes, and the parameter's names in
    files."""

    module: Any
    layer: str
    parameter: str
    names: tuple[str, ...]


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
    ) -> None:
        self.base, self.wrapper = base, base.wrapper if base is not None else None
        self.files, self.adapter_config, self.num_own_tokens = files, adapter_config, num_own_tokens
        self.trained_dtype, self.dtype = trained_dtype, dtype
        self.sources, self.shapes = index_sources(checkpoint)

    def write(self, to: Path, skeleton: Any, carried: Carried = NOTHING) -> list[str]:
        """Writes the merged weights. Returns the names written: those that the base model's files have.
        `skeleton`: the model on the meta device. `carried`: tensors that are not the trained model's."""
        layout, state = FileLayout(skeleton, self.files[0].parent), skeleton.state_dict()
        wanted = layout.name_in_files(dict(state))
        if skeleton.config.tie_word_embeddings:
            wanted.pop("lm_head.weight", None)
        adapters = self._find_adapters(skeleton, layout)
        adapter_of = {name: index for index, adapter in enumerate(adapters) for name in adapter.names}
        if missing := sorted(adapter_of.keys() - wanted.keys()):
            raise CheckpointError(f"the adapters of {missing[0]} have no weight of their own in the base model's files")
        whole = self._find_whole_parts(skeleton, layout)
        tables = layout.name_in_files(_find_tables(skeleton))
        buffers = layout.name_in_files({name: state[name] for name in list_buffer_names(skeleton)}).keys()
        in_files = self.wrapper.name_in_files if self.wrapper else str
        writer = ShardWriter(to, "model", self.dtype)
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
                        tensor = read_parameter(whole[target], self.sources, self.shapes)
                    elif target in tables and len(tensor) == self.num_own_tokens:
                        tensor = grow_rows(tensor.to(self.trained_dtype), len(wanted[target]))
                    if tensor.shape != wanted[target].shape:
                        shapes = f"{tuple(tensor.shape)}, the model has it as {tuple(wanted[target].shape)}"
                        raise CheckpointError(f"{file} holds {name} as {shapes}")
                    if target in adapter_of:
                        if adapter_of[target] != current:
                            current = adapter_of[target]
                            deltas = self._compute_deltas(adapters[current], layout)
                            lengths = self._read_lengths(adapters[current])
                        tensor = tensor.to(self.trained_dtype).float() + deltas[target]
                        if lengths is not None:
                            tensor *= (lengths / tensor.norm(dim=1))[:, None]
                    write = writer.add_unchanged if target in buffers else writer.add
                    write(in_files(target), tensor)
        for name, tensor in carried.read():
            writer.add_unchanged(name, tensor)
        written = writer.finish()
        copies = layout.name_in_files({name: state[name] for name in _find_copies(skeleton)}).keys()
        if missing := sorted({in_files(name) for name in wanted.keys() - copies} - set(written)):
            raise CheckpointError(f"the base model's files lack {', '.join(missing[:3])}")
        return written

    def _find_adapters(self, skeleton: Any, layout: FileLayout) -> list[Adapter]:
        """The adapters in the order of the model's layers."""
        adapted = copy.deepcopy(skeleton)
        add_adapters(adapted, self.adapter_config)
        adapters, parameters = [], dict(skeleton.named_parameters(remove_duplicate=False))
        for name, module in adapted.named_modules():
            if "default" in getattr(module, "lora_A", {}):
                part = getattr(module, "parameter_name", "weight")  # an expert's adapter names its parameter
                parameter = f"{name.replace('.base_layer', '')}.{part}"
                file_names = tuple(layout.name_in_files({parameter: parameters[parameter]}))
                adapters.append(Adapter(module, PREFIX + name, parameter, file_names))
        ends = (A, B, LENGTHS) if self.adapter_config.use_dora else (A, B)
        expected = {adapter.layer + end for adapter in adapters for end in ends}
        if self.adapter_config.modules_to_save:
            train_whole_parts(adapted, self.adapter_config.modules_to_save)
            expected |= {PREFIX + name for name, value in adapted.named_parameters() if value.requires_grad}
        if unmatched := sorted(expected ^ self.sources.keys()):
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
        names = {name.removeprefix(PREFIX): name for name in self.sources if ".lora_" not in name}
        return {
            file_name: full for name, full in names.items() for file_name in layout.name_in_files({name: own[name]})
        }

    def _read_lengths(self, adapter: Adapter) -> Tensor | None:
        """The trained length of each row of the merged weight, under DoRA."""
        if not self.adapter_config.use_dora:
            return None
        if len(adapter.names) != 1:
            raise CheckpointError(f"{adapter.parameter} is several tensors in files: DoRA cannot be merged into them")
        return read_parameter(adapter.layer + LENGTHS, self.sources, self.shapes).float()

    def _compute_deltas(self, adapter: Adapter, layout: FileLayout) -> dict[str, Tensor]:
        """What one adapter adds to the base, by name in the files."""
        module, originals = adapter.module, []
        for part, end in ((module.lora_A, A), (module.lora_B, B)):
            originals.append((part["default"], part["default"].weight))
            value = read_parameter(adapter.layer + end, self.sources, self.shapes)
            part["default"].weight = torch.nn.Parameter(value, requires_grad=False)
        module.get_param = lambda: torch.empty(0)  # peft reads the device and dtype of an expert's delta from it
        delta = module.get_delta_weight("default")
        for linear, weight in originals:
            linear.weight = weight
        return layout.name_in_files({adapter.parameter: delta})

    def check(self, folder: Path, config: Any) -> str:
        """Compares the merged folder, loaded as a user would, with base and adapters as they were trained. Loads one
        after the other."""
        from transformers import AutoModelForCausalLM

        if sum(file.stat().st_size for file in self.files) > MEMORY_SHARE * count_free_bytes():
            return "not reloaded: host memory is too small for the model"
        options: dict[str, Any] = {"dtype": self.trained_dtype, "attn_implementation": "eager"}
        probe = torch.arange(PROBE_TOKENS)[None] % config.vocab_size
        base_config = copy.deepcopy(config)
        base_config.vocab_size = self.num_own_tokens or config.vocab_size
        there = self.files[0].parent
        mapping = find_key_mapping(str(there))
        base = AutoModelForCausalLM.from_pretrained(there, config=base_config, key_mapping=mapping, **options)
        if base_config.vocab_size < config.vocab_size:
            grow_embeddings(base, config.vocab_size)
        add_adapters(base, self.adapter_config)
        named = ((PREFIX + name, value) for name, value in base.named_parameters())
        trained = {name: value for name, value in named if ".lora_" in name or name in self.sources}
        if trained.keys() != self.sources.keys():
            raise CheckpointError(f"the adapters do not fit: {sorted(trained.keys() ^ self.sources.keys())[:3]}")
        for name, value in trained.items():
            value.data.copy_(read_parameter(name, self.sources, self.shapes))
        expected = _compute_logits(base, probe)
        del base, trained
        options["dtype"] = self.dtype
        merged = load_text_model(folder, self.base, **options)
        find_carried(merged, self.base).check(folder)
        error = ((_compute_logits(merged, probe) - expected).norm() / expected.norm()).item()
        tolerance = max(TOLERANCES[self.dtype], TOLERANCES[self.trained_dtype])
        if not error <= tolerance:
            raise CheckpointError(
                f"{folder} was not exported correctly: logits differ by {error:.1e} from those with adapters, more "
                f"than rounding explains ({tolerance:g})"
            )
        return f"logits of a probe differ from those with adapters by {error:.1e}, as {self.dtype} rounds"


def add_adapters(model: Any, adapter_config: Any) -> Any:
    """Adds adapters to the model, which stays frozen. Returns peft's config with the values that peft has filled
    in."""
    from peft import get_peft_model

    adapted = get_peft_model(model, leave_whole_parts(adapter_config), autocast_adapter_dtype=False)
    filled = adapted.peft_config["default"]
    filled.modules_to_save = adapter_config.modules_to_save
    return filled


@torch.no_grad()
def _compute_logits(model: Any, probe: Tensor) -> Tensor:
    logits: Tensor = model.eval()(probe, use_cache=False).logits.float()
    return logits


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
