"""Tensors without values, the types of their elements, and the meter that counts their bytes: what is allocated now,
on the device and on the host, and the peak of each phase. A storage's bytes are counted while any tensor holds it:
Python's reference counting frees it, as torch's frees a real one. Knows no operator."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from math import prod
from typing import TYPE_CHECKING, Any, ClassVar


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


Tag = tuple[str, str]  # what kind of work makes a storage, and the path of the module in which it is made


@dataclass(eq=False)
class Place:
    """TensorDevice or host memory."""

    now: int = 0
    peak: int = 0  # of the present phase
    peaks: dict[str, int] = field(default_factory=dict)


class ByteMeter:
    """`events`: where it is a list, bytes are noted there in order as they come (above 0) and go (below 0), with the
    phase and the storage's tag. `held`: by tag, what is there before the first event."""

    def __init__(self, events: list[tuple[int, str, Tag]] | None = None) -> None:
        self.device, self.host = Place(), Place()
        self.phase, self.events = "", events
        self.tag: Tag = ("", "")
        self.held: Counter[Tag] = Counter()

    def add(self, num_bytes: int, tag: Tag, *, on_host: bool) -> None:
        place = self.host if on_host else self.device
        place.now += num_bytes
        if place.now > place.peak:
            place.peak = place.now
        if self.events is not None and num_bytes and not on_host:
            self.events.append((num_bytes, self.phase, tag))

    def add_temporary(self, num_bytes: int) -> None:
        """Memory that an operator takes and gives back."""
        self.add(num_bytes, self.tag, on_host=False)
        self.add(-num_bytes, self.tag, on_host=False)

    def forget(self, *kept: str) -> None:
        """Forgets events and the peaks of all phases but these."""
        for num_bytes, _, tag in self.events or ():
            self.held[tag] += num_bytes
        self.events = None if self.events is None else []
        for place in (self.device, self.host):
            place.peak = place.now
            place.peaks = {phase: peak for phase, peak in place.peaks.items() if phase in kept}

    def enter(self, phase: str) -> str:
        """Begins a phase and returns the one before."""
        for place in (self.device, self.host):
            place.peaks[self.phase] = max(place.peak, place.peaks.get(self.phase, 0))
            place.peak = place.now
        before, self.phase = self.phase, phase
        return before

    @contextmanager
    def during(self, phase: str) -> Iterator[None]:
        before = self.enter(phase)
        try:
            yield
        finally:
            self.enter(before)


Shape = tuple[int, ...]


class UnknownOperator(Exception):
    """Code asks for something of which no sizes are known. Its text names it."""


class Running:
    """Of the run in progress. `sees_kernels`: what a GPU's kernels take and give back inside is counted. `product`: is
    told of each product of matrices in a forward: both of them, and the multiplications of numbers."""

    meter: ClassVar[ByteMeter] = ByteMeter()
    grad: ClassVar[bool] = True
    sequence: ClassVar[int] = 0
    hooks: ClassVar[list[Any]] = []
    device: ClassVar[TensorDevice] = HOST  # of what is made without a device
    dtype: ClassVar[DType | None] = None  # of what is made without a type
    sees_kernels: ClassVar[bool] = False
    product: ClassVar[Callable[[Tensor, Tensor, int], None] | None] = None


class Storage:
    __slots__ = ("__weakref__", "meter", "num_bytes", "on_host", "tag")

    def __init__(self, num_bytes: int, tag: Tag | None = None, *, on_host: bool = False) -> None:
        self.meter, self.num_bytes, self.on_host = Running.meter, num_bytes, on_host
        self.tag = tag or self.meter.tag
        self.meter.add(num_bytes, self.tag, on_host=on_host)

    def __del__(self) -> None:
        self.meter.add(-self.num_bytes, self.tag, on_host=self.on_host)


class Tensor:
    """`steps`: how many elements lie between neighbours of each dimension; None where the tensor is contiguous."""

    __slots__ = (
        "__weakref__", "_accumulate", "_hooks", "_requires_grad", "base", "dtype", "grad", "index", "node", "shape",
        "steps", "storage",
    )  # fmt: skip

    def __init__(self, shape: Shape, dtype: DType, storage: Storage, steps: Shape | None = None) -> None:
        self.shape = shape
        self.dtype = dtype
        self.storage = storage
        self.steps = steps
        self.node: Any = None  # of the graph: what made this tensor
        self.grad: Tensor | None = None
        self._accumulate: Any = None
        self._hooks: list[Any] | None = None
        self._requires_grad, self.index = False, 0
        self.base: Tensor | None = None  # whose elements a view shows

    # --- what it is

    @property
    def requires_grad(self) -> bool:
        return self._requires_grad

    @requires_grad.setter
    def requires_grad(self, value: bool) -> None:
        self._requires_grad = value

    @property
    def device(self) -> TensorDevice:
        return HOST if self.storage.on_host else DEVICE

    @property
    def is_cuda(self) -> bool:
        return False  # kernels for GPUs alone are not run

    @property
    def ndim(self) -> int:
        return len(self.shape)

    @property
    def is_leaf(self) -> bool:
        return self.node is None

    @property
    def grad_fn(self) -> Any:
        return self.node

    @property
    def nbytes(self) -> int:
        return prod(self.shape) * self.dtype.itemsize

    @property
    def itemsize(self) -> int:
        return self.dtype.itemsize

    @property
    def data(self) -> Tensor:
        return self.detach()

    @data.setter
    def data(self, other: Tensor) -> None:
        self.shape = other.shape
        self.dtype = other.dtype
        self.storage = other.storage
        self.steps = other.steps

    def numel(self) -> int:
        return prod(self.shape)

    def element_size(self) -> int:
        return self.dtype.itemsize

    def dim(self) -> int:
        return len(self.shape)

    def size(self, dim: int | None = None) -> Any:
        return self.shape if dim is None else self.shape[dim]

    def stride(self, dim: int | None = None) -> Any:
        steps = get_steps(self)
        return steps if dim is None else steps[dim]

    def is_contiguous(self, **_: Any) -> bool:
        return is_contiguous(self)

    def is_floating_point(self) -> bool:
        return self.dtype.is_floating_point

    def __len__(self) -> int:
        return self.shape[0]

    def __hash__(self) -> int:
        return id(self)

    def __bool__(self) -> bool:
        return False  # code only reads truth values to ask whether something went wrong

    def __repr__(self) -> str:
        return f"Tensor{list(self.shape)}, {self.dtype}"

    def __iter__(self) -> Iterator[Tensor]:
        return iter(self.unbind(0))

    # --- bytes

    def detach(self) -> Tensor:
        return Tensor(self.shape, self.dtype, self.storage, self.steps)

    def requires_grad_(self, value: bool = True) -> Tensor:
        self.requires_grad = value
        return self

    def register_post_accumulate_grad_hook(self, hook: Any) -> None:
        self._hooks = [*(self._hooks or ()), hook]

    if TYPE_CHECKING:  # operators add the rest

        def __getattr__(self, name: str) -> Any: ...


