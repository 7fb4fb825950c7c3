"""The process of one rank: parses arguments, redirects output, handles signals, runs the worker, records a failure."""

from __future__ import annotations

import argparse
import os
import signal
import sys
import traceback
import warnings
from collections.abc import Collection, Sequence
from contextlib import ExitStack
from pathlib import Path

from ulysses_cli.plan.files import open_own
from ulysses_cli.plan.problem import FAILED, RecipeError, get_signal_code
from ulysses_cli.plan.resolved import read_plan
from ulysses_cli.plan.secrets import collect_secrets, mask_secrets
from ulysses_cli.run.lock import hold_lock
from ulysses_cli.run.records import give_room, keep_room, read_json, write_failure_record
from ulysses_cli.train.processes.interruption import Interruption, SignalListener, end_process
from ulysses_cli.train.processes.masked_log import MaskedStream, open_masked
from ulysses_cli.train.record import Record


def parse_arguments(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m ulysses_cli.train", description=__doc__)
    parser.add_argument("--plan", required=True, type=Path, help="what the command has resolved, among the logs")
    parser.add_argument("--plan-hash", required=True, help="of the plan that the command wrote")
    parser.add_argument("--data", required=True, type=Path, help="prepared rows")
    parser.add_argument("--resume")
    parser.add_argument("--resume-anyway", action="store_true")
    parser.add_argument("--dry-run", action="store_true")
    parser.add_argument("--pretend", action="store_true", help="run rank 0 alone, with simulated other ranks")
    return parser.parse_args(arguments)


def redirect_output(logs: Path, rank: int, secrets: Collection[str]) -> int | None:
    """Sends all that this process, its libraries and their C++ write to the rank's log, with secrets masked. Returns
    rank 0's former stdout, the user's terminal, which only the display writes to; None on other ranks."""
    logs.mkdir(parents=True, exist_ok=True)
    terminal = os.dup(1) if rank == 0 else None
    log = open_masked(open_own(logs / f"rank-{rank}.log", os.O_WRONLY | os.O_CREAT | os.O_APPEND), secrets)
    os.dup2(log, 1)
    os.dup2(log, 2)
    os.close(log)
    return terminal


def read_final_failure(logs: Path, rank: int) -> int | None:
    """After a restart in place: the exit code of a failure that would happen again, or None. This rank's own record of
    the last failure is renamed, so that it is not mistaken for the next one's."""
    num_restarts = int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"))
    if not num_restarts:
        return None
    for file in sorted(logs.glob("rank-*.error*.json")):
        failure = read_json(file)  # None where another rank has just renamed it
        if isinstance(failure, dict) and failure.get("is_final"):
            return int(failure["exit_code_wanted"])
    own = logs / f"rank-{rank}.error.json"
    if own.exists():
        own.rename(logs / f"rank-{rank}.error-{num_restarts - 1}.json")
    return None


def write_interruption_record(logs: Path, rank: int, number: int, record: Record, leftovers: ExitStack) -> None:
    """Records where an interrupted rank was, for the command to report. Closes the display."""
    code = get_signal_code(number or signal.SIGTERM)
    failure = {"rank": rank, "phase": record.describe_phase(), "is_interruption": True, "exit_code_wanted": code}
    write_failure_record(logs, rank, failure)
    leftovers.close()
    record.close()


def main(arguments: Sequence[str]) -> int:
    options = parse_arguments(arguments)
    rank, logs = int(os.environ.get("RANK", "0")), options.plan.parent
    try:
        plan = read_plan(options.plan, options.plan_hash)
    except RecipeError as error:
        (problem,) = error.problems
        failure = {"message": f"{problem.where}: {problem.message}", "hint": problem.hint, "is_final": True}
        failure |= {"rank": rank, "phase": "starting", "is_cause": True, "exit_code_wanted": FAILED}
        write_failure_record(logs, rank, failure)
        return FAILED
    loaded = plan.loaded
    secrets = collect_secrets(loaded.recipe.model_dump(mode="json"), os.environ)
    try:
        terminal = redirect_output(logs, rank, secrets)
    except OSError as error:
        message = f"the log of this rank cannot be written: {error.strerror} ({error.filename})"
        failure = {"rank": rank, "phase": "starting", "message": message, "is_cause": True, "exit_code_wanted": FAILED}
        write_failure_record(logs, rank, failure)
        return FAILED
    keep_room(logs, rank)
    record, leftovers = Record(logs.parent, loaded.recipe.run.logging_steps, hold_lock()), ExitStack()

    def end(number: int) -> None:
        end_process(number, lambda: write_interruption_record(logs, rank, number, record, leftovers))

    interruption = Interruption(end, record.warn)
    SignalListener(interruption.receive, interruption.check).start()
    warnings.simplefilter("ignore", FutureWarning)  # DeepSpeed's use of torch raises several a step
    if (code := read_final_failure(logs, rank)) is not None:
        return code
    # heavy imports come after the listener has started
    from ulysses_cli.hardware_table import load_hardware
    from ulysses_cli.report.live import RunDisplay, make_display
    from ulysses_cli.train.inputs import Launch
    from ulysses_cli.train.start import run_worker

    def open_display(num_steps: int) -> RunDisplay:
        run, world_size = loaded.recipe.run, int(os.environ.get("WORLD_SIZE", "1"))
        binary = os.fdopen(terminal if terminal is not None else 2, "wb")
        stream = MaskedStream(binary, encoding="utf-8", errors="backslashreplace")
        stream.secrets = secrets
        return make_display(stream, num_steps, run.price_per_gpu_hour, world_size, logging_steps=run.logging_steps)

    try:
        run_worker(Launch(plan, options, open_display, load_hardware, interruption, leftovers), record)
    except BaseException as error:  # noqa: BLE001 - any end of a rank is recorded
        from ulysses_cli.train.failure import describe_failure

        traceback.print_exc()
        failure = mask_secrets(describe_failure(error), known=secrets)
        if not failure["is_cause"]:
            interruption.end_if_asked()  # the others have ended, as this rank was about to
        failure |= {"rank": rank, "phase": record.describe_phase()}
        write_failure_record(logs, rank, failure)
        leftovers.close()
        sys.stderr.flush()
        os._exit(failure["exit_code_wanted"])  # others may wait in a collective; nothing here may wait for them
    give_room(logs, rank)
    if interruption.is_asked:  # an upload may be in progress, whose threads Python would wait for
        sys.stderr.flush()
        os._exit(0)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
