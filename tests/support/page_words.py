"""What a page of HTML says, without its drawings."""

import re


def list_words(page: str, start: str = "", end: str = "") -> list[str]:
    """Texts from `start` to `end`, else from the first to the last but one: of a drawing its title and its description,
    and not the table of its numbers."""
    page = re.sub(r"<svg.*?<title[^>]*>(.*?)</title><desc[^>]*>(.*?)</desc>.*?</svg>", r"\1: \2\n", page, flags=re.S)
    page = re.sub(r"<style>.*?</style>|<details.*?</details>", "", page, flags=re.S)
    words = [line.strip() for line in re.sub(r"<[^>]+>", "\n", page).splitlines() if line.strip()]
    return words[words.index(start) if start else 0 : words.index(end) if end in words else -1]
