"""Rules that look at the disk: data files, chat templates and the tokenizer's markers, run directory, checkpoint.
check.py runs them. Nothing is written."""

from __future__ import annotations

import difflib
import glob
import json
import math
import os
import re
from collections.abc import Callable
from pathlib import Path

from ulysses_cli.plan.files import HINT_WHILE_LIVE, expand_pattern, find_address, find_address_problem, find_holder
from ulysses_cli.plan.models.model_files import (
    CLOCK,
    DATE,
    OUR_VARIABLES,
    TokenizerFacts,
    explain_markers,
    explain_no_template,
    find_missing_markers,
    read_date,
    read_template,
)
from ulysses_cli.plan.problem import Problem, Problems, RecipeError
from ulysses_cli.plan.recipe.changes import add_new_settings, list_differences, shorten_list
from ulysses_cli.plan.recipe.recipe import Recipe, compute_recipe_hash
from ulysses_cli.plan.recipe.sections import COLUMNS, OPTIONAL, Dataset
from ulysses_cli.plan.secrets import collect_secrets, mask_secrets, mask_text

HUB_NAME = re.compile(r"[\w][\w.-]*(/[\w][\w.-]*)?", re.ASCII)
DATA_SUFFIXES = (
    *(".jsonl", ".ndjson", ".json", ".parquet", ".arrow", ".csv", ".tsv", ".txt", ".md"),
    *(".gz", ".zst"),
)
MAX_NEARBY = 5
SHARE_TOLERANCE = 0.005  # of the sum of shares: three thirds may be written as 0.33
CHECKPOINT_MANIFEST = "manifest.json"  # written last
FILE_SUFFIX = re.compile(r"\.[A-Za-z][A-Za-z0-9]*$", re.ASCII)
VARIABLE = re.compile(r"\$(\{\w+\}|[A-Za-z_]\w*)", re.ASCII)
CHAT_TYPES = ("chat", "conversations")
HINT_AFTER_END = (
    "`ulysses train` with --resume auto continues it and names settings that must stay, with --overwrite replaces it; "
    "or choose another run.output_dir"
)


def check_datasets(recipe: Recipe) -> Problems:
    """Each source names files or a data set, and named files exist."""
    for section in ("datasets", "eval_datasets"):
        for index, dataset in enumerate(getattr(recipe.data, section)):
            yield from check_dataset(dataset, f"data.{section}.{index}")
            yield from _check_unused(dataset, f"data.{section}.{index}", is_eval=section == "eval_datasets")
            yield from _check_reading(dataset, f"data.{section}.{index}")
            yield from _check_columns(dataset, f"data.{section}.{index}.columns")


def check_loss_mask(recipe: Recipe) -> Problems:
    """assistant_only_loss needs chat data."""
    types = {dataset.type for dataset in recipe.data.datasets}
    if recipe.data.assistant_only_loss and "auto" not in types and not types & set(CHAT_TYPES):
        yield Problem(
            "data.assistant_only_loss",
            f"needs chat data, but the sources are of type {', '.join(sorted(types))}",
            "use data of type chat or conversations, or set data.assistant_only_loss: false",
        )


