"""Tests mistakes that a new user may type, over all commands: exit code, place and message, never a trace.

The commands run in this process, in a folder of their own with a few wrong files in it.
"""

import json
from pathlib import Path

import pytest
from support.paths import RECIPES as SHIPPED
from support.paths import TINY_RECIPE
from support.tiers import sample_every
from typer.testing import CliRunner

from ulysses_cli.cli import app

FILES = {
    "empty.yaml": "",
    "broken.yaml": "model: [\n",
    "tab.yaml": "model:\n\tname: x\n",
    "words.yaml": "just words\n",
    "two.yaml": "model: {}\n---\nmodel: {}\n",
    "twice.yaml": "model: {}\nmodel: {}\n",
    "short.yaml": "model: Qwen/Qwen3-8B\ndata:\n  datasets:\n  - a.jsonl\n  max_length: 64K tokens\n",
    "colon.yaml": "model:\n  name_or_path x\ndata: {datasets: d/a.jsonl, max_length: 64}\n",
    "begun/run.json": "{}",
    "tag.yaml": "model: !!python/name:os.system x\n",
    "d/a.jsonl": '{"text": "a"}\n',
    "d/b.jsn": '{"text": "a"}\n',
    "d/empty.txt": "",
    "broken/config.json": '{"model_type": ',
    "old/run.json": '{"recipe_hash": "x", "recipe": {"train": {"max_steps": 7}}}',
    "r\u00e9.yaml": "a\u0301: 1\n",
}
FILE_BELOW_FILE = 'data.datasets={"path":"d/a.jsonl","data_files":["d.jsonl"]}'
NUMBER = "hint: write a whole number, such as 10, 65_536, 500K or 64Ki"
QWEN = ("--model", "Qwen/Qwen3-8B", "--max-length")
LONG = str(SHIPPED / "llama-3.1-8b-128k-8gpu.yaml")

