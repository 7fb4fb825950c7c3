"""Reads and parses the chat template that a recipe names: a shipped one, a file, or text in the recipe.

Neither compiles nor renders it: Jinja computes a template's constants when it compiles, without any bound. Loads no
tokenizer.
"""

from __future__ import annotations

import difflib
import os
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ulysses_cli.plan.problem import Problem, RecipeError

if TYPE_CHECKING:
    from jinja2 import Environment, nodes

FOLDER = Path(__file__).parent / "templates"
KEY = "data.chat_template"
MAX_BYTES = 1 << 20
# Around a thought in what the assistant says.
THOUGHT_MARKS = (("<think>", "</think>"), ("[THINK]", "[/THINK]"), ("<seed:think>", "</seed:think>"))
# Variables by which templates leave thinking out, or ask for it. A template that reads neither ignores both.
THINKING_SWITCHES = ("enable_thinking", "thinking")
# Variables by which templates keep the thoughts of earlier turns, and the values that do so.
KEEPING_THOUGHTS = {"preserve_thinking": "true", "clear_thinking": "false", "truncate_history_thinking": "false"}
# What this tool, transformers or the row itself gives to a template.
OUR_VARIABLES = ("messages", "tools", "tokenize", "add_generation_prompt", "chat_template", "continue_final_message")
# With this templates write the date of the day, which would give a chat other tokens tomorrow. The recipe's variable of
# this name says which date stands there; without it, the one that Llama's templates write where they have no clock.
CLOCK, DATE = "strftime_now", "2024-07-26"
IM = ("<|im_start|>", "<|im_end|>")


@dataclass(frozen=True)
class Shipped:
    """`markers`: tokens that the template itself writes. `end`: the token that ends a turn; '' if that is the
    tokenizer's end of text."""

    markers: tuple[str, ...]
    end: str = ""


SHIPPED = {
    "chatml": Shipped(IM, "<|im_end|>"),
    "llama-3": Shipped(("<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"), "<|eot_id|>"),
    "mistral": Shipped(("[INST]", "[/INST]")),
    "gemma": Shipped(("<start_of_turn>", "<end_of_turn>"), "<end_of_turn>"),
    "phi": Shipped(("<|system|>", "<|user|>", "<|assistant|>", "<|end|>"), "<|end|>"),
    "qwen": Shipped(IM, "<|im_end|>"),
}
NAMES = ", ".join(SHIPPED)
NAME_ONE = f"name a file that holds one, or one of {NAMES}"


@dataclass(frozen=True)
class Template:
    """`name`: of the shipped set, or ''."""

    text: str
    name: str = ""

    @property
    def markers(self) -> tuple[str, ...]:
        return SHIPPED[self.name].markers if self.name else ()


def read_template(value: str) -> Template:
    """Takes the value of `data.chat_template`, returns a template that parses. Raises RecipeError."""
    if "{{" in value or "{%" in value:
        return Template(_check_syntax(value, "the template, line "))
    if value in SHIPPED:
        return Template(_read_file(FOLDER / f"{value}.jinja"), value)
    file = Path(os.path.expanduser(value))
    if os.path.isfile(file):
        return Template(_check_syntax(_read_file(file), f"{value}:"))
    looks_like_path = "/" in value or value.endswith((".jinja", ".jinja2", ".j2", ".txt"))
    close = difflib.get_close_matches(value.lower(), SHIPPED, n=1)
    if looks_like_path:
        raise RecipeError([Problem(KEY, f"{value} is not a file", f"name a file, or one of {NAMES}")])
    hint = f"did you mean `{close[0]}`?" if close else f"write {NAMES}, a file, or a template with {{{{ }}}}"
    raise RecipeError([Problem(KEY, f"{value} is neither a shipped template nor a file", hint)])


def _read_file(file: Path) -> str:
    try:
        with open(file, "rb") as stream:
            return stream.read(MAX_BYTES).decode("utf-8-sig").rstrip("\n")
    except OSError as error:
        raise RecipeError([Problem(KEY, f"{file} cannot be read: {error.strerror}", "make it readable")]) from None
    except UnicodeDecodeError:
        raise RecipeError([Problem(KEY, f"{file} is not UTF-8 text", "save it as UTF-8")]) from None


