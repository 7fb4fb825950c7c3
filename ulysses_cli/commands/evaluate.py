"""`ulysses evaluate`: what a model answers at given lengths, on the layout that trained it."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ulysses_cli.commands.options import Format, FormatOption, OnlineOption, PageOption, end_with, or_exit

if TYPE_CHECKING:
    from ulysses_cli.plan.models.shape import ModelShape


DEFAULT_BUDGETS = "4Ki,16Ki,64Ki"


class EvaluationDevice(StrEnum):
    auto = "auto"
    cuda = "cuda"
    cpu = "cpu"


class WeightsDtype(StrEnum):
    bfloat16 = "bfloat16"
    float32 = "float32"


def evaluate(
    model: Annotated[
        str, typer.Argument(metavar="MODEL", help="a model folder, a hub name, output_dir, or its checkpoints/step-N")
    ],
    suite: Annotated[str, typer.Option(help="suites or tasks, with commas between them")] = "ruler",
    max_length: Annotated[str, typer.Option(help="lengths in tokens, with commas: 4Ki,32Ki,128Ki")] = "4Ki",
    samples: Annotated[
        int | None,
        typer.Option(min=1, max=100_000, help="samples per task and length  [default: 20; all of lm-eval's tasks]"),
    ] = None,
    sp_size: Annotated[int, typer.Option(min=1, help="ranks that share a prompt")] = 1,
    device: Annotated[
        EvaluationDevice, typer.Option(help="auto: all GPUs, or the CPU where there is none")
    ] = EvaluationDevice.auto,
    against: Annotated[str | None, typer.Option(metavar="MODEL", help="compare with it, question by question")] = None,
    against_retrieval: Annotated[
        bool,
        typer.Option(
            "--against-retrieval",
            help="ask each question also with no context, with the chunks that BM25 finds, and with the evidence",
        ),
    ] = False,
    budget: Annotated[
        str | None,
        typer.Option(help=f"tokens of what BM25 finds, with commas between them  [default: {DEFAULT_BUDGETS}]"),
    ] = None,
    tokenizer: Annotated[str | None, typer.Option(help="the tokenizer, where the model's folder has none")] = None,
    dtype: Annotated[WeightsDtype, typer.Option(help="of the weights")] = WeightsDtype.bfloat16,
    path: Annotated[
        str | None,
        typer.Option(
            help="file, folder or hub data set: questions of a suite, documents for loss; lm-eval: its task files"
        ),
    ] = None,
    text: Annotated[Path | None, typer.Option(help="text for haystacks: a file, or a folder of .txt files")] = None,
    squad: Annotated[Path | None, typer.Option(help="dev-v2.0.json of SQuAD, for qa_1")] = None,
    hotpotqa: Annotated[Path | None, typer.Option(help="HotpotQA's distractor set, for qa_2")] = None,
    code: Annotated[Path | None, typer.Option(help="a folder of source files, for code_recall")] = None,
    seed: Annotated[int, typer.Option(help="another seed makes other samples")] = 0,
    chat_template: Annotated[
        bool | None,
        typer.Option("--chat-template/--no-chat-template", help="ask in a user's message  [default: if there is one]"),
    ] = None,
    to: Annotated[
        Path | None, typer.Option("--output", help="folder of the results  [default: in runs/evaluations]")
    ] = None,
    price: Annotated[float | None, typer.Option(min=0, help="dollars per hour of one GPU")] = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="predict memory and operations, with --gpu seconds; run nothing")
    ] = False,
    gpu: Annotated[str | None, typer.Option(help="with --dry-run: the kind of GPU, such as h100")] = None,
    trust_remote_code: Annotated[
        bool, typer.Option("--trust-remote-code", help="run Python code that comes with the model")
    ] = False,
    html: PageOption = None,
    online: OnlineOption = False,
    output: FormatOption = Format.text,
) -> None:
    """Measure what a model recalls and answers at lengths that no single GPU holds.

    Prompts are read by all ranks together, as rows are in training, and every answer is decoded greedily. Tasks are
    made from a seed, exactly as long as asked with the answer; other suites are read from their files. A killed
    evaluation goes on where it was when it is started again with the same --output.

    \b
    Suites: ruler, niah, graphs, code, loss.
    Tasks of lm-eval: lm-eval:TASK, such as lm-eval:hellaswag.
    \b
    From files or the hub: ruler-files, longbench, longbench-v2, infinitebench, mrcr, graphwalks.

    \b
    Examples:
      ulysses evaluate runs/mine/model --suite ruler --max-length 4Ki,32Ki,128Ki --sp-size 8
      ulysses evaluate runs/mine/checkpoints/step-400 --against meta-llama/Llama-3.1-8B --html quality.html
      ulysses evaluate my/model --suite longbench-v2 --path THUDM/LongBench-v2 --format json
      ulysses evaluate my/model --suite niah --max-length 32Ki --against-retrieval
    """
    import os

    from ulysses_cli.commands.bench import read_numbers
    from ulysses_cli.commands.children.answering import (
        ModelQuestion,
        find_base,
        find_documents,
        find_model,
        find_reader,
        name_results,
        prepare_model,
        run,
    )
    from ulysses_cli.evaluate.files import FILE_SUITES
    from ulysses_cli.evaluate.losses import TASK as LOSS
    from ulysses_cli.evaluate.suites import DEFAULT_SAMPLES, HARNESS, SUITES, Sources, plan_suites
    from ulysses_cli.launch import environments, launcher
    from ulysses_cli.launch.suite_files import find_suite_path
    from ulysses_cli.plan.planner.generation import predict, predict_seconds
    from ulysses_cli.plan.problem import Problem
    from ulysses_cli.report import printing, quality

    or_exit(lambda: environments.check_one_process(os.environ, "evaluate"), output)
    lengths = or_exit(lambda: read_numbers("--max-length", max_length, []), output)
    if budget is not None and not against_retrieval:
        end_with([Problem("--budget", "is not used without --against-retrieval", "add it, or leave this out")], output)
    if gpu is not None and not dry_run:
        end_with([Problem("--gpu", "is not used without --dry-run", "add it, or leave this out")], output)
    budgets = or_exit(lambda: read_numbers("--budget", budget or DEFAULT_BUDGETS, []), output)
    suites = [word.strip() for word in suite.split(",") if word.strip()]
    if not suites:
        end_with([Problem("--suite", "no suite is named", f"use some of: {', '.join(SUITES)}")], output)
    reader = or_exit(lambda: find_reader(suites, path), output)
    documents = or_exit(lambda: find_documents(model, path), output) if LOSS in suites else ()
    is_benchmark = reader in FILE_SUITES
    files = or_exit(lambda: find_suite_path(path or "", printing.print_message), output) if is_benchmark else None
    harness = Path(path) if path and reader.startswith(HARNESS) else None
    sources = Sources(text, squad, hotpotqa, code, files, harness, documents)
    plan = or_exit(lambda: plan_suites(suites, sources), output)
    if path is not None and not reader:
        hint = f"leave it out, or add one of {', '.join((LOSS, *FILE_SUITES))}, {HARNESS}TASK"
        end_with([Problem("--path", f"no suite of {', '.join(suites)} reads files", hint)], output)
    folder = to or Path("runs/evaluations") / name_results(model)
    slots = launcher.count_rank_slots("cuda") if device is not EvaluationDevice.cpu else 0
    if device is EvaluationDevice.cuda and not slots:
        end_with([Problem("--device", "no GPU was found", "use --device cpu, or run ulysses doctor")], output)
    num_ranks = max(sp_size, slots // sp_size * sp_size) if slots else sp_size
    question = ModelQuestion(
        sp_size, num_ranks, max(lengths), dtype.value, tokenizer, "cuda" if slots else "cpu", trust_remote_code
    )

    def prepare(name: str) -> tuple[str, ModelShape]:
        found = find_model(name, folder / "models", trust_remote_code=trust_remote_code)
        return prepare_model(found, None, question, online=online)

    if dry_run:
        from ulysses_cli.hardware_table import load_hardware

        # a checkpoint is not exported: what it was trained from has its shape
        _, shape = or_exit(lambda: prepare_model(*find_base(model), question, online=online), output)
        kind = or_exit(lambda: load_hardware().get_gpu(gpu), output) if gpu is not None else None
        width = 4 if dtype is WeightsDtype.float32 else 2
        predictions = [predict(shape, length, sp_size, num_ranks, width) for length in lengths]
        for each in predictions:
            seconds = predict_seconds(shape, each["length"], sp_size, width, kind) if kind is not None else None
            each["prefill_seconds"], each["token_seconds"] = seconds or (None, None)
        if output is Format.json:
            printing.print_json({"predictions": predictions, "notes": list(plan.notes)})
        else:
            printing.print_data(quality.format_predictions(predictions, shape.name))
        return
    own = or_exit(lambda: prepare(model)[0], output)
    other = or_exit(lambda: prepare(against)[0], output) if against is not None else None
    task = {
        "subject": model,
        "model": own,
        "against": other,
        "suites": suites,
        "lengths": lengths,
        "samples": samples or DEFAULT_SAMPLES,
        "harness_limit": samples,
        "seed": seed,
        "sources": sources.as_json(),
        "budgets": budgets if against_retrieval else [],
        "sp_size": sp_size,
        "num_ranks": num_ranks,
        "output": str(folder),
        "with_template": chat_template,
        "max_prompt_tokens": max(lengths) if plan.samples else 0,
        "price": price,
    }
    run(task, "cuda" if slots else "cpu", output, html)
