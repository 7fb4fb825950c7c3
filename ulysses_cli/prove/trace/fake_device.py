"""A GPU that is not there: tensors without data on `meta`, host memory on `cpu`, streams that only have numbers.

What DeepSpeed and torch would ask a real device is answered here, for this whole process: run it in a child. Holds no
model and counts no bytes.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from deepspeed.accelerator import set_accelerator
from deepspeed.accelerator.cpu_accelerator import CPU_Accelerator
from torch import Tensor, _meta_registrations

if TYPE_CHECKING:
    from ulysses_cli.plan.resolved import RunPlan
    from ulysses_cli.train.assembly.parts import Parts

DEVICE, HOST = torch.device("meta"), torch.device("cpu")
DEFAULT_STREAM = 0
DEFAULT_KERNEL = "flash_attention_2"  # of those that a GPU may have, the one that takes most
_current = DEFAULT_STREAM
_move = torch.nn.Module.to
_multiply_groups = _meta_registrations._meta_grouped_mm_common


def get_current_stream() -> int:
    """The number of the stream that work is now issued to: memory is reused within a stream."""
    return _current


class Stream:
    """Order is that of the program; only the number matters."""

    num_made = DEFAULT_STREAM

    def __init__(self, *_: Any, **__: Any) -> None:
        Stream.num_made += 1
        self.number = Stream.num_made

    def wait_stream(self, _: Any) -> None: ...

    def wait_event(self, _: Any) -> None: ...

    def synchronize(self) -> None: ...

    def record_event(self, event: Any = None) -> Any:
        return event or StreamEvent()


class _Default(Stream):
    def __init__(self) -> None:
        self.number = DEFAULT_STREAM


class StreamEvent:
    def __init__(self, *_: Any, **__: Any) -> None: ...

    def record(self, *_: Any) -> None: ...

    def wait(self, *_: Any) -> None: ...

    def synchronize(self) -> None: ...

    def query(self) -> bool:
        return True

    def elapsed_time(self, _: Any) -> float:
        return 0.0


@contextmanager
def enter_stream(stream: Stream | None) -> Iterator[None]:
    global _current
    before, _current = _current, stream.number if stream is not None else _current
    try:
        yield
    finally:
        _current = before


class FakeAccelerator(CPU_Accelerator):
    """What DeepSpeed asks of a GPU. Asynchronous, as a GPU is: the paths that use streams are taken."""

    def __init__(self) -> None:
        super().__init__()
        self._name = DEVICE.type
        self._communication_backend_name = "fake"

    def is_synchronized_device(self) -> bool:
        return False

    def device_name(self, device_index: Any = None) -> str:
        return DEVICE.type

    def current_device_name(self) -> str:
        return DEVICE.type

    def current_device(self) -> Any:
        return DEVICE

    def device_count(self) -> int:
        return 1

    @property
    def Stream(self) -> Any:
        return Stream

    @property
    def Event(self) -> Any:
        return StreamEvent

    def stream(self, stream: Any) -> Any:
        return enter_stream(stream)

    def current_stream(self, device_index: Any = None) -> Any:
        return _Default()

    def default_stream(self, device_index: Any = None) -> Any:
        return _Default()

    def memory_allocated(self, device_index: Any = None) -> int:
        return 0

    max_memory_allocated = memory_cached = max_memory_cached = memory_reserved = max_memory_reserved = memory_allocated

    def available_memory(self, device_index: Any = None) -> int:
        return 1 << 60  # what takes more than a GPU has is to be seen

    def pin_memory(self, tensor: Tensor, make_copy: bool = True, match_shape: bool = True) -> Tensor:
        return tensor

    def is_pinned(self, tensor: Tensor) -> bool:
        return tensor.device.type == "cpu"

    def on_accelerator(self, tensor: Tensor) -> bool:
        return tensor.device.type == DEVICE.type

    def create_op_builder(self, op_name: str) -> None:
        return None  # nothing is compiled

    def get_op_builder(self, class_name: str) -> None:
        return None


def install() -> None:
    """From here on this process has the fake device and no other."""
    set_accelerator(FakeAccelerator())
    from deepspeed.runtime.zero import linear, partition_parameters, partitioned_param_coordinator, stage_1_and_2

    # Ranks compare lists of numbers; there are no others.
    partitioned_param_coordinator.assert_ints_same_as_other_ranks = lambda _: None
    partition_parameters.zero_wrapper_for_fp_tensor_constructor = cast_what_is_made
    _meta_registrations._meta_grouped_mm_common = multiply_groups
    linear.get_accelerator = CPU_Accelerator  # asked for its autocast alone, which the fake device does not have
    stage_1_and_2.torch = ShapesWithoutBytes()
    # Gradients without values are in order.
    stage_1_and_2.DeepSpeedZeroOptimizer.has_overflow = lambda self, partition_gradients=True: False
    Tensor.record_stream = lambda self, stream: None
    torch.nn.Module.to = stay_or_move


def forget_groups() -> None:
    """After a model: DeepSpeed makes the groups of replicas once in a process."""
    from deepspeed.utils import groups

    groups._ZERO_PARAM_INTRA_PARALLEL_GROUP = None


def stay_or_move(module: torch.nn.Module, *args: Any, **kwargs: Any) -> torch.nn.Module:
    """A module is made on its device: torch would make its parameters anew there, which their watchers do not allow."""
    device, dtype, *_ = torch._C._nn._parse_to(*args, **kwargs)
    return module if device == DEVICE and dtype is None else _move(module, *args, **kwargs)


def cast_what_is_made(
    fn: Callable[..., Tensor], target_fp_dtype: torch.dtype | None, target_device: Any
) -> Callable[..., Tensor]:
    """As DeepSpeed does, which exchanges a tensor's data: a tensor without data has none to exchange."""

    def made(*args: Any, **kwargs: Any) -> Tensor:
        if target_device is not None and kwargs.get("device") is None:
            kwargs["device"] = target_device
        tensor = fn(*args, **kwargs)
        return tensor.to(target_fp_dtype) if target_fp_dtype is not None and tensor.is_floating_point() else tensor

    return made


