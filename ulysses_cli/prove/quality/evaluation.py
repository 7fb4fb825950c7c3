"""Runs the task of `ulysses evaluate`: one model, or two whose answers are compared. Builds a model on ranks of this
machine without an optimizer, asks all questions, sums up, and says how long it still takes."""

from __future__ import annotations

import hashlib
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ulysses_cli.data.tokenizing.pieces import list_parting_letters
from ulysses_cli.data.tokenizing.renderer import Renderer
from ulysses_cli.data.tokenizing.tokenizer import get_variables, load_tokenizer
from ulysses_cli.evaluate.prompts import Prompter, TaskPrompt
from ulysses_cli.evaluate.results import (
    REPORT_SECONDS,
    SPENT,
    ResultsFile,
    TimeLeft,
    list_asked,
    split_results,
)
from ulysses_cli.evaluate.retrieval import WHOLE, check_retrieval, get_way, keep_whole, make_ways, summarize_retrieval
from ulysses_cli.evaluate.suites import (
    CALLS,
    Amount,
    Plan,
    Sources,
    check_lengths,
    check_samples,
    count_prompts,
    make_prompts,
    plan_suites,
)
from ulysses_cli.evaluate.summary import TASK as LOSS
from ulysses_cli.evaluate.summary import compare_all, compare_losses, compare_results, summarize, summarize_losses
from ulysses_cli.plan.flops import compute_layers_flops
from ulysses_cli.plan.models.model_files import fingerprint_weights, list_weight_files
from ulysses_cli.plan.problem import Problem, RecipeError
from ulysses_cli.plan.recipe.loader import parse_recipe
from ulysses_cli.plan.units import format_count
from ulysses_cli.prove.machines import MachinePlace, Machines
from ulysses_cli.prove.quality.documents import Found, read_chats, read_documents
from ulysses_cli.prove.ranks import run_on_ranks
from ulysses_cli.prove.results import describe_machine
from ulysses_cli.train.document_losses import CutDocument
from ulysses_cli.train.generation.questions import make_call_prompts
from ulysses_cli.train.record import list_versions

if TYPE_CHECKING:
    from ulysses_cli.prove.quality.documents import EvaluatedModel


TIME_LIMIT = 14 * 24 * 3600.0


@dataclass(frozen=True)
class ModelEvaluation:
    """Everything that the ranks need to know. `model`: the text of a recipe; `output`: the folder of the results."""

    model: str
    suites: tuple[str, ...]
    amount: Amount
    sources: Sources
    num_ranks: int
    output: str
    with_template: bool | None = None
    max_prompt_tokens: int = 0
    documents: tuple[CutDocument, ...] = ()
    prompts: tuple[TaskPrompt, ...] = ()  # of turns with calls
    budgets: tuple[int, ...] = ()  # in tokens, of what BM25 finds; () asks no question about retrieval
    harness: Mapping[str, Any] | None = None  # what load_tasks takes
    harness_limit: int | None = None  # samples of each of lm-eval's tasks; None: all
    thinking: int = 0  # tokens for a thought before each answer

    def make_plan(self) -> Plan:
        return plan_suites(self.suites, self.sources, self.amount)

    def make_prompter(self, tokenizer: Any) -> Prompter:
        letters = list_parting_letters(tokenizer)
        settings: dict[str, Any] = {"with_template": self.with_template, "letters": letters, "thinking": self.thinking}
        with closing(Renderer(tokenizer, variables=get_variables(tokenizer))) as renderer:
            return Prompter(tokenizer, renderer.render_text, **settings)

    def list_settings(self, tokenizer: Any) -> dict[str, Any]:
        """What results depend on. Tokenizer and template are hashed, since two models may share a name."""
        vocabulary = hashlib.sha256(repr(sorted(tokenizer.get_vocab().items())).encode()).hexdigest()[:16]
        template = hashlib.sha256(str(getattr(tokenizer, "chat_template", "")).encode()).hexdigest()[:16]
        recipe = parse_recipe(self.model, "evaluate", []).recipe
        return {
            "model": recipe.model.model_dump(mode="json"),
            **({"lora": recipe.lora.model_dump(mode="json")} if recipe.lora is not None else {}),
            "weights": fingerprint_weights(Path(recipe.model.name_or_path or "").expanduser()),
            "seed": self.amount.seed,
            "tokenizer": vocabulary,
            "template": template,
            **({"variables": variables} if (variables := get_variables(tokenizer)) else {}),
            "with_template": self.with_template,
            "thinking": self.thinking,
            "sources": self.sources.as_json(),
            "content": self.sources.hash_content(),
        }

    def list_facts(self, tokenizer: Any) -> dict[str, Any]:
        """What all machines of one evaluation must share. Where a model lies may differ, its files may not."""
        recipe = parse_recipe(self.model, "evaluate", []).recipe
        settings = recipe.model_dump(mode="json")
        name = settings["model"].pop("name_or_path") or ""
        if settings["lora"] is not None:
            settings["lora"]["adapter_name_or_path"] = Path(settings["lora"]["adapter_name_or_path"]).name
        folder = Path(name).expanduser()
        files = [(file.name, file.stat().st_size) for file in list_weight_files(folder)] if folder.is_dir() else []
        config = folder / "config.json"
        return {
            "the number of ranks": self.num_ranks,
            "how a model is loaded": settings,
            "the model's weight files": sorted(files) or name,
            "the model's config.json": hashlib.sha256(config.read_bytes()).hexdigest() if config.exists() else "",
            "the tokenizer": hashlib.sha256(repr(sorted(tokenizer.get_vocab().items())).encode()).hexdigest(),
        }


