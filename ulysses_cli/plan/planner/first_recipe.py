"""Writes the first recipe of a user as YAML with a comment for each choice: for GPUs from a plan, for CPUs from a few
facts."""

from __future__ import annotations

from dataclasses import dataclass

from ulysses_cli.plan.layout import GPUS_PER_NODE, Layout
from ulysses_cli.plan.models.shape import ModelShape
from ulysses_cli.plan.planner.candidates import Candidate, PlanRequest, needs_stretch, quote, write_levers
from ulysses_cli.plan.planner.search import draft_candidate
from ulysses_cli.plan.recipe.sections import RowType
from ulysses_cli.plan.rules.files import CHAT_TYPES
from ulysses_cli.plan.units import format_plain, format_usd

TINY = "tiny"  # a small random model, to try the tool without a download
BYTES_PER_TOKEN = 4  # of English text and code, with the tokenizers of today
CPU_RANKS = 2
MIN_DOCUMENTS = 20  # of which some are held out for evaluation
MAX_CPU_LENGTH = 1024
JUDGED: dict[RowType, str] = {  # and what the recipe says of their loss
    "preference": "sigmoid  # DPO; others are robust, ipo, apo_zero, simpo, orpo, ...",
    "unpaired": "kto  # it learns from answers that have a label and no partner",
}
MAX_DEFAULT_LENGTH = 131072


@dataclass(frozen=True)
class FirstAnswers:
    """What the user wants. `num_tokens`: tokens of the data, None where unknown. `budget_usd` bounds the cost. `kind`:
    what the rows of the data hold, None where that is not known yet."""

    data: str
    model: str
    max_length: int
    is_lora: bool
    is_tree: bool = False
    num_documents: int | None = None
    num_tokens: int | None = None
    budget_usd: float | None = None
    output_dir: str = "runs/mine"
    quantize_base: str | None = None
    kind: RowType | None = None


@dataclass(frozen=True)
class Choice:
    """The layout and settings that were chosen, with the lines of the header that explain them."""

    layout: Layout
    header: tuple[str, ...]
    memory: tuple[str, ...] = ()
    lora_targets: tuple[str, ...] = ()
    is_packed: bool = True
    price: float | None = None
    is_cpu: bool = False
    stretches: bool = False
    accumulation: int = 1
    zero_stage: int = 3
    gpu: str | None = None  # its kind


def suggest_length(longest_tokens: int | None, max_positions: int | None, *, is_cpu: bool) -> int:
    """Returns a power of two that holds the longest document, inside what the model was trained for."""
    most = MAX_CPU_LENGTH if is_cpu else min(MAX_DEFAULT_LENGTH, max_positions or MAX_DEFAULT_LENGTH)
    length = 512
    while length < (longest_tokens if longest_tokens is not None else most):
        length *= 2
    return max(2, min(length, 1 << (most.bit_length() - 1)))


def choose_on_cpu(shape: ModelShape, max_length: int, num_ranks: int, zero_stage: int = 3) -> Choice:
    sizes = [size for size in shape.sp_sizes if size <= num_ranks and max_length % size == 0]
    layout = Layout(sp_size=1 if shape.inexact else max(sizes, default=1))
    ranks = layout.world_size
    header = (f"hardware   {ranks} CPU {'process' if ranks == 1 else 'processes'}: for trying things out",)
    return Choice(layout, header, is_cpu=True, is_packed=not shape.crosses_documents,
                  stretches=needs_stretch(shape, max_length), zero_stage=zero_stage)  # fmt: skip


def choose_by_plan(best: Candidate, request: PlanRequest, model: str) -> Choice:
    draft, header = draft_candidate(best, request, model, "")
    cost = best.usd
    lines = tuple(line for line in header if line.startswith(("hardware", "predicted", "measured", "step")))
    lines += (f"cost       {format_usd(*cost, digits=2)} for the data below",) if cost else ()
    memory = tuple(write_levers(draft.levers)) if draft.levers is not None else ()
    price = best.gpu.usd_middle
    return Choice(
        draft.layout, lines, memory, draft.lora_targets, draft.is_packed, price, stretches=draft.needs_stretch,
        accumulation=draft.accumulation, gpu=draft.gpu, zero_stage=draft.zero_stage,
    )  # fmt: skip


