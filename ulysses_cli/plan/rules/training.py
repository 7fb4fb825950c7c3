"""Rules about steps, schedule, optimizer, the split for evaluation, notifications and money, and about pairs of
answers and what does not go with them. check.py runs them. Each yields Problems."""

from __future__ import annotations

import re
import shlex
from collections.abc import Callable

from ulysses_cli.plan.problem import Problem, Problems
from ulysses_cli.plan.recipe.recipe import Recipe
from ulysses_cli.plan.recipe.sections import SMOOTHED, UNPAIRED, WITHOUT_REFERENCE, Preference
from ulysses_cli.plan.rules.files import HUB_NAME
from ulysses_cli.plan.schedule import ACCURACY_MEASURE, LOSS_MEASURE, POLYNOMIAL_END, SCORE_MEASURE
from ulysses_cli.plan.secrets import find_variable
from ulysses_cli.plan.units import format_count

MAX_PROMPT_CHARS = 20_000
MAX_HOST_LENGTH = 253
HOST = re.compile(r"(?P<name>\[[0-9a-fA-F:.]+\]|[\w-]{1,63}(?:\.[\w-]{1,63})*\.?)(?::(?P<port>[0-9]{1,5}))?", re.ASCII)
# transformers' schedules: numbers of which exactly one must be given, and numbers that may be given.
SCHEDULES: dict[str, tuple[set[str], set[str]]] = {
    "linear": (set(), set()),
    "constant": (set(), set()),
    "constant_with_warmup": (set(), set()),
    "cosine": (set(), {"num_cycles"}),
    "cosine_with_min_lr": ({"min_lr", "min_lr_rate"}, {"num_cycles"}),
    "polynomial": (set(), {"lr_end", "power"}),
    "inverse_sqrt": (set(), {"timescale"}),
    "warmup_stable_decay": ({"num_decay_steps"}, {"num_stable_steps", "min_lr_ratio", "num_cycles"}),
}


def check_optimizer(recipe: Recipe) -> Problems:
    """8-bit AdamW works on weights on the GPU; DeepSpeed's Adam on the host has only float32 moments."""
    where = recipe.memory.offload_optimizer
    if recipe.train.optim == "adamw_8bit" and where not in ("none", "auto"):
        yield Problem(
            "train.optim",
            f"adamw_8bit does not run with memory.offload_optimizer: {where}, whose Adam has float32 moments",
            "use train.optim: adamw, or memory.offload_optimizer: none",
        )


def check_muon(recipe: Recipe) -> Problems:
    """Muon needs whole matrices: ranks of ZeRO-3 exchange their shares of one, on the GPU."""
    if recipe.train.optim != "muon":
        return
    stage, where = recipe.zero_stage, recipe.memory.offload_optimizer
    if stage < 3:
        what = f"muon needs ZeRO stage 3; stage {stage} cuts its ranks' shares across matrices"
        yield Problem("train.optim", what, "set parallel.zero_stage: 3, or use train.optim: adamw")
    if where not in ("none", "auto"):
        what = f"muon does not run with memory.offload_optimizer: {where}, since it orthogonalizes matrices on the GPU"
        yield Problem("train.optim", what, "use train.optim: adamw, or memory.offload_optimizer: none")
    if recipe.lora is not None:
        what = "muon does not train adapters: a small factor of a matrix is none of the matrices that it is made for"
        yield Problem("train.optim", what, "use train.optim: adamw, or leave lora out")


