"""A fake GPU: tensors without data on `meta`, host memory on `cpu`, streams that are only numbers, and in place of
DeepSpeed's operator for files one that counts their bytes, moves nothing and answers at once.  It replaces what
DeepSpeed and torch call on a real device, in this whole process: use it in a child process. Holds no model.
Page-locked buffers are tensors without data, which the trace counts as host memory."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from concurrent.futures import Executor, Future
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from deepspeed.accelerator import set_accelerator
from deepspeed.accelerator.cpu_accelerator import CPU_Accelerator
from torch import Tensor, _meta_registrations

if TYPE_CHECKING:
    from ulysses_cli.plan.resolved import RunPlan
    from ulysses_cli.train.choosing import Choice as Chosen
    from ulysses_cli.train.model.parts import Functions, Parts
    from ulysses_cli.train.recurrence.rules import Kernel


DEVICE, HOST = torch.device("meta"), torch.device("cpu")
DEFAULT_STREAM = 0
DEFAULT_KERNEL = "flash_attention_2"  # of the kernels that a GPU may have, the one that needs most memory
_current = DEFAULT_STREAM
_move = torch.nn.Module.to
_multiply_groups = _meta_registrations._meta_grouped_mm_common


def get_current_stream() -> int:
    """The number of the current stream: the allocator reuses memory within one stream only."""
    return _current


class Stream:
    """Work runs in program order; only the stream's number is used."""

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
    """The accelerator interface of DeepSpeed. It is asynchronous, as a GPU is, so that DeepSpeed uses its streams."""

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
        return 1 << 60  # a recipe that needs more than a GPU has must be traced too

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
    """Makes the fake device the only device of this process."""
    set_accelerator(FakeAccelerator())
    from deepspeed.runtime.zero import linear, partition_parameters, partitioned_param_coordinator, stage_1_and_2

    # It compares numbers between ranks; this process is the only rank.
    partitioned_param_coordinator.assert_ints_same_as_other_ranks = lambda _: None
    partitioned_param_coordinator.set = LastMadeFirst
    partition_parameters.zero_wrapper_for_fp_tensor_constructor = cast_new_tensors
    _meta_registrations._meta_grouped_mm_common = multiply_groups
    linear.get_accelerator = CPU_Accelerator  # used only for its autocast, which the fake device does not have
    stage_1_and_2.torch = ShapesWithoutBytes()
    # Gradients without values cannot overflow.
    stage_1_and_2.DeepSpeedZeroOptimizer.has_overflow = lambda self, partition_gradients=True: False
    Tensor.record_stream = lambda self, stream: None
    torch.nn.Module.to = stay_or_move


class LastMadeFirst(set[Any]):
    """DeepSpeed waits for a module's weights in the order of a set, which differs from rank to rank. In this order the
    gathers of a module are all in memory before the first is freed, so that a trace repeats itself and shows the
    most."""

    def __iter__(self) -> Iterator[Any]:
        return iter(sorted(super().__iter__(), key=lambda each: getattr(each, "ds_id", each), reverse=True))


def forget_groups() -> None:
    """Call after each model: DeepSpeed makes the replica groups once per process."""
    from deepspeed.utils import groups

    groups._ZERO_PARAM_INTRA_PARALLEL_GROUP = None


def stay_or_move(module: torch.nn.Module, *args: Any, **kwargs: Any) -> torch.nn.Module:
    """A module is already made on its device. Moving it there would make new parameters, which the weak references of
    the tracer do not allow."""
    device, dtype, *_ = torch._C._nn._parse_to(*args, **kwargs)
    return module if device == DEVICE and dtype is None else _move(module, *args, **kwargs)


def cast_new_tensors(
    fn: Callable[..., Tensor], target_fp_dtype: torch.dtype | None, target_device: Any
) -> Callable[..., Tensor]:
    """As DeepSpeed's function of this place, which replaces `tensor.data`: a tensor without data has none to
    replace."""

    def make_tensor(*args: Any, **kwargs: Any) -> Tensor:
        if target_device is not None and kwargs.get("device") is None:
            kwargs["device"] = target_device
        tensor = fn(*args, **kwargs)
        return tensor.to(target_fp_dtype) if target_fp_dtype is not None and tensor.is_floating_point() else tensor

    return make_tensor


