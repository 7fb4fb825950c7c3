"""setting(): a field of a recipe with doc line, unit, bounds and other spellings. Section: the base of all sections."""

from __future__ import annotations

import unicodedata
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BaseModel, ConfigDict, Field

MAX_TOKENS = 2**40  # far more than any run has; keeps products of a few settings inside 64 bits
Place = Literal["auto", "none", "cpu", "nvme"]
UNMOVED: dict[Any, Any] = {None: "none", False: "none"}
LINES = "lines"  # marks the type of a text that may have several lines
Lines = Annotated[str, LINES]
CONTROLS = ("Cc", "Cs", "Zl", "Zp")  # control characters, halves of characters, and what Unicode calls a line's end
ON_GPU = {"gpu": "write none, which keeps them on the GPU"}  # where the place is the GPU itself


def setting(
    default: Any,
    doc: str,
    *,
    unit: str = "",
    aliases: tuple[str, ...] = (),
    spellings: dict[Any, Any] | None = None,
    spellings_by_alias: dict[str, dict[Any, Any]] | None = None,
    refused: dict[str, str] | None = None,
    **bounds: Any,
) -> Any:
    """One field. `aliases`: other names of the key. `spellings`: other ways to write a value, each with the value it
    means. `spellings_by_alias`: those that hold only where the key is written by that alias. `refused`: values that
    people try, each with the reason why it is not offered."""
    extra: dict[str, Any] = {
        "unit": unit,
        "aliases": list(aliases),
        "spellings": spellings or {},
        "spellings_by_alias": spellings_by_alias or {},
        "refused": refused or {},
    }
    return Field(default, description=doc, json_schema_extra=extra, **bounds)


def text(default: str | None, doc: str, *, unit: str = "name", **more: Any) -> Any:
    return setting(default, doc, unit=unit, min_length=1, max_length=4096, **more)


def find_control(text: str) -> str:
    """The first character of a text that ends a line or is none that people write; '' where all are fine. In a comment
    of another file it would begin a line of that file."""
    return next((letter for letter in text if unicodedata.category(letter) in CONTROLS), "")


class Section(BaseModel):
    """`SHORT`: the setting that a plain value in place of the section stands for."""

    SHORT: ClassVar[str] = ""
    model_config = ConfigDict(frozen=True, strict=True, extra="forbid", protected_namespaces=(), defer_build=True)