def run_evaluation(
    evaluation: ModelEvaluation,
    device: str,
    report: Callable[[str], None],
    machines: Machines | None = None,
    name: str = "",
) -> dict[str, Any]:
    """Returns the findings that report/proofs.py shows; {} on a machine that has not rank 0. `name`: of this
    evaluation among those of the same machines."""
    ours, theirs = Pipe(duplex=False)
    listener = threading.Thread(target=_pass_on, args=(ours, report), daemon=True)
    listener.start()
    started = time.monotonic()
    try:
        findings: dict[str, Any] | None = run_on_ranks(
            evaluation.num_ranks,
            _run_rank,
            evaluation,
            theirs,
            machines is not None,
            device=device,
            time_limit=TIME_LIMIT,
            machines=machines,
            name=name,
        )
    except BaseException:
        if machines is not None:
            machines.tell_failure()
        raise
    finally:
        theirs.close()
    if findings is None:
        return {}
    return {
        **findings,
        "command": "evaluate",
        "passed": True,
        "seconds": round(time.monotonic() - started, 2),
        "num_ranks": evaluation.num_ranks,
        "machine": describe_machine(),
    }


def _pass_on(pipe: Connection, report: Callable[[str], None]) -> None:
    while True:
        try:
            report(pipe.recv())
        except (EOFError, OSError):
            return


def _run_rank(device: Any, evaluation: ModelEvaluation, pipe: Connection, is_on_several: bool) -> dict[str, Any] | None:
    """One rank. Returns rank 0's findings. On several machines rank 0 alone has the questions and the documents."""
    from ulysses_cli.prove.quality.documents import load_for_evaluation
    from ulysses_cli.train.document_losses import measure_documents
    from ulysses_cli.train.generation.questions import Quiz, ask_questions
    from ulysses_cli.train.processes.consistency import gather_values, scatter_values

    started = time.monotonic()
    model = load_for_evaluation(evaluation.model, device, pipe.send)
    groups, quiz, own = model.groups, None, None
    if is_on_several:
        shares = [evaluation] * groups.layout.world_size if groups.is_first else None
        evaluation = replace(scatter_values(shares, groups.host_group), model=evaluation.model)
    if groups.is_first:
        own = _Questions(evaluation, model, pipe.send, started)
        quiz = Quiz(own.walk(), own.prompter, own.one_answer_tasks, own.record)
    ask_questions(model.engine, quiz, model.stop_tokens)
    if evaluation.documents:
        # a value that all ranks share: rank 0 alone reads the file of the results
        done = gather_values(own.file.done if own is not None else None, groups.host_group)[0]
        measure_documents(
            model.engine, model.batching, evaluation.documents, done, own.record if own is not None else _ignore
        )
    rows: list[dict[str, Any]] = []
    if evaluation.harness is not None:
        from ulysses_cli.prove.quality.harness import load_tasks, run_harness, serve

        if own is None:
            serve(model)
        else:
            tasks, cache = load_tasks(**evaluation.harness), Path(evaluation.output) / "lm-eval"
            wants_template = bool(evaluation.with_template)
            rows = run_harness(model, tasks, cache, evaluation.harness_limit, wants_template, pipe.send)
    return {**own.describe(), "lm_eval": rows} if own is not None else None


