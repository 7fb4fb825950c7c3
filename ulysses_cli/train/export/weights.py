"""Exports a checkpoint as a Hugging Face folder, layer by layer: host memory holds one shard of the result. Then
loads the folder as a user would and compares it with the checkpoint. Sets the size of a shard, for `merging.py` too.

Works from the files alone, in one process. Any number of ranks may have written them."""

from __future__ import annotations

import copy
import json
import os
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor

from ulysses_cli.plan.files import remove_own
from ulysses_cli.plan.secrets import collect_secrets, mask_text
from ulysses_cli.plan.units import format_count
from ulysses_cli.run.checkpoints import MODEL_FACTS, REPLACED, WRITING, CheckpointError, sync
from ulysses_cli.train.checkpoint.format import index_sources, read_range
from ulysses_cli.train.export.base_model import NOTHING, BaseModel, Carried, FileLayout, find_carried, read_buffers
from ulysses_cli.train.model.adapters import name_in_files
from ulysses_cli.train.model.loading import find_key_mapping
from ulysses_cli.train.processes.host import count_free_bytes
from ulysses_cli.train.record import TOOL, get_own_version
from ulysses_cli.train.tensor_file import WORDS, is_finite, write_tensors

MAX_SHARD_BYTES = 5 * 10**9
BASE_CONFIG = "base_config"  # next to adapters: the base's config as trained, with its rope scaling
PREFIX = "model."  # the engine wraps the model under this name
LAYER = re.compile(r"(.*?\.layers\.\d+\.)")


class ShardWriter:
    """Writes tensors to STEM.safetensors, or to numbered shards with an index. Holds one shard at a time."""

    def __init__(self, to: Path, stem: str, dtype: torch.dtype, max_bytes: int = MAX_SHARD_BYTES) -> None:
        self.to, self.stem, self.dtype, self.max_bytes = to, stem, dtype, max_bytes
        self.files: list[tuple[Path, list[str]]] = []
        self.batch: list[tuple[str, Tensor]] = []
        self.batch_bytes = self.total_bytes = 0

    def add(self, name: str, tensor: Tensor) -> None:
        self.add_unchanged(name, convert(name, tensor, self.dtype))

    def add_unchanged(self, name: str, tensor: Tensor) -> None:
        """Keeps the tensor's own dtype: training has not changed it."""
        num_bytes = tensor.numel() * tensor.dtype.itemsize
        if self.batch and self.batch_bytes + num_bytes > self.max_bytes:
            self._flush()
        self.batch.append((name, tensor))
        self.batch_bytes += num_bytes
        self.total_bytes += num_bytes

    def finish(self) -> list[str]:
        """Writes the last shard and the index. Returns the names written."""
        self._flush()
        index: dict[str, str] = {}
        for position, (part, names) in enumerate(self.files, 1):
            number = "" if len(self.files) == 1 else f"-{position:05d}-of-{len(self.files):05d}"
            part.rename(self.to / f"{self.stem}{number}.safetensors")
            index |= dict.fromkeys(names, f"{self.stem}{number}.safetensors")
        if len(self.files) > 1:
            content = {"metadata": {"total_size": self.total_bytes}, "weight_map": index}
            (self.to / f"{self.stem}.safetensors.index.json").write_text(json.dumps(content, indent=2))
        return sorted(index)

    def _flush(self) -> None:
        part = self.to / f"{self.stem}.{len(self.files)}.part"
        write_tensors(part, self.batch, {"format": "pt"})
        self.files.append((part, [name for name, _ in self.batch]))
        self.batch.clear()
        self.batch_bytes = 0


