"""Tests `ulysses train` as a person runs it: real processes, a real signal, a model folder that plain transformers
loads."""

import json
import math
import re
import signal
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
import yaml
from support.faults import TIME_LIMIT, Runs, wait_until
from support.hybrids import describe_hybrid
from support.rank_pool import run_on_ranks
from support.run_harness import RunHarness
from support.small_run import make_settings
from support.training import MemoryRows
from syrupy.assertion import SnapshotAssertion
from torch import Tensor
from torch.nn import functional
from transformers import AutoModelForCausalLM, AutoTokenizer

from ulysses_cli.data.store import open_rows
from ulysses_cli.plan.recipe.loader import parse_recipe
from ulysses_cli.run.resume import ResumePoint
from ulysses_cli.train.attention.documents import make_documents

RECIPE = make_settings(
    parallel={"sp_size": 2},
    data={"eval_split": 0.002, "max_length": 256},
    train={"max_steps": 6},
    run={"eval_steps": 3, "save_steps": 3, "save_total_limit": None},
)
METRICS = {
    *("step", "epoch", "loss", "grad_norm", "learning_rate", "tokens", "supervised_tokens", "step_seconds"),
    *("tokens_per_second", "tokens_per_second_per_gpu", "tflops", "mfu", "peak_memory_bytes"),
    *("host_peak_memory_bytes", "communication_share"),
}


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Runs:
    """Returns runs with one finished run in `run`, as the recipe sets it."""
    made = Runs(tmp_path_factory.mktemp("runs"), RECIPE)
    process = made.start("run")
    out, err = process.communicate(timeout=TIME_LIMIT)
    assert process.returncode == 0, err
    assert out == "run/model\n"
    assert "done model_dir=run/model" in err
    return made


def test_a_run_writes_its_metrics_and_facts(runs: Runs) -> None:
    lines = runs.read_lines("run")
    assert [line["step"] for line in lines] == list(range(1, 7))
    assert all(line.keys() >= METRICS for line in lines)
    sampled = [line for line in lines if "step_parts" in line]
    assert [line["step"] for line in sampled] == [3]
    parts = sampled[0]["step_parts"]
    assert sum(parts.values()) == pytest.approx(sampled[0]["step_seconds"], rel=0.05)
    assert {name for name, seconds in parts.items() if seconds > 0} >= {
        *("projections", "attention", "mlp", "head_loss", "exchange", "gather_reduce", "optimizer", "data", "other")
    }
    assert [line["step"] for line in runs.read_lines("run", "eval")] == [0, 3, 6]
    before = runs.read_lines("run", "eval")[0]
    chance = math.log(RECIPE["model"]["config"]["vocab_size"])
    assert before["loss"] == pytest.approx(chance, rel=0.05), "random weights know nothing"
    facts = json.loads((runs.folder / "run" / "run.json").read_text())
    assert facts["layout"]["world_size"] == 2
    assert facts["recipe"]["data"]["max_length"] == 256
    assert sorted(path.name for path in (runs.folder / "run" / "checkpoints").iterdir()) == ["step-3", "step-6"]


def test_plain_transformers_loads_the_model_with_the_same_loss(runs: Runs) -> None:
    model = AutoModelForCausalLM.from_pretrained(runs.folder / "run" / "model")
    assert model.config.use_cache
    assert "r.yaml" not in (runs.folder / "run" / "model" / "README.md").read_text()
    tokenizer = AutoTokenizer.from_pretrained(runs.folder / "run" / "model")
    assert tokenizer.decode(tokenizer("déjà vu")["input_ids"], skip_special_tokens=True) == "déjà vu"
    name = json.loads((runs.folder / "run" / "run.json").read_text())["data"]["hash"]
    rows, total, count = open_rows(runs.folder / "runs" / "store" / "rows" / name, "eval"), 0.0, 0
    for row in range(len(rows)):
        at, tokens = 0, rows.read(row, 0, rows.count_tokens(row)).input_ids
        for length in rows.get_lengths(row):
            document = torch.from_numpy(tokens[at : at + length].copy())
            at += length
            with torch.no_grad():
                logits = model(document[None]).logits[0].double()
            total += functional.cross_entropy(logits[:-1], document[1:], reduction="sum").item()
            count += length - 1
    messages = runs.read_lines("run", "eval")[-1]
    assert messages["tokens"] == count
    assert messages["loss"] == pytest.approx(total / count, rel=1e-5)
    assert messages["perplexity"] == pytest.approx(math.exp(total / count), rel=1e-4)
    assert messages["by_position"] == {"0-2K": {"loss": pytest.approx(total / count, rel=1e-5), "tokens": count}}


@pytest.mark.check
def test_a_killed_rank_is_named_once_and_the_others_end(runs: Runs) -> None:
    words = ("train.max_steps=1000", "run.rehearsal=false")
    process = runs.start("killed", *words)
    assert wait_until(process, lambda: runs.count_steps("killed") >= 2), process.read_stderr()
    code, err = runs.train("killed", *words)
    assert code == 2
    assert "in use" in err
    process.signal_rank(1)
    _, err = process.communicate(timeout=TIME_LIMIT)
    assert process.returncode == 1, err
    end = err[err.rindex("rank ") :]
    assert re.search(r"rank \d (was killed by SIGKILL|failed)", err), end
    assert "killed/logs/" in err
    assert "Traceback" not in err


