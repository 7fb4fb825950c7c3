"""The `ulysses` command, and `python -m ulysses_cli`. Ctrl-C while the command's code is loaded leaves no trace."""

import sys


def main() -> None:
    try:
        from ulysses_cli.cli import run
    except KeyboardInterrupt:
        sys.exit(130)
    run()


if __name__ == "__main__":
    main()
