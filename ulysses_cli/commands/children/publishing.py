"""Publishes a run's model folder on the Hugging Face hub, with retries, and completes its card: what it was trained on,
losses by length, layout, versions, how to load it in transformers and vLLM. Takes the card that the export wrote
and the facts of the run. The access token is the hub's own (HF_TOKEN, or `hf auth login`); it appears in no
message."""

from __future__ import annotations

import hashlib
import json
import math
import os
import re
import stat
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from ulysses_cli.plan.files import describe_special, read_regular
from ulysses_cli.plan.models.model_files import find_damaged_weights, fingerprint_weights
from ulysses_cli.plan.problem import Problem, RecipeError
from ulysses_cli.plan.resolved import changes_positions
from ulysses_cli.plan.rules.files import HUB_NAME
from ulysses_cli.plan.rules.public_names import (
    LOCAL_FOLDER,
    find_public_name,
    list_public_datasets,
    make_config_public,
    make_public,
)
from ulysses_cli.plan.secrets import collect_secrets, mask_text
from ulysses_cli.plan.units import format_count
from ulysses_cli.report.run_summary import SHORT_CHECK_COLUMNS, RecordedRun, list_values, load_run, tabulate_short_check
from ulysses_cli.run.checkpoints import MANIFEST, get_folder, read_model_steps
from ulysses_cli.run.records import note_notification

PAUSES = (2.0, 8.0, 30.0)  # seconds before each further attempt; each has retries of its own
TEMPORARY = (408, 409, 412, 425, 429, 500, 502, 503, 504)
TOKEN_HINT = "set HF_TOKEN to a token that may write, or run `hf auth login`"
CARD = "README.md"
MODEL_FILES = ("config.json", "adapter_config.json")
YOUR_ACCOUNT = "YOUR-ACCOUNT"
# Names that transformers, peft and this tool give to a model's files. Anything else may be private: keys, notes, .env.
OF_A_MODEL = re.compile(
    r"(?:model|adapter_model)(?:-\d{5}-of-\d{5})?\.safetensors|(?:model|adapter_model)\.safetensors\.index\.json"
    r"|(?:base_config/)?config\.json|(?:generation|adapter|tokenizer|preprocessor|processor|video_preprocessor)_config\.json"
    r"|tokenizer\.json|special_tokens_map\.json|added_tokens\.json|normalizer\.json|vocab(?:-src|-tgt)?\.json|vocab\.txt"
    r"|merges\.txt|bpe\.codes|dict\.txt|(?:source|target)\.spm|[\w-]+\.tiktoken"
    r"|(?:tokenizer|tiktoken|spiece|spm|spm_char|sentencepiece|sentencepiece\.bpe)\.model"
    r"|chat_template\.(?:jinja|json)|additional_chat_templates/[\w-]+\.jinja"
    r"|ulysses\.json|README\.md|(?:LICENSE|NOTICE)(?:\.txt|\.md)?",
    re.ASCII,
)
CODE = re.compile(r"[A-Za-z]\w*\.py", re.ASCII)
MAX_SHOWN = 10
MAX_CONFIG_BYTES = 64 << 20  # of a JSON file whose content is looked at
_T = TypeVar("_T")


def list_files(folder: Path) -> list[Path]:
    """What is uploaded of a model folder besides its card. Raises RecipeError where the folder holds anything that is
    no part of a model, or a link: what it leads to is not meant to be published."""
    if folder.is_symlink():
        hint = "put the folder itself there"
        raise RecipeError([Problem("", f"{folder} is a link; nothing was uploaded", hint)])
    has_code = any(_names_code(folder / name) for name in ("config.json", "tokenizer_config.json"))
    files, others = list[Path](), list[str]()
    for file in sorted(_walk(folder)):
        name = file.relative_to(folder).as_posix()
        if not stat.S_ISREG(file.lstat().st_mode):
            kind = "a link" if file.is_symlink() else describe_special(file) or "no file"
            others.append(f"{name} ({kind})")
        elif OF_A_MODEL.fullmatch(name) or (has_code and CODE.fullmatch(name)):
            files.append(file)
        else:
            others.append(name)
    if others:
        shown = ", ".join(others[:MAX_SHOWN]) + (f" and {len(others) - MAX_SHOWN} more" if others[MAX_SHOWN:] else "")
        hint = "move them out of the folder; where they belong to the model, upload them yourself"
        raise RecipeError(
            [Problem("", f"{folder} holds what is no file of a model: {shown}; nothing was uploaded", hint)]
        )
    return [file for file in files if file.name != CARD]


