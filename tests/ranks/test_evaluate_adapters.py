"""`ulysses evaluate` of a run's checkpoints with adapters, on another layout than they were trained on: merged, they
answer as plain peft does with the adapters beside their base."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from peft import PeftModel
from support.commands import run, succeed
from support.prompters import make_prompter
from support.small_run import make_settings
from support.training import save_bytes_model
from transformers import AutoModelForCausalLM, BitsAndBytesConfig

from ulysses_cli.data.tokenizing.tokenizer import make_bytes_tokenizer
from ulysses_cli.evaluate.prompts import Prompter, TaskPrompt
from ulysses_cli.evaluate.suites import Amount, Sources, make_prompts, plan_suites

TASK, LENGTH, NUM_SAMPLES = "niah_single_1", 1200, 2
PAGE_BYTES, NUM_TABLES = 512, 3  # of an allocator; of codes and of an offset, for each weight in four bits
WORDS = ("--tokenizer", "bytes", "--dtype", "float32", "--device", "cpu", "--format", "json", "--suite", TASK)
RUN = make_settings(
    parallel={"sp_size": 2},
    train={"max_steps": 4, "learning_rate": 0.05},
    lora={"r": 4, "alpha": 32},
    run={"save_steps": 2, "rehearsal": False},
)


def train_on_base(folder: Path, changes: dict[str, int], **sections: Any) -> None:
    """Trains adapters of a new base, in these files, with these sections of the recipe changed."""
    save_bytes_model(folder / "base", max_position_embeddings=4096, initializer_range=0.3, **changes)
    model = {"name_or_path": str(folder / "base"), "tokenizer": "bytes", "dtype": "float32"}
    (folder / "r.yaml").write_text(yaml.safe_dump({**RUN, "model": model, **sections}))
    succeed("train", "r.yaml", cwd=folder)


def score_all(model: Any) -> dict[str, float]:
    """The log-probability of the right answer to each question."""
    prompter = make_prompter(make_bytes_tokenizer())
    prompts = make_prompts(plan_suites([TASK], Sources()), prompter, Amount((LENGTH,), NUM_SAMPLES), print)
    return {prompt.name: score_plainly(model, prompter, prompt) for prompt in prompts}


def score_plainly(model: Any, prompter: Prompter, prompt: TaskPrompt) -> float:
    answer = prompter.encode_answer(prompt, prompt.sample.references[0])
    tokens = torch.tensor([[*prompt.tokens, *answer]])
    with torch.no_grad():
        logits = model(tokens).logits[0, len(prompt.tokens) - 1 : -1].log_softmax(-1)
    return float(logits.gather(1, torch.tensor(answer)[:, None]).sum())


@pytest.mark.full
def test_merged_adapters_answer_as_plain_peft_on_another_layout(tmp_path: Path) -> None:
    train_on_base(tmp_path, {})
    checkpoints = tmp_path / "run" / "checkpoints"
    amount = ("--max-length", str(LENGTH), "--samples", str(NUM_SAMPLES), "--sp-size", "1")
    against = ("--against", str(checkpoints / "step-2"), "--output", str(tmp_path / "found"))
    succeed("evaluate", str(checkpoints / "step-4"), *WORDS, *amount, *against, cwd=tmp_path)
    findings = json.loads((tmp_path / "found" / "quality.json").read_text())
    assert [(row["task"], row["n"]) for row in findings["differences"]] == [(TASK, NUM_SAMPLES)]
    assert [row["n"] for row in findings["against"]["scores"]] == [NUM_SAMPLES]

    ours = {each["id"]: each["log_probability"] for each in findings["results"]}
    base = AutoModelForCausalLM.from_pretrained(tmp_path / "base", dtype=torch.float32).eval()
    without = score_all(base)
    adapted = PeftModel.from_pretrained(base, str(tmp_path / "run" / "model")).eval()
    assert ours == pytest.approx(score_all(adapted), rel=1e-4)
    assert ours != pytest.approx(without, rel=1e-2), "the adapters have learned something"
    old = {
        line["id"]: line["log_probability"]
        for line in map(json.loads, (tmp_path / "found" / "against" / "results.jsonl").read_text().splitlines())
        if "log_probability" in line
    }
    assert old.keys() == ours.keys()
    assert old != ours, "the other checkpoint is another model"
    assert "step-4" in (tmp_path / "run" / "evaluations" / f"step-4-{TASK}.json").read_text()


def count_held(model: Any) -> tuple[int, int]:
    """The bytes of weights, codes and scales, and the number of weights in four bits."""
    held: list[torch.Tensor] = []
    states = []
    for weight in model.parameters():
        held.append(weight)
        if (state := getattr(weight, "quant_state", None)) is not None:
            states.append(state)
            held += [state.absmax, state.code, state.offset, state.state2.absmax, state.state2.code]
    return sum(each.numel() * each.element_size() for each in held), len(states)


@pytest.mark.full
def test_adapters_beside_a_base_in_four_bits_answer_as_bitsandbytes(tmp_path: Path) -> None:
    """The base stays in four bits: what was trained is asked, on two ranks. A merged export is another model."""
    lora, parallel = {"r": 4, "alpha": 32, "quantize_base": "nf4"}, {"sp_size": 2, "zero_stage": 2}
    sizes = {"hidden_size": 64, "intermediate_size": 96, "head_dim": 16}
    train_on_base(tmp_path, sizes, lora=lora, parallel=parallel)
    subject = (str(tmp_path / "run" / "checkpoints" / "step-4"), *WORDS, "--max-length", str(LENGTH))
    predicted = run("evaluate", *subject, "--dry-run", "--sp-size", "2", cwd=tmp_path)
    (prediction,) = json.loads(predicted.stdout)["predictions"]
    found = ("--samples", str(NUM_SAMPLES), "--sp-size", "2", "--output", str(tmp_path / "found"))
    succeed("evaluate", *subject, *found, cwd=tmp_path)
    findings = json.loads((tmp_path / "found" / "quality.json").read_text())
    ours = {each["id"]: each["log_probability"] for each in findings["results"]}

    four_bits = BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type="nf4",
        bnb_4bit_use_double_quant=True,
        bnb_4bit_compute_dtype=torch.float32,
    )
    base = AutoModelForCausalLM.from_pretrained(tmp_path / "base", dtype=torch.float32, quantization_config=four_bits)
    for module in base.modules():
        module.support_avx512bf16_for_cpu = False  # its products for CPUs round to bfloat16
    held, num_quantized = count_held(base)
    spare = prediction["weight_bytes"] - held
    assert 0 <= spare <= PAGE_BYTES * NUM_TABLES * num_quantized, "a GPU rounds each table up to a page"
    adapted = PeftModel.from_pretrained(base, str(tmp_path / "run" / "model")).eval()
    assert ours == pytest.approx(score_all(adapted), rel=1e-4)
    whole = AutoModelForCausalLM.from_pretrained(tmp_path / "base", dtype=torch.float32)
    merged = PeftModel.from_pretrained(whole, str(tmp_path / "run" / "model")).eval()
    assert ours != pytest.approx(score_all(merged), rel=1e-3)
