"""Exit codes of commands and of the processes that they start. docs/faq.md explains each of them."""

DONE = 0
FAILED = 1  # the run or the proof failed
USAGE = 2  # the recipe or the command line is wrong
INTERRUPTED = 130  # before a checkpoint could be written; after SIGTERM 143
