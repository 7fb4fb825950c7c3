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
from ulysses_cli.train.checkpoint.format import index_sources
from ulysses_cli.train.export.buffers import read_buffers
from ulysses_cli.train.export.carried import find_carried
from ulysses_cli.train.export.weights import PREFIX, read_parameter, rename
from ulysses_cli.train.export.wrapper import BaseModel
from ulysses_cli.train.processes.host_memory import count_free_bytes

# An ordinary text: the first ids of a vocabulary are special tokens with rows that were hardly trained, on which a real
# model's logits differ by half between two dtypes.
PROBE_TEXT = """The river rises in the hills above the town. In spring it carries melted snow past the old mill, where
two roads meet; in summer children swim below the bridge. In 1904 the water stood 3 metres above the market square."""
MEMORY_SHARE = 0.5  # of the host memory that is free: other processes need some too


def make_probe(tokenizer: Any, vocab_size: int) -> Tensor:
    """Tokens of an ordinary text, of which every model that was trained knows what follows."""
    ids = tokenizer(PROBE_TEXT, add_special_tokens=True)["input_ids"]
    return torch.tensor([ids]) % vocab_size  # a tokenizer may know more tokens than the model has rows


def check_adapter(checkpoint: Path, folder: Path, dtype: torch.dtype) -> str:
    """Checks that the file holds every adapter, with its name and values."""
    sources, shapes = index_sources(checkpoint)
    with safe_open(folder / "adapter_model.safetensors", "pt") as opened:
        wanted = {rename(name, is_adapter=True): name for name in sources}
        _compare_names(set(opened.keys()), set(wanted))
        for name in wanted:
            if not torch.equal(opened.get_tensor(name), read_parameter(wanted[name], sources, shapes).to(dtype)):
                raise CheckpointError(f"{folder} was not exported correctly: {name} differs from the checkpoint")
    verb = "equals" if len(wanted) == 1 else "equal"
    return f"{format_count(len(wanted), 'tensor')} {verb} the checkpoint's"


def check_model(
    checkpoint: Path,
    folder: Path,
    config: Any,
    dtype: torch.dtype,
    report: Callable[[str], None],
    probe: Tensor,
    base: BaseModel | None = None,
) -> str:
    """Reloads the folder with transformers and compares names, shapes, every value, and the logits of `probe`."""
    from transformers import AutoModelForCausalLM

    sources, shapes = index_sources(checkpoint)
    num_bytes = sum(torch.Size(shape).numel() for shape in shapes.values()) * dtype.itemsize
    if 2 * num_bytes > MEMORY_SHARE * count_free_bytes():
        return "not reloaded: host memory is too small for two copies of the model"
    report("loading what was exported")
    options: dict[str, Any] = {"dtype": dtype, "attn_implementation": "eager"}  # every family has it
    model = load_text_model(folder, base, **options)
    reference = AutoModelForCausalLM.from_config(copy.deepcopy(config), **options)
    trained = {name: parameter for name, parameter in reference.named_parameters() if parameter.requires_grad}
    wanted = {name.removeprefix(PREFIX): name for name in sources}
    _compare_names(set(trained), set(wanted))
    loaded = dict(model.named_parameters())
    for name, parameter in trained.items():
        parameter.data.copy_(read_parameter(wanted[name], sources, shapes))
        if not torch.equal(parameter, loaded[name]):
            raise CheckpointError(f"{folder} was not exported correctly: {name} differs from the checkpoint")
    loaded_buffers, reference_buffers = model.state_dict(), reference.state_dict()
    for name, value in read_buffers(reference, base).items():
        if not torch.equal(loaded_buffers[name], value.to(loaded_buffers[name].dtype)):
            raise CheckpointError(f"{folder} was not exported correctly: {name} differs from the base model's")
        reference_buffers[name].copy_(value)
    with torch.no_grad():
        logits, expected = (candidate.eval()(probe, use_cache=False).logits for candidate in (model, reference))
    if not torch.equal(logits, expected):
        raise CheckpointError(f"{folder} was not exported correctly: logits differ from the trained model's")
    find_carried(model, base).check(folder)
    return f"{format_count(len(wanted), 'tensor')} and the logits on a text equal the trained model's"


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
