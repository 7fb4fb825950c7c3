"""`ulysses evaluate`: what a model answers at given lengths, on the layout that trained it."""

from __future__ import annotations

from collections.abc import Sequence
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ulysses_cli.commands.options import Format, FormatOption, OnlineOption, PageOption, check_page, end_with, or_exit

if TYPE_CHECKING:
    from ulysses_cli.evaluate.endpoint import Endpoint
    from ulysses_cli.evaluate.suites import Amount, Plan, Sources
    from ulysses_cli.plan.models.shape import ModelShape


DEFAULT_BUDGETS = "4Ki,16Ki,64Ki"
DEFAULT_LENGTH = 4096  # of what is made for a length


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
    max_length: Annotated[
        str | None,
        typer.Option(
            help="lengths in tokens, with commas: 4Ki,32Ki,128Ki  [default: 4Ki; for files, the model's own length]"
        ),
    ] = None,
    samples: Annotated[
        int | None,
        typer.Option(min=1, max=100_000, help="samples per task and length  [default: 20; all of files and lm-eval]"),
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
            help="file, folder or hub data set: questions of a suite, documents for loss, chats for calls; task files "
            "of lm-eval"
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
    thinking: Annotated[
        int, typer.Option(min=0, max=1 << 20, help="tokens for a thought before each answer; 0: answer at once")
    ] = 0,
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
    offload_weights: Annotated[
        bool, typer.Option("--offload-weights", help="keep weights in host memory, for a model that GPUs cannot hold")
    ] = False,
    nnodes: Annotated[int | None, typer.Option(min=1, help="machines that share the work; also NNODES")] = None,
    node_rank: Annotated[int | None, typer.Option(min=0, help="number of this machine, from 0; also NODE_RANK")] = None,
    master_addr: Annotated[
        str | None, typer.Option(help="host name of the machine with number 0; also MASTER_ADDR")
    ] = None,
    master_port: Annotated[
        int | None, typer.Option(min=1, max=65535, help="port on that machine; also MASTER_PORT  [default: 29400]")
    ] = None,
    hostfile: Annotated[
        Path | None, typer.Option(help="DeepSpeed's list of machines: a line `host slots=N` for each, number 0 first")
    ] = None,
    endpoint: Annotated[
        str | None,
        typer.Option(
            metavar="URL", help="ask the model of this name at an OpenAI-compatible server: http://host:8000/v1"
        ),
    ] = None,
    endpoint_key_env: Annotated[
        str | None,
        typer.Option(metavar="NAME", help="the variable that holds the server's key  [default: OPENAI_API_KEY]"),
    ] = None,
    endpoint_requests: Annotated[
        int | None, typer.Option(min=1, max=1024, help="questions that a server gets at once  [default: 4]")
    ] = None,
    endpoint_timeout: Annotated[
        float | None,
        typer.Option(min=1, max=86400, help="seconds for a server's answer, with all tries  [default: 600]"),
    ] = None,
    html: PageOption = None,
    online: OnlineOption = False,
    output: FormatOption = Format.text,
) -> None:
    """Measure what a model recalls and answers at lengths that no single GPU holds.

    Prompts are read by all ranks together, as rows are in training, and every answer is decoded greedily. Tasks are
    made from a seed, exactly as long as asked with the answer; other suites are read from their files. A killed
    evaluation goes on where it was when it is started again with the same --output.

    On several machines, start the command on each, as `ulysses train` is started. Number 0 reads the files of
    questions and documents, and writes the results; each has the model.

    \b
    Suites: ruler, niah, graphs, code, loss, calls.
    Tasks of lm-eval: lm-eval:TASK, such as lm-eval:hellaswag.
    \b
    From files or the hub: ruler-files, longbench, longbench-v2, infinitebench, mrcr, graphwalks, helmet-rag,
    helmet-rerank, helmet-json.

    \b
    Examples:
      ulysses evaluate runs/mine/model --suite ruler --max-length 4Ki,32Ki,128Ki --sp-size 8
      ulysses evaluate runs/mine/checkpoints/step-400 --against meta-llama/Llama-3.1-8B --html quality.html
      ulysses evaluate my/model --suite longbench-v2 --path THUDM/LongBench-v2 --format json
      ulysses evaluate my/model --suite niah --max-length 32Ki --against-retrieval
      ulysses evaluate Qwen/Qwen3-8B --endpoint http://127.0.0.1:8000/v1 --suite niah --max-length 4Ki,32Ki
    """
    import os
    from dataclasses import replace

    from ulysses_cli.commands.bench import read_numbers
    from ulysses_cli.commands.children.evaluating import (
        ModelQuestion,
        find_base,
        find_model,
        find_place,
        list_uncounted,
        name_results,
        note_positions,
        plan_questions,
        predict_evaluation,
        prepare_model,
        run,
    )
    from ulysses_cli.commands.children.training import Machine
    from ulysses_cli.evaluate.endpoint import Endpoint, read_address
    from ulysses_cli.evaluate.files import FILE_SUITES
    from ulysses_cli.evaluate.suites import CALLS, DEFAULT_SAMPLES, SUITES, Amount, Plan, Sources
    from ulysses_cli.plan.problem import Problem
    from ulysses_cli.report import printing, proofs
    from ulysses_cli.run import launcher

    budgets = or_exit(lambda: read_numbers("--budget", budget or DEFAULT_BUDGETS, []), output)
    suites = [word.strip() for word in suite.split(",") if word.strip()]
    if not suites:
        end_with([Problem("--suite", "no suite is named", f"use some of: {', '.join(SUITES)}")], output)
    read = {*FILE_SUITES, CALLS}
    made = [DEFAULT_LENGTH] if set(suites) - read else []  # of what is not read from files
    lengths = or_exit(lambda: read_numbers("--max-length", max_length, made), output)
    sources, plan = Sources(text, squad, hotpotqa, code), Plan((), (), ())
    amount = Amount((), samples or DEFAULT_SAMPLES, seed, of_files=samples)
    if endpoint is not None:
        unused = {
            "--sp-size": sp_size != 1, "--device": device is not EvaluationDevice.auto, "--against": against,
            "--against-retrieval": against_retrieval, "--price": price, "--dry-run": dry_run, "--gpu": gpu,
            "--trust-remote-code": trust_remote_code, "--offload-weights": offload_weights, "--nnodes": nnodes,
            "--node-rank": node_rank, "--master-addr": master_addr, "--master-port": master_port,
            "--hostfile": hostfile, "--online": online, "--budget": budget,
            "--dtype": dtype is not WeightsDtype.bfloat16,
        }  # fmt: skip
        hint = "leave it out, or name the model's folder without --endpoint"
        if wrong := [Problem(name, "is not used with --endpoint", hint) for name, given in unused.items() if given]:
            end_with(wrong, output)
        if thinking and chat_template is False:
            end_with([Problem("--thinking", "the chat template is not used", "leave it out")], output)
        suites, notes = or_exit(lambda: _leave_out_measured(suites), output)
        sources, plan = or_exit(lambda: plan_questions(model, suites, path, sources, amount), output)
        key_name = endpoint_key_env or "OPENAI_API_KEY"
        served = or_exit(
            lambda: Endpoint(
                read_address(endpoint), model, os.environ.get(key_name, "").strip(), key_name, endpoint_timeout or 600,
                thinking, is_chat=chat_template is not False, report=printing.print_message,
            ),
            output,
        )  # fmt: skip
        _run_endpoint(
            served, suites, replace(plan, notes=(*plan.notes, *notes)), sources,
            replace(amount, lengths=tuple(lengths)), tokenizer=tokenizer,
            has_limit=bool(plan.samples) and max_length is not None, num_requests=endpoint_requests or 4,
            folder=to or Path("runs/evaluations") / name_results(f"{model}-served", suites), output=output, html=html,
        )  # fmt: skip
        return
    of_servers = {
        "--endpoint-key-env": endpoint_key_env, "--endpoint-requests": endpoint_requests,
        "--endpoint-timeout": endpoint_timeout,
    }  # fmt: skip
    if wrong := [
        Problem(name, "is not used without --endpoint", "add it, or leave this out")
        for name, given in of_servers.items()
        if given is not None
    ]:
        end_with(wrong, output)
    slots = launcher.count_rank_slots("cuda") if device is not EvaluationDevice.cpu else 0
    if device is EvaluationDevice.cuda and not slots:
        end_with([Problem("--device", "no GPU was found", "use --device cpu, or run ulysses doctor")], output)
    machine = Machine(nnodes, node_rank, master_addr, master_port, hostfile)
    nodes, num_ranks = or_exit(lambda: find_place(sp_size, slots, os.environ, machine), output)
    if budget is not None and not against_retrieval:
        end_with([Problem("--budget", "is not used without --against-retrieval", "add it, or leave this out")], output)
    if gpu is not None and not dry_run:
        end_with([Problem("--gpu", "is not used without --dry-run", "add it, or leave this out")], output)
    if not nodes.rank:  # the other machines receive the questions
        sources, plan = or_exit(lambda: plan_questions(model, suites, path, sources, amount), output)
    if nodes.count > 1:
        printing.print_message(f"machines: {nodes.describe()}")
    folder = to or Path("runs/evaluations") / name_results(model, suites)
    reads_files = bool(set(suites) & read)
    question = ModelQuestion(
        sp_size, num_ranks, max(lengths, default=0) + thinking, dtype.value, tokenizer, "cuda" if slots else "cpu",
        trust_remote_code, offload_weights, uses_positions=reads_files and max_length is None,
    )  # fmt: skip

    def prepare(name: str, question: ModelQuestion) -> tuple[str, ModelShape]:
        found = find_model(name, folder / "models", trust_remote_code=trust_remote_code)
        return prepare_model(found, None, question, online=online)

    def choose_limit(shape: ModelShape) -> int:
        """The most tokens of a question from files, with its answer."""
        return shape.max_position_embeddings if question.uses_positions else max(lengths)

    def list_positions(limit: int) -> list[int]:
        """Positions that are used. Questions of files that do not fit with a thought are not asked."""
        return [*(each + thinking for each in lengths), *([limit] if reads_files else [])]

    if dry_run:
        from ulysses_cli.hardware_table import load_hardware

        # a checkpoint is not exported: what it was trained from has its shape
        base, config = or_exit(lambda: find_base(model), output)
        _, shape = or_exit(lambda: prepare_model(base, config, question, online=online), output)
        if against is not None:
            other_base, other_config = or_exit(lambda: find_base(against), output)
            or_exit(lambda: prepare_model(other_base, other_config, question, online=online), output)
        kind = or_exit(lambda: load_hardware().get_gpu(gpu), output) if gpu is not None else None
        limit = choose_limit(shape)
        every = list(dict.fromkeys([*lengths, limit]))
        predictions = predict_evaluation(
            shape, plan, every, made=lengths, limit=limit, num_samples=samples or DEFAULT_SAMPLES, gpu=kind,
            sp_size=sp_size, num_ranks=num_ranks, bytes_per_number=4 if dtype is WeightsDtype.float32 else 2,
            quantized=base.recipe["lora"]["quantize_base"] if "lora" in base.recipe else None,
            is_on_host=offload_weights, num_models=1 if against is None else 2, price=price,
            thinking=thinking,
        )  # fmt: skip
        past = note_positions(list_positions(limit), [shape])
        notes = [*plan.notes, *past, *list_uncounted(plan, against, against_retrieval)]
        if output is Format.json:
            printing.print_json({"predictions": predictions, "notes": notes})
        else:
            printing.print_data(proofs.format_predictions(predictions, shape.name, notes))
        return
    own, shape = or_exit(lambda: prepare(model, question), output)
    limit, shapes, other = choose_limit(shape), [shape], None
    if against is not None:  # it answers the same questions
        same = replace(question, max_length=max([*lengths, limit]) + thinking, uses_positions=False)
        other, other_shape = or_exit(lambda: prepare(against, same), output)
        shapes.append(other_shape)
    task = {
        "subject": model,
        "model": own,
        "against": other,
        "other": against,
        "suites": suites,
        "lengths": lengths or [limit],
        "samples": samples or DEFAULT_SAMPLES,
        "samples_of_files": samples,
        "harness_limit": samples,
        "seed": seed,
        "sources": sources.as_json(),
        "budgets": budgets if against_retrieval else [],
        "sp_size": sp_size,
        "num_ranks": num_ranks,
        "output": str(folder),
        "with_template": chat_template,
        "thinking": thinking,
        "max_prompt_tokens": limit if reads_files else 0,
        "notes": note_positions(list_positions(limit), shapes),
        "price": price,
    }
    run(task, "cuda" if slots else "cpu", output, html, nodes)