def _walk(folder: Path) -> Iterator[Path]:
    """Everything below a folder that is no folder itself; links are not followed."""
    for path in folder.iterdir():
        if path.is_dir() and not path.is_symlink():
            yield from _walk(path)
        else:
            yield path


def _names_code(file: Path) -> bool:
    """Whether a config says that Python files come with the model."""
    try:
        content = json.loads(read_regular(file, MAX_CONFIG_BYTES)) if not file.is_symlink() else {}
    except (OSError, ValueError, RecursionError):
        return False
    return isinstance(content, dict) and "auto_map" in content


def measure_sent(file: Path) -> int:
    sent = read_public(file)
    return len(sent) if isinstance(sent, bytes) else file.stat().st_size


def read_public(file: Path) -> str | bytes:
    """What is sent of a file: its path, or its content where it would name folders of this machine."""
    if file.suffix != ".json" or file.stat().st_size > MAX_CONFIG_BYTES:
        return str(file)
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except ValueError:
        return str(file)
    public = make_config_public(content) if isinstance(content, dict) else content
    return str(file) if public == content else (json.dumps(public, indent=2, ensure_ascii=False) + "\n").encode()


class HubModels:
    """The models of one account on the hub. `pauses` are the seconds before each further attempt."""

    def __init__(self, report: Callable[[str], None], pauses: tuple[float, ...] = PAUSES) -> None:
        from huggingface_hub import HfApi, constants, get_token
        from huggingface_hub.utils.tqdm import disable_progress_bars

        if constants.HF_HUB_OFFLINE:
            raise RecipeError([Problem("HF_HUB_OFFLINE", "is set: the hub cannot be reached", "unset it to publish")])
        token = get_token()
        if not token:
            raise RecipeError([Problem("", "there is no access token of the hub", TOKEN_HINT)])
        disable_progress_bars()
        # The Xet client is a program of its own that speaks to further services: its retries, messages and use of the
        # token are not ours to test. The hub takes the same files over plain HTTP.
        constants.HF_HUB_DISABLE_XET = True
        self.report, self.pauses = report, pauses
        self.known = {*collect_secrets({}, os.environ), token}
        self.api = HfApi(endpoint=os.environ.get("HF_ENDPOINT") or None, token=token)

    def complete_name(self, name: str) -> str:
        """Returns owner/name; an account's own name is the owner where none is given. Asks the hub, which refuses a
        wrong token here, before anything else is done."""
        account: Mapping[str, Any] = self._try("the hub refuses the token", self.api.whoami)
        return name if "/" in name else f"{account['name']}/{name}"

    def find_licence(self, base: str) -> dict[str, str]:
        """Returns the licence of a model as a card has it: license, license_name, license_link. Empty where the hub
        knows none, or not the model."""
        from huggingface_hub.errors import HfHubHTTPError

        try:
            card = self.api.model_info(base).card_data
        except (HfHubHTTPError, OSError, ValueError):
            return {}
        facts: dict[str, Any] = card.to_dict() if card is not None else {}  # type: ignore[no-untyped-call]
        return {key: str(facts[key]) for key in ("license", "license_name", "license_link") if facts.get(key)}

    def publish(self, folder: Path, name: str, card: str, *, is_private: bool, message: str) -> str:
        """Uploads a folder's files, with `card` as its README.md, as one commit. Returns the model's address. A file
        that the hub has already is not sent again, so that a second call goes on where the first one failed."""
        from huggingface_hub import CommitOperationAdd

        def create() -> str:
            return str(self.api.create_repo(name, private=is_private, exist_ok=True))

        address: str = self._try(f"{name} cannot be made", create)
        if is_private and self._try(f"{name} cannot be read", lambda: self.api.model_info(name)).private is False:
            hint = "make it private in its settings on the hub, or name another repository"
            raise RecipeError([Problem("", f"{name} exists already and is public; nothing was uploaded", hint)])
        files = list_files(folder)

        def send() -> None:
            operations = [CommitOperationAdd(file.relative_to(folder).as_posix(), read_public(file)) for file in files]
            operations.append(CommitOperationAdd(CARD, card.encode()))
            self.api.create_commit(name, operations, commit_message=message)

        self._try(f"{name} cannot be written", send)
        return address

    def _try(self, what: str, call: Callable[[], _T]) -> _T:
        """Failures that may pass are tried again; others are told at once."""
        from huggingface_hub.errors import HfHubHTTPError

        for pause in (*self.pauses, None):
            try:
                return call()
            except (HfHubHTTPError, OSError, ValueError) as error:
                response = getattr(error, "response", None)
                status = response.status_code if response is not None else None
                reason = mask_text((str(error).strip().splitlines() or [type(error).__name__])[0][:300], self.known)
                if pause is None or (status is not None and status not in TEMPORARY) or isinstance(error, ValueError):
                    hint = TOKEN_HINT if status in (401, 403) else "try again: files that arrived are not sent again"
                    raise RecipeError([Problem("", f"{what}: {reason}", hint)]) from None
                self.report(f"{what} ({reason}); trying again in {pause:g} s")
                time.sleep(pause)
        raise AssertionError("the last attempt returns or raises")


