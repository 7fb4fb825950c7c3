"""Rules about pairs of answers and what does not go with them. Run by check.py."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from ulysses_cli.plan.problem import Problem
from ulysses_cli.plan.recipe.preference_section import SMOOTHED, UNPAIRED, WITHOUT_REFERENCE
from ulysses_cli.plan.recipe.recipe import Recipe

Problems = Iterator[Problem]


def check_sources(recipe: Recipe) -> Problems:
    """Pairs are learned by the section `preference`, and by nothing else; answers without a partner by kto."""
    wanted = "unpaired" if recipe.preference is not None and recipe.preference.loss in UNPAIRED else "preference"
    for section in ("datasets", "eval_datasets"):
        for index, dataset in enumerate(getattr(recipe.data, section)):
            key = f"data.{section}.{index}.type"
            if recipe.preference is None and dataset.type in ("preference", "unpaired"):
                loss = "sigmoid}, which is DPO" if dataset.type == "preference" else "kto}"
                what = f"{dataset.type} holds judged answers, which only a run with a section `preference` learns from"
                yield Problem(key, what, f"write preference: {{loss: {loss}")
            elif recipe.preference is not None and dataset.type not in ("auto", wanted):
                held = "pairs of answers" if wanted == "preference" else "answers with labels"
                what = f"{dataset.type} holds no {held}, and {recipe.preference.loss} learns from nothing else"
                yield Problem(key, what, f"write type: {wanted}, or leave the section out")


def check_loss(recipe: Recipe) -> Problems:
    """A loss gets the settings that it has."""
    preference = recipe.preference
    if preference is None:
        return
    smoothing, key = preference.label_smoothing, "preference.label_smoothing"
    if smoothing and preference.loss not in SMOOTHED:
        hint = f"leave it out, or use one of {', '.join(SMOOTHED)}"
        yield Problem(key, f"{preference.loss} has no such setting", hint)
    if preference.loss == "exo_pair" and not smoothing:
        yield Problem(key, "exo_pair takes its logarithm, so it cannot be 0", f"write {key}: 0.001")
    if preference.sft_weight and preference.loss in UNPAIRED:
        yield Problem("preference.sft_weight", f"{preference.loss} has no such setting", "leave it out")
    own = {"discopop_tau": "discopop", "gamma": "simpo", "desirable_weight": "kto", "undesirable_weight": "kto"}
    for name, loss in own.items():
        if name in preference.model_fields_set and preference.loss != loss:
            yield Problem(f"preference.{name}", f"{preference.loss} has no such setting", "leave it out")


def check_data(recipe: Recipe) -> Problems:
    """Both answers of a pair stand whole in one row and see nothing but their prompt."""
    if recipe.preference is None:
        return
    data = recipe.data
    if data.packing == "stream":
        yield Problem("data.packing", "stream cuts answers where a row ends", "use documents or off")
    if data.excess_length_strategy in ("split", "truncate"):
        what = f"{data.excess_length_strategy} would compare parts of answers"
        yield Problem("data.excess_length_strategy", what, "use raise or drop")
    if data.attend_across_documents:
        what = "the rejected answer would see the chosen one"
        yield Problem("data.attend_across_documents", what, "set it to false")
    if data.assistant_only_loss:
        what = "is not used: of a pair the answers are the targets"
        yield Problem("data.assistant_only_loss", what, "leave it out")
    if not data.completion_only_loss:
        what = "false would count the prompt as a part of both answers"
        yield Problem("data.completion_only_loss", what, "leave it out")
    if data.on_rewritten_turns == "split":
        what = "split makes several texts of a chat, and an answer is one"
        yield Problem("data.on_rewritten_turns", what, "use raise, mask or keep")


def check_training(recipe: Recipe) -> Problems:
    """What would change token losses, or the model from one forward to the next."""
    if recipe.preference is None:
        return
    if recipe.train.z_loss_weight:
        yield Problem("train.z_loss_weight", "is not used: a pair's loss is one of whole answers", "leave it out")
    if recipe.train.token_loss is not None:
        yield Problem("train.token_loss", "is not used: a pair's loss is one of whole answers", "leave it out")
    has_reference = recipe.preference.loss not in WITHOUT_REFERENCE
    if recipe.lora is not None and recipe.lora.dropout and has_reference:
        what = f"{recipe.lora.dropout:g}: an answer would differ from its reference by chance"
        yield Problem("lora.dropout", what, "set it to 0")


RULES: tuple[Callable[[Recipe], Problems], ...] = (check_sources, check_loss, check_data, check_training)