@pytest.mark.skipif(find_spec("wandb") is not None, reason="wandb is installed, as `make test-full` does")
def test_missing_files_are_named_before_ranks_start(runs: Runs, snapshot: SnapshotAssertion) -> None:
    code, err = runs.train("tracked", "run.report_to=[wandb]")
    assert (code, err[err.index("command line:") :]) == (2, snapshot)
    assert not (runs.folder / "tracked" / "logs").exists(), "no rank was started"


def test_a_folder_with_a_run_in_it_is_refused(runs: Runs, snapshot: SnapshotAssertion) -> None:
    code, err = runs.train("run")
    assert (code, err.partition("hint: ")[2]) == (2, snapshot)


@pytest.mark.check
def test_a_dry_run_may_be_larger_than_the_machine(runs: Runs) -> None:
    process = runs.start("dry", "--dry-run", "parallel.dp_shard_size=32")
    out, err = process.communicate(timeout=TIME_LIMIT)
    assert (process.returncode, out) == (0, ""), err
    assert "dp_replicate 1 x dp_shard 32 x sp 2" in err
    assert "step 1: 32 rows, " in err
    assert not (runs.folder / "dry" / "checkpoints").exists()


HYBRID = make_settings(
    describe_hybrid("lfm2", vocab_size=260, initializer_range=0.2),
    parallel={"sp_size": 2},
    data={"max_length": 256},
    train={"max_steps": 6},
    run={"save_steps": 2},
)
DOCUMENTS = (37, 1, 26)


@torch.no_grad()
def compute_logits(text: str, checkpoint: str, folder: str, ids: Tensor) -> Tensor:
    """Returns the logits of this rank's tokens, by the model as it trains, with a checkpoint's weights."""
    harness = RunHarness(parse_recipe(text, "test", []).recipe, MemoryRows([[(64, 0)]]), 1, folder)
    harness.saves.resume(harness.train_state, ResumePoint(Path(checkpoint), {}))
    axis = harness.built.engine.groups.sp_axis
    positions = torch.cat([torch.arange(length) for length in DOCUMENTS])[None]
    own, places = (whole.chunk(axis.size, 1)[axis.rank] for whole in (ids, positions))
    model = harness.built.module.model
    logits: Tensor = model(own, position_ids=places, use_cache=False, documents=make_documents(DOCUMENTS)).logits
    return logits.clone()


@pytest.mark.full
def test_a_killed_hybrid_resumes_and_plain_transformers_gives_the_logits_of_training(tmp_path: Path) -> None:
    """A family with short convolutions: all ranks are killed in the step after a checkpoint."""
    runs = Runs(tmp_path, HYBRID)
    runs.finish("whole")
    plan = {"phase": "micro-step 1", "step": 3, "who": "all", "signal": signal.SIGKILL}
    assert runs.start("killed", plan=plan).wait(TIME_LIMIT) == 1
    assert "resumed from killed/checkpoints/step-2 after step 2" in runs.finish("killed", "--resume", "auto")
    assert runs.read_losses("killed") == runs.read_losses("whole")
    assert runs.read_model("killed") == runs.read_model("whole")
    ids = torch.randint(0, 256, (1, sum(DOCUMENTS)), generator=torch.Generator().manual_seed(1))
    newest = str(tmp_path / "killed" / "checkpoints" / "step-6")
    given = (yaml.safe_dump(HYBRID), newest, str(tmp_path / "again"), ids)
    trained = torch.cat(run_on_ranks(2, compute_logits, *given), 1)
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "killed" / "model")
    assert type(model).__module__.startswith("transformers.models.lfm2.")
    with torch.no_grad():
        plain = torch.cat([model(document, use_cache=False).logits for document in ids.split(DOCUMENTS, 1)], 1)
    assert plain.std() > 0.1
    assert torch.allclose(trained, plain, rtol=0, atol=1e-5), (trained - plain).abs().max()


@pytest.mark.check
def test_a_recipe_that_is_edited_while_its_run_begins_changes_nothing(tmp_path: Path) -> None:
    """The command has read it: its data and its ranks get what the command has resolved."""
    process = Runs(tmp_path, RECIPE).start("run")
    assert wait_until(process, (tmp_path / "run" / "lock-0").exists), process.read_stderr()
    other = {**RECIPE, "data": {**RECIPE["data"], "max_length": 64}, "train": {"max_steps": 1}}
    (tmp_path / "r.yaml").write_text(yaml.safe_dump(other))
    _, err = process.communicate(timeout=TIME_LIMIT)
    assert process.returncode == 0, err
    facts = json.loads((tmp_path / "run" / "run.json").read_text())
    assert (facts["recipe"]["data"]["max_length"], facts["recipe"]["train"]["max_steps"]) == (256, 6)
    assert facts["recipe_file"] == "r.yaml"
    assert not list((tmp_path / "run" / "logs").glob("plan*"))
