"""Reads the task of `ulysses evaluate` and runs it: one model, or two whose answers are compared."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from ulysses_cli.data.tokenizing.tokenizer import load_tokenizer
from ulysses_cli.evaluate.prompts import Prompter
from ulysses_cli.evaluate.suites import Amount, Sources, check_lengths, plan_suites
from ulysses_cli.evaluate.summary import compare_results
from ulysses_cli.plan.recipe.loader import parse_recipe
from ulysses_cli.prove.quality.evaluation import ModelEvaluation, run_evaluation


def check_task(evaluation: ModelEvaluation) -> None:
    """Raises RecipeError for what is wrong with tasks, files, template or lengths, before a model is loaded."""
    recipe = parse_recipe(evaluation.model, "evaluate", []).recipe
    prompter = Prompter(load_tokenizer(recipe.model, recipe.data), with_template=evaluation.with_template)
    check_lengths(plan_suites(evaluation.suites, evaluation.sources), prompter, evaluation.amount)


def run_task(options: Mapping[str, Any], device: str, report: Callable[[str], None]) -> dict[str, Any]:
    """`against`: the recipe text of a second model, which answers the same questions first."""
    sources = Sources(**{name: Path(path) if path else None for name, path in options["sources"].items()})
    evaluation = ModelEvaluation(
        options["model"],
        tuple(options["suites"]),
        Amount(tuple(options["lengths"]), options["samples"], options["seed"]),
        sources,
        options["num_ranks"],
        options["output"],
        options["with_template"],
        options["max_prompt_tokens"],
    )
    report("making sure that each task fits")
    check_task(evaluation)
    before = None
    if options["against"]:
        folder = str(Path(options["output"]) / "against")
        before = run_evaluation(replace(evaluation, model=options["against"], output=folder), device, report)
    findings = run_evaluation(evaluation, device, report)
    if before is not None:
        findings["against"] = {key: before[key] for key in ("scores", "mean", "effective_length")}
        findings["differences"] = compare_results(before["results"], findings["results"])
    price = options["price"]
    if price:
        findings["usd"] = findings["seconds"] / 3600 * findings["num_ranks"] * price
    return {**findings, "subject": options["subject"]}