def push_run(run_dir: Path, repo: str | None, *, is_private: bool, report: Callable[[str], None]) -> tuple[str, str]:
    """Returns the repository's name and address. Raises RecipeError."""
    run, folder = _load_model_run(run_dir)
    models = HubModels(report)
    name = models.complete_name(_choose_name(run, run_dir, repo))
    _check_repo_name(name)
    base = find_public_name(run.get_part("recipe").get("model", {}).get("name_or_path")) or ""
    licence = models.find_licence(base) if "/" in base else {}
    card = complete_card(_read_card(folder, name), name, run, folder, licence)
    report(f"uploading {folder} to {name}{', private' if is_private else ''}")
    step = run.metrics[-1]["step"] if run.metrics else 0
    address = models.publish(folder, name, card, is_private=is_private, message=f"The model after step {step}")
    size = sum(file.stat().st_size for file in list_files(folder))
    note_notification(run_dir, "hub", name, f"published the model after step {step}, {size:,} bytes: {address}")
    return name, address


def plan_upload(run_dir: Path, repo: str | None, *, is_private: bool) -> dict[str, Any]:
    """What a push would upload. Asks no network: the account's name and the base's licence are left open."""
    run, folder = _load_model_run(run_dir)
    name = _choose_name(run, run_dir, repo)
    shown = _check_repo_name(name) if "/" in name else f"{YOUR_ACCOUNT}/{_check_repo_name(name)}"
    card = complete_card(_read_card(folder, shown), shown, run, folder, {})
    sizes = {file.relative_to(folder).as_posix(): measure_sent(file) for file in list_files(folder)}
    sizes[CARD] = len(card.encode())
    files = [{"path": path, "bytes": size} for path, size in sizes.items()]
    return {"repo": shown, "private": is_private, "files": files, "bytes": sum(sizes.values()), "card": card}


def _load_model_run(run_dir: Path) -> tuple[RecordedRun, Path]:
    run, folder = load_run(run_dir), run_dir / "model"
    if not any((folder / name).is_file() for name in MODEL_FILES):
        hint = f"finish the run, or `ulysses export {run_dir} --to {folder}` for its newest checkpoint"
        raise RecipeError([Problem("", f"{run_dir} holds no model", hint)])
    list_files(folder)  # before anything in it is read
    if damage := find_damaged_weights(folder):
        hint = f"move {folder} away and write it again: ulysses export {run_dir} --to {folder}"
        raise RecipeError([Problem("", f"{damage}; nothing was uploaded", hint)])
    return run, folder


def _read_card(folder: Path, name: str) -> str:
    """The card that the export wrote."""
    file = folder / CARD
    return file.read_text(encoding="utf-8", errors="replace") if file.is_file() else f"---\n---\n\n# {name}\n"


def _choose_name(run: RecordedRun, run_dir: Path, repo: str | None) -> str:
    """The repository that was asked for, or the run's name, which must be one that the hub accepts."""
    return repo or _check_repo_name(str(run.facts.get("run_name") or run_dir.resolve().name))


def _check_repo_name(name: str) -> str:
    """Raises RecipeError for a name that the hub does not accept."""
    if not HUB_NAME.fullmatch(name):
        raise RecipeError([Problem("--repo", f"{name} is not the name of a repository", "write owner/name")])
    return name


