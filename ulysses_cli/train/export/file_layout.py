"""Under which names, and in how many parts, an export holds a model's tensors: as the base model's files do. Files of
one family may hold experts stacked or one by one. transformers reads both, other programs may not.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from torch import Tensor

from ulysses_cli.plan.files.weight_files import list_weight_names
from ulysses_cli.train.assembly.text_part import find_key_mapping, is_text_name


class FileLayout:
    """`skeleton`: the model, which may be on the meta device. `folder`: the base model's; None where transformers
    chooses the layout. Names in files are those of a text model, also where the base is a multimodal one.

    A tensor that the files hold as the model does has the name that it has there. All others are split by transformers'
    rules, of which those that the files do not need are left out."""

    def __init__(self, skeleton: Any, folder: Path | None) -> None:
        self.skeleton = skeleton
        self.whole: dict[str, str] = {}  # names in the files, by the model's own
        self.rules: list[Any] | None = None
        if folder is None:
            return
        own, self.rules = skeleton.state_dict(), _list_rules(skeleton)
        found = {name: _find_own(name, self.rules, skeleton, own) for name in _list_text_names(folder)}
        found = {name: (own_name, is_whole) for name, (own_name, is_whole) in found.items() if own_name in own}
        self.whole = {own_name: name for name, (own_name, is_whole) in found.items() if is_whole}
        rules = _list_rules(skeleton)  # other tensors of the files have used the first ones
        for name in found:
            _find_own(name, rules, skeleton, own)
        self.rules = [rule for rule in rules if rule.was_used()]

    def name_in_files(self, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        """Renames and splits tensors, which may be on the meta device, too. A tensor of the files may be made of
        several: these must be given together."""
        from transformers.core_model_loading import revert_weight_conversion

        whole = {self.whole[name]: tensor for name, tensor in tensors.items() if name in self.whole}
        others = {name: tensor for name, tensor in tensors.items() if name not in self.whole}
        self.skeleton._weight_conversions = self.rules  # where transformers keeps those that a model's files needed
        try:
            return whole | revert_weight_conversion(self.skeleton, others)
        finally:
            del self.skeleton._weight_conversions


def _list_rules(skeleton: Any) -> list[Any]:
    from transformers.conversion_mapping import get_model_conversion_mapping

    return list(get_model_conversion_mapping(skeleton, add_legacy=False))


def _list_text_names(folder: Path) -> list[str]:
    """Names of the text model's tensors in the files, without what a multimodal model puts before them."""
    names, mapping = list_weight_names(folder), find_key_mapping(str(folder))
    if mapping is None:
        return names
    names = [name for name in names if is_text_name(name)]
    for pattern, target in mapping.items():
        names = [re.sub(pattern, target, name) for name in names]
    return names


def _find_own(name: str, rules: Sequence[Any], skeleton: Any, own: dict[str, Tensor]) -> tuple[str, bool]:
    """Returns the model's name for a tensor of the files, and whether it is the same tensor."""
    from transformers.core_model_loading import WeightConverter, WeightRenaming, rename_source_key

    renamings = [rule for rule in rules if isinstance(rule, WeightRenaming)]
    converters = [rule for rule in rules if isinstance(rule, WeightConverter)]
    prefix = skeleton.base_model_prefix
    own_name, pattern = rename_source_key(name, renamings, converters, base_model_prefix=prefix, meta_state_dict=own)
    return own_name, pattern is None
