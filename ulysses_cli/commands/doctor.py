"""`ulysses doctor`: checks whether this machine can train, and lists what to fix first."""

from __future__ import annotations

from ulysses_cli.commands.options import Format, FormatOption, OnlineOption, OptionalRecipeWords, PageOption


def doctor(
    words: OptionalRecipeWords = None,
    html: PageOption = None,
    online: OnlineOption = False,
    output: FormatOption = Format.text,
) -> None:
    """Check that this machine can train: packages, GPUs, data exchange between ranks, attention kernels, disks.

    Each check runs what training runs. With a recipe, also checks that this machine has the GPUs, kernels, memory and
    disk space that it needs. The output ends with a list of what to fix, the most urgent first. Exit code 1 when a
    check fails. Takes about a minute.

    \b
    Examples:
      ulysses doctor
      ulysses doctor my.yaml parallel.sp_size=8 --format json
    """
    from ulysses_cli.commands.children.proving import prove, read_subject

    subject = read_subject(words, output, online=online) if words else None
    prove("doctor", subject, {}, output, html)