LOADED_BY_TRANSFORMERS = """\
```python
from transformers import AutoModelForCausalLM, AutoTokenizer

tokenizer = AutoTokenizer.from_pretrained("{name}")
model = AutoModelForCausalLM.from_pretrained("{name}", dtype="auto")
```"""
LAST_HEADING = "\n## Recipe\n"
VLLM_RANKS = (8, 16, 32, 64, 128, 256, 320, 512)  # what --max-lora-rank takes
LOSS_TABLES = {
    "by_position": "position in the document",
    "by_class": "what the assistant writes",
    "by_turn": "turn of the assistant",
}
SHOWN_VERSIONS = ("ulysses", "torch", "transformers", "deepspeed", "peft", "python")


def complete_card(card: str, name: str, run: RecordedRun, folder: Path, licence: Mapping[str, str]) -> str:
    """`folder`: the model's; `licence`: what the base model's card says of it."""
    recipe, written = read_recipe(card, run)
    holds_adapters = (folder / "adapter_config.json").is_file()
    head, _, body = card.removeprefix("---\n").partition("\n---\n")
    keys = [line for line in head.splitlines() if line]
    keys += [f"{key}: {json.dumps(value)}" for key, value in licence.items()]
    keys += ["pipeline_tag: text-generation", "tags:", "- ulysses", "- long-context"]
    datasets = list_public_datasets(recipe.get("data", {}).get("datasets", ()))
    named = [path for path in datasets if "/" in path]
    keys += ["datasets:", *(f"- {path}" for path in named)] if named else []
    keys += _write_scores(name, list_own_evaluations(run, folder))
    sections = [
        *_write_data(run, datasets),
        *_write_losses(run),
        *_write_short_check(run, folder),
        *_write_layout(run),
        *_write_loading(name, recipe, folder, holds_adapters=holds_adapters),
        *_write_licence(recipe, licence),
    ]
    before, heading, after = body.partition(LAST_HEADING)
    return "\n".join(["---", *keys, "---", before.rstrip(), "", *sections]) + heading + (written or after)


def list_own_evaluations(run: RecordedRun, folder: Path) -> list[dict[str, Any]]:
    """What `ulysses evaluate` found on the weights in the model's folder: on the folder itself, or on the checkpoint
    that it was written from."""
    weights, exports = fingerprint_weights(folder), set[str]()
    if steps := read_model_steps(folder):
        manifest = get_folder(run.folder) / f"step-{steps[0]}" / MANIFEST
        if manifest.is_file():
            export = f"{manifest.parent.name}-{hashlib.sha256(manifest.read_bytes()).hexdigest()[:12]}"
            exports = {export, f"{export}-adapters"}
    own = []
    for findings in run.evaluations:
        settings = findings.get("settings")
        settings = settings if isinstance(settings, dict) else {}
        parts = [part for part in (settings.get("model"), settings.get("lora")) if isinstance(part, dict)]
        paths = [part.get(key) for part in parts for key in ("name_or_path", "adapter_name_or_path")]
        is_of_checkpoint = not exports.isdisjoint(Path(str(path)).name for path in paths if path)
        if settings.get("weights") == weights or is_of_checkpoint:
            own.append(findings)
    return own


def _write_scores(name: str, evaluations: Sequence[Mapping[str, Any]]) -> list[str]:
    """The card's `model-index`, by which the hub shows scores. Tasks are named as `ulysses evaluate` names them."""
    import yaml

    found: dict[tuple[str, str], dict[str, float]] = {}

    def add(task: object, length: object, metric: object, value: object) -> None:
        if isinstance(value, int | float) and math.isfinite(value):
            where = f"{task}, {length:,} tokens" if isinstance(length, int) else str(task)
            found.setdefault((str(task), where), {})[str(metric)] = float(value)

    for findings in evaluations:
        for row in _list_rows(findings, "scores"):
            add(row.get("task"), row.get("length"), "score", row.get("score"))
        for row in _list_rows(findings, "losses"):
            if (row.get("from"), row.get("to")) == (0, row.get("length")):
                add("held-out documents", row.get("length"), "loss", row.get("loss"))
        for row in _list_rows(findings, "lm_eval"):
            add(row.get("task"), None, row.get("metric"), row.get("value"))
    results = [
        {
            "task": {"type": "text-generation"},
            "dataset": {"type": task, "name": where},
            "metrics": [{"type": metric, "value": value} for metric, value in metrics.items()],
        }
        for (task, where), metrics in found.items()
    ]
    index = {"model-index": [{"name": name.rpartition("/")[2], "results": results}]}
    return yaml.safe_dump(index, sort_keys=False, allow_unicode=True).splitlines() if results else []


