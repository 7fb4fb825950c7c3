"""YAML for people: the order of keys stays, texts of several lines are blocks. What is written is read again."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import yaml

from ulysses_cli.launch.jobs.job import refuse_difference


class _Dumper(yaml.SafeDumper):
    pass


def _represent_text(dumper: yaml.SafeDumper, text: str) -> yaml.ScalarNode:
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style="|" if "\n" in text else None)


_Dumper.add_representer(str, _represent_text)


def dump_yaml(content: dict[str, Any]) -> str:
    return str(yaml.dump(content, Dumper=_Dumper, sort_keys=False, width=120, allow_unicode=True))


def write_documents(head: str, documents: Sequence[dict[str, Any]], file: str) -> str:
    """Returns comments, then a document each. Raises RecipeError where a reader would find anything else in it."""
    text = head + "---\n".join(dump_yaml(each) for each in documents)
    try:
        found = list(yaml.safe_load_all(text))
    except yaml.YAMLError:
        found = []
    if found != list(documents):
        raise refuse_difference(file)
    return text
