"""Tensors without values. A storage's bytes are counted while any tensor holds it: Python's reference counting frees
it, as torch's frees a real one."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from math import prod
from typing import TYPE_CHECKING, Any, ClassVar

from ulysses_cli.plan.sizes.dtypes import DEVICE, HOST, DType, TensorDevice
from ulysses_cli.plan.sizes.meter import ByteMeter, Tag

Shape = tuple[int, ...]


class UnknownOperator(Exception):
    """Code asks for something of which no sizes are known. Its text names it."""


class Running:
    """Of the run in progress. `sees_kernels`: what a GPU's kernels take and give back inside is counted."""

    meter: ClassVar[ByteMeter] = ByteMeter()
    grad: ClassVar[bool] = True
    sequence: ClassVar[int] = 0
    hooks: ClassVar[list[Any]] = []
    device: ClassVar[TensorDevice] = HOST  # of what is made without a device
    dtype: ClassVar[DType | None] = None  # of what is made without a type
    sees_kernels: ClassVar[bool] = False


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
        self.shape, self.dtype, self.storage, self.steps = shape, dtype, storage, steps
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
        self.shape, self.dtype, self.storage, self.steps = other.shape, other.dtype, other.storage, other.steps

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
