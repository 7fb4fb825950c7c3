"""Types of a tensor's elements, devices, and which type the result of an operator has."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, eq=False)
class DType:
    """`category`: 0 for truth values, 1 for integers, 2 for floats, 3 for complex numbers. `order`: of two types of one
    category the result has the higher one."""

    name: str
    itemsize: int
    category: int
    order: int

    @property
    def is_floating_point(self) -> bool:
        return self.category == 2

    @property
    def is_complex(self) -> bool:
        return self.category == 3

    def __repr__(self) -> str:
        return f"torch.{self.name}"


BOOL = DType("bool", 1, 0, 0)
UINT8, INT8, INT16, INT32, INT64 = (
    DType(name, size, 1, order)
    for order, (name, size) in enumerate((("uint8", 1), ("int8", 1), ("int16", 2), ("int32", 4), ("int64", 8)))
)
FLOAT8, FLOAT16, BFLOAT16, FLOAT32, FLOAT64 = (
    DType(name, size, 2, order)
    for order, (name, size) in enumerate(
        (("float8_e4m3fn", 1), ("float16", 2), ("bfloat16", 2), ("float32", 4), ("float64", 8))
    )
)
COMPLEX64, COMPLEX128 = DType("complex64", 8, 3, 0), DType("complex128", 16, 3, 1)
DTYPES = (
    BOOL, UINT8, INT8, INT16, INT32, INT64, FLOAT8, FLOAT16, BFLOAT16, FLOAT32, FLOAT64, COMPLEX64, COMPLEX128,
)  # fmt: skip
BY_NAME = {dtype.name: dtype for dtype in DTYPES}
ALIASES = {
    "float": FLOAT32, "double": FLOAT64, "half": FLOAT16, "int": INT32, "long": INT64, "short": INT16,
    "cfloat": COMPLEX64, "cdouble": COMPLEX128,
}  # fmt: skip
DEFAULTS = {0: BOOL, 1: INT64, 2: FLOAT32, 3: COMPLEX64}  # of Python's numbers


def find_category(number: Any) -> int:
    if isinstance(number, bool):
        return 0
    return 1 if isinstance(number, int) else 2 if isinstance(number, float) else 3


def join(a: DType, b: DType) -> DType:
    """torch.promote_types"""
    if a is b:
        return a
    if a.category != b.category:
        high, low = (a, b) if a.category > b.category else (b, a)
        return COMPLEX128 if high is COMPLEX64 and low is FLOAT64 else high
    if {a, b} == {FLOAT16, BFLOAT16}:
        return FLOAT32
    if UINT8 in (a, b) and INT8 in (a, b):
        return INT16
    return a if a.order > b.order else b


def find_result(typed: Iterable[tuple[DType, int]], numbers: Iterable[Any] = ()) -> DType:
    """torch.result_type of tensors, given by type and number of dimensions, and of Python's numbers: a tensor without
    dimensions counts only where its category is higher, and a number only where its category is higher still."""
    result: DType | None = None
    for wanted in (True, False):
        part: DType | None = None
        for dtype, dims in typed:
            if bool(dims) is wanted:
                part = dtype if part is None else join(part, dtype)
        if part is not None and (result is None or part.category > result.category):
            result = part if result is None or not part.is_complex else join(part, result)
    category = max((find_category(number) for number in numbers), default=0)
    if result is None or category > result.category:
        return DEFAULTS[category]
    return result


class TensorDevice:
    """A place of tensors. Only whether it is the host makes a difference."""

    def __init__(self, place: Any, index: int | None = None) -> None:
        self.type: str
        self.type, _, number = (place.type if isinstance(place, TensorDevice) else str(place)).partition(":")
        self.index = int(number) if number else index

    def __eq__(self, other: object) -> bool:
        return isinstance(other, TensorDevice) and (self.type, self.index) == (other.type, other.index)

    def __hash__(self) -> int:
        return hash((self.type, self.index))

    def __str__(self) -> str:
        return self.type

    def __repr__(self) -> str:
        return f"device(type='{self.type}')"


DEVICE, HOST = TensorDevice("meta"), TensorDevice("cpu")