def check_overlap(recipe: Recipe) -> Problems:
    """Early steps of the optimizer are made on the host, for groups of weights as ZeRO-3 has them."""
    memory, stage = recipe.memory, recipe.zero_stage
    if memory.overlap_optimizer == "auto" or not memory.overlap_optimizer:
        return
    if memory.offload_optimizer in ("none", "nvme"):
        what = (
            f"is not used: it needs the optimizer in host memory, and offload_optimizer is {memory.offload_optimizer}"
        )
        yield Problem("memory.overlap_optimizer", what, "set memory.offload_optimizer: cpu, or leave it out")
    elif recipe.train.optim != "adamw":
        what = f"is not used: it needs the optimizer in host memory, and {recipe.train.optim} stays on the GPU"
        yield Problem("memory.overlap_optimizer", what, "use train.optim: adamw, or leave it out")
    if stage < 3:
        what = f"needs ZeRO stage 3; stage {stage} steps all weights at once, when the backward is over"
        yield Problem("memory.overlap_optimizer", what, "set parallel.zero_stage: 3, or leave it out")


def check_tiles(recipe: Recipe) -> Problems:
    """Large tiles are tiles of MLPs, norms or the loss."""
    memory = recipe.memory
    if memory.large_tiles is True and memory.tiled_mlp is False and memory.tiled_loss is False:
        what = "is not used: tiled_mlp and tiled_loss are false"
        yield Problem("memory.large_tiles", what, "set one of them to auto or true, or leave it out")


def check_steps(recipe: Recipe) -> Problems:
    """The length of the run and of its warm-up is given once."""
    train = recipe.train
    if train.max_steps is not None and train.num_train_epochs is not None:
        yield Problem(
            "train.num_train_epochs",
            f"{train.num_train_epochs:g} and max_steps {train.max_steps} both say how long the run is",
            "keep one; on the command line train.max_steps=null or train.num_train_epochs=null leaves one out",
        )
    if train.warmup_steps and train.warmup_ratio:
        yield Problem(
            "train.warmup_ratio",
            f"{train.warmup_ratio:g} and warmup_steps {train.warmup_steps} both say how long the warm-up is",
            "keep one; on the command line train.warmup_steps=0 or train.warmup_ratio=0 leaves one out",
        )
    if train.max_steps is not None and train.warmup_steps >= train.max_steps and train.warmup_steps:
        yield Problem(
            "train.warmup_steps",
            f"{train.warmup_steps} leaves no step at the full learning rate: max_steps is {train.max_steps}",
            f"use {train.max_steps - 1:,} or fewer" if train.max_steps > 1 else "use 0",
        )


def check_schedule(recipe: Recipe) -> Problems:
    """Each schedule takes its own numbers, by transformers' names, and no others."""
    train, key = recipe.train, "train.lr_scheduler_kwargs"
    name, given = train.lr_scheduler_type, train.lr_scheduler_kwargs
    needed, allowed = SCHEDULES[name]
    for extra in sorted(given.keys() - allowed - needed):
        takes = ", ".join(sorted(needed | allowed)) or "no numbers of its own"
        yield Problem(f"{key}.{extra}", f"is not part of {name}", f"{name} takes {takes}")
    if needed and len(needed & given.keys()) != 1:
        what = ("exactly one of " if len(needed) > 1 else "") + " and ".join(sorted(needed))
        yield Problem(key, f"{name} needs {what}", f"write lr_scheduler_kwargs: {{{max(needed)}: ...}}")
    if name == "constant" and (train.warmup_steps or train.warmup_ratio):
        hint = "use constant_with_warmup, or leave the warm-up out"
        yield Problem("train.lr_scheduler_type", "constant does not warm up", hint)
    if name == "polynomial" and given.get("lr_end", POLYNOMIAL_END) >= train.learning_rate > 0:
        yield Problem(f"{key}.lr_end", f"is not below learning_rate {train.learning_rate:g}", "use a smaller lr_end")
    for lowest, most in (("min_lr", train.learning_rate), ("min_lr_rate", 1.0), ("min_lr_ratio", 1.0)):
        if given.get(lowest, 0.0) >= most > 0:
            peak = "learning_rate" if lowest == "min_lr" else "the whole learning rate,"
            yield Problem(f"{key}.{lowest}", f"is not below {peak} {most:g}", f"use a smaller {lowest}")
    decay = given.get("num_decay_steps", 0.0)
    if train.max_steps is not None and decay and decay + train.warmup_steps > train.max_steps:
        yield Problem(
            f"{key}.num_decay_steps",
            f"decay ({decay:g}) and warm-up ({train.warmup_steps}) take more steps than max_steps {train.max_steps}",
            f"use {train.max_steps - train.warmup_steps} or fewer",
        )


