"""Numbers of a model that training does not change and that its files hold: biases of routers, scalars of layers.

transformers keeps them as buffers or frozen parameters, so they are in no checkpoint of weights. An export takes them
from the base model.
"""

from __future__ import annotations

import copy
from typing import Any

from safetensors import safe_open
from torch import Tensor

from ulysses_cli.plan.files.weight_files import list_weight_files
from ulysses_cli.run_folder.archive import CheckpointError
from ulysses_cli.train.assembly.loading import map_names
from ulysses_cli.train.assembly.text_part import find_key_mapping
from ulysses_cli.train.export.wrapper import BaseModel


def list_buffer_names(model: Any) -> set[str]:
    """Returns the names of those that belong to the model's files. `model`: as its class makes it, without adapters; it
    may be on the meta device."""
    frozen = {name for name, parameter in model.named_parameters() if not parameter.requires_grad}
    return frozen | ({name for name, _ in model.named_buffers()} & model.state_dict().keys())


def read_buffers(skeleton: Any, base: BaseModel | None) -> dict[str, Tensor]:
    """Returns the buffers as the base model's files hold them, by the model's own names. `skeleton`: the model on the
    meta device. `base`: None for a model from random weights, which has the buffers of its class."""
    from transformers import AutoModelForCausalLM

    names = list_buffer_names(skeleton)
    if not names:
        return {}
    if base is None:
        made = AutoModelForCausalLM.from_config(copy.deepcopy(skeleton.config))
        return {name: value for name, value in made.state_dict().items() if name in names}
    values = {}
    own_names = map_names(skeleton, base.folder, find_key_mapping(str(base.folder)))
    for file in list_weight_files(base.folder):
        with safe_open(file, "pt") as opened:
            for name in opened.keys():  # noqa: SIM118
                if own_names.get(name) in names:
                    values[own_names[name]] = opened.get_tensor(name)
    if missing := sorted(names - values.keys()):
        raise CheckpointError(f"the base model's files lack {', '.join(missing[:3])}")
    return values