def _ignore(_: object) -> None:
    return None


def _compare_documents(evaluation: ModelEvaluation, results: Sequence[Mapping[str, Any]]) -> None:
    """Raises RecipeError where a document or a chat has changed since it was read."""
    before = {result["id"]: result["prompt_hash"] for result in results if result["task"] in (LOSS, CALLS)}
    now = [(each.name, each.digest, f"{each.source} is not the document whose loss") for each in evaluation.documents]
    now += [(each.name, each.digest, f"{each.name} is not the turn whose answer") for each in evaluation.prompts]
    for name, digest, what in now:
        if before.get(name, digest) != digest:
            message = f"{what} was measured before"
            raise RecipeError([Problem("--output", message, "name another folder, or remove this one")])


class _Questions:
    """Rank 0's side: which questions are left, their results, and the progress with the time that is left. `started`:
    when the rank began to load the model."""

    def __init__(
        self, evaluation: ModelEvaluation, model: EvaluatedModel, send: Callable[[str], None], started: float
    ) -> None:
        self.evaluation, self.send, tokenizer = evaluation, send, model.tokenizer
        self.prompter = evaluation.make_prompter(tokenizer)
        self.plan = evaluation.make_plan()
        self.one_answer_tasks = {task.name for task in self.plan.tasks if task.has_one_answer}
        self.settings = evaluation.list_settings(tokenizer)
        self.file = ResultsFile(Path(evaluation.output) / "results.jsonl", self.settings)
        self.too_long: list[dict[str, Any]] = []
        _compare_documents(evaluation, self.file.results)
        counts = count_prompts(self.plan, evaluation.amount) + Counter(each.length for each in evaluation.documents)
        counts[0] += len(evaluation.prompts)
        self.time_left = TimeLeft(counts, lambda length: compute_layers_flops(model.shape, [length]))
        known = self._list_asked()
        for result in keep_whole(known):
            self.time_left.drop(result["length"])
        self.total, self.num_before = counts.total(), len(known)
        self.earlier_seconds = sum(result.get(SPENT, 0.0) for result in known)
        self.num_recorded = 0
        self.num_ways = 0  # so far: how many there will be is not known before
        self.before, self.recorded, self.told = started, time.monotonic(), 0.0
        if self.num_before:
            send(f"going on: {format_count(self.num_before, 'question')} answered already")

    def _list_asked(self) -> list[dict[str, Any]]:
        return list_asked(self.file.results, self.plan, self.evaluation.amount, self.evaluation.prompts)

    def walk(self) -> Iterator[TaskPrompt]:
        """The questions that are not answered yet. Those that are too long are listed, and not cut."""
        limit, done = self.evaluation.max_prompt_tokens, self.file.done
        for prompt in self._make_prompts():
            needed = len(prompt.tokens) + self.prompter.count_new_tokens(prompt.sample)
            if limit and not prompt.length and needed > limit:
                own = {"id": prompt.name, "task": prompt.sample.task, "tokens": needed}
                self.too_long.append({**own, "file_id": prompt.sample.facts.get("id")})
                self.time_left.drop(prompt.length)
            elif prompt.name not in done:
                yield prompt

    def _make_prompts(self) -> Iterator[TaskPrompt]:
        amount, budgets = self.evaluation.amount, self.evaluation.budgets
        # which ways there are depends on the question itself, so that answered ones are made again
        done = self.file.done if not budgets else set[str]()
        for prompt in make_prompts(self.plan, self.prompter, amount, _ignore, done):
            yield prompt
            if budgets:
                yield from self._make_ways(prompt)
        yield from self.evaluation.prompts

    def _make_ways(self, prompt: TaskPrompt) -> Iterator[TaskPrompt]:
        for way in make_ways(prompt, self.prompter, self.evaluation.budgets):
            self.num_ways += way.name not in self.file.done
            yield way

    def record(self, result: dict[str, Any]) -> None:
        now = time.monotonic()
        self.file.add({**result, SPENT: round(now - self.before, 3)})
        self.before = now
        if get_way(result) == WHOLE:  # the time of its other ways is counted with the next question
            self.time_left.note(result["length"], now - self.recorded)
            self.recorded = now
        self.num_recorded += 1
        number = self.num_recorded
        if now - self.told >= REPORT_SECONDS or number == 1:
            self.told = now
            total = self.total + self.num_ways - len(self.too_long)
            left = f"{self.time_left.estimate():.0f} s left"
            if self.evaluation.budgets:
                left = f"at least {left}"  # questions of later ones are not counted yet
            place = f"question {number + self.num_before} of {total}"
            self.send(f"{place}, {result['task']} at {result['prompt_tokens']:,} tokens; {left}")

    def describe(self) -> dict[str, Any]:
        results, notes = self._list_asked(), list(self.plan.notes)
        if number := sum(result.get("has_answer") is False for result in results):
            thoughts = format_count(number, "thought")
            notes.append(
                f"{thoughts} used up the {self.evaluation.thinking:,} tokens of --thinking: no answer, scored 0"
            )
        answers, losses = split_results(results)
        summary = {**summarize(keep_whole(answers), self.too_long), "losses": summarize_losses(losses)}
        return {
            **summary,
            "results": results,
            "notes": notes,
            "settings": self.settings,
            "versions": list_versions(),
            "earlier_seconds": round(self.earlier_seconds, 2),
        }


