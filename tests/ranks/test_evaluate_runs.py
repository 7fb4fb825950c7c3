"""What `ulysses evaluate` says of folders that are no model, and of wrong inputs."""

import json
from pathlib import Path

import pytest
from support.commands import run
from support.small_run import BYTES_CONFIG
from transformers import AutoConfig, AutoModelForCausalLM

from ulysses_cli.commands.children.evaluating import name_results
from ulysses_cli.data.tokenizing.tokenizer import make_bytes_tokenizer

WORDS = ("--dtype", "float32", "--device", "cpu", "--format", "json", "--suite", "vt", "--max-length", "1200")


def test_results_of_two_runs_have_folders_of_their_own() -> None:
    assert name_results("runs/mine/checkpoints/step-400", ["ruler"]) == "mine-step-400-ruler"
    assert name_results("runs/mine/model/", ["niah", "loss"]) == "mine-model-niah-loss"
    assert name_results("Qwen/Qwen3-0.6B", ["lm-eval:gsm8k"]) == "Qwen3-0.6B-lm-eval-gsm8k"
    long = [name_results("m", [f"lm-eval:{'x' * 120}{end}"]) for end in "ab"]
    assert len({*long}) == 2
    assert all(len(name) <= 100 for name in long)


@pytest.mark.parametrize(
    ("files", "message"),
    [
        ((), "holds neither config.json nor a checkpoint"),
        (("adapter_config.json",), "holds adapters alone, and no checkpoint of theirs"),
        (("manifest.json",), "is not a complete checkpoint"),
    ],
)
def test_a_folder_that_is_no_model_ends_with_2(tmp_path: Path, files: tuple[str, ...], message: str) -> None:
    for name in files:
        (tmp_path / name).write_text("{}")
    result = run("evaluate", str(tmp_path), *WORDS)
    assert result.returncode == 2
    (problem,) = json.loads(result.stdout)["problems"]
    assert message in problem["message"]
    assert problem["key"] == "MODEL"
    assert problem["hint"]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--suite", ""), "no suite is named"),
        (("--suite", "longbench-v2", "--path", "numbers.json"), "numbers.json:1:1: a JSON value that is not an object"),
        (("--suite", "vt", "--text", "nowhere.txt"), "nowhere.txt does not exist"),
        (("--suite", "code", "--code", "nowhere"), "nowhere is not a folder"),
        pytest.param(("--thinking", "64"), "the model's chat template knows of no thoughts", marks=pytest.mark.check),
        pytest.param(
            ("--tokenizer", "plain", "--chat-template"),
            "the model's tokenizer has no chat template",
            marks=pytest.mark.full,
        ),
    ],
)
def test_a_wrong_input_ends_with_2(tmp_path: Path, words: tuple[str, ...], message: str) -> None:
    (tmp_path / "numbers.json").write_text("[1, 2]")
    plain = make_bytes_tokenizer()
    plain.chat_template = None
    plain.save_pretrained(tmp_path / "plain")
    config = AutoConfig.for_model(**{**BYTES_CONFIG, "max_position_embeddings": 4096})
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path / "model")
    result = run("evaluate", "model", *WORDS, "--tokenizer", "bytes", *words, cwd=tmp_path)
    assert result.returncode == 2, result.stderr
    (problem,) = json.loads(result.stdout)["problems"]
    assert message in problem["message"]
    assert problem["hint"]


@pytest.mark.parametrize(
    ("environment", "message", "hint"),
    [
        (
            {"TORCHELASTIC_RUN_ID": "none"},
            "torchrun started this command once for each process",
            "leave it out: `ulysses evaluate`",
        ),
        ({"NNODES": "2"}, "2 machines need --node-rank", "NODE_RANK and MASTER_ADDR"),
        (
            {"SLURM_STEP_NODELIST": "a1", "SLURM_NODEID": "0", "SLURM_STEP_TASKS_PER_NODE": "8"},
            "SLURM started this command 8 times on each machine",
            "srun --ntasks-per-node=1 ulysses evaluate",
        ),
    ],
)
def test_a_place_that_is_unclear_ends_with_2(
    environment: dict[str, str], message: str, hint: str, tmp_path: Path
) -> None:
    result = run("evaluate", str(tmp_path), *WORDS, **environment)
    assert result.returncode == 2
    (problem,) = json.loads(result.stdout)["problems"]
    assert message in problem["message"]
    assert hint in problem["hint"]


def test_a_quantized_model_is_refused_by_name(tmp_path: Path) -> None:
    config = AutoConfig.for_model(**{**BYTES_CONFIG, "max_position_embeddings": 4096})
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    stored = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**stored, "quantization_config": {"quant_method": "gptq"}}))
    result = run("evaluate", str(tmp_path), *WORDS, "--tokenizer", "bytes")
    assert result.returncode == 2
    (problem,) = json.loads(result.stdout)["problems"]
    assert "are quantized by gptq" in problem["message"]
    assert problem["hint"] == "name the same model in bfloat16"
