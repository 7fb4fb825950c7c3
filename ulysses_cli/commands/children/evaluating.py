"""What `evaluate` does before and after the child process: finds the machine's place among others and its ranks, finds
the model, checks it, chooses what is asked (suites, documents that a run has held out), says what it will take, and
shows what was answered."""

from __future__ import annotations

import hashlib
import json
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from ulysses_cli.commands.options import Format, check_page, or_exit, write_page
from ulysses_cli.plan.files import open_own, take_lock, write_whole
from ulysses_cli.plan.problem import FAILED
from ulysses_cli.plan.resolved import changes_positions
from ulysses_cli.run.checkpoints import (
    EVALUATIONS,
    MANIFEST,
    NAME,
    find_damage,
    find_run_dir,
    get_folder,
    list_checkpoints,
    load_state,
    read_model_steps,
)

if TYPE_CHECKING:
    from ulysses_cli.commands.children.training import Machine
    from ulysses_cli.evaluate.suites import Amount, Plan, Sources
    from ulysses_cli.plan.hardware import Gpu
    from ulysses_cli.plan.models.shape import ModelShape
    from ulysses_cli.run.nodes import Nodes, Rendezvous


RUN_FILE = "run.json"


def find_reader(suites: Sequence[str], path: str | None) -> str:
    """The suite that --path is read for; '' where no path is given."""
    from ulysses_cli.evaluate.files import FILE_SUITES
    from ulysses_cli.evaluate.suites import CALLS, HARNESS
    from ulysses_cli.evaluate.summary import TASK as LOSS
    from ulysses_cli.plan.problem import Problem, RecipeError

    if path is None:
        return ""
    readers = [name for name in suites if name in (LOSS, CALLS, *FILE_SUITES)]
    readers += [name for name in suites if name.startswith(HARNESS)][:1]  # one folder serves all of lm-eval's tasks
    if len(readers) > 1:
        message = f"--path is read for one suite, and there are {', '.join(readers)}"
        raise RecipeError([Problem("--suite", message, "evaluate them one after the other")])
    return readers[0] if readers else ""


def find_documents(model: str, path: str | None) -> tuple[dict[str, Any], ...]:
    """The data sets whose loss is measured, or whose calls are asked: what --path names, else the held-out ones of the
    run whose model it is."""
    from ulysses_cli.plan.problem import Problem, RecipeError
    from ulysses_cli.plan.recipe.sections import Dataset
    from ulysses_cli.plan.rules.files import check_dataset

    if path and "://" in path:
        raise RecipeError([Problem("--path", f"{path} is an address", "download it, and name the file")])
    missing = check_dataset(Dataset(path=path), "--path") if path else ()
    if found := [replace(problem, key="--path") for problem in missing]:
        raise RecipeError(found)
    return ({"path": path},) if path else _list_held_out(Path(model).expanduser())


def plan_questions(
    model: str, suites: Sequence[str], path: str | None, sources: Sources, amount: Amount
) -> tuple[Sources, Plan]:
    """Finds the files and documents that --path names, and plans the suites. Raises RecipeError."""
    from ulysses_cli.evaluate.files import FILE_SUITES
    from ulysses_cli.evaluate.suites import CALLS, HARNESS, plan_suites
    from ulysses_cli.evaluate.summary import TASK as LOSS
    from ulysses_cli.plan.problem import Problem, RecipeError
    from ulysses_cli.report import printing
    from ulysses_cli.run.downloads import find_suite_path

    reader = find_reader(suites, path)
    documents = find_documents(model, path) if {LOSS, CALLS} & set(suites) else ()
    files = find_suite_path(path or "", printing.print_message) if reader in FILE_SUITES else None
    harness = Path(path) if path and reader.startswith(HARNESS) else None
    sources = replace(sources, path=files, harness=harness, documents=documents)
    plan = plan_suites(suites, sources, amount)
    if path is not None and not reader:
        hint = f"leave it out, or add one of {', '.join((LOSS, CALLS, *FILE_SUITES))}, {HARNESS}TASK"
        raise RecipeError([Problem("--path", f"no suite of {', '.join(suites)} reads files", hint)])
    return sources, plan


