"""Exit codes of commands and of the processes that they start. What each means to a person stands in docs/faq.md."""

DONE = 0
FAILED = 1  # the run or the proof failed
USAGE = 2  # the recipe or the command line is wrong
INTERRUPTED = 130  # before a checkpoint could be written; after SIGTERM 143