def check_turns(recipe: Recipe) -> Problems:
    """What says which turns of a chat are targets needs a loss mask, and whole turns."""
    data = recipe.data
    types = {dataset.type for dataset in (*data.datasets, *data.eval_datasets)}
    masks = data.assistant_only_loss or (
        data.completion_only_loss and bool(types & {"auto", "completion", "answers", "preference", "unpaired"})
    )
    needing = {
        "train_on_turns": data.train_on_turns != "all",
        "thoughts": data.thoughts != "train",
        "on_rewritten_turns": data.on_rewritten_turns in ("split", "mask"),
    }
    for name, is_set in needing.items():
        if is_set and not masks:
            message = (
                f"{getattr(data, name)} chooses among what the assistant says, but every token of a chat is learned"
            )
            yield Problem(f"data.{name}", message, "set data.assistant_only_loss: true")
    if data.train_on_turns == "last" and data.excess_length_strategy == "truncate":
        message = "truncate cuts off the end of a long chat, and only its last turn is a target"
        yield Problem("data.excess_length_strategy", message, "set data.excess_length_strategy: split, drop or raise")
    if data.on_rewritten_turns == "split" and data.attend_across_documents:
        message = "a split chat repeats its turns, and documents of a row would see each other's answers"
        yield Problem("data.attend_across_documents", message, "set data.attend_across_documents: false")
    sections = [("data", data.chat_template_kwargs)]
    for section in ("datasets", "eval_datasets"):
        rows = enumerate(getattr(data, section))
        sections += [(f"data.{section}.{index}", dataset.chat_template_kwargs) for index, dataset in rows]
    for key, variables in sections:
        for name in variables:
            if name in OUR_VARIABLES:
                yield Problem(
                    f"{key}.chat_template_kwargs.{name}", "is given by the row or by this tool", "leave it out"
                )
        try:
            read_date(variables)
        except ValueError:
            place = f"{key}.chat_template_kwargs"
            yield Problem(
                f"{place}.{CLOCK}", f"{variables[CLOCK]!r} is not a date", f"write {place}: {{{CLOCK}: {DATE}}}"
            )