def multiply_groups(a: Tensor, b: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    """torch's shapes of a grouped product are those of a GPU, for bfloat16 alone; a CPU rank has float32 too."""
    if a.dtype != torch.float32:
        return _multiply_groups(a, b, *args, **kwargs)
    return _multiply_groups(a.bfloat16(), b.bfloat16(), *args, **kwargs).float()


class ShapesWithoutBytes:
    """torch as DeepSpeed's stages 1 and 2 see it: they keep the shapes of weights as tensors on `meta`, where the fake
    device has its bytes and a GPU has none."""

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)

    @staticmethod
    def zeros_like(tensor: Tensor, **kwargs: Any) -> Tensor:
        if kwargs.get("device") == DEVICE.type:
            return torch.zeros((), dtype=tensor.dtype, device=HOST).expand(tensor.shape)
        return torch.zeros_like(tensor, **kwargs)


class HostAdam(torch.optim.Optimizer):
    """What DeepSpeed's Adam for the host holds: two float32 moments of each tensor, from the first step on."""

    def __init__(self, groups: Any, lr: float = 1e-3, adamw_mode: bool = True, **numbers: Any) -> None:
        super().__init__(groups, {"lr": lr, **numbers})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                state = self.state[parameter]
                if parameter.grad is not None and not state:
                    state["exp_avg"] = torch.zeros_like(parameter, dtype=torch.float32)
                    state["exp_avg_sq"] = torch.zeros_like(parameter, dtype=torch.float32)


def replace_everywhere(function: Callable[..., Any], stand_in: Callable[..., Any], package: str) -> None:
    """In each loaded module of a package that imported a function by name."""
    for name, module in list(sys.modules.items()):
        if name.startswith(package):
            for key, value in list(vars(module).items()):
                if value is function:
                    setattr(module, key, stand_in)