def check_evaluation(recipe: Recipe) -> Problems:
    """Evaluation needs data, from exactly one source."""
    data, run = recipe.data, recipe.run
    if run.eval_steps is not None and not data.eval_datasets and not data.eval_split:
        yield Problem(
            "run.eval_steps",
            f"evaluates every {format_count(run.eval_steps, 'step')}, but there is nothing to evaluate on",
            "write data.eval_split: 0.01 or data.eval_datasets, or leave out run.eval_steps",
        )
    if data.eval_datasets and data.eval_split:
        what = f"{data.eval_split:g} and eval_datasets both say what is evaluated"
        yield Problem("data.eval_split", what, "keep one of the two")


def check_model_choice(recipe: Recipe) -> Problems:
    """Keeping the best model and early stopping need evaluations during the run."""
    run = recipe.run
    named = {"keep_best": run.keep_best, "early_stopping_patience": run.early_stopping_patience}
    if run.keep_best == SCORE_MEASURE and run.eval_suite_steps is None:
        yield Problem(
            "run.keep_best",
            "eval_suite goes by the score of questions that are asked during the run, and none are",
            "write run.eval_suite: [niah_single_1] and run.eval_suite_steps: 100",
        )
    if run.keep_best not in (None, LOSS_MEASURE, SCORE_MEASURE):
        if recipe.preference is None:
            yield Problem(
                "run.keep_best",
                f"{run.keep_best} compares answers, and a run without a section preference has no pairs of them",
                "write run.keep_best: eval_loss",
            )
        elif run.keep_best == ACCURACY_MEASURE and "kto" in recipe.preference.loss:
            yield Problem(
                "run.keep_best",
                f"{run.keep_best} counts pairs, and answers of kto have no partner",
                "write run.keep_best: eval_rewards/margins",
            )
    for name, value in named.items():
        if value is not None and run.eval_steps is None and run.keep_best != SCORE_MEASURE:
            yield Problem(
                f"run.{name}", "needs evaluations during the run", "write run.eval_steps, and data.eval_split: 0.01"
            )
    if run.export_best and run.keep_best is None:
        yield Problem("run.export_best", "needs the best checkpoint to be kept", "write run.keep_best: eval_loss")
    if run.early_stopping_threshold and run.early_stopping_patience is None:
        yield Problem(
            "run.early_stopping_threshold",
            f"{run.early_stopping_threshold:g} is not used without early_stopping_patience",
            "write run.early_stopping_patience: 3, or leave the threshold out",
        )
    elif run.keep_best in (SCORE_MEASURE, ACCURACY_MEASURE) and run.early_stopping_threshold >= 1:
        yield Problem(
            "run.early_stopping_threshold",
            f"no score rises by more than {run.early_stopping_threshold:g}: scores are shares from 0 to 1",
            "write a share below 1, such as 0.01",
        )


def check_samples(recipe: Recipe) -> Problems:
    """Samples need prompts, and short ones: a rank reads a prompt's end by itself."""
    run = recipe.run
    used = {"sample_steps": run.sample_steps is not None, "sample_as_chat": run.sample_as_chat}
    for name in [name for name, is_used in used.items() if is_used and not run.sample_prompts]:
        yield Problem(f"run.{name}", "is not used without sample_prompts", 'write run.sample_prompts: ["Once upon"]')
    for index, prompt in enumerate(run.sample_prompts):
        if not prompt.strip() or len(prompt) > MAX_PROMPT_CHARS:
            what = "is empty" if not prompt.strip() else f"has {len(prompt):,} letters"
            yield Problem(f"run.sample_prompts.{index}", what, f"write a text of up to {MAX_PROMPT_CHARS:,} letters")


