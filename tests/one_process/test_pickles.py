"""Tests that no pickle of a model folder runs code: one that tries is refused with a message."""

import json
import os
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from support.paths import ROOT
from support.training import CONFIG
from transformers import AutoConfig

from ulysses_cli.train.model.loading import BuildError, ModelOptions, load_pretrained

PACKAGE = ROOT / "ulysses_cli"


class Payload:
    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.marker),)


def test_a_pickle_that_would_run_code_is_refused(tmp_path: Path) -> None:
    marker, folder = tmp_path / "the code ran", tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(CONFIG))
    torch.save({"lm_head.weight": Payload(marker)}, folder / "pytorch_model.bin")
    making = ModelOptions(AutoConfig.for_model(**CONFIG), torch.float32, "eager")
    with pytest.raises(BuildError, match=r"model cannot be loaded: its pickle holds more than tensors"):
        load_pretrained(making, str(folder))
    assert not marker.exists()
    torch.load(folder / "pytorch_model.bin", weights_only=False)  # proves that the pickle would have run
    assert marker.exists()


def test_only_three_files_unpickle() -> None:
    """prove/ranks.py reads what its own processes have just written in a folder of its own; consistency.py and
    rendezvous.py read what carries the run's seal."""
    plan_results = {
        str(file.relative_to(PACKAGE))
        for file in PACKAGE.rglob("*.py")
        if re.search(r"\bpickle\.loads?\b|torch\.load\(|joblib|allow_pickle=True", file.read_text())
    }
    assert plan_results <= {"prove/ranks.py", "train/processes/consistency.py", "train/processes/rendezvous.py"}