def copy_on_streams() -> None:
    """Offloading keeps what leaves the device until its copies are done: it is told of streams, and that one waits."""
    from ulysses_cli.train.assembly import levers
    from ulysses_cli.train.memory import offload

    class Offloader(offload.Offloader):
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            self.out_stream, self.in_stream = Stream(), Stream()

    levers.Offloader = Offloader  # type: ignore[attr-defined]
    torch.cuda.current_stream = lambda _=None: _Default()
    torch.cuda.stream, torch.cuda.Event = enter_stream, StreamEvent


def drop_as_a_gpu_does() -> None:
    """With a mask of a byte; torch keeps factors of the input's own type elsewhere."""

    def drop(given: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> Tensor:
        return torch.native_dropout(given, p, training)[0] if p and training else given

    torch.nn.functional.dropout = drop


def make_parts() -> Parts:
    """Weights are made and not read, and the kernel is the one that every GPU has."""
    from transformers import AutoModelForCausalLM

    from ulysses_cli.train.assembly import adapters
    from ulysses_cli.train.assembly.parts import Parts as RealParts
    from ulysses_cli.train.attention.kernels.choice import KernelChoice

    def make_weights(recipe: Any, config: Any, attention: str, _: Any) -> Any:
        dtype = getattr(torch, recipe.model.dtype)
        with torch.device(DEVICE):  # moving a module there later would make new parameters
            return AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation=attention)

    def add_adapters(recipe: Any, model: Any) -> Any:
        """peft gives adapters the base's dtype when it moves them to its device, and never moves to this one."""
        usual = torch.get_default_dtype()
        torch.set_default_dtype(getattr(torch, recipe.model.dtype))
        try:
            with torch.device(DEVICE):
                return adapters.add_adapters(recipe, model)
        finally:
            torch.set_default_dtype(usual)

    def choose(plan: RunPlan, *_: Any) -> KernelChoice:
        wanted = plan.recipe.model.attn_implementation
        return KernelChoice(DEFAULT_KERNEL if wanted == "auto" else wanted, "traced")

    return RealParts(make_weights, add_adapters, choose)


def replace_parts(max_tiles: int) -> None:
    """Parts of the project that need values or a real device: of many equal tiles a few are enough."""
    import torch.optim.optimizer as optimizers
    from deepspeed.ops.adam import DeepSpeedCPUAdam

    from ulysses_cli.train.memory import offload, tiled_loss, tiled_mlp, tiled_norm, tiling

    def keep_few(split: Callable[..., list[slice]]) -> Callable[..., list[slice]]:
        def few(*args: Any) -> list[slice]:
            parts = split(*args)
            return parts if len(parts) <= max_tiles else [*parts[: max_tiles - 1], parts[-1]]

        return few

    @torch.no_grad()
    def compute_losses(loss: Any, hidden: Tensor, labels: Tensor, rule: Any) -> Tensor:
        """As many losses as there are tokens, from a few tiles."""
        parts = loss.walk_tiles(labels.numel())
        found = [tiled_loss.compute_losses(loss.compute_logits(hidden[part]), labels[part], rule)[0] for part in parts]
        return found[0].new_empty(labels.numel())

    offload.count_free_bytes = lambda: 1 << 60  # type: ignore[attr-defined]
    for tiled in (tiled_mlp, tiled_norm):
        tiled.split_tokens = keep_few(tiling.split_tokens)  # type: ignore[attr-defined]
    tiled_loss.TiledLoss.walk_tiles = keep_few(tiled_loss.TiledLoss.walk_tiles)  # type: ignore[method-assign]
    replace_everywhere(DeepSpeedCPUAdam, HostAdam, "deepspeed")
    tiled_loss.TiledLoss.compute_losses_in_tiles = compute_losses  # type: ignore[method-assign]
    supported = optimizers._get_fused_kernels_supported_devices
    optimizers._get_fused_kernels_supported_devices = lambda: [*supported(), DEVICE.type]