def check_suite(recipe: Recipe) -> Problems:
    """Settings of the questions between steps need questions."""
    run = recipe.run
    for name in ("eval_suite_steps", "eval_suite_lengths"):
        if getattr(run, name) and not run.eval_suite:
            yield Problem(f"run.{name}", "is not used without eval_suite", "write run.eval_suite: [niah_single_1]")
    if "calls" in run.eval_suite and not (recipe.data.eval_datasets or recipe.data.eval_split):
        message = "calls are asked in held-out chats, and none are held out"
        yield Problem("run.eval_suite", message, "write data.eval_split: 0.01, or name data.eval_datasets")


def check_money(recipe: Recipe) -> Problems:
    """A limit on cost needs a price."""
    run = recipe.run
    if run.max_cost is not None and run.price_per_gpu_hour is None:
        yield Problem(
            "run.max_cost",
            "cannot be kept without a price",
            "write run.price_per_gpu_hour, in USD for one GPU and hour",
        )


def check_notice(recipe: Recipe) -> Problems:
    """The targets of notifications are usable: notify_webhook is a web address, notify_command splits into words."""
    run, hook = recipe.run, recipe.run.notify_webhook
    if hook is not None and not find_variable(hook) and (fault := find_address_fault(hook)):
        hint = "write one such as https://hooks.example.org/x, or $NAME for an environment variable that holds it"
        yield Problem("run.notify_webhook", f"is not a web address: {fault}", hint)
    if run.notify_command is not None:
        try:
            words = shlex.split(run.notify_command)
        except ValueError:
            words = []
        if not words:
            yield Problem("run.notify_command", "is not a command: it is empty, or a closing quote is missing",
                          "write a program and its arguments, such as: sh notify.sh")  # fmt: skip


def find_address_fault(address: str) -> str:
    """Why no request can be sent to a web address; '' where one can. Says nothing of what the address holds."""
    if not address.startswith(("https://", "http://")):
        return "it does not start with https://"
    if not address.isascii() or not address.isprintable() or " " in address:
        return "it holds a space or a letter that addresses encode"
    place = HOST.fullmatch(re.split("[/?#]", address.partition("://")[2])[0])
    if place is None or len(place["name"]) > MAX_HOST_LENGTH:
        return "its host or port is none"
    return "" if int(place["port"] or 1) in range(1, 1 << 16) else "its host or port is none"


def check_hub_model(recipe: Recipe) -> Problems:
    """The repository has a name that the hub accepts."""
    name = recipe.run.hub_model_id
    if name is not None and not HUB_NAME.fullmatch(name):
        yield Problem("run.hub_model_id", f"{name} is not the name of a repository", "write owner/name")


TRAINING_RULES: tuple[Callable[[Recipe], Problems], ...] = (
    check_notice,
    check_hub_model,
    check_optimizer,
    check_muon,
    check_overlap,
    check_tiles,
    check_steps,
    check_schedule,
    check_evaluation,
    check_model_choice,
    check_samples,
    check_suite,
    check_money,
)


def check_preference_sources(recipe: Recipe) -> Problems:
    """Pairs are learned by the section `preference`, and by nothing else; answers without a partner by kto."""
    preference = recipe.preference
    wanted = "unpaired" if preference is not None and preference.is_unpaired else "preference"
    for section in ("datasets", "eval_datasets"):
        for index, dataset in enumerate(getattr(recipe.data, section)):
            key = f"data.{section}.{index}.type"
            if preference is None and dataset.type in ("preference", "unpaired"):
                loss = "sigmoid}, which is DPO" if dataset.type == "preference" else "kto}"
                what = f"{dataset.type} holds judged answers, which only a run with a section `preference` learns from"
                yield Problem(key, what, f"write preference: {{loss: {loss}")
            elif preference is not None and dataset.type not in ("auto", wanted):
                held = "pairs of answers" if wanted == "preference" else "answers with labels"
                what = f"{dataset.type} holds no {held}, and {', '.join(preference.loss)} learns from nothing else"
                yield Problem(key, what, f"write type: {wanted}, or leave the section out")