def multiply_groups(a: Tensor, b: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    """torch computes the shapes of a grouped product for bfloat16 only, as on a GPU; a CPU rank uses float32 too."""
    if a.dtype != torch.float32:
        return _multiply_groups(a, b, *args, **kwargs)
    return _multiply_groups(a.bfloat16(), b.bfloat16(), *args, **kwargs).float()


class ShapesWithoutBytes:
    """torch as DeepSpeed's stages 1 and 2 use it: they keep the shapes of weights as tensors on `meta`. A GPU spends no
    bytes on those, but this fake device counts tensors on `meta`, so they are made without storage."""

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)

    @staticmethod
    def zeros_like(tensor: Tensor, **kwargs: Any) -> Tensor:
        if kwargs.get("device") == DEVICE.type:
            return torch.zeros((), dtype=tensor.dtype, device=HOST).expand(tensor.shape)
        return torch.zeros_like(tensor, **kwargs)


class HostAdam(torch.optim.Optimizer):
    """The state of DeepSpeed's CPU Adam: two float32 moments of each tensor, allocated at the first step."""

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


class AtOnce(Executor):
    """Runs in the caller's thread, where allocations are counted."""

    def submit(self, function: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        future: Future[Any] = Future()
        future.set_result(function(*args, **kwargs))
        return future


def replace_everywhere(function: Callable[..., Any], stand_in: Callable[..., Any], package: str) -> None:
    """Replaces a function in each loaded module of a package that imported it by name."""
    for name, module in list(sys.modules.items()):
        if name.startswith(package):
            for key, value in list(vars(module).items()):
                if value is function:
                    setattr(module, key, stand_in)


def copy_on_streams() -> None:
    """Gives the offloader streams. It keeps a tensor on the device until the copy on its stream is done, so that
    streams change the peak."""
    from ulysses_cli.train.memory import offload
    from ulysses_cli.train.model import loss_model

    class Offloader(offload.Offloader):
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            self.out_stream, self.in_stream = Stream(), Stream()

    loss_model.Offloader = Offloader  # type: ignore[attr-defined]
    torch.cuda.current_stream = lambda _=None: _Default()
    torch.cuda.stream, torch.cuda.Event = enter_stream, StreamEvent


def drop_as_a_gpu_does() -> None:
    """Dropout with a mask of one byte per element, as on a GPU; elsewhere torch saves factors of the input's dtype."""

    def drop(hidden: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> Tensor:
        return torch.native_dropout(hidden, p, training)[0] if p and training else hidden

    torch.nn.functional.dropout = drop


def make_parts() -> Parts:
    """Parts of a build for the fake device: weights are made instead of loaded, and the attention kernel is fixed."""
    from transformers import AutoModelForCausalLM

    from ulysses_cli.prove.trace import kernels
    from ulysses_cli.prove.trace import kernels as recurrent_kernels
    from ulysses_cli.train.attention.kernels.choice import KernelChoice
    from ulysses_cli.train.choosing import Choice
    from ulysses_cli.train.elementwise.choice import ElementwiseChoice, foresee_implementations
    from ulysses_cli.train.model import adapters
    from ulysses_cli.train.model.parts import Parts as RealParts
    from ulysses_cli.train.recurrence.interface import CONVOLUTION

    def make_weights(recipe: Any, config: Any, attention: str, _: Any) -> Any:
        dtype = getattr(torch, recipe.model.dtype)
        kind = recipe.lora.quantize_base if recipe.lora is not None else None
        with torch.device(DEVICE if kind is None else HOST):  # moving a module later would make new parameters
            made = AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation=attention)
        if kind is not None:  # no more than one weight is whole on the device
            kernels.replace_quantized_parts()
            adapters.quantize_layers(made, kind, DEVICE)
            adapters.settle_layers(made)
            kernels.make_anew(made, DEVICE)
        if recipe.run.device != "cpu":
            recurrent_kernels.replace_kernels(made)
        return made

    def add_adapters(recipe: Any, shape: Any, model: Any) -> Any:
        """peft casts adapters to the base model's dtype when it moves them to a device. It never moves them to this
        one, so that they are made in that dtype. No values are loaded."""
        recipe = recipe.model_copy(update={"lora": recipe.lora.model_copy(update={"adapter_name_or_path": None})})
        default_dtype = torch.get_default_dtype()
        torch.set_default_dtype(getattr(torch, recipe.model.dtype))
        try:
            with torch.device(DEVICE):
                return adapters.add_adapters(recipe, shape, model)
        finally:
            torch.set_default_dtype(default_dtype)

    def choose(plan: RunPlan, *_: Any) -> KernelChoice:
        name = plan.recipe.model.attn_implementation
        return KernelChoice(DEFAULT_KERNEL if name == "auto" else name, "traced")

    def choose_implementations(plan: RunPlan, *_: Any) -> ElementwiseChoice:
        model, is_gpu = plan.recipe.model, plan.recipe.run.device != "cpu"
        dtype = getattr(torch, model.dtype)
        found = foresee_implementations(dtype, is_fused=model.fused_kernels, is_gpu=is_gpu)
        return ElementwiseChoice(found, "traced")

    def choose_recurrences(functions: Functions, plan: RunPlan, *_: Any) -> dict[str, Chosen[Kernel]]:
        """On a GPU, kernels of packages; a convolution is called for each row."""
        if plan.recipe.run.device == "cpu":
            return dict.fromkeys(functions, Choice("torch", "the only one that runs on a CPU"))
        by_name: dict[str, Chosen[Kernel]] = {name: Choice("torch", "no kernel is known") for name in functions}
        kernels: dict[str, Chosen[Kernel]] = dict.fromkeys(recurrent_kernels.STAND_INS, Choice("packed", "traced"))
        kernels[CONVOLUTION] = Choice("by document", "traced")
        return by_name | {name: choice for name, choice in kernels.items() if name in functions}

    def choose_experts(*_: Any) -> Chosen[str]:
        return Choice("grouped_mm", "traced")

    return RealParts(
        make_weights,
        add_adapters,
        choose,
        choose_implementations,
        choose_recurrences,
        choose_experts,
        make_executor=lambda _: AtOnce(),
    )


def replace_parts() -> None:
    """Replaces code of the project that needs values or a real device."""
    import torch.optim.optimizer as optimizers
    from deepspeed.ops.adam import DeepSpeedCPUAdam

    from ulysses_cli.prove.trace.few_tiles import keep_few_tiles
    from ulysses_cli.train.memory import offload

    keep_few_tiles()
    offload.count_free_bytes = lambda: 1 << 60  # type: ignore[attr-defined]
    replace_everywhere(DeepSpeedCPUAdam, HostAdam, "deepspeed")
    supported = optimizers._get_fused_kernels_supported_devices
    optimizers._get_fused_kernels_supported_devices = lambda: [*supported(), DEVICE.type]


class CountedHandle:
    """Has what DeepSpeed's swappers call of an aio_handle. All handles of a process share its files and buffers."""

    files: ClassVar[dict[str, int]] = {}
    locked: ClassVar[set[int]] = set()

    def __init__(self, *_: Any, **__: Any) -> None:
        self.num_pending = 0

    def new_cpu_locked_tensor(self, num_elements: int, like: Tensor) -> Tensor:
        buffer = torch.empty(num_elements, dtype=like.dtype, device="cpu")
        self.locked.add(_get_key(buffer))
        return buffer

    def free_cpu_locked_tensor(self, buffer: Tensor) -> bool:
        self.locked.discard(_get_key(buffer))
        return True

    def is_pinned(self, tensor: Tensor) -> bool:
        return _get_key(tensor) in self.locked

    def async_pwrite(self, buffer: Tensor, path: str, _: int) -> int:
        self.files[path] = buffer.numel() * buffer.element_size()
        self.num_pending += 1
        return 0

    def async_pread(self, buffer: Tensor, path: str, _: int) -> int:
        if buffer.numel() * buffer.element_size() > self.files[path]:
            raise AssertionError(f"more is read from {path} than was written there")
        self.num_pending += 1
        return 0

    def wait(self) -> int:
        num_done, self.num_pending = self.num_pending, 0
        return num_done


class CountedOperator:
    aio_handle = CountedHandle


class CountedBuilder:
    """The builder of that operator."""

    def load(self, verbose: bool = True) -> type[CountedOperator]:
        return CountedOperator

    def is_compatible(self, verbose: bool = True) -> bool:
        return True


def replace_swaps() -> None:
    from deepspeed.ops.op_builder import AsyncIOBuilder
    from deepspeed.runtime.swap_tensor.partitioned_param_swapper import AsyncPartitionedParameterSwapper as Swapper

    make_swapper = Swapper.__init__

    def make_on_host(self: Any, *args: Any, **kwargs: Any) -> None:
        """The tensor that stands for a weight in a file is in host memory, although a model is made around it."""
        with torch.device("cpu"):
            make_swapper(self, *args, **kwargs)

    Swapper.__init__ = make_on_host
    replace_everywhere(AsyncIOBuilder, CountedBuilder, "deepspeed")


def forget_files() -> None:
    CountedHandle.files.clear()
    CountedHandle.locked.clear()


def count_file_bytes() -> dict[str, int]:
    """By what the files hold."""
    of_weights = sum(size for path, size in CountedHandle.files.items() if path.endswith("_param.tensor.swp"))
    return {"states": sum(CountedHandle.files.values()) - of_weights, "weights": of_weights}


def _get_key(tensor: Tensor) -> int:
    return tensor.untyped_storage()._cdata