def read_date(variables: Mapping[str, Any]) -> datetime:
    """The date that a template with these variables writes. Raises ValueError for what is none."""
    return datetime.fromisoformat(str(variables.get(CLOCK) or DATE))


def find_switch(template: str) -> tuple[str, str] | None:
    """The variable with which this template keeps the thoughts of earlier turns, and its value, if it reads one."""
    names = list_variables(template)
    return next(((name, value) for name, value in KEEPING_THOUGHTS.items() if name in names), None)


def list_variables(template: str) -> frozenset[str]:
    """The variables that a template reads; none where it cannot be parsed."""
    from jinja2 import TemplateError

    try:
        return frozenset(_list_names(_make_environment().parse(template)))
    except (TemplateError, ValueError, RecursionError, MemoryError):
        return frozenset()


def _check_syntax(text: str, where: str) -> str:
    """Parses the template as transformers would."""
    from jinja2 import TemplateSyntaxError

    hint = "fix it: a chat template is Jinja, as transformers reads it"
    environment = _make_environment()
    try:
        tree = environment.parse(text)
        unknown = next(_walk_unknown(tree, environment), None)
    except TemplateSyntaxError as error:
        raise RecipeError([Problem(KEY, f"{where}{error.lineno}: {error.message}", hint)]) from None
    except (ValueError, RecursionError, MemoryError) as error:  # a number of 5,000 digits, 1,000 brackets in brackets
        place = where.rpartition(", line")[0] or where.removesuffix(":")
        reason = "it is nested too deeply" if isinstance(error, RecursionError) else str(error)
        raise RecipeError([Problem(KEY, f"{place} cannot be parsed: {reason}", hint)]) from None
    if unknown is not None:
        raise RecipeError([Problem(KEY, f"{where}{unknown[0]}: {unknown[1]}", hint)])
    if "messages" not in _list_names(tree):
        place = where.rpartition(", line")[0] or where.removesuffix(":")
        raise RecipeError([Problem(KEY, f"{place} never reads `messages`, so it is no chat template", NAME_ONE)])
    return text


def _make_environment() -> Environment:
    """The syntax that transformers gives to templates: loop controls and `generation` blocks."""
    from jinja2.ext import Extension
    from jinja2.parser import Parser
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    class Generation(Extension):
        tags = {"generation"}  # noqa: RUF012 - jinja2 reads it from the class

        def parse(self, parser: Parser) -> list[nodes.Node]:
            next(parser.stream)
            return parser.parse_statements(("name:endgeneration",), drop_needle=True)

    return ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[Generation, "jinja2.ext.loopcontrols"]
    )


def _list_names(tree: nodes.Template) -> set[str]:
    """Variables that are read. jinja2.meta would compute the constants."""
    from jinja2 import nodes

    return {node.name for node in tree.find_all(nodes.Name) if node.ctx == "load"}


def _walk_unknown(tree: nodes.Node, environment: Environment) -> Iterator[tuple[int, str]]:
    """Line and message of filters and tests that do not exist. Jinja allows them in a branch that is never taken."""
    from jinja2 import nodes

    if isinstance(tree, nodes.Filter) and tree.name not in environment.filters:
        yield tree.lineno, f"No filter named '{tree.name}'."
    if isinstance(tree, nodes.Test) and tree.name not in environment.tests:
        yield tree.lineno, f"No test named '{tree.name}'."
    if not isinstance(tree, nodes.If | nodes.CondExpr):
        for child in tree.iter_child_nodes():
            yield from _walk_unknown(child, environment)


def explain_no_template(tokenizer: str, source: str) -> Problem:
    """`source`: the key of the data that holds chats."""
    message = f"required: {source} holds chats, and the tokenizer of {tokenizer} has no chat template"
    return Problem(KEY, message, f"write data.chat_template: {NAMES}, a file, or a template; or name a chat model")


def find_missing_markers(template: Template, tokens: Collection[str]) -> list[str]:
    return [marker for marker in template.markers if marker not in tokens]


def explain_markers(template: Template, missing: Sequence[str], added: Sequence[str], tokenizer: str) -> Problem:
    """The hint is the whole line, with the tokens that are added already."""
    line = ", ".join(f'"{token}"' for token in (*added, *missing))
    message = f"{template.name} marks turns with {', '.join(missing)}, which the tokenizer of {tokenizer} does not have"
    return Problem(KEY, message, f"write data.added_tokens: [{line}]")