def predict_evaluation(
    shape: ModelShape,
    plan: Plan,
    lengths: Sequence[int],
    *,
    made: Sequence[int],
    limit: int,
    num_samples: int,
    sp_size: int,
    num_ranks: int,
    bytes_per_number: int,
    gpu: Gpu | None,
    quantized: str | None,
    is_on_host: bool,
    num_models: int,
    price: float | None,
    thinking: int = 0,
) -> list[dict[str, Any]]:
    """Memory, operations, seconds and dollars by length. `made`: lengths of the tasks that are made; questions from
    files have up to `limit` tokens. `num_models`: they answer the same questions, one after the other."""
    from ulysses_cli.plan.planner.generation import NEW_TOKENS, judge_room, predict, predict_questions, predict_seconds

    predictions = []
    for length in lengths:
        samples = plan.samples if length == limit else ()
        new_tokens = thinking + max([NEW_TOKENS, *(sample.max_new_tokens for sample in samples)])
        each = predict(shape, length, sp_size, num_ranks, bytes_per_number, new_tokens, quantized)
        each["weights_are_on"] = "host" if is_on_host else "GPU"
        seconds = predict_seconds(shape, length, sp_size, bytes_per_number, gpu) if gpu is not None else None
        each["prefill_seconds"], each["token_seconds"] = seconds or (None, None)
        each["questions"] = (len(plan.tasks) * num_samples if length in made else 0) + len(samples)
        taken = predict_questions(seconds, each["questions"], num_ranks // sp_size, new_tokens)
        each["questions_seconds"] = None if taken is None else num_models * taken
        is_priced = price is not None and taken is not None
        each["usd"] = each["questions_seconds"] / 3600 * num_ranks * price if is_priced else None
        each["room"] = judge_room(each, gpu) if gpu is not None else "unknown"
        predictions.append(each)
    return predictions


def list_uncounted(plan: Plan, against: str | None, against_retrieval: bool) -> list[str]:
    """What a prediction leaves out, and what it counts twice."""
    parts = [
        name for name, has in (("the loss of documents", plan.has_loss), ("the calls of chats", plan.has_calls)) if has
    ]
    parts += ["lm-eval's tasks"] if plan.harness else []
    parts += ["what --against-retrieval asks beside the whole context"] if against_retrieval else []
    notes = [f"{', '.join(parts)}: not in the time of the questions"] if parts else []
    in_turn = "both models answer the questions, each in turn: their time is the sum"
    return [*notes, in_turn] if against else notes


def _list_held_out(path: Path) -> tuple[dict[str, Any], ...]:
    """`data.eval_datasets` of the run that a model, a checkpoint or a run's folder belongs to."""
    folder = find_own_run(path)
    if folder is None:
        return ()
    try:
        sets = json.loads((folder / RUN_FILE).read_text(encoding="utf-8"))["recipe"]["data"]["eval_datasets"]
        return tuple({name: value for name, value in each.items() if value is not None} for each in sets or ())
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return ()  # another program's run.json, or a damaged one: --path names the documents


def find_own_run(path: Path) -> Path | None:
    """The folder of the run that a model, a checkpoint or a run's folder belongs to."""
    if not path.is_dir():
        return None
    whole = path.absolute()
    return next((each for each in (whole, *whole.parents[:2]) if (each / RUN_FILE).is_file()), None)


COMMAND = "evaluate"
OWN_PROCESSES = "NPROC_PER_NODE"  # of a run; an evaluation takes a machine's GPUs, or what --sp-size needs
JOIN_SECONDS = 600.0  # that machines wait for each other, as run.join_timeout does


def find_place(sp_size: int, slots: int, environ: Mapping[str, str], machine: Machine) -> tuple[Nodes, int]:
    """This machine's part, and the number of all ranks: as many groups of `sp_size` as there are GPUs for. `slots`:
    GPUs of a machine, 0 on the CPU, where there is one group, or a rank on each machine. Raises RecipeError."""
    from ulysses_cli.run.environments import refuse
    from ulysses_cli.run.nodes import count_nodes, find_nodes

    count = count_nodes(environ, command=COMMAND, nnodes=machine.nnodes, hostfile=machine.hostfile)
    num_gpus = slots * count
    num_ranks = max(sp_size, num_gpus // sp_size * sp_size) if slots else math.lcm(sp_size, count)
    if num_ranks % count:
        hint = f"use a --sp-size that divides {num_gpus}" if slots else f"use a multiple of {count}"
        raise refuse(f"{num_ranks} ranks cannot be dealt evenly to {count} machines", hint)
    rest = {name: value for name, value in environ.items() if name != OWN_PROCESSES}
    return find_nodes(num_ranks, rest, command=COMMAND, **vars(machine)), num_ranks


@contextmanager
def open_meeting(
    nodes: Nodes, folder: Path, environ: Mapping[str, str]
) -> Iterator[tuple[Rendezvous | None, dict[str, Any] | None]]:
    """Where machines meet, for the environment of the child and for its task; None for both on one machine."""
    from ulysses_cli.run.nodes import open_rendezvous

    if nodes.count == 1:
        yield None, None
        return
    folder.mkdir(parents=True, exist_ok=True)
    with open_rendezvous(nodes, folder, environ, JOIN_SECONDS) as rendezvous:
        yield (
            rendezvous,
            {
                "count": nodes.count,
                "rank": nodes.rank,
                "endpoint": rendezvous.endpoint,
                "address": rendezvous.address,
                "join_seconds": rendezvous.join_seconds,
            },
        )


MAX_NAME = 100


@dataclass(frozen=True)
class ModelQuestion:
    """How a model is loaded. `uses_positions`: for prompts as long as the model's positions, where these exceed
    `max_length`."""

    sp_size: int
    num_ranks: int
    max_length: int
    dtype: str
    tokenizer: str | None
    device: str
    trust_remote_code: bool
    offloads_weights: bool = False
    uses_positions: bool = False


def name_results(model: str, suites: Sequence[str]) -> str:
    """The folder of what a model answers to these suites. A run's model and its checkpoints carry the run's name."""
    path = Path(model.rstrip("/"))
    parts = [part for part in path.parts[-3:] if part != "checkpoints"]
    is_of_run = path.name == "model" or NAME.fullmatch(path.name) is not None
    return _join_names("-".join(parts[-2:]) if is_of_run else path.name, suites)


def _join_names(model: str, suites: Sequence[str]) -> str:
    name = re.sub(r"[^\w.-]+", "-", f"{model}-{'-'.join(suites)}")
    if len(name) <= MAX_NAME:
        return name
    digest = hashlib.sha256(name.encode()).hexdigest()[:8]
    return f"{name[: MAX_NAME - 9]}-{digest}"


@dataclass(frozen=True)
class FoundModel:
    """A model's folder, or its name on the hub. `recipe`: what its own recipe says of adapters beside a base that is
    held in fewer bits, in sections; empty where the model is whole. `positions`: those that its recipe stretches it to,
    where its config does not say so yet; else 0."""

    name: str
    recipe: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    positions: int = 0


def find_model(name: str, folder: Path, *, trust_remote_code: bool) -> FoundModel:
    """Finds the model. A run, a checkpoint or a run's adapters are exported below `folder` once, with adapters merged
    into their base, or beside it where the recipe holds the base in fewer bits. The export is named after the
    checkpoint's content."""
    from ulysses_cli.commands.export import run_export
    from ulysses_cli.plan.problem import Problem, RecipeError

    path = Path(name).expanduser()
    if not path.exists():
        return FoundModel(name)
    _refuse_file(name, path)
    if (path / "config.json").is_file():
        return FoundModel(name)
    checkpoint = _find_checkpoint(path)
    try:
        recipe = load_state(checkpoint)["recipe"]
        digest = hashlib.sha256((checkpoint / MANIFEST).read_bytes()).hexdigest()[:12]
        has_adapters, keeps_base = recipe.get("lora") is not None, _keeps_base(recipe)
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        message = f"{checkpoint} is not a complete checkpoint: {error}"
        raise RecipeError([Problem("MODEL", message, "name another checkpoint")]) from None
    target = folder / f"{checkpoint.resolve().name}-{digest}{'-adapters' if keeps_base else ''}"
    found = _describe_adapters(recipe, target) if keeps_base else FoundModel(str(target))
    with _alone(folder):
        if target.exists():
            return found
        words = [str(checkpoint), "--to", str(target), *(["--merge-lora"] if has_adapters and not keeps_base else [])]
        code, last, log = run_export([*words, *(["--trust-remote-code"] if trust_remote_code else [])], target)
        if code or "result" not in last:
            message = str(last.get("problem") or (log or ["the export ended without a result"])[-1])
            hint = "evaluate a model that ulysses export wrote, or another checkpoint"
            raise RecipeError([Problem("MODEL", f"{checkpoint} cannot be exported: {message}", hint)])
    return found


def _refuse_file(name: str, path: Path) -> None:
    from ulysses_cli.plan.problem import Problem, RecipeError

    if path.exists() and not path.is_dir():
        what = "a recipe" if path.suffix in (".yaml", ".yml") else "not a folder"
        hint = "name a model folder, a name on the hub, a run's output_dir, or one of its checkpoints"
        raise RecipeError([Problem("MODEL", f"{name} is {what}", hint)])


def _keeps_base(recipe: Mapping[str, Any]) -> bool:
    """Whether the model is read as it was trained: adapters beside a base in fewer bits. Stretched positions follow
    from the length that was trained, so that such a model is merged."""
    lora, model = recipe.get("lora"), recipe["model"]
    is_quantized = lora is not None and lora.get("quantize_base") is not None
    return is_quantized and not changes_positions(model) and model.get("name_or_path") is not None


def _describe_adapters(recipe: Mapping[str, Any], adapters: Path) -> FoundModel:
    model, lora = recipe["model"], {**recipe["lora"], "adapter_name_or_path": str(adapters.absolute())}
    own = {name: model[name] for name in ("revision", "tokenizer") if model.get(name)}
    data = {name: recipe["data"][name] for name in ("added_tokens", "chat_template_kwargs") if recipe["data"].get(name)}
    return FoundModel(str(model["name_or_path"]), {"model": own, "data": data, "lora": lora})


@contextmanager
def _alone(folder: Path) -> Iterator[None]:
    """Machines that share a disk export a checkpoint one after the other: the second finds what the first has
    written."""
    folder.mkdir(parents=True, exist_ok=True)
    with open(folder / "lock", "w", opener=open_own) as lock:
        take_lock(lock.fileno(), waits=True)
        yield


def keep_in_run(model: str, suites: Sequence[str], findings: dict[str, Any]) -> Path | None:
    """Where the model is a run's, writes what was found, without the questions, into the run's folder, where its report
    finds it. A later evaluation of the same model and suites replaces it. Raises OSError."""
    path = Path(model).expanduser()
    if (run_dir := find_own_run(path)) is None:
        return None
    own = "newest" if path.resolve() == run_dir.resolve() else path.resolve().name
    file = run_dir / EVALUATIONS / f"{_join_names(own, suites)}.json"
    file.parent.mkdir(exist_ok=True)
    kept = leave_out_examples(findings)
    write_whole(file, json.dumps(kept, indent=1, ensure_ascii=False) + "\n")
    return file


def leave_out_examples(findings: Mapping[str, Any]) -> dict[str, Any]:
    """Without the questions and answers of both models: quality.json has them."""
    kept = {key: value for key, value in findings.items() if key != "results"}
    if other := findings.get("against"):
        kept["against"] = {key: value for key, value in other.items() if key != "results"}
    return kept


def _find_checkpoint(path: Path) -> Path:
    """The checkpoint that a folder is, or the newest whole one of a run, or the one that adapters were exported
    from."""
    from ulysses_cli.plan.problem import Problem, RecipeError

    if (path / "adapter_config.json").is_file():
        steps = read_model_steps(path)
        own = get_folder(path.absolute().parent) / f"step-{steps[0]}" if steps else None
        if own is not None and own.is_dir():
            return own
        hint = "name their checkpoint, or merge them: ulysses export CHECKPOINT --to MODEL --merge-lora"
        raise RecipeError([Problem("MODEL", f"{path} holds adapters alone, and no checkpoint of theirs", hint)])
    if (run_dir := find_run_dir(path)) is None:
        if (path / MANIFEST).exists():
            return path
        hint = "name a model folder, a run, or one of its checkpoints"
        raise RecipeError([Problem("MODEL", f"{path} holds neither config.json nor a checkpoint", hint)])
    for checkpoint in list_checkpoints(run_dir):
        if not find_damage(checkpoint, is_quick=True):
            return checkpoint
    raise RecipeError([Problem("MODEL", f"{path} has no whole checkpoint", "name another run")])


def find_base(name: str) -> tuple[FoundModel, dict[str, Any] | None]:
    """A model's folder or name, and its config where its checkpoint's recipe holds one: what `find_model` would export
    has the shape of what was trained. Exports nothing."""
    from ulysses_cli.plan.problem import Problem, RecipeError

    path = Path(name).expanduser()
    _refuse_file(name, path)
    if not path.is_dir() or (path / "config.json").is_file():
        return FoundModel(name), None
    checkpoint = _find_checkpoint(path)
    try:
        recipe = load_state(checkpoint)["recipe"]
        model = recipe["model"]
        if _keeps_base(recipe):
            return _describe_adapters(recipe, path), None
        is_dynamic = (model.get("rope_scaling") or {}).get("type") == "dynamic"
        positions = recipe["data"]["max_length"] if changes_positions(model) and not is_dynamic else 0
        return FoundModel(str(model.get("name_or_path") or name), positions=positions), model.get("config")
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        message = f"{checkpoint} is not a complete checkpoint: {error}"
        raise RecipeError([Problem("MODEL", message, "name another checkpoint")]) from None


def prepare_model(
    model: FoundModel, config: dict[str, Any] | None, question: ModelQuestion, *, online: bool
) -> tuple[str, ModelShape]:
    """The text of a recipe that loads the model, and the model's shape. `config`: the model's own, where no folder has
    it. Raises RecipeError."""
    from importlib.util import find_spec

    import yaml

    from ulysses_cli import hub
    from ulysses_cli.plan.models.model_files import find_weight_problem
    from ulysses_cli.plan.models.shape import read_model_shape
    from ulysses_cli.plan.planner.generation import choose_head_chunks
    from ulysses_cli.plan.problem import Problem, RecipeError, Where
    from ulysses_cli.plan.recipe.loader import parse_recipe

    name, own = model.name, model.recipe
    settings: dict[str, Any] = {
        "model": {
            **own.get("model", {}),
            **({"config": config} if config else {"name_or_path": name}),
            "dtype": question.dtype,
            "trust_remote_code": question.trust_remote_code,
            **({"tokenizer": question.tokenizer} if question.tokenizer else {}),
        },
        "data": {
            "datasets": [{"type": "synthetic"}],
            "max_length": max(question.max_length, question.sp_size, 2),  # the least that a recipe takes
            **own.get("data", {}),
        },
        "parallel": {
            "sp_size": question.sp_size,
            "dp_shard_size": question.num_ranks // question.sp_size,
            **({"zero_stage": 2} if "lora" in own else {}),  # each rank holds the whole base
        },
        **({"lora": dict(own["lora"])} if "lora" in own else {}),
        "memory": {
            "gradient_checkpointing": False,
            "tiled_mlp": True,
            "tiled_loss": True,
            "offload_optimizer": "none",
            "offload_param": "cpu" if question.offloads_weights else "none",
        },
        "run": {"device": question.device},
    }
    if "lora" in own and question.offloads_weights:
        message = f"each GPU holds the whole base in {own['lora']['quantize_base']}, beside its adapters"
        hint = "leave it out; or merge the adapters: ulysses export CHECKPOINT --to MODEL --merge-lora"
        raise RecipeError([Problem("--offload-weights", message, hint)])
    if "lora" in own and find_spec("bitsandbytes") is None:
        message = f"its base is held in {own['lora']['quantize_base']} by bitsandbytes, which is not installed"
        hint = "pip install bitsandbytes; or merge the adapters: ulysses export CHECKPOINT --to MODEL --merge-lora"
        raise RecipeError([Problem("MODEL", message, hint)])
    recipe = parse_recipe(yaml.safe_dump(settings), "evaluate", []).recipe
    try:
        found, _ = hub.find_model_config(recipe, online=online)
    except RecipeError as error:
        raise RecipeError([replace(problem, key="MODEL", where=Where()) for problem in error.problems]) from None
    shape = read_model_shape(found, name, "MODEL")
    shape = replace(shape, max_position_embeddings=max(shape.max_position_embeddings, model.positions))
    if question.uses_positions:
        settings["data"]["max_length"] = max(settings["data"]["max_length"], shape.max_position_embeddings)
    folder = Path(name).expanduser()
    if config is None and folder.is_dir() and (problem := find_weight_problem(folder)):
        raise RecipeError([Problem("MODEL", problem, "copy the model's folder again, or name another")])
    if not shape.list_ring_sizes(question.sp_size):
        legal = ", ".join(str(size) for size in shape.sp_sizes)
        heads = f"the {shape.common_heads} attention heads"
        message = f"{question.sp_size} does not divide {heads}, and {shape.ring_obstacle}"
        raise RecipeError([Problem("--sp-size", message, f"use {legal}")])
    width, length = 4 if question.dtype == "float32" else 2, settings["data"]["max_length"]
    chunks = choose_head_chunks(shape, length, question.sp_size, width)
    settings["memory"]["attention_head_chunks"] = chunks
    if shape.quantization and shape.quantization != "mxfp4":
        message = f"the weights of {name} are quantized by {shape.quantization}, and ranks cannot share them"
        raise RecipeError([Problem("MODEL", message, "name the same model in bfloat16")])
    if shape.inexact and question.sp_size > 1:
        message = f"{name} cannot be split over ranks: {shape.inexact}"
        raise RecipeError([Problem("--sp-size", message, "use --sp-size 1")])
    return yaml.safe_dump(settings), shape


def note_positions(lengths: Sequence[int], shapes: Sequence[ModelShape]) -> list[str]:
    """Notes on lengths that a model was not made for: it answers, but says little about what it learned."""
    from ulysses_cli.report.quantities import format_binary

    notes = []
    for shape in shapes:
        past = [format_binary(length) for length in sorted(set(lengths)) if length > shape.max_position_embeddings]
        if past:
            positions = f"the {shape.max_position_embeddings:,} positions that {shape.name} was made for"
            notes.append(f"{', '.join(past)}: longer than {positions}, which are used as they are")
    return notes


def run(options: dict[str, Any], device: str, output: Format, html: Path | None, nodes: Nodes) -> None:
    """Runs the evaluation in a child process, shows its findings and exits with its exit code. On several machines the
    first one shows and keeps them."""
    import os

    from ulysses_cli.commands.children.proving import run_child
    from ulysses_cli.plan.problem import Problem
    from ulysses_cli.report import printing
    from ulysses_cli.run import launcher
    from ulysses_cli.run.host import watch_builds

    or_exit(lambda: check_page(html), output)
    folder = Path(options["output"])
    with ExitStack() as stack:
        rendezvous, place = or_exit(lambda: stack.enter_context(open_meeting(nodes, folder, os.environ)), output)
        environ = launcher.make_environment(os.environ, device, 1, rendezvous)
        task = {"command": "evaluate", "device": device, "plan": "", "config": {}}
        stack.enter_context(watch_builds(environ, printing.print_message))
        findings, code = run_child({**task, "options": {**options, "machines": place}}, environ)
    if not findings:
        printing.print_message(f"evaluate ended without a result, with exit code {code}")
        raise typer.Exit(code if code > 0 else FAILED)
    if "problems" in findings:
        if output is Format.json:
            printing.print_json(findings)
        else:
            entries = findings["problems"]
            printing.print_problems([Problem(entry["key"], entry["message"], entry["hint"]) for entry in entries])
        raise typer.Exit(code)
    if "machine_number" in findings:
        message = f"machine number {findings['machine_number']} is done; number 0 has the results"
        if output is Format.json:
            printing.print_json(findings)
        printing.print_message(message)
        raise typer.Exit(code)
    show_findings(findings, options, output, html)
    raise typer.Exit(code)


def show_findings(findings: dict[str, Any], options: Mapping[str, Any], output: Format, html: Path | None) -> None:
    """Keeps what was found, in the folder of the results and where the model is a run's in that too, and shows it."""
    from ulysses_cli.report import printing, proofs

    folder = Path(options["output"])
    (folder / "quality.json").write_text(json.dumps(findings, indent=1, ensure_ascii=False), encoding="utf-8")
    try:
        kept = None if "endpoint" in findings else keep_in_run(options["subject"], options["suites"], findings)
    except OSError as error:
        kept = None
        printing.print_message(f"the run's folder does not take what was found: {error}")
    if kept is not None:
        printing.print_message(f"for the run's report: {kept}")
    if output is Format.json:
        printing.print_json(leave_out_examples(findings))
    else:
        printing.print_data(proofs.format_quality(findings))
        printing.print_message(f"every question with its answer: {folder / 'quality.json'}")
    if html is not None:
        write_page(html, proofs.make_quality_page(findings))