def _list_rows(findings: Mapping[str, Any], name: str) -> list[Mapping[str, Any]]:
    rows = findings.get(name)
    return [row for row in rows if isinstance(row, dict)] if isinstance(rows, list) else []


def read_recipe(card: str, run: RecordedRun) -> tuple[dict[str, Any], str]:
    """The recipe as the card shows it, without what earlier versions have written of the machine, and its section; the
    run's own and '' where the card shows none. The export has written the card where relative paths lead somewhere."""
    import yaml

    before, fence, rest = card.partition(LAST_HEADING)[2].partition("```yaml\n")
    content, end, after = rest.rpartition("```")
    try:
        recipe = yaml.safe_load(content) if fence and end else None
    except yaml.YAMLError:
        recipe = None
    if not isinstance(recipe, dict):
        return make_public(run.get_part("recipe")), ""
    public = make_public(recipe)
    dumped = yaml.safe_dump(public, sort_keys=False, allow_unicode=True)
    return public, f"{before}{fence}{dumped.rstrip()}\n{end}{after}"


def _write_data(run: RecordedRun, datasets: Sequence[str]) -> list[str]:
    tokens, targets = (int(sum(list_values(run.metrics, key))) for key in ("tokens", "supervised_tokens"))
    steps = run.metrics[-1]["step"] if run.metrics else 0
    lines = ["## Data", "", f"- sources: {', '.join(datasets) or 'not recorded'}"]
    lines += [f"- trained on {tokens:,} tokens, {targets:,} of them targets, in {format_count(steps, 'step')}"]
    length = run.get_part("recipe").get("data", {}).get("max_length")
    return [*lines, *([f"- rows of {length:,} tokens"] if length else []), ""]


def _write_losses(run: RecordedRun) -> list[str]:
    if not run.evals:
        loss = run.metrics[-1].get("loss") if run.metrics else None
        is_known = isinstance(loss, int | float)
        return ["## Loss", "", f"Training loss at the end: {loss:.4f}. Nothing was held out.", ""] if is_known else []
    first, last = run.evals[0], run.evals[-1]
    before = f" Before step 1: {_format(first.get('loss'))}." if first["step"] == 0 < last["step"] else ""
    name, key = "perplexity", "perplexity"
    if "rewards/accuracies" in last:
        name, key = "share of pairs whose chosen answer has the higher reward", "rewards/accuracies"
    lines = ["## Loss on held-out documents", "", f"After step {last['step']}: {_format(last.get('loss'))}, "
             f"{name} {_format(last.get(key))}.{before}", ""]  # fmt: skip
    for key, title in LOSS_TABLES.items():
        buckets = last.get(key)
        if not isinstance(buckets, dict) or not buckets:
            continue
        former = first.get(key) if before else None
        former = former if isinstance(former, dict) else {}
        then, line = (" before step 1 |", " --- |") if former else ("", "")
        lines += [f"| {title} | loss |{then} tokens |", f"| --- | --- |{line} --- |"]
        for place, facts in buckets.items():
            loss, tokens = (facts.get("loss"), facts.get("tokens")) if isinstance(facts, dict) else (facts, None)
            old = former.get(place)
            then = f" {_format(old.get('loss') if isinstance(old, dict) else old)} |" if former else ""
            lines.append(f"| {place} | {_format(loss)} |{then} {f'{tokens:,}' if isinstance(tokens, int) else ''} |")
        lines.append("")
    return lines


def _write_short_check(run: RecordedRun, folder: Path) -> list[str]:
    """Of the step that the model is from."""
    steps = read_model_steps(folder)
    lines = [line for line in run.short_checks if steps is None or line["step"] == steps[0]]
    if not lines:
        return []
    caption, rows = tabulate_short_check(lines[-1])
    table = [f"| {' | '.join(row)} |" for row in (SHORT_CHECK_COLUMNS, ["---"] * len(SHORT_CHECK_COLUMNS), *rows)]
    return ["## Loss on short texts", "", caption, "", *table, ""]


def _format(value: object) -> str:
    return f"{value:.4f}" if isinstance(value, int | float) else "not a number"