def convert(name: str, tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """Converts a tensor; a value that is not finite afterwards is an error (float16 ends at 65504)."""
    converted = tensor.to(dtype)
    if not is_finite(converted):
        reason = f" as {dtype}: its largest value is {tensor.abs().max():g}" if is_finite(tensor) else ""
        raise CheckpointError(f"{name} holds {WORDS}{reason}")
    return converted


def add_weighted(tensors: Iterable[Tensor], weights: Sequence[float]) -> Tensor:
    """The weighted sum in float32: one product and one sum after another, in the given order."""
    total: Tensor | None = None
    for tensor, weight in zip(tensors, weights, strict=True):
        part = tensor.float() * weight  # not fused with the sum, whose last bit would depend on the processor
        total = part if total is None else total.add_(part)
    assert total is not None
    return total


class CheckpointWeights:
    """The float32 weights of a checkpoint, or the mean of those of several, by the engine's names."""

    def __init__(self, *checkpoints: Path) -> None:
        self.indexed = [index_sources(checkpoint) for checkpoint in checkpoints]
        self.shapes = self.indexed[0][1]
        for checkpoint, (_, shapes) in zip(checkpoints, self.indexed, strict=True):
            if shapes != self.shapes:
                raise CheckpointError(f"{checkpoint} and {checkpoints[0]} hold other weights: they have no mean")
            if not shapes:
                raise CheckpointError(f"{checkpoint} holds no weights")

    def read(self, name: str) -> Tensor:
        shape, key = self.shapes[name], f"{name}|master"
        numel = torch.Size(shape).numel()
        parts = [read_range(sources[name], key, 0, numel).view(shape) for sources, _ in self.indexed]
        return parts[0] if len(parts) == 1 else add_weighted(parts, [1 / len(parts)] * len(parts))


def export_weights(
    weights: CheckpointWeights,
    to: Path,
    dtype: torch.dtype,
    left_out: frozenset[str],
    is_adapter: bool,
    skeleton: Any = None,
    base: BaseModel | None = None,
    carried: Carried = NOTHING,
    shard_bytes: int = MAX_SHARD_BYTES,
) -> list[str]:
    """Writes every trained tensor to model*.safetensors or adapter_model.safetensors. Returns the names written.
    `skeleton`: the model on the meta device. `base`: the model whose layout the files get; None for random weights."""
    wrapper = base.wrapper if base is not None and not is_adapter else None
    layout = FileLayout(skeleton, _find_folder(base)) if skeleton is not None else None
    names = sorted(name for name in weights.shapes if rename(name, is_adapter) not in left_out)
    writer = ShardWriter(to, "adapter_model" if is_adapter else "model", dtype, shard_bytes)
    for group in _group_by_layer(names):
        for name, tensor in _read(group, weights, dtype, is_adapter, layout):
            writer.add(wrapper.name_in_files(name) if wrapper else name, tensor)
    for name, tensor in layout.name_in_files(read_buffers(skeleton, base)).items() if layout else ():
        writer.add_unchanged(wrapper.name_in_files(name) if wrapper else name, tensor)
    for name, tensor in carried.read():
        writer.add_unchanged(name, tensor)
    return writer.finish()


def _group_by_layer(names: Sequence[str]) -> list[list[str]]:
    """A tensor in a file may be made of several parameters of one layer, but never of several layers."""
    groups: dict[str, list[str]] = {}
    for name in names:
        layer = LAYER.match(name)
        groups.setdefault(layer[1] if layer else name, []).append(name)
    return list(groups.values())


def _read(
    names: list[str],
    weights: CheckpointWeights,
    dtype: torch.dtype,
    is_adapter: bool,
    layout: FileLayout | None,
) -> Iterator[tuple[str, Tensor]]:
    tensors = {rename(name, is_adapter): convert(name, weights.read(name), dtype) for name in names}
    tensors = layout.name_in_files(tensors) if layout else tensors
    for name in sorted(tensors):
        yield name, tensors[name].contiguous()


def _find_folder(base: BaseModel | None) -> Path | None:
    """Returns the folder whose layout an export gets; None where the base's files are not on this machine."""
    try:
        return base.find_folder() if base is not None else None
    except (OSError, ValueError):
        return None


def rename(name: str, is_adapter: bool) -> str:
    """The model's own name of a parameter, or the name that peft expects in a file."""
    name = name.removeprefix(PREFIX)
    return f"base_model.model.{name_in_files(name)}" if is_adapter else name


def export_model(
    checkpoint: Path | CheckpointWeights,
    to: Path,
    *,
    config: Any,
    tokenizer: Any,
    adapter_config: Any,
    dtype: torch.dtype,
    card: str,
    step: int,
    run_step: int | None = None,
    check: Callable[[Path], object] = lambda _: None,
    merge: Callable[[Path, Any, Carried], object] | None = None,
    base: BaseModel | None = None,
    tell: Callable[[str], object] = lambda _: None,
    turn_ends: Sequence[str] = (),
    shard_bytes: int = MAX_SHARD_BYTES,
) -> Path:
    """Writes the whole folder. It gets its final name only when it is complete and `check` has raised nothing. `merge`,
    if given, writes the weights instead; it takes the folder, the model on the meta device and what is carried over.
    `run_step`: the run's last step, where the checkpoint is an earlier one. `base`: the model whose layout the folder
    gets; None for random weights. `tell` takes what there is to say about tensors that are carried over. `turn_ends`:
    tokens with which the turns end that were trained."""
    from transformers import AutoModelForCausalLM

    with temporary_folder(to) as folder:
        is_adapter = adapter_config is not None
        tied = frozenset({"lm_head.weight"}) if config.tie_word_embeddings else frozenset()
        with torch.device("meta"):
            skeleton = None if is_adapter else AutoModelForCausalLM.from_config(copy.deepcopy(config))
        carried = NOTHING if is_adapter else find_carried(skeleton, base)
        if merge is not None:
            merge(folder, skeleton, carried)
        else:
            weights = CheckpointWeights(checkpoint) if isinstance(checkpoint, Path) else checkpoint
            export_weights(weights, folder, dtype, tied, is_adapter, skeleton, base, carried, shard_bytes)
        if is_adapter:
            adapter_config.inference_mode = True
            adapter_config.save_pretrained(folder)
        else:
            config.architectures = [type(skeleton).__name__]
            _write_generation_config(config, tokenizer, turn_ends, folder)
        config.dtype = dtype
        # Adapters name their base, whose own config would override one in their folder; the card says how to load both.
        config_file = (folder / BASE_CONFIG if is_adapter else folder) / "config.json"
        wrapper = base.wrapper if base is not None and not is_adapter else None
        if wrapper is None:
            config.save_pretrained(config_file.parent)
        else:
            wrapper.write_config(config, dtype, folder)
            wrapper.copy_companions(folder)
        if described := carried.describe():
            card += f"\n{described[0].upper()}{described[1:]}.\n"
            tell(described)
        config_file.write_text(mask_text(config_file.read_text(encoding="utf-8"), collect_secrets({}, os.environ)))
        tokenizer.save_pretrained(folder)
        (folder / "README.md").write_text(card, encoding="utf-8")
        facts = {
            "step": step,
            "run_step": step if run_step is None else run_step,
            "made_by": f"{TOOL} {get_own_version()}",
        }
        (folder / MODEL_FACTS).write_text(json.dumps(facts), encoding="utf-8")
        check(folder)
    return to


@contextmanager
def temporary_folder(to: Path) -> Iterator[Path]:
    """An empty folder next to `to`, renamed to it at the end. On an error the unfinished folder is removed."""
    folder = to.with_name(f"{to.name}{WRITING}")
    remove_own(folder)
    folder.mkdir(parents=True)
    try:
        yield folder
        put_folder(folder, to)
    finally:
        remove_own(folder)


def _write_generation_config(config: Any, tokenizer: Any, turn_ends: Sequence[str], to: Path) -> None:
    """Writes the base model's generation settings, and the ends of turns as stop tokens besides its own. A model from
    random weights may have neither."""
    from transformers import GenerationConfig

    try:
        generation = GenerationConfig.from_pretrained(config.name_or_path)
    except (OSError, ValueError):
        generation = None
    if turn_ends:
        generation = generation or GenerationConfig(eos_token_id=config.eos_token_id)
        eos = generation.eos_token_id if generation.eos_token_id is not None else tokenizer.eos_token_id
        stops = eos if isinstance(eos, list) else [] if eos is None else [eos]
        ends = [tokenizer.convert_tokens_to_ids(end) for end in turn_ends]
        generation.eos_token_id = list(dict.fromkeys([*stops, *ends]))
    if generation is not None:
        generation.save_pretrained(to)


def put_folder(folder: Path, to: Path) -> None:
    """Renames the folder to `to`. A folder of that name is complete at any moment: an older one is renamed first, then
    removed."""
    for file in folder.rglob("*"):
        sync(file)
    sync(folder)
    replaced = to.with_name(f"{to.name}{REPLACED}")
    remove_own(replaced)
    if to.exists():
        to.rename(replaced)
    folder.rename(to)
    sync(to.parent)
    remove_own(replaced)


# An ordinary text: the first ids of a vocabulary are special tokens with rows that were hardly trained, on which a real
# model's logits differ by half between two dtypes.
PROBE_TEXT = """The river rises in the hills above the town. In spring it carries melted snow past the old mill, where
two roads meet; in summer children swim below the bridge. In 1904 the water stood 3 metres above the market square."""
# Logits may be off by so many times what one more rounding of each weight changes. Those of a merged model of 135M
# parameters that was really trained are off by 0.6 to 1.4 times that, on prose and chats.
NOISE_FACTOR = 4
MEMORY_SHARE = 0.5  # of the host memory that is free: other processes need some too


def make_probe(tokenizer: Any, vocab_size: int) -> Tensor:
    """Tokens of an ordinary text, of which every model that was trained knows what follows."""
    ids = tokenizer(PROBE_TEXT, add_special_tokens=True)["input_ids"]
    return torch.tensor([ids]) % vocab_size  # a tokenizer may know more tokens than the model has rows


class ProbedModel:
    """The logits of a model as it was trained, and how far one more rounding of each weight moves them. The model's
    weights are changed."""

    def __init__(self, model: Any, probe: Tensor) -> None:
        self.probe, self.logits = probe, _compute_logits(model, probe)
        self.eps = max(torch.finfo(value.dtype).eps for value in model.parameters())
        _disturb(model)
        self.noise = self._measure(_compute_logits(model, probe))

    def compare(self, exported: Any, folder: Path) -> str:
        """Says how far the exported model's logits are off. Its weights are proven already: what this finds is a
        config, a buffer or a kind of adapter that computes something else."""
        error = self._measure(_compute_logits(exported, self.probe))
        if not error <= NOISE_FACTOR * (self.noise + self.eps):
            raise CheckpointError(
                f"{folder} was not exported correctly: its weights are right, and its logits on a text are off by "
                f"{error:.1e}; one more rounding of each weight explains {self.noise:.1e}"
            )
        return (
            f"logits on a text are off by {error:.1e}; one more rounding of each weight moves them by {self.noise:.1e}"
        )

    def _measure(self, logits: Tensor) -> float:
        return ((logits - self.logits).norm() / self.logits.norm()).item()


@torch.no_grad()
def _compute_logits(model: Any, probe: Tensor) -> Tensor:
    logits: Tensor = model.eval()(probe, use_cache=False).logits.float()
    return logits


@torch.no_grad()
def _disturb(model: Any) -> None:
    """Moves each weight up or down by about one step of its dtype."""
    generator = torch.Generator().manual_seed(0)
    for value in model.parameters():
        signs = torch.randint(0, 2, value.shape, generator=generator, dtype=torch.int8) * 2 - 1
        value.mul_(1 + signs.to(value.dtype) * (torch.finfo(value.dtype).eps / 2))


def check_adapter(checkpoint: Path, folder: Path, dtype: torch.dtype) -> str:
    """Checks that the file holds every adapter, with its name and values."""
    weights = CheckpointWeights(checkpoint)
    with safe_open(folder / "adapter_model.safetensors", "pt") as opened:
        wanted = {rename(name, is_adapter=True): name for name in weights.shapes}
        _compare_names(set(opened.keys()), set(wanted))
        for name in wanted:
            if not torch.equal(opened.get_tensor(name), weights.read(wanted[name]).to(dtype)):
                raise CheckpointError(f"{folder} was not exported correctly: {name} differs from the checkpoint")
    verb = "equals" if len(wanted) == 1 else "equal"
    return f"{format_count(len(wanted), 'tensor')} {verb} the checkpoint's"


def check_model(
    checkpoint: Path | CheckpointWeights,
    folder: Path,
    config: Any,
    dtype: torch.dtype,
    report: Callable[[str], None],
    probe: Tensor,
    base: BaseModel | None = None,
) -> str:
    """Reloads the folder with transformers and compares names, shapes, every value, and the logits of `probe`."""
    from transformers import AutoModelForCausalLM

    weights = CheckpointWeights(checkpoint) if isinstance(checkpoint, Path) else checkpoint
    num_bytes = sum(torch.Size(shape).numel() for shape in weights.shapes.values()) * dtype.itemsize
    if 2 * num_bytes > MEMORY_SHARE * count_free_bytes():
        return "not reloaded: host memory is too small for two copies of the model"
    report("loading what was exported")
    options: dict[str, Any] = {"dtype": dtype, "attn_implementation": "eager"}  # every family has it
    model = load_text_model(folder, base, **options)
    reference = AutoModelForCausalLM.from_config(copy.deepcopy(config), **options)
    trained = {name: parameter for name, parameter in reference.named_parameters() if parameter.requires_grad}
    wanted = {name.removeprefix(PREFIX): name for name in weights.shapes}
    _compare_names(set(trained), set(wanted))
    loaded = dict(model.named_parameters())
    for name, parameter in trained.items():
        parameter.data.copy_(weights.read(wanted[name]))
        if not torch.equal(parameter, loaded[name]):
            raise CheckpointError(f"{folder} was not exported correctly: {name} differs from the checkpoint")
    loaded_buffers, reference_buffers = model.state_dict(), reference.state_dict()
    for name, value in read_buffers(reference, base).items():
        if not torch.equal(loaded_buffers[name], value.to(loaded_buffers[name].dtype)):
            raise CheckpointError(f"{folder} was not exported correctly: {name} differs from the base model's")
        reference_buffers[name].copy_(value)
    find_carried(model, base).check(folder)
    named = format_count(len(wanted), "tensor")
    return f"{named} equal the trained model's; {ProbedModel(reference, probe).compare(model, folder)}"


def load_text_model(folder: Path, base: BaseModel | None, **options: Any) -> Any:
    """Loads an exported model. transformers must read every weight of the text model from the folder, and no other but
    those that an export carries over."""
    from transformers import AutoConfig, AutoModelForCausalLM

    wrapper = base.wrapper if base is not None else None
    options |= {"config": AutoConfig.from_pretrained(folder).get_text_config(decoder=True)} if wrapper else {}
    options |= {"key_mapping": find_key_mapping(str(folder))} if wrapper else {}
    model, loading_info = AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True, **options)
    keys = {*loading_info["missing_keys"], *loading_info["unexpected_keys"], *loading_info["mismatched_keys"]}
    if keys := keys - find_carried(model, base).names:
        raise CheckpointError(f"{folder} was not exported correctly: {', '.join(sorted(map(str, keys))[:3])}")
    return model


def _compare_names(exported: set[str], wanted: set[str]) -> None:
    if exported != wanted:
        names = ", ".join(sorted(exported ^ wanted)[:3])
        raise CheckpointError(f"the export is wrong: the folder or the checkpoint alone holds {names}")