def _run_endpoint(
    endpoint: Endpoint,
    suites: Sequence[str],
    plan: Plan,
    sources: Sources,
    amount: Amount,
    *,
    tokenizer: str | None,
    has_limit: bool,
    num_requests: int,
    folder: Path,
    output: Format,
    html: Path | None,
) -> None:
    """Asks a served model, without a child process, and shows what it answered. `has_limit`: whether the longest length
    also bounds questions of files."""
    from ulysses_cli.commands.children.evaluating import show_findings
    from ulysses_cli.evaluate.endpoint import EndpointLost, ServedEvaluation, ServedTokenizer, run_served
    from ulysses_cli.hub import find_folder
    from ulysses_cli.plan.problem import FAILED, Problem, RecipeError
    from ulysses_cli.report import printing

    def find_tokenizer() -> ServedTokenizer | None:
        name = tokenizer or endpoint.model
        found = find_folder(name)
        if found is not None and (found / "tokenizer.json").is_file():
            return ServedTokenizer(found / "tokenizer.json")
        if not (plan.tasks or has_limit or tokenizer):
            return None
        message = f"lengths are counted by a tokenizer, and {name} has no tokenizer.json on this machine"
        raise RecipeError([Problem("--tokenizer", message, "name a folder with it, or the hub name of a cached model")])

    def ask() -> dict[str, Any]:
        check_page(html)
        own = find_tokenizer()
        endpoint.check_model()
        limit = max(amount.lengths) if has_limit else 0
        asked = ServedEvaluation(endpoint, plan, amount, sources, folder, own, limit, num_requests)
        return run_served(asked, printing.print_message)

    try:
        findings = or_exit(ask, output)
    except EndpointLost as error:
        hint = "what was answered is kept: start the same command again when the server answers"
        problem = Problem("--endpoint", str(error), hint)
        if output is Format.json:
            printing.print_json({"problems": [problem.as_json()]})
        else:
            printing.print_problems([problem])
        raise typer.Exit(FAILED) from None
    show_findings(findings, {"subject": endpoint.model, "suites": suites, "output": str(folder)}, output, html)


def _leave_out_measured(suites: Sequence[str]) -> tuple[list[str], list[str]]:
    """The suites that a server can be asked, and notes on the others. Raises RecipeError where none is left."""
    from ulysses_cli.evaluate.suites import CALLS, HARNESS
    from ulysses_cli.evaluate.summary import TASK as LOSS
    from ulysses_cli.plan.problem import Problem, RecipeError

    left_out = [name for name in suites if name in (LOSS, CALLS) or name.startswith(HARNESS)]
    if not left_out:
        return list(suites), []
    message = f"{', '.join(left_out)}: left out, since a server is asked for answers alone, not for losses or tokens"
    if len(left_out) == len(suites):
        hint = "name another suite, or the model's folder without --endpoint"
        raise RecipeError([Problem("--suite", message, hint)])
    return [name for name in suites if name not in left_out], [message]
