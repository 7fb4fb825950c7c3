"""Checks an exported folder: loads it as a user would and compares it with the checkpoint that it was made from."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor

from ulysses_cli.plan.nouns import format_count
from ulysses_cli.run_folder.archive import CheckpointError
from ulysses_cli.train.assembly.text_part import find_key_mapping
from ulysses_cli.train.export.buffers import read_buffers
from ulysses_cli.train.export.carried import find_carried
from ulysses_cli.train.export.weights import PREFIX, CheckpointWeights, rename
from ulysses_cli.train.export.wrapper import BaseModel
from ulysses_cli.train.processes.host_memory import count_free_bytes

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
