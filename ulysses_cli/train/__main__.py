"""One rank's life: read what is wanted, meet the others, build, rehearse, train, leave a model, tear down."""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
import traceback
import warnings
from collections.abc import Collection, Sequence
from contextlib import ExitStack
from pathlib import Path

from ulysses_cli.plan.secrets import collect_secrets, mask_secrets
from ulysses_cli.run_folder.failure_record import give_room, keep_room, write_failure_record
from ulysses_cli.run_folder.run_lock import hold_lock
from ulysses_cli.train.guard.interruption import Interruption, Listener, end_process
from ulysses_cli.train.guard.masked_log import MaskedStream, open_masked
from ulysses_cli.train.telemetry.record import Record


def read_arguments(words: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m ulysses_cli.train", description=__doc__)
    parser.add_argument("--recipe", required=True)
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE")
    parser.add_argument("--data", required=True, type=Path, help="prepared rows")
    parser.add_argument("--resume")
    parser.add_argument("--resume-anyway", action="store_true")
    parser.add_argument("--dry-run", action="store_true")
    parser.add_argument("--pretend", action="store_true", help="be rank 0 of a world that is not there")
    return parser.parse_args(words)


def take_screen(logs: Path, rank: int, known: Collection[str]) -> int | None:
    """Rank 0's stdout is the person's terminal, for the display alone. All else that this process, its libraries and
    their C++ say goes to its log, without secrets."""
    logs.mkdir(parents=True, exist_ok=True)
    screen = os.dup(1) if rank == 0 else None
    log = open_masked(os.open(logs / f"rank-{rank}.log", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o666), known)
    os.dup2(log, 1)
    os.dup2(log, 2)
    os.close(log)
    return screen


def read_former_end(logs: Path, rank: int) -> int | None:
    """After a restart in place: the exit code of a failure that would come again, or None. What was said last time is
    put away, so that the next failure is not taken for it."""
    num_restarts = int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"))
    if not num_restarts:
        return None
    for file in sorted(logs.glob("rank-*.error*.json")):
        try:
            told = json.loads(file.read_text())
        except (OSError, ValueError):
            continue  # another rank has just put it away
        if told.get("is_final"):
            return int(told["exit_code_wanted"])
    own = logs / f"rank-{rank}.error.json"
    if own.exists():
        own.rename(logs / f"rank-{rank}.error-{num_restarts - 1}.json")
    return None


def leave_failure_record(logs: Path, rank: int, number: int, record: Record, leftovers: ExitStack) -> None:
    """Of a rank that ends before its work: where it was, for the command to say. The display is put in order."""
    code = 128 + (number or signal.SIGTERM)
    told = {"rank": rank, "phase": record.describe_phase(), "is_interruption": True, "exit_code_wanted": code}
    write_failure_record(logs, rank, told)
    leftovers.close()
    record.close()


def main(words: Sequence[str]) -> int:
    from ulysses_cli.plan.recipe.loader import load_recipe

    options = read_arguments(words)
    loaded = load_recipe(options.recipe, options.set)
    rank = int(os.environ.get("RANK", "0"))
    logs = Path(os.path.expanduser(loaded.recipe.run.output_dir)) / "logs"
    known = collect_secrets(loaded.recipe.model_dump(mode="json"), os.environ)
    screen = take_screen(logs, rank, known)
    keep_room(logs, rank)
    record, leftovers = Record(logs.parent, loaded.recipe.run.logging_steps, hold_lock()), ExitStack()

    def end(number: int) -> None:
        end_process(number, lambda: leave_failure_record(logs, rank, number, record, leftovers))

    interruption = Interruption(end, record.warn)
    Listener(interruption.hear, interruption.look).start()
    warnings.simplefilter("ignore", FutureWarning)  # of DeepSpeed's use of torch: several a step, in a log for people
    if (code := read_former_end(logs, rank)) is not None:
        return code
    # heavy imports come after signals are heard
    from ulysses_cli.hardware_table import load_hardware
    from ulysses_cli.report.live.progress import RunDisplay, make_display
    from ulysses_cli.train.inputs import Launch
    from ulysses_cli.train.worker import run_worker

    def open_display(num_steps: int) -> RunDisplay:
        run, world_size = loaded.recipe.run, int(os.environ.get("WORLD_SIZE", "1"))
        binary = os.fdopen(screen if screen is not None else 2, "wb")
        stream = MaskedStream(binary, encoding="utf-8", errors="backslashreplace")
        stream.known = known
        return make_display(stream, num_steps, run.price_per_gpu_hour, world_size, logging_steps=run.logging_steps)

    try:
        run_worker(Launch(loaded, options, open_display, load_hardware, interruption, leftovers), record)
    except BaseException as error:  # noqa: BLE001 - whatever ends a rank is told
        from ulysses_cli.train.failure import describe_failure

        traceback.print_exc()
        told = mask_secrets(describe_failure(error), known=known)
        if not told["is_cause"]:
            interruption.end_if_told()  # the others have ended, as this rank was about to
        told |= {"rank": rank, "phase": record.describe_phase()}
        write_failure_record(logs, rank, told)
        leftovers.close()
        sys.stderr.flush()
        os._exit(told["exit_code_wanted"])  # others may wait in a collective; nothing here may wait for them
    give_room(logs, rank)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
