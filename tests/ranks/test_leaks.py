"""Tests that no file and no output of a real run holds a planted secret, also when the run fails."""

import json
import os
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from safetensors.numpy import save_file
from support.faults import RECIPE, TIME_LIMIT, Runs

VARIABLES = {"HF_TOKEN": "correct-horse-battery", "WANDB_API_KEY": "0123456789abcdef01234567"}
PLANTED: dict[str, Any] = {
    # Masked by its value, since its name says nothing. DeepSpeed prints its whole config.
    "deepspeed.comms_logger.prof_ops": [VARIABLES["HF_TOKEN"]],
    "run.run_name": "https://me:p4ssw0rd@host/x",
    "model.config.note": "hf_QwErTyUiOpAsDfGhJkLzXcVb",
}
SECRETS = (*VARIABLES.values(), "p4ssw0rd", "hf_QwErTyUiOpAsDfGhJkLzXcVb")


def find_secrets(folder: Path) -> list[str]:
    """Returns every file below a folder that holds a secret, except the recipe itself."""
    files = [file for file in folder.rglob("*") if file.is_file() and file.name != "r.yaml"]
    assert len(files) > 10
    return [
        f"{file.relative_to(folder)}: {secret}"
        for file in files
        for secret in SECRETS
        if secret.encode() in file.read_bytes()
    ]


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Runs:
    made = Runs(tmp_path_factory.mktemp("runs"))
    made.environ |= VARIABLES
    recipe = json.loads(json.dumps(RECIPE))
    for key, secret in PLANTED.items():
        *path, last = key.split(".")
        section = recipe
        for part in path:
            section = section.setdefault(part, {})
        section[last] = secret
    recipe["parallel"] = {"sp_size": 1}
    recipe["run"] |= {"save_steps": 2}
    recipe["train"]["max_steps"] = 3
    (made.folder / "r.yaml").write_text(yaml.safe_dump(recipe))
    return made


@pytest.mark.check
def test_a_run_and_its_export_hold_no_secret(runs: Runs) -> None:
    (runs.folder / "run").mkdir(mode=0o750)
    process = runs.start("run")
    out, err = process.communicate(timeout=240)
    assert process.returncode == 0, err
    assert find_secrets(runs.folder) == []
    assert not [secret for secret in SECRETS if secret in out + err]
    run = runs.folder / "run"
    for written in ("run.json", "checkpoints/step-3/state.json", "model/README.md"):
        assert "***" in (run / written).read_text(), written
    open_to_others = [path for path in (run, *run.rglob("*")) if path.stat().st_mode & 0o027]
    assert open_to_others == []  # no file is open to more users than the folder is


@pytest.mark.full
def test_a_failed_run_holds_no_secret(runs: Runs) -> None:
    secret = SECRETS[-1]
    folder = runs.folder / f"model-{secret}"  # every message about a folder names this one
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(RECIPE["model"]["config"]))
    save_file({"strange": np.zeros(1, np.float32)}, folder / "model.safetensors")  # only a rank notices what is missing
    words = ["model.config=null", f"model.name_or_path={folder}", "model.tokenizer=bytes"]
    code, output = runs.train("failed", *words)
    assert code == 2, output
    assert "***" in output
    assert secret not in output
    logs = runs.folder / "failed" / "logs"
    end = time.monotonic() + TIME_LIMIT  # the process that masks the log may outlive its rank
    while "***" not in (logs / "rank-0.log").read_text():
        assert time.monotonic() < end
        time.sleep(0.05)
    assert not [file for file in logs.iterdir() if secret in file.read_text()]
    assert os.environ.get("HF_TOKEN") != VARIABLES["HF_TOKEN"]
