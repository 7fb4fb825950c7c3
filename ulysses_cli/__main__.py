"""`python -m ulysses_cli` is the `ulysses` command."""

from ulysses_cli.cli import run

run()