def check_task(evaluation: ModelEvaluation, against: str | None) -> Found:
    """Raises RecipeError for what is wrong with tasks, files, template, documents or lengths, before a model is loaded.
    Returns the documents whose loss is measured, the prompts of turns with calls, and notes."""
    tokenizer = _load_tokenizer(evaluation.model)
    prompter = evaluation.make_prompter(tokenizer)
    if against and evaluation.thinking:
        evaluation.make_prompter(_load_tokenizer(against))  # refuses a model that knows no thoughts
    plan, amount = evaluation.make_plan(), evaluation.amount
    check_lengths(plan, prompter, amount)
    check_samples(plan, prompter, evaluation.max_prompt_tokens)
    if evaluation.harness is not None:
        from ulysses_cli.prove.quality.harness import load_tasks

        load_tasks(**evaluation.harness)
    notes = prompter.list_notes() if plan.samples or plan.tasks else []
    notes += check_retrieval(plan.samples, bool(plan.tasks)) if evaluation.budgets else []
    reads_tokens = [name for name, has in ((LOSS, plan.has_loss), (CALLS, plan.has_calls)) if has]
    if against and reads_tokens and _load_tokenizer(against).get_vocab() != tokenizer.get_vocab():
        what = "losses per token" if plan.has_loss else "answers to the same tokens"
        message = f"the two models have different tokenizers, so their {what} cannot be compared"
        hint = f"leave {' and '.join(reads_tokens)} out of --suite, or name a model of this family"
        raise RecipeError([Problem("--against", message, hint)])
    sets, prompts = evaluation.sources.documents, list[TaskPrompt]()
    if plan.has_calls:
        limit, thinking = evaluation.max_prompt_tokens, evaluation.thinking
        chats = read_chats(sets, tokenizer)
        prompts, said = make_call_prompts(
            chats, tokenizer, amount.num_samples, seed=amount.seed, limit=limit, thinking=thinking
        )
        notes += said
    found = Found((), ())
    if plan.has_loss:
        found = read_documents(sets, tokenizer, amount.lengths, amount.num_samples)
    return replace(found, notes=(*found.notes, *notes), prompts=tuple(prompts))