RECIPES = (
    ("empty.yaml", "empty.yaml:1:1: model: required and not written\n\nhint: write model, a section with name_or_path"),
    ("folder", "folder: cannot be read: Is a directory\n\nhint: name a file"),
    ("broken.yaml", "broken.yaml:2:1: not valid YAML: expected the node content, but found '<stream end>'\n"),
    ("tab.yaml", "tab.yaml:2:1: not valid YAML"),
    ("bytes.yaml", "bytes.yaml:2:1: not UTF-8 text\n\nhint: save the recipe as UTF-8"),
    ("words.yaml", "words.yaml:1:1: a recipe is a mapping of sections"),
    ("twice.yaml", "twice.yaml:2:1: model: written twice, first in line 1"),
    ("tag.yaml", "is refused: a recipe is plain data"),
    ("r\u00e9.yaml", "r\u00e9.yaml:1:1: a\u0301: unknown key"),
    ("short.yaml", "short.yaml:1:8: model: 'Qwen/Qwen3-8B' is not a section\n\nhint: write model: {name_or_path: "),
    ("short.yaml", NUMBER),
    ("colon.yaml", "model: 'name_or_path x' is not a section\n\nhint: write name_or_path: x, with a colon"),
    ("two.yaml", "two.yaml:2:1: not valid YAML: found another document\n\nhint: a recipe is one document: remove"),
    ("missing.yml", "missing.yml: cannot be read: No such file or directory"),
)  # fmt: skip
SETTINGS = (  # those of small recipes without files are rows of messages.txt
    ("model.config.model_type=qwen33", "knows no model type qwen33\n\nhint: did you mean qwen3?"),
    ("--gpu quantum", "--gpu: no GPU is called quantum"),
    ("run.output_dir=t.yaml", "run.output_dir: t.yaml is a file, not a folder"),
    ('data.datasets={"path":"d/a.jsn"}', "d/a.jsn does not exist\n\nhint: d holds a.jsonl, empty.txt"),
    ('data.datasets={"path":"d/b.jsn"}', "names no data format: .jsn\n\nhint: rename it to what"),
    ('data.datasets={"path":"d/empty.txt"}', "data.datasets.0.path: d/empty.txt is empty\n\nhint: name another"),
    ('data.datasets={"path":"folder"}', "data.datasets.0.path: folder holds no file\n"),
    ('data.datasets={"path":"folder","type":"folder"}', "data.datasets.0.path: folder holds no file\n"),
    ("model.tokenizer=nowhere", "model.tokenizer: nowhere is not on this machine: no folder, and not in the Hugging"),
    ("deepspeed.bf16.enabled=true", "is true, but model.dtype is float32"),
    ("run.resume_from_checkpoint=folder", "folder is not a checkpoint: manifest.json is missing\n\nhint: name a run's"),
    ("run.output_dir=t.yaml/x", "run.output_dir: t.yaml/x: t.yaml is a file, not a folder\n\nhint: name a folder"),
    ("run.output_dir=${HOME}/x", "run.output_dir: ${HOME} is not replaced in a recipe"),
    ("train.max_steps=1", "no step at the full learning rate: max_steps is 1\n\nhint: use 0\n"),
    ("model.config=null model.name_or_path=t.yaml", "model.name_or_path: t.yaml is a file, not a folder"),
)
COMMANDS = (
    ("train", "Missing argument 'RECIPE"),
    ("train t.yaml t.yaml", "2 recipes: t.yaml, t.yaml\n\nhint: name one"),
    ("train t.yaml train.max_steps 3", "hint: write train.max_steps=3"),
    ("train t.yaml --resume nowhere", "hint: use auto for the newest valid checkpoint"),
    ("train t.yaml --resume folder", "folder is not a checkpoint"),
    ("train t.yaml --resume auto --overwrite", "--overwrite: contradicts --resume auto\n\nhint: keep --resume"),
    ("train t.yaml --resume=", "--resume: names no checkpoint\n\nhint: write --resume auto"),
    ("train t.yaml --resume-anyway", "--resume-anyway: is not used without --resume\n\nhint: add --resume auto"),
    ("train t.yaml --nnodes 2", "2 machines need --node-rank"),
    ("train t.yaml --node-rank 3", "node rank 3 is outside 1 machine\n\nhint: add --nnodes"),
    ("train t.yaml --hostfile nowhere", "nowhere cannot be read: No such file or directory\n\nhint: give a file"),
    ("launch slurm t.yaml", "run.device: cpu needs no GPU, and a job is written for machines with GPUs"),
    ("launch k8s t.yaml --image i --claim c", "run.device: cpu needs no GPU"),
    ("launch sky t.yaml run.device=cuda --image i --gpu h100 --bucket mine", "such as s3://mine"),
    ("prepare missing.yaml", "missing.yaml: cannot be read"),
    ("verify t.yaml parallel.ring_size=3", "3 does not divide sp_size 2"),
    ("doctor t.yaml parallel.sp_size=x", "hint: write a whole number, such as 10\n"),
    ("bench t.yaml --sp-size 0", "--sp-size: 0 is not a whole number above 0"),
    ("bench t.yaml --sp-size 3", "does not divide the 4 attention heads\n\nhint: use 1, 2, 4"),
    ("bench t.yaml --max-length 1", "1 is shorter than sp_size 2\n\nhint: use 2 or more"),
    ("bench t.yaml --sp-on-off --sp-size 2", "chooses the sizes itself"),
    ("bench t.yaml --sp-on-off --against trainer", "and --against are two comparisons"),
    ("bench t.yaml --sp-on-off parallel.sp_size=1", "the recipe has sp_size 1"),
    ("bench t.yaml --html folder", "--html: folder cannot be written: Is a directory"),
    ("estimate-memory", "neither a recipe nor --model is given"),
    ("estimate-memory nowhere.yaml", "cannot be read"),
    ("estimate-memory RECIPE --gpu h1000", "--gpu: no GPU is called h1000"),
    ("estimate-memory RECIPE --model Qwen/Qwen3-8B", "cannot be combined with"),
    ("estimate-memory RECIPE --max-length 8Ki", "--max-length: is for --model only"),
    ("estimate-memory RECIPE --num-processes 6", "the run has 6 processes"),
    ("estimate-memory RECIPE --num-processes 0", "Invalid value"),
    ("estimate-memory --model Qwen/Qwen3-8B", "--max-length: required with --model"),
    ("estimate-memory --model Qwen/Qwen3-8 --max-length 8Ki", "a similar model that is known is Qwen/Qwen3-8B"),
    ("estimate-memory QWEN -3", "-3 is not a whole number from 2"),
    ("estimate-memory QWEN 8Ki parallel.ring_size=3", "does not divide"),
    ("estimate-memory --model deepseek-ai/DeepSeek-V3 --max-length 8Ki", "quantized by fp8"),
    ("plan --model deepseek-ai/DeepSeek-V3 --max-length 8Ki", "quantized by fp8"),
    ("plan --model Qwen/Qwen3-8B", "--max-length: required"),
    ("plan QWEN 8Ki --tokens 4Ki", "less than one row"),
    ("plan QWEN 8Ki --tokens 1M --tokens-per-step 2M", "2,000,000 are more than the 1,000,000 in all"),
    ("plan QWEN 8Ki --gpus h100:0", "is not a number of GPUs"),
    ("plan QWEN 8Ki --gpus=", "--gpus: names no GPU"),
    ("plan QWEN 8Ki --longest", "leave out one of them"),
    ("plan QWEN 256Mi --gpus h100:8", "no plan (heads)"),
    ("plan --model Qwen/Qwen3-8B --longest --budget 100", "--budget: bounds a plan for rows"),
    ("plan --model Qwen/Qwen3-8B --longest --deadline 1h", "--deadline: bounds a plan for rows"),
    ("plan --model Qwen/Qwen3-8B --longest --tokens-per-step 1Mi", "leave out one of them"),
    ("plan --model microsoft/Phi-3-mini-128k-instruct --max-length 256Ki", "longer than the 131072"),
    ("plan --model meta-llama/Llama-3.1-70B --max-length 8Ki --gpus h100:1 --method full", "no plan (host)"),
    ("plan --model Qwen/Qwen3-32B --longest --gpus rtx-4090:1 --method lora", "leave out --method"),
    ("plan --model Qwen/Qwen3-30B-A3B --max-length 8Ki --gpus h100:1 --method qlora", "--method: the experts of"),
    ("estimate-memory t.yaml --gpu h100,h200", "hint: write --gpu again for each"),
    ("estimate-memory t.yaml --sweep --html folder", "--html: folder cannot be written"),
    ("estimate-memory --model t.yaml --max-length 8Ki", "--model: t.yaml is a recipe"),
    ("estimate-memory --model folder --max-length 8Ki", "folder/config.json does not exist"),
    ("estimate-memory --model a/b --max-length 8Ki,9Ki", "config.json of a/b is not on this machine"),
    ("plan QWEN 64Ki --gpus 8xh100", "hint: write KIND:MOST, such as h100-80gb:8; did you mean h100?"),
    ("plan QWEN 64Ki --gpus h100:8 --write folder --force", "--write: folder is a folder"),
    ("plan QWEN 64Ki --gpus h100:8,h100-80gb:4", "--gpus: h100-80gb is named twice\n\nhint: name each kind once"),
    ("plan QWEN 64Ki --deadline tomorrow", "tomorrow is not a time\n\nhint: write hours or days"),
    ("plan QWEN 64Ki --budget free", "Invalid value for '--budget'"),
    (
        "estimate-memory QWEN 128Ki --num-processes 1048576",
        "command line: --num-processes: sets parallel.dp_shard_size: 131072 is not a whole number from 1 to 65,536",
    ),
    ("estimate-memory QWEN 900G", "command line: --max-length: one call of attention of a rank would have"),
    ("estimate-memory QWEN 128Ki data.max_length=3Ki", "data.max_length: is what --max-length says"),
    ("plan QWEN 64k", "--max-length: 64k is not a whole number from 2 to 1,099,511,627,776"),
    ("export nowhere --to x", "CHECKPOINT: nowhere does not exist"),
    ("export folder --to x", "folder is neither a checkpoint nor a run"),
    ("sample t.yaml hi", "MODEL: t.yaml is a recipe\n\nhint: name its run.output_dir"),
    ("sample nowhere hi", "MODEL: no folder nowhere is here; "),
    ("sample ./nowhere hi", "MODEL: no folder ./nowhere is here; this is a path, not a hub name\n"),
    ("report nowhere", "nowhere does not exist"),
    ("report t.yaml", "t.yaml is a file, not a run directory"),
    ("recipes show tiny", "no recipe is called tiny\n\nhint: did you mean tiny-cpu?"),
    ("recipes copy tiny-cpu t.yaml", "t.yaml already exists\n\nhint: add --force"),
    ("recipes copy tiny-cpu no/such/x.yaml", "no/such is not a folder\n\nhint: make it"),
    ("init new.yaml --data d/a.jsonl --model tyni --gpus cpu --yes", "called tyni\n\nhint: did you mean tiny?"),
    ("config-schema train.max_stps", "hint: did you mean train.max_steps?"),
    ("plan --by money", "'--by': 'money' is not one of 'cost', 'time'"),
    ("bench t.yaml --against deepspeed", "'--against': 'deepspeed' is not one of 'trainer'"),
    ("evaluate folder --samples 0", "'--samples': must be greater than or equal to 1"),
    ("evaluate folder --samples few", "'--samples': must be a valid integer"),
    ("evaluate folder --dtype int8", "'--dtype': 'int8' is not one of 'bfloat16', 'float32'"),
    ("evaluate t.yaml", "MODEL: t.yaml is a recipe\n\nhint: name a model folder"),
    ("export t.yaml --to x", "CHECKPOINT: t.yaml is a recipe\n\nhint: name a run's output_dir"),
    ("evaluate t.yaml --dry-run", "MODEL: t.yaml is a recipe\n\nhint: name a model folder"),
    ("evaluate Qwen/Qwen3-0.6B --dry-run --against nope", "nope"),
    ("export begun --to x", "begun holds no checkpoint: the run has not written one"),
    (f"validate-config t.yaml {FILE_BELOW_FILE}", "does not exist\n\nhint: d/a.jsonl is a file, not a folder\n"),
    ("validate-config t.yaml data.datasets=nodata/x/y.jsonl", "hint: no nodata is here\n"),
    (
        "models lama",
        "NAME: lama is neither a family proven exact nor a model on this machine\n\nhint: did you mean llama?",
    ),
    ("models gpt2", "NAME: gpt2 is neither a family proven exact nor a model"),
    ("trian t.yaml", "No such command 'trian'"),
    ("models broken", "NAME: broken/config.json is not valid JSON"),
    ("models folder", "NAME: folder/config.json does not exist\n\nhint: a model folder holds config.json"),
    ("models d/a.jsonl", "NAME: d/a.jsonl is a file, not a folder\n\nhint: name the folder that holds config.json"),
    ("sample broken hi", "MODEL: broken/config.json is not valid JSON"),
    ("sample bare hi", "MODEL: bare holds no weights: no *.safetensors\n\nhint: copy the model's folder again"),
    ("prepare t.yaml --html folder", "--html: folder cannot be written: Is a directory"),
    ("prepare t.yaml --html t.yaml/x.html", "--html: t.yaml/x.html cannot be written: t.yaml is a file, not a folder"),
    ("plan QWEN 64Ki --gpus h100:100000000", "100000000 is not a number of GPUs from 1 to 1,048,576"),
    ("plan QWEN 1Ti", "--tokens: 1,000,000,000, its default, are less than one row of 1,099,511,627,776"),
    (
        "launch slurm t.yaml run.device=cuda --gpu h100 --out folder",
        "folder is a folder\n\nhint: name a file with --out",
    ),
    ("launch sky t.yaml run.device=cuda --image i --gpu h100 --bucket /mine", "such as s3://mine\n"),
    (
        "launch k8s t.yaml run.device=cuda --image i --gpu h100 --claim A_b",
        "--claim: 'A_b' is not a name in Kubernetes",
    ),
    ("recipes show TINY-CPU", "hint: did you mean tiny-cpu?"),
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("wrong")
    (folder / "folder").mkdir()
    (folder / "d").mkdir()
    for name in ("begun", "broken", "bare", "old"):
        (folder / name).mkdir()
    (folder / "bare" / "config.json").write_text(json.dumps({"model_type": "qwen3"}))
    (folder / "t.yaml").write_bytes((TINY_RECIPE).read_bytes())
    (folder / "bytes.yaml").write_bytes(b"model:\n  \xff\xfe")
    for name, content in FILES.items():
        (folder / name).write_text(content, encoding="utf-8")
    return folder


@pytest.mark.parametrize(
    ("line", "message"),
    sample_every(
        4,
        [
            *((f"validate-config {recipe}", message) for recipe, message in RECIPES),
            *((f"validate-config t.yaml {setting}", message) for setting, message in SETTINGS),
            *COMMANDS,
        ],
    ),
)
def test_a_wrong_input_is_reported(line: str, message: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(folder)
    result = CliRunner().invoke(app, line.replace("QWEN", " ".join(QWEN)).replace("RECIPE", LONG).split())
    assert isinstance(result.exception, SystemExit)
    assert (result.exit_code, result.stdout) == (2, "")
    assert message in result.stderr


def test_an_empty_argument_is_named(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(folder)
    for command in ("validate-config", "prepare", "estimate-memory"):
        result = CliRunner().invoke(app, [command, ""])
        assert result.exit_code == 2
        assert "RECIPE: is an empty argument\n\nhint: name a recipe, or leave" in result.stderr
    result = CliRunner().invoke(app, ["estimate-memory", "--model", "", "--max-length", "8Ki"])
    assert (result.exit_code, "--model: is an empty text" in result.stderr) == (2, True)
    for command in ("train", "prepare"):
        assert "2 recipes: t.yaml, an empty argument\n" in CliRunner().invoke(app, [command, "t.yaml", ""]).stderr


def test_consequences_of_a_wrong_value_are_not_reported(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(folder)
    output = CliRunner().invoke(app, ["validate-config", "t.yaml", "data.eval_split=10%"]).stderr
    assert "data.eval_split: '10%' is not a number" in output
    assert "nothing to evaluate on" not in output
    assert output.rstrip().endswith("1 problem")


def test_a_value_that_cannot_be_read_is_not_compared_with_an_earlier_run(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It would be shown as if it were the default."""
    monkeypatch.chdir(folder)
    words = ["validate-config", "t.yaml", "run.output_dir=old"]
    assert "old holds the run of another recipe" in CliRunner().invoke(app, words).stderr
    output = CliRunner().invoke(app, [*words, "train.max_steps=ten"]).stderr
    assert "train.max_steps: 'ten' is not a whole number" in output
    assert "another recipe" not in output