def check_preference_loss(recipe: Recipe) -> Problems:
    """Losses that are added up share a reference, and each setting belongs to one of them."""
    preference = recipe.preference
    if preference is None:
        return
    yield from _check_mixture_of_losses(preference)
    losses, lacks = preference.loss, f"{', '.join(preference.loss)} has no such setting"
    smoothing, key = preference.label_smoothing, "preference.label_smoothing"
    if smoothing and {*losses}.isdisjoint(SMOOTHED):
        yield Problem(key, lacks, f"leave it out, or use one of {', '.join(SMOOTHED)}")
    if "exo_pair" in losses and not smoothing:
        yield Problem(key, "exo_pair takes its logarithm, so it cannot be 0", f"write {key}: 0.001")
    if preference.sft_weight and preference.is_unpaired:
        yield Problem("preference.sft_weight", lacks, "leave it out")
    own = {"discopop_tau": "discopop", "gamma": "simpo", "desirable_weight": "kto", "undesirable_weight": "kto"}
    for name, loss in own.items():
        if name in preference.model_fields_set and loss not in losses:
            yield Problem(f"preference.{name}", lacks, "leave it out")


def _check_mixture_of_losses(preference: Preference) -> Problems:
    losses, weights, key = preference.loss, preference.loss_weights, "preference.loss"
    if losses == ("sft",):
        hint = "write [sigmoid, sft], or learn from the chosen answers without this section"
        yield Problem(key, "sft compares no answers", hint)
    for loss in dict.fromkeys(losses):
        if losses.count(loss) > 1:
            yield Problem(key, f"{loss} is listed {losses.count(loss)} times", "list it once, with a weight")
        if len(losses) > 1 and loss in (*WITHOUT_REFERENCE, *UNPAIRED):
            what = "learns from answers without a partner" if loss in UNPAIRED else "has no reference"
            yield Problem(key, f"{loss} {what}, so that nothing can be added to it", f"write {key}: {loss}")
    if weights and len(weights) != len(losses):
        what = f"has {format_count(len(weights), 'weight')} for {format_count(len(losses), 'loss')}"
        yield Problem("preference.loss_weights", what, "write one for each loss, or leave it out")
    if "sft" in losses and preference.sft_weight is not None:
        hint = "write it among preference.loss_weights"
        yield Problem("preference.sft_weight", "says again what the weight of sft says", hint)


def check_preference_data(recipe: Recipe) -> Problems:
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


def check_preference_training(recipe: Recipe) -> Problems:
    """What would change token losses, or the model from one forward to the next."""
    if recipe.preference is None:
        return
    if recipe.train.z_loss_weight:
        yield Problem("train.z_loss_weight", "is not used: a pair's loss is one of whole answers", "leave it out")
    for name in ("router_aux_loss_coef", "router_z_loss_coef"):
        if getattr(recipe.train, name):
            yield Problem(f"train.{name}", "is not offered for preferences: it is a mean over tokens", "leave it out")
    if recipe.train.token_loss is not None:
        yield Problem("train.token_loss", "is not used: a pair's loss is one of whole answers", "leave it out")
    if recipe.lora is not None and recipe.lora.dropout and recipe.preference.has_reference:
        what = f"{recipe.lora.dropout:g}: an answer would differ from its reference by chance"
        yield Problem("lora.dropout", what, "set it to 0")


PREFERENCE_RULES: tuple[Callable[[Recipe], Problems], ...] = (
    check_preference_sources,
    check_preference_loss,
    check_preference_data,
    check_preference_training,
)