def _write_layout(run: RecordedRun) -> list[str]:
    layout, versions = run.get_part("layout"), run.get_part("versions")
    sizes = " x ".join(f"{key.removesuffix('_size')} {size}" for key, size in layout.items() if key != "world_size")
    device = run.get_part("machine").get("device", "an unknown device")
    attention = run.get_part("attention").get("name", "unknown")
    size = layout.get("world_size")
    ranks = "an unknown number of ranks" if size is None else format_count(size, "rank")
    lines = ["## How it was trained", "", f"- {ranks} on {device}: {sizes}"]
    lines += [f"- attention kernel: {attention}"]
    exact = ", ".join(f"{name} {versions[name]}" for name in SHOWN_VERSIONS if name in versions)
    return [*lines, f"- versions: {exact}", ""]


def _write_loading(name: str, recipe: Mapping[str, Any], folder: Path, *, holds_adapters: bool) -> list[str]:
    config = _read_json(folder / ("base_config/config.json" if holds_adapters else "config.json"))
    lengths = (recipe.get("data", {}).get("max_length"), config.get("max_position_embeddings"))
    trained, positions = (value if isinstance(value, int) else 0 for value in lengths)
    length = min(filter(None, (trained, positions)), default=0)
    limit = f" --max-model-len {length}" if length else ""
    rope = config.get("rope_parameters") or config.get("rope_scaling")
    is_stretched = changes_positions(recipe.get("model", {}))
    lines, unserved = ["## Serving", ""], _list_unserved(recipe.get("lora") or {}) if holds_adapters else ""
    if unserved:
        merged = "`ulysses export CHECKPOINT --to MERGED --merge-lora`"
        lines += [f"vLLM does not serve {unserved} beside a base model: merge them first, {merged}.", ""]
        command, written = "", "base_config/config.json tells transformers, and a merged model's config.json tells both"
    elif holds_adapters:
        base = _get_public_base(recipe) or "BASE_MODEL"
        override = f" --hf-overrides '{json.dumps({'rope_parameters': rope})}'" if is_stretched else ""
        own_rank = (recipe.get("lora") or {}).get("r", 16)
        rank = next((rank for rank in VLLM_RANKS if rank >= own_rank), own_rank)
        command = f"vllm serve {base} --enable-lora --max-lora-rank {rank} --lora-modules tuned={name}{limit}{override}"
        lines += [] if base != "BASE_MODEL" else ["BASE_MODEL is the base model's folder.", ""]
        written = "the command above tells vLLM"
    else:
        lines += [LOADED_BY_TRANSFORMERS.format(name=name), ""]
        command, written = f"vllm serve {name}{limit}", "config.json tells both"
    lines += ["```sh", command, "```", ""] if command else []
    if is_stretched and isinstance(rope, dict):
        lines += [f"Positions are {_describe_positions(rope)}: {written}.", ""]
    if 0 < trained < positions:
        lines += [f"No row of the training was longer than {trained:,} tokens. The model has {positions:,} positions; "
                  "measure it at longer texts before you serve them.", ""]  # fmt: skip
    return lines


def _describe_positions(rope: Mapping[str, Any]) -> str:
    inner = rope.get("full_attention")  # plan.models.family is not needed for a word of transformers
    rope = inner if isinstance(inner, dict) else rope
    kind, theta = rope.get("rope_type", rope.get("type")), rope.get("rope_theta")
    parts = [] if kind == "default" else [f"stretched by {kind}, factor {rope.get('factor')}"]
    return " and ".join([*parts, *([f"computed with base {theta:,.0f}"] if isinstance(theta, int | float) else [])])


def _list_unserved(lora: Mapping[str, Any]) -> str:
    """What vLLM refuses of adapters (vllm/lora/peft_helper.py), or has left out silently (vllm #41384, #52198)."""
    whole = ["adapters with parts that were trained whole"] if lora.get("modules_to_save") else []
    experts = ["adapters of experts"] if lora.get("experts") else []
    return " or ".join([*whole, *experts, *(["DoRA"] if lora.get("use_dora") else [])])


def _write_licence(recipe: Mapping[str, Any], licence: Mapping[str, str]) -> list[str]:
    base = _get_public_base(recipe)
    if not base:
        return []
    text = licence.get("license_name") or licence.get("license") or "not stated by its card"
    return ["## Licence", "", f"The base model's: {text} ({base}).", ""]


def _get_public_base(recipe: Mapping[str, Any]) -> str:
    base = str(recipe.get("model", {}).get("name_or_path") or "")
    return base if base != LOCAL_FOLDER else ""


def _read_json(file: Path) -> dict[str, Any]:
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return content if isinstance(content, dict) else {}
