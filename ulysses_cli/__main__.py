"""`python -m ulysses_cli` runs the `ulysses` command."""

from ulysses_cli.cli import run

run()
