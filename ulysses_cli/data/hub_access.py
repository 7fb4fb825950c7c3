"""Asks once whether the hub can be reached. Without it, libraries read only their caches: alone they would try for half
a minute, with lines of their own."""

from __future__ import annotations

from functools import cache

from ulysses_cli.plan.problem import Problem

REACH_SECONDS = 10


@cache
def find_obstacle() -> str:
    """Why the hub cannot be asked; '' if it can. If it cannot, the libraries of this process go into offline mode."""
    from huggingface_hub import constants, get_session

    if constants.HF_HUB_OFFLINE:
        return "HF_HUB_OFFLINE forbids downloads"
    try:
        get_session().head(constants.ENDPOINT, timeout=REACH_SECONDS)
    except Exception as error:  # noqa: BLE001 - the HTTP library is the hub library's choice
        constants.HF_HUB_OFFLINE = True
        return f"{constants.ENDPOINT} cannot be reached ({_describe(error)})"
    return ""


def explain_absence(key: str, what: str, obstacle: str, download: str) -> Problem:
    """`download`: the arguments of `hf download` on a machine with a network."""
    cause = "unset it" if obstacle.startswith("HF_HUB_OFFLINE") else "check the connection and its proxy"
    hint = f"{cause}; to work offline, run `hf download {download} --local-dir DIR` elsewhere, and name a copy of DIR"
    return Problem(key, f"{what} is not on this machine, and {obstacle}", hint)


def _describe(error: Exception) -> str:
    return str(error).strip().split("\n")[0] or type(error).__name__