def check_output_dir(recipe: Recipe) -> Problems:
    """A run directory belongs to one recipe. Whether its checkpoint can be resumed, ranks check later."""
    if recipe.run.resume_from_checkpoint is not None:
        return
    folder = Path(os.path.expanduser(recipe.run.output_dir))
    if folder.exists() and not folder.is_dir():
        yield Problem("run.output_dir", f"{recipe.run.output_dir} is a file, not a folder", "name a folder")
        return
    run_file = folder / "run.json"
    try:
        run = json.loads(run_file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return
    except NotADirectoryError:
        above = next(parent for parent in folder.parents if parent.is_file())
        yield Problem("run.output_dir", f"{recipe.run.output_dir}: {above} is a file, not a folder", "name a folder")
        return
    except (OSError, ValueError, RecursionError) as error:
        yield Problem("run.output_dir", f"{run_file} cannot be read: {error}", "choose another run.output_dir")
        return
    facts = run if isinstance(run, dict) else {}
    if facts.get("recipe_hash") == compute_recipe_hash(recipe):
        return
    holders = {find_holder(file) for file in folder.glob("lock-*")}
    is_live = True in holders
    message = f"{recipe.run.output_dir} holds the run of another recipe"
    message += ", and that run is still going on" if is_live else "" if None in holders else ", which has ended"
    plain, details = recipe.model_dump(mode="json"), tuple[str, ...]()
    if isinstance(facts.get("recipe"), dict):
        masked = mask_secrets(plain, known=collect_secrets(plain, {}))
        details = shorten_list(list_differences(add_new_settings(facts["recipe"], recipe), masked))
        if not details and facts["recipe"].keys() == plain.keys():
            return  # an earlier version wrote it, which had fewer settings
        message += "; this recipe differs from its recipe in:" if details else ""
    hint = HINT_WHILE_LIVE if is_live else HINT_AFTER_END
    yield Problem("run.output_dir", message, hint, details=details)


def check_resume(recipe: Recipe) -> Problems:
    """A checkpoint named by its path exists, and was finished. Whether its files are whole, preflight checks."""
    path, key = recipe.run.resume_from_checkpoint, "run.resume_from_checkpoint"
    if path in (None, "auto"):
        return
    folder = Path(os.path.expanduser(str(path)))
    if not folder.is_dir():
        yield Problem(key, f"{path} is not a folder", "use auto for the newest valid checkpoint")
    elif not (folder / CHECKPOINT_MANIFEST).is_file():
        is_run = (folder / "checkpoints").is_dir()
        hint = f"name one of {path}/checkpoints" if is_run else "name a run's checkpoints/step-N"
        what = f"{path} is not a checkpoint: {CHECKPOINT_MANIFEST} is missing"
        yield Problem(key, what, f"{hint}, or use auto for the newest valid one in run.output_dir")


def check_start(recipe: Recipe) -> Problems:
    """What contradicts run.start_from. Whether it names a run with fitting weights, preflight checks: a stage may be
    written before the one that it starts from has ended."""
    path, key = recipe.run.start_from, "run.start_from"
    if path is None:
        if not recipe.run.start_moments:
            yield Problem("run.start_moments", "is not used without run.start_from", "leave it out")
        return
    if Path(os.path.expanduser(path)).resolve() == Path(os.path.expanduser(recipe.run.output_dir)).resolve():
        what = f"{path} is run.output_dir: a run does not start from itself"
        yield Problem(key, what, "name another run.output_dir, or go on with `ulysses train --resume auto`")
    if recipe.lora is not None and recipe.lora.adapter_name_or_path is not None:
        yield Problem("lora.adapter_name_or_path", f"{key} says already where adapters begin", "keep one of the two")
    if recipe.preference is not None and recipe.preference.has_reference:
        losses = ", ".join(recipe.preference.loss)
        what = f"preference.loss: {losses} compares with the model that model.name_or_path names"
        yield Problem(key, what, "export the run, and name the exported folder as model.name_or_path")


def check_short_check(recipe: Recipe) -> Problems:
    """The texts are here, and what is trained has a loss per token."""
    path, key = recipe.run.short_check, "run.short_check"
    if path is None:
        return
    if recipe.preference is not None:
        yield Problem(key, "compares losses of texts, and a section preference trains on pairs", "leave it out")
    place = Path(os.path.expanduser(path))
    if not os.path.exists(place):
        yield Problem(key, f"{path} does not exist", _suggest_nearby(place))
    else:
        yield from _check_content(Dataset(path=path), place, key)


def check_checkpoint_uri(recipe: Recipe) -> Problems:
    """The address has a known scheme and holds no key."""
    if (address := recipe.run.checkpoint_uri) is not None:
        message, hint = find_address_problem(address)
        if message:
            yield Problem("run.checkpoint_uri", f"{mask_text(address)} {message}", hint)


def check_dataset(dataset: Dataset, key: str) -> Problems:
    """What a data set names is there. Problems name `key.path`, or one of `key.data_files`."""
    if dataset.type == "synthetic":
        if dataset.path is not None:
            yield Problem(f"{key}.path", "is not used: synthetic documents are generated", "leave path out")
        return
    if dataset.path is not None and "://" in dataset.path:
        message, hint = find_address_problem(dataset.path)
        hint = hint if message else "name its folder, and the files below it in data_files"
        yield Problem(f"{key}.path", f"{mask_text(dataset.path)} {message or 'has a pattern'}", hint)
        return
    if dataset.path is None and not dataset.data_files:
        yield Problem(f"{key}.path", "no source is named", "write a file, a folder or a hub data set")
        return
    if dataset.path is not None and (dataset.type == "folder" or is_local(dataset.path)):
        path = Path(os.path.expanduser(dataset.path))
        if not _exists(path) and find_address(dataset.path):
            return  # prepare and train download it
        if not _exists(path):
            yield Problem(f"{key}.path", f"{dataset.path} does not exist", _suggest_nearby(path))
            return
        if dataset.type == "folder" and not os.path.isdir(path):
            yield Problem(f"{key}.path", f"{dataset.path} is not a folder", "use type: auto for a single file")
            return
        if not dataset.data_files:
            yield from _check_content(dataset, path, f"{key}.path")
    elif dataset.path is not None:
        if _looks_like_file(dataset.path):
            path = Path(os.path.expanduser(dataset.path))
            yield Problem(f"{key}.path", f"{dataset.path} does not exist", _suggest_nearby(path))
        return  # only the hub knows the files of a hub data set
    for index, file in enumerate(dataset.data_files or ()):
        path = Path(os.path.expanduser(dataset.path or "."), os.path.expanduser(file))
        if not _exists(path):
            yield Problem(f"{key}.data_files.{index}", f"{path} does not exist", _suggest_nearby(path))


def list_distant_data(recipe: Recipe) -> list[str]:
    """Addresses and names of data sets that no rule looked at: they are not files of this machine."""
    names = []
    for dataset in (*recipe.data.datasets, *recipe.data.eval_datasets):
        address = find_address(dataset.path)
        if address and not _exists(Path(os.path.expanduser(str(dataset.path)))):
            names.append(address)
        elif dataset.path is not None and dataset.type != "folder" and not is_local(dataset.path):
            names.append(dataset.path)
    return list(dict.fromkeys(names))


def _looks_like_file(path: str) -> bool:
    """A name that the hub could have, but with a suffix, and beside what is in a folder here."""
    return bool(FILE_SUFFIX.search(path)) and os.path.isdir(os.path.dirname(path) or os.curdir)


def _check_content(dataset: Dataset, path: Path, key: str) -> Problems:
    """Refuses a file that is empty or of a format that is not known, and a folder without a file."""
    if path.is_file():
        suffix = FILE_SUFFIX.search(path.name)
        if path.stat().st_size == 0:
            yield Problem(key, f"{dataset.path} is empty", "name another file or folder")
        elif suffix and dataset.type != "text" and not path.name.lower().endswith(DATA_SUFFIXES):
            close = difflib.get_close_matches(suffix[0].lower(), DATA_SUFFIXES, n=1)
            hint = f"rename it to what it holds, such as {close[0] if close else '.jsonl'}"
            as_text = ", or write type: text to read it as one text"
            yield Problem(key, f"{dataset.path} has a suffix that names no data format: {suffix[0]}", hint + as_text)
    elif path.is_dir() and dataset.path != "." and not any(files for _, _, files in os.walk(path)):
        # `.` is wherever the command runs: a recipe for any repository is valid before it is copied there
        yield Problem(key, f"{dataset.path} holds no file", "name another file or folder")


def _check_unused(dataset: Dataset, key: str, *, is_eval: bool) -> Problems:
    """Refuses settings that would be ignored."""
    if not dataset.join_files and dataset.type != "folder":
        yield Problem(f"{key}.join_files", f"is not used for type {dataset.type}", "set type: folder, or leave it out")
    if is_eval and dataset.weight != 1:
        yield Problem(f"{key}.weight", "is not used: evaluation reads each document once", "leave it out")
    if dataset.name is not None and (dataset.path is None or is_local(dataset.path)):
        yield Problem(f"{key}.name", "is not used for files on disk", "leave it out, or name a hub data set")


def check_mixture(recipe: Recipe) -> Problems:
    """Shares are those of all sources and add up to 1; bounds of lengths leave something between them."""
    datasets, what = recipe.data.datasets, "is not used: evaluation reads each document once"
    for index, dataset in enumerate(recipe.data.eval_datasets):
        for name in ("share", "min_tokens", "max_tokens"):
            if getattr(dataset, name) is not None:
                yield Problem(f"data.eval_datasets.{index}.{name}", what, "leave it out")
    for index, dataset in enumerate(datasets):
        key, low, high = f"data.datasets.{index}", dataset.min_tokens, dataset.max_tokens
        if low is not None and high is not None and low > high:
            yield Problem(f"{key}.min_tokens", f"{low:,} is more than max_tokens {high:,}", "exchange the two")
        if dataset.share is not None and dataset.weight != 1:
            yield Problem(f"{key}.weight", "is not used beside share", "leave one of the two out")
    shares = [dataset.share for dataset in datasets]
    given = [share for share in shares if share is not None]
    if given and len(given) < len(shares):
        key = f"data.datasets.{shares.index(None)}.share"
        rest = 1 - math.fsum(given)
        hint = f"write share: {rest / (len(shares) - len(given)):.3g}" if rest > 0 else "lower the others' shares"
        yield Problem(key, "required, since other sources have a share", hint)
    elif given and abs(math.fsum(given) - 1) > SHARE_TOLERANCE:
        total = math.fsum(given)
        proposed = ", ".join(f"{share / total:.3g}" for share in given)
        yield Problem("data.datasets.0.share", f"the shares add up to {total:g}, not to 1", f"write {proposed}")


def _check_reading(dataset: Dataset, key: str) -> Problems:
    """Refuses settings of hub data sets on sources that are on disk."""
    base = Path(os.path.expanduser(dataset.path or "."))
    is_saved = (base / "state.json").is_file() or (base / "dataset_dict.json").is_file()
    is_tree = dataset.type in ("folder", "synthetic")
    is_here = is_tree or dataset.path is None or is_local(dataset.path)
    if dataset.split != "train" and is_here and (is_tree or not (base / "dataset_dict.json").is_file()):
        yield Problem(f"{key}.split", "is not used for what is on disk: all of it is read", "leave it out")
    if dataset.streaming and is_here:
        yield Problem(f"{key}.streaming", "is not used for what is on disk", "leave it out")
    if dataset.data_files and (is_tree or (is_saved and dataset.path is not None)):
        what = f"for type {dataset.type}" if is_tree else "for a data set that was saved to disk"
        yield Problem(f"{key}.data_files", f"is not used {what}", "leave it out, or name files with type: auto")


def _check_columns(dataset: Dataset, key: str) -> Problems:
    """Names that are expected, each once. Whether rows have the columns, `prepare` finds out."""
    kinds = [kind for kind in COLUMNS if dataset.type in (kind, "auto")]
    known = list(dict.fromkeys(name for kind in kinds for name in (*COLUMNS[kind], *OPTIONAL[kind])))
    if dataset.columns and not known:
        yield Problem(key, f"is not used for type {dataset.type}", "leave it out")
        return
    hint = f"write {{EXPECTED: NAME IN THE FILE}}; expected are {', '.join(known)}"
    for name in dataset.columns:
        if name not in known:
            what = "is no column that rows are read from" if dataset.type == "auto" else f"type {dataset.type} has none"
            yield Problem(f"{key}.{name}", what, hint)
    given = list(dataset.columns.values())
    for name, own in dataset.columns.items():
        if given.count(own) > 1 and given.index(own) != list(dataset.columns).index(name):
            yield Problem(f"{key}.{name}", f"`{own}` is named twice", "name each column of the file once")


def is_local(path: str) -> bool:
    """A path on disk, as opposed to the name of a hub data set (`name` or `owner/name`)."""
    return path.endswith(DATA_SUFFIXES) or not HUB_NAME.fullmatch(path) or os.path.exists(path)


def _exists(path: Path) -> bool:
    return os.path.exists(path) or bool(expand_pattern(str(path)))


def _suggest_nearby(path: Path) -> str:
    """For a mistyped path: the folder's data files, or how far the path exists."""
    parent = path.parent
    while not os.path.exists(parent) and parent != parent.parent:
        parent = parent.parent
    if not os.path.isdir(parent):
        return f"{parent} is a file, not a folder"
    if parent != path.parent:
        return f"no {path.parts[0]} is here" if parent == Path() else f"the path is right as far as {parent}"
    names = sorted(os.path.basename(path) for path in glob.glob(f"{glob.escape(str(parent))}/*"))
    data = [name for name in names if name.endswith(DATA_SUFFIXES)]
    shown = ", ".join(data[:MAX_NEARBY]) + (f" and {len(data) - MAX_NEARBY} more" if len(data) > MAX_NEARBY else "")
    return f"{parent} holds {shown}" if data else f"{parent} holds no data file"


def check_folders(recipe: Recipe) -> Problems:
    """Folders that the run reads or writes exist."""
    tokenizer, nvme = recipe.model.tokenizer, recipe.memory.nvme_path
    is_path = tokenizer is not None and tokenizer != "bytes" and not HUB_NAME.fullmatch(tokenizer)
    if is_path and not os.path.isdir(os.path.expanduser(str(tokenizer))):
        yield Problem("model.tokenizer", f"{tokenizer} is not a folder", "name a hub model, a folder, or bytes")
    if nvme is not None and not os.path.isdir(os.path.expanduser(nvme)):
        yield Problem("memory.nvme_path", f"{nvme} is not a folder", "make it, on a fast local disk")
    adapters = recipe.lora.adapter_name_or_path if recipe.lora is not None else None
    if adapters is not None:
        folder = Path(os.path.expanduser(adapters))
        if not folder.is_dir() and not HUB_NAME.fullmatch(adapters):
            yield Problem("lora.adapter_name_or_path", f"{adapters} is not a folder", "name a folder, or owner/name")
        elif folder.is_dir() and not (folder / "adapter_config.json").is_file():
            hint = "name the folder that holds it: the model/ of an earlier run, or what peft saved"
            yield Problem("lora.adapter_name_or_path", f"{adapters} holds no adapter_config.json", hint)


def check_variables(recipe: Recipe) -> Problems:
    """No folder or address that a run makes holds a shell's variable: it would be made under that very name."""
    for key, text in (
        ("data.store_dir", recipe.data.store_dir),
        ("run.output_dir", recipe.run.output_dir),
        ("run.checkpoint_uri", recipe.run.checkpoint_uri),
    ):
        if text is not None and (variable := VARIABLE.search(text)):
            hint = f"write the path itself, or give it on the command line, where a shell does: {key}=..."
            yield Problem(key, f"{variable[0]} is not replaced in a recipe", hint)


def check_token_loss(recipe: Recipe) -> Problems:
    """The function of train.token_loss has a file or a module, and a name. It is imported when a run starts."""
    reference = recipe.train.token_loss
    if reference is None:
        return
    place, _, name = reference.rpartition(":")
    parts = place.split(".")
    if not name.isidentifier() or not (place.endswith(".py") or all(part.isidentifier() for part in parts)):
        hint = "write FILE.py:NAME or MODULE:NAME, such as losses.py:focal"
        yield Problem("train.token_loss", f"{reference} names no function", hint)
    elif place.endswith(".py") and not os.path.isfile(os.path.expanduser(place)):
        yield Problem("train.token_loss", f"{place} is not a file", "paths start in the folder of the command")


RULES: tuple[Callable[[Recipe], Problems], ...] = (
    check_datasets,
    check_token_loss,
    check_loss_mask,
    check_turns,
    check_output_dir,
    check_resume,
    check_start,
    check_mixture,
    check_checkpoint_uri,
    check_short_check,
    check_folders,
    check_variables,
)


MAX_ROW_BYTES = 4 << 20


def check_chats(recipe: Recipe, tokenizer: TokenizerFacts | None) -> Problems:
    """`tokenizer`: facts from its files; None where they are not on disk, and `prepare` checks the same later."""
    yield from _check_added(recipe)
    data, template = recipe.data, None
    if data.chat_template is not None:
        try:
            template = read_template(data.chat_template)
        except RecipeError as error:
            yield from error.problems
            return
    if tokenizer is None:
        return
    if template is None:
        if not tokenizer.has_template and (source := find_chats(recipe)):
            yield explain_no_template(tokenizer.name, source)
    elif tokenizer.vocabulary is not None:
        missing = find_missing_markers(template, {*tokenizer.vocabulary.ids, *data.added_tokens})
        if missing:
            yield explain_markers(template, missing, data.added_tokens, tokenizer.name)


def _check_added(recipe: Recipe) -> Problems:
    added = recipe.data.added_tokens
    for index, token in enumerate(added):
        if token in added[:index]:
            yield Problem(f"data.added_tokens.{index}", f"{token} is written twice", "keep one of the two")
        elif not token.strip():
            yield Problem(f"data.added_tokens.{index}", "is white space alone", "write a marker such as <|im_end|>")
    if added and recipe.memory.offload_param == "nvme" and recipe.model.name_or_path is not None:
        message = "nvme keeps each weight in a file of its size, which data.added_tokens may change"
        yield Problem("memory.offload_param", message, "use memory.offload_param: cpu")


def find_chats(recipe: Recipe) -> str:
    """The key of a source that holds chats, by its type or by the first row of its file; '' if there is none."""
    for section in ("datasets", "eval_datasets"):
        for index, dataset in enumerate(getattr(recipe.data, section)):
            if dataset.type in CHAT_TYPES or (dataset.type == "auto" and _begins_with_chat(dataset)):
                return f"data.{section}.{index}"
    return ""


def _begins_with_chat(dataset: Dataset) -> bool:
    """Reads one row of a file of lines; files of other kinds are left to `prepare`."""
    path = os.path.expanduser(dataset.path or "")
    if not path.endswith((".jsonl", ".ndjson")) or not os.path.isfile(path):
        return False
    try:
        with open(path, "rb") as stream:
            row = json.loads(stream.readline(MAX_ROW_BYTES).decode("utf-8-sig"))
    except (OSError, ValueError, RecursionError):
        return False
    return isinstance(row, dict) and bool({"messages", "conversations"} & row.keys())
