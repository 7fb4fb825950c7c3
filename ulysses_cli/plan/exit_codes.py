"""Exit codes of commands and of the processes that they start. docs/faq.md explains each of them."""

DONE = 0
FAILED = 1  # the run or the proof failed
USAGE = 2  # the recipe or the command line is wrong
STOPPED = 75  # stopped with a checkpoint before the last step, under a scheduler; the sysexits' "try again later"


def get_signal_code(number: int) -> int:
    """Of a process that a signal ended before its work was done, as shells report it: 130 after SIGINT, 143 after
    SIGTERM."""
    return 128 + number