def make(shape: Sequence[int], dtype: DType, steps: Shape | None = None, *, on_host: bool = False) -> Tensor:
    """A tensor of its own storage, without holes."""
    shape = tuple(shape)
    return Tensor(shape, dtype, Storage(prod(shape) * dtype.itemsize, on_host=on_host), steps)


def make_like(t: Tensor, dtype: DType | None = None) -> Tensor:
    """A new tensor whose dimensions lie in memory in the order of those of `t`."""
    return make(t.shape, dtype or t.dtype, keep_order([t], t.shape), on_host=t.storage.on_host)


def view(t: Tensor, shape: Shape, steps: Shape | None) -> Tensor:
    out = Tensor(shape, t.dtype, t.storage, steps)
    out.base = (t if t.base is None else t.base) if Running.grad else None
    return out


def list_steps(shape: Sequence[int]) -> Shape:
    """Of a contiguous tensor."""
    steps, size = [0] * len(shape), 1
    for dim in range(len(shape) - 1, -1, -1):
        steps[dim] = size
        size *= max(shape[dim], 1)
    return tuple(steps)


def get_steps(t: Tensor) -> Shape:
    return list_steps(t.shape) if t.steps is None else t.steps


def is_contiguous(t: Tensor) -> bool:
    if t.steps is None:
        return True
    size = 1
    for length, step in zip(reversed(t.shape), reversed(t.steps), strict=True):
        if length != 1:
            if step != size:
                return False
            size *= length
    return True


def keep_order(tensors: Sequence[Tensor], shape: Shape) -> Shape | None:
    """The steps of a new tensor of this shape that an elementwise operator of these tensors makes: its dimensions are
    in their order (ATen/TensorIterator.cpp: reorder_dimensions)."""
    if all(t.steps is None or is_contiguous(t) for t in tensors):
        return None
    padding = len(shape)
    steps = [
        (0,) * (padding - len(t.shape))
        + tuple(0 if size == 1 and whole_size != 1 else step for size, step, whole_size in zip(
            t.shape, get_steps(t), shape[padding - len(t.shape):], strict=True))
        for t in tensors
    ]  # fmt: skip

    def compare(a: int, b: int) -> int:
        for own in steps:
            if own[a] == 0 or own[b] == 0:
                continue
            if own[a] != own[b]:
                return -1 if own[a] < own[b] else 1
            if shape[a] > shape[b]:
                return 1
        return 0

    order = list(range(len(shape) - 1, -1, -1))
    for start in range(1, len(order)):
        moved = start
        for at in range(start - 1, -1, -1):
            result = compare(order[at], order[moved])
            if result > 0:
                order[at], order[moved] = order[moved], order[at]
                moved = at
            elif result < 0:
                break
    found, size = [0] * len(shape), 1
    for dim in order:
        found[dim] = size
        size *= max(shape[dim], 1)
    return None if tuple(found) == list_steps(shape) else tuple(found)


def find_view_steps(t: Tensor, shape: Shape) -> Shape | bool | None:
    """The steps of a view of this shape, or False where there is none (ATen/TensorUtils.cpp: computeStride)."""
    if is_contiguous(t):
        return None
    if not t.shape:
        return tuple(1 for _ in shape)
    old, steps = t.shape, get_steps(t)
    found, at = [0] * len(shape), len(shape) - 1
    base, size, seen = steps[-1], 1, 1
    for dim in range(len(old) - 1, -1, -1):
        size *= old[dim]
        if dim == 0 or (old[dim - 1] != 1 and steps[dim - 1] != size * base):
            while at >= 0 and (seen < size or shape[at] == 1):
                found[at] = seen * base
                seen *= shape[at]
                at -= 1
            if seen != size:
                return False
            if dim:
                base, size, seen = steps[dim - 1], 1, 1
    return tuple(found) if at < 0 else False