def write_first_recipe(answers: FirstAnswers, choice: Choice, file: str) -> str:
    trained = "LoRA adapters" if answers.is_lora else "all weights"
    trained += f", on a base in {answers.quantize_base}," if answers.quantize_base else ""
    lines = [f"# Trains {trained} of {answers.model} on {answers.data}, {answers.max_length:,} tokens per row."]
    lines += ["#", *(f"# {line}" for line in choice.header), f"# launch     ulysses train {file}", ""]
    lines += ["model:", *_write_model(answers, choice)]
    lines += _write_parallel(choice.layout, choice.zero_stage)
    lines += ["", "data:", "  datasets:", f"    - path: {quote(answers.data)}"]
    if answers.is_tree:
        lines += ["      type: folder  # the whole tree is one document; join_files: false makes each file one"]
    if answers.kind in (*CHAT_TYPES, "answers", *JUDGED):
        lines += [f"      type: {answers.kind}"]
    if answers.num_documents is None or answers.num_documents >= MIN_DOCUMENTS:
        lines += ["  eval_split: 0.05  # held out, for the loss that the run reports"]
    lines += _write_rows(answers)
    lines += (
        [] if choice.is_packed else ["  packing: off  # this model's layers carry something into the next document"]
    )
    if answers.kind in JUDGED:
        lines += ["", "preference:", f"  loss: {JUDGED[answers.kind]}", "  beta: 0.1"]
    lines += ["", "train:", *_write_steps(answers, choice)]
    if choice.memory:
        lines += ["", "# chosen so that a step fits with a margin; `auto` lets each run choose", *choice.memory]
    if answers.is_lora:
        lines += ["", "lora:", "  r: 16", "  alpha: 32"]
        lines += [f"  target_modules: [{', '.join(choice.lora_targets)}]"] if choice.lora_targets else []
        lines += [f"  quantize_base: {answers.quantize_base}"] if answers.quantize_base else []
    lines += ["", "run:", f"  output_dir: {quote(answers.output_dir)}  # checkpoints, metrics, report and the model"]
    lines += ["  device: cpu"] if choice.is_cpu else []
    lines += [f"  gpu: {quote(choice.gpu)}  # kind, for estimates and `ulysses launch`"] if choice.gpu else []
    lines += ["  save_steps: 100  # `ulysses train ... --resume auto` goes on from the newest checkpoint"]
    if answers.budget_usd is not None and choice.price is not None:
        lines += [f"  price_per_gpu_hour: {choice.price:g}  # USD; write what you pay"]
        limit = format_plain(answers.budget_usd).replace(",", "_")
        lines += [f"  max_cost: {limit}  # the run stops with a checkpoint when it has cost this"]
    return "\n".join(lines) + "\n"


def _write_rows(answers: FirstAnswers) -> list[str]:
    """How documents become rows, and which of their tokens are targets."""
    is_chat, targets = answers.kind in CHAT_TYPES, list[str]()
    longer = "longer texts are split, shorter ones share rows"
    if answers.kind not in (None, "text", "tokens"):
        noun = "chat" if is_chat else "row"
        how = "between turns" if is_chat else "it"
        longer = f"a longer {noun} is an error, or excess_length_strategy: split cuts {how}"
    if answers.kind in JUDGED:
        longer = "a prompt with two answers that is longer is an error; excess_length_strategy: drop leaves it out"
    if is_chat:
        targets = ["  assistant_only_loss: true  # learns what the assistant says; false learns the user's turns too"]
    if answers.kind is None and not answers.is_tree:
        longer += "; a longer chat is an error"
        targets = ["  # assistant_only_loss: true  # for chats: learns what the assistant says, not the user's turns"]
    return [f"  max_length: {answers.max_length}  # tokens per row; {longer}", *targets]


def _write_model(answers: FirstAnswers, choice: Choice) -> list[str]:
    if answers.model == TINY:
        config = make_tiny_config(answers.max_length)
        lines = ["  config:  # random weights: a model of your own is `name_or_path: owner/name`"]
        lines += [
            f"    {key}: {str(value).lower() if isinstance(value, bool) else value}" for key, value in config.items()
        ]
        lines += ["  tokenizer: bytes"]
    else:
        lines = [f"  name_or_path: {quote(answers.model)}"]
    if choice.stretches:
        lines += ["  rope_scaling:  # rows are longer than the model was trained for", "    type: yarn"]
    return [*lines, "  dtype: float32"] if choice.is_cpu else lines


def _write_parallel(layout: Layout, zero_stage: int) -> list[str]:
    comments = {
        "sp_size": "ranks that share a row",
        "dp_shard_size": "rows in flight",
        "dp_replicate_size": "copies of the parameters for gathering",
    }
    sizes = [(name, getattr(layout, name), comment) for name, comment in comments.items()]
    lines = [f"  {name}: {size}  # {comment}" for name, size, comment in sizes if size > 1]
    if layout.ring_size > 1 or layout.sp_size > GPUS_PER_NODE:  # auto may choose another
        lines.append(f"  ring_size: {layout.ring_size}  # shares of a row's queries")
    lines += [f"  zero_stage: {zero_stage}  # each GPU holds all weights"] if zero_stage < 3 else []
    return ["", "parallel:", *lines] if lines else []


def _write_steps(answers: FirstAnswers, choice: Choice) -> list[str]:
    rate = 3e-3 if answers.model == TINY else 1e-4 if answers.is_lora else 1e-5
    rate /= 10 if answers.kind in JUDGED else 1
    known = answers.num_tokens is not None
    length = "  num_train_epochs: 1" if known else "  max_steps: 500  # the size of the data is not known yet"
    rounds = f"  gradient_accumulation_steps: {choice.accumulation}  # so that a step has as many rows on any GPUs"
    lines = [length, rounds] if choice.accumulation > 1 else [length]
    return [*lines, f"  learning_rate: {rate:.0e}".replace("e-0", "e-"), "  warmup_ratio: 0.03"]


def make_tiny_config(max_length: int) -> dict[str, object]:
    """Returns the config of a model that two CPU cores train."""
    return {
        "model_type": "qwen3",
        "hidden_size": 96,
        "intermediate_size": 256,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "vocab_size": 260,
        "max_position_embeddings": max(2048, max_length),
        "tie_word_embeddings": True,
    }


def make_request(shape: ModelShape, answers: FirstAnswers) -> PlanRequest:
    num_tokens = max(answers.num_tokens or 500 * answers.max_length, answers.max_length)
    return PlanRequest(
        shape, answers.max_length, num_tokens, answers.is_lora, answers.budget_usd,
        quantize_base=answers.quantize_base, has_pairs=answers.kind in JUDGED,
    )  # fmt: skip
