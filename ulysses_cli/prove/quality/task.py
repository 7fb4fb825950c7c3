"""Reads the task of `ulysses evaluate` and runs it: one model, or two whose answers are compared."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from ulysses_cli.data.tokenizing.tokenizer import load_tokenizer
from ulysses_cli.evaluate.losses import TASK as LOSS
from ulysses_cli.evaluate.losses import compare_losses
from ulysses_cli.evaluate.prompts import TaskPrompt
from ulysses_cli.evaluate.retrieval import check_retrieval, keep_whole, summarize_retrieval
from ulysses_cli.evaluate.suites import CALLS, Amount, Sources, check_lengths, check_samples
from ulysses_cli.evaluate.summary import compare_all, compare_results
from ulysses_cli.plan.problem import Problem, RecipeError
from ulysses_cli.plan.recipe.loader import parse_recipe
from ulysses_cli.prove.quality.documents import Found, read_chats, read_documents
from ulysses_cli.prove.quality.evaluation import ModelEvaluation, run_evaluation, split_results
from ulysses_cli.prove.ranks.machines import MachinePlace, Machines
from ulysses_cli.train.generation.call_turns import make_call_prompts
from ulysses_cli.train.telemetry.run_file import list_versions


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
    reads_tokens = [LOSS] * plan.has_loss + [CALLS] * plan.has_calls
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