def _name_harness(evaluation: ModelEvaluation) -> dict[str, Any] | None:
    """What load_tasks takes. `metadata`: what lm-eval's own tasks of a given length read."""
    plan, sources = evaluation.make_plan(), evaluation.sources
    if not plan.harness:
        return None
    model = parse_recipe(evaluation.model, "evaluate", []).recipe.model
    metadata = {"tokenizer": model.tokenizer or model.name_or_path, "max_seq_lengths": list(evaluation.amount.lengths)}
    return {"names": list(plan.harness), "folder": sources.harness, "metadata": metadata}


def _load_tokenizer(text: str) -> Any:
    recipe = parse_recipe(text, "evaluate", []).recipe
    return load_tokenizer(recipe.model, recipe.data, is_finished=True)


def _meet(place: MachinePlace, evaluations: Sequence[ModelEvaluation], report: Callable[[str], None]) -> Machines:
    """Waits for the other machines. Raises RecipeError where one has other versions, or would load other models."""
    facts: dict[str, Any] = {"versions": list_versions(), "the number of models": len(evaluations)}
    for each in evaluations:
        own = each.list_facts(_load_tokenizer(each.model))
        facts |= {f"{name} of --against" if name in facts else name: value for name, value in own.items()}
    return Machines(place, facts, report)


def run_task(options: Mapping[str, Any], device: str, report: Callable[[str], None]) -> dict[str, Any]:
    """`against`: the recipe text of a second model, which answers the same questions first. `samples_of_files`: how
    many of each task that is read from files, None for all."""
    against = options["against"]
    evaluation = ModelEvaluation(
        options["model"],
        tuple(options["suites"]),
        Amount(tuple(options["lengths"]), options["samples"], options["seed"], options["samples_of_files"]),
        Sources.read(options["sources"]),
        options["num_ranks"],
        options["output"],
        options["with_template"],
        options["max_prompt_tokens"],
        budgets=tuple(options["budgets"]),
        thinking=options["thinking"],
    )
    place = MachinePlace(**options["machines"]) if options["machines"] else None
    found = Found((), ())
    if place is None or not place.rank:
        report("making sure that each task fits")
        evaluation = replace(evaluation, harness=_name_harness(evaluation), harness_limit=options["harness_limit"])
        found = check_task(evaluation, against)
        evaluation = replace(evaluation, documents=found.documents, prompts=found.prompts)
    other = replace(evaluation, model=against, output=str(Path(options["output"]) / "against")) if against else None
    other = replace(other, budgets=()) if other else None  # how it retrieves is not compared
    machines = _meet(place, [evaluation, *([other] if other else [])], report) if place else None
    try:
        before = run_evaluation(other, device, report, machines, "against") if other else None
        findings = run_evaluation(evaluation, device, report, machines, "subject")
    finally:
        if machines is not None:
            machines.leave()
    if not findings:
        return {"command": "evaluate", "passed": True, "machine_number": options["machines"]["rank"]}
    findings["notes"] += [*found.notes, *options["notes"]]
    if before is not None:
        kept = (
            "scores", "mean", "effective_length", "heat_map", "losses", "lm_eval", "seconds", "earlier_seconds",
            "results",
        )  # fmt: skip
        findings["against"] = {"subject": options["other"], **{key: before[key] for key in kept}}
        old, new = (split_results(each["results"]) for each in (before, findings))
        pair = [keep_whole(each[0]) for each in (old, new)]
        findings["differences"], findings["difference"] = compare_results(*pair), compare_all(*pair)
        findings["loss_differences"] = compare_losses(old[1], new[1])
    price = options["price"]
    if evaluation.budgets:
        answers, _ = split_results(findings["results"])
        findings["retrieval"] = summarize_retrieval(answers, options["sp_size"], price)
    if price:
        findings["usd"] = count_seconds(findings, before) / 3600 * findings["num_ranks"] * price
    return {**findings, "subject": options["subject"]}


def count_seconds(findings: Mapping[str, Any], before: Mapping[str, Any] | None) -> float:
    """What was paid for: this start, the starts of this evaluation that were killed, and those of the other model."""
    each = [findings] if before is None else [findings, before]
    return sum(one["seconds"] + one["earlier_seconds"] for one in each)
