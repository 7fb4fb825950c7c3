"""One run on sizes: builds the model, changes it with this package's own levers, and takes a step, an evaluation and
the step that all later ones are like. Computes no value."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from functools import cache
from inspect import signature
from types import SimpleNamespace
from typing import Any, NamedTuple

from ulysses_cli.plan.ledger.adapted_layers import add_adapters, quantize_layers
from ulysses_cli.plan.ledger.depth import Depth, Stack, describe_stack, find_layers
from ulysses_cli.plan.ledger.hooks import (
    INPUTS,
    PARAMETERS,
    Hooks,
    LinearOfShards,
    ModuleWeights,
    WeightSize,
    multiply_sharded,
    tagged,
)
from ulysses_cli.plan.ledger.job import Job
from ulysses_cli.plan.ledger.walk import Recorded
from ulysses_cli.plan.models.shape import ModelShape
from ulysses_cli.plan.recipe.sections import Lora
from ulysses_cli.plan.resolved import rank_experts
from ulysses_cli.plan.rows.ring import deal_rows, list_dearest
from ulysses_cli.plan.sizes import nn
from ulysses_cli.plan.sizes.autograd import grad_mode
from ulysses_cli.plan.sizes.library import CustomOperator, Namespace, Nothing, Unknown
from ulysses_cli.plan.sizes.nn import Linear, Parameter, SizedModule
from ulysses_cli.plan.sizes.sources import ModelSources, make_config, make_model
from ulysses_cli.plan.sizes.tensor import (
    BFLOAT16,
    DEVICE,
    FLOAT32,
    INT64,
    UINT8,
    ByteMeter,
    DType,
    Running,
    Tensor,
    make,
)

DTYPES: Mapping[int, DType] = {2: BFLOAT16, 4: FLOAT32}
LOAD, BETWEEN = "load", "between"
# DeepSpeed's own leaf modules (runtime/zero/leaf_module_config.py).
WHOLE = ("MixtralSparseMoeBlock", "Qwen2MoeSparseMoeBlock", "Qwen3MoeSparseMoeBlock")
LARGEST_KERNEL = "flash_attention_2"  # of the kernels that a GPU may have, the one that needs most memory


@contextmanager
def alone() -> Iterator[None]:
    """Bytes are freed by references alone, and what the last run left is gone."""
    was_collecting = gc.isenabled()
    gc.disable()
    Running.meter, Running.device, Running.dtype = ByteMeter([]), DEVICE, FLOAT32
    Running.hooks, Running.grad, Running.sequence = [], True, 0
    Running.sees_kernels, Running.product = False, None
    Unknown.running = True
    try:
        yield
    finally:
        Unknown.running, SizedModule.call, SizedModule.read = False, None, None
        Linear.compute = staticmethod(nn.linear)
        CustomOperator.inside = {}
        if was_collecting:
            gc.enable()


class Recording(NamedTuple):
    """What tensors take, and the modules and weights of the layers that ran."""

    recorded: Recorded
    modules: list[ModuleWeights]
    weights: list[WeightSize]


def make_bare(shape: ModelShape, lora: Lora | None = None) -> Any:
    """The model without levers, with a recipe's adapters."""
    Unknown.running = False  # files are executed and models made
    sources, _ = _open_sources(is_gpu=True)
    sources.forget_run()
    model = make_model(sources, make_config(sources, shape.config))
    if lora is not None:
        put_adapters(sources, model, lora, shape)
    return model


def load_own(name: str) -> Any:
    """One of this package's modules below train, as runs execute it."""
    return _open_sources(is_gpu=True)[0].load_own(f"ulysses_cli.train.{name}")


def put_adapters(sources: ModelSources, model: Any, lora: Lora, shape: ModelShape) -> None:
    left_out = sources.load_own("ulysses_cli.train.model.routers").list_router_layers(model)
    add_adapters(model, lora, left_out, rank_experts(lora, shape))


def read_stack(job: Job) -> Stack:
    """A look at the layers of a model without levers."""
    with alone():
        Unknown.running = False  # files are executed and models made
        sources, _ = _open_sources(is_gpu=not job.is_on_cpu)
        sources.forget_run()
        config = make_config(sources, job.shape.config)
        layers = find_layers(make_model(sources, config))
        if layers is None:
            return Stack((), is_apart=True)
        stack = describe_stack(list(layers))
        try:
            with stack.make_few([0]):
                make_model(sources, config)
        except AttributeError:  # the model reads modules of its layers
            return replace(stack, seen=())
        return stack


class SizedRun:
    """`depth`: which layers run, as many of them offloaded as the levers say."""

    def __init__(self, job: Job, rank: int, depth: Depth, stack: Stack | None = None) -> None:
        self.job = job
        self.rank = rank
        self.depth = depth
        self.meter = Running.meter
        self.meter.enter(LOAD)
        Unknown.running = False  # files are executed and models made
        self.sources, leaves = _open_sources(is_gpu=not job.is_on_cpu)
        self.sources.forget_run()
        leaves.clear()
        if not job.is_on_cpu:
            Running.sees_kernels = True
            CustomOperator.inside = {"ulysses::attend": _count_forward, "ulysses::attend_backward": _count_backward}
        attention = self._register_attention(rank)
        Running.dtype = DTYPES[job.dtype_bytes]
        config = make_config(self.sources, job.shape.config)
        config._attn_implementation = attention
        with tagged(*PARAMETERS), nullcontext() if stack is None or depth.is_whole else stack.make_few(depth.live):
            model = make_model(self.sources, config)
        with tagged(*PARAMETERS):
            self.layers = find_layers(model)
            if self.layers is not None and not depth.is_whole:
                depth.skip(self.layers)
            if job.quantized is not None:
                quantize_layers(model, job.quantized)
        Running.dtype, made = FLOAT32, list(list_as_made(model))
        for parameter in made:  # the engine makes all in one type, whatever type a file asks for
            parameter.dtype = DTYPES[job.dtype_bytes] if parameter.dtype.is_floating_point else parameter.dtype
        self.module = self._apply_levers(model)
        leaves += [module for module in model.modules() if type(module).__name__ in WHOLE]
        is_sharded = job.zero_stage == 3
        if is_sharded:
            Linear.compute = staticmethod(multiply_sharded)
        kept = job.engine.persistence_threshold
        self.hooks = Hooks(self.module, leaves, made, gathers=is_sharded, kept=kept)
        self.meter.forget()
        if self.layers is not None:
            self.meter.held[PARAMETERS] += self.depth.count_skipped(list(self.layers))
        SizedModule.call, SizedModule.read = self.hooks.call, self.hooks.read if is_sharded else None

    def record(self, *, step_alone: bool) -> Recording:
        """The proof of the head, a step, an evaluation and a save, or the step alone."""
        if not step_alone:
            groups = SimpleNamespace(sp_axis=self.axis, ring_axis=self.ring_axis)
            self._load("model.loss_model").check_head(self.module.model, self.rule, groups, DEVICE)
        self.meter.enter(BETWEEN)
        Unknown.running = True
        self.step()
        if self.job.evaluates and not step_alone:
            self.evaluate()
        if not step_alone:
            with self.meter.during("save"):
                self.hooks.mark("save")
        events, self.meter.events = self.meter.events or (), None
        rename = cache(self.depth.rename)
        named = [(size, phase, (kind, rename(path))) for size, phase, (kind, path) in events]
        marks = [mark._replace(path=rename(mark.path), weight=rename(mark.weight)) for mark in self.hooks.marks]
        recorded = Recorded(self.meter.held, named, marks)
        modules, weights = self.hooks.list_modules(rename), self.hooks.list_weights(rename)
        return Recording(recorded, list(modules), list(weights))

    def _load(self, name: str) -> Any:
        return self.sources.load_own(f"ulysses_cli.train.{name}")

    def _register_attention(self, rank: int) -> str:
        layout, axis = self.job.layout, self._load("processes.groups").SequenceAxis

        def make_axis(size: int, own: int) -> Any:
            return axis("ranks" if size > 1 else None, size, own)

        outer, inner = divmod(rank % layout.sp_size, layout.ulysses_size)
        kernel = self.job.kernel
        self.axis, self.ring_axis = make_axis(layout.sp_size, rank % layout.sp_size), make_axis(layout.ring_size, outer)
        name: str = self._load("attention.interface").register_attention(
            make_axis(layout.ulysses_size, inner),
            LARGEST_KERNEL if kernel == "auto" else kernel,
            self.job.levers.head_chunks,
            ring=self.ring_axis,
            overlaps=self.job.levers.overlap_exchange,
        )
        return name

    def _apply_levers(self, model: Any) -> Any:
        """Rotations that follow a document's length (serve_rotary) are left out: which lengths there are is data. A
        rotation is transformers' own: whether it may be another is found by numbers (elementwise/interface.py)."""
        job, shape = self.job, self.job.shape
        self._serve_recurrences(model)
        if job.lora is not None:
            with tagged(*PARAMETERS):
                put_adapters(self.sources, model, job.lora, shape)
        elementwise = self._load("elementwise.interface")
        elementwise.recognise_norm_class = recognise_norm
        implementations = self._load("elementwise.choice").foresee_implementations(
            DTYPES[job.dtype_bytes], is_fused=job.fused_norms, is_gpu=not job.is_on_cpu
        )
        elementwise.serve_elementwise(model, {**implementations, "rotary": "transformers"})
        self.rule = self._load("loss").HeadRule(shape.final_softcap, shape.logits_divisor, float(job.has_z_loss))
        of_model = self._load("model.loss_model")
        loss = of_model.apply_levers(model, self._make_plan(), self.rule, DEVICE, implementations["loss"])
        module = of_model.LossModel(model, loss)
        module.train()
        return module

    def _make_plan(self) -> SimpleNamespace:
        """What the levers read of a run's plan."""
        job = self.job
        recipe = SimpleNamespace(
            model=SimpleNamespace(dtype="bfloat16" if job.dtype_bytes == BFLOAT16.itemsize else "float32"),
            zero_stage=job.zero_stage,
            micro_step_tokens=job.micro_step_tokens,
        )
        return SimpleNamespace(levers=job.levers, shape=job.shape, recipe=recipe, layout=job.layout)

    def _serve_recurrences(self, model: Any) -> None:
        """As the trace chooses: kernels of packages on a GPU, transformers' own functions on a CPU."""
        recurrence = self._load("recurrence.interface")
        fake = self.sources.load_own("ulysses_cli.prove.trace.kernels")
        is_gpu = not self.job.is_on_cpu
        if is_gpu:
            fake.replace_kernels(model)
        ways = dict.fromkeys(recurrence.list_functions(model), "torch")
        if is_gpu:
            ways |= {name: "packed" for name in fake.STAND_INS if name in ways}
            ways |= {name: "by document" for name in ways if name == recurrence.CONVOLUTION}
        recurrence.serve_recurrent_layers(model, self.axis, ways)

    def _make_rows(self) -> tuple[Any, ...]:
        job = self.job
        lengths, shared = list_dearest(job.max_length, job.batch, job.num_branches)
        order = deal_rows(lengths, job.batch, job.make_ring(), shared)
        with tagged(*INPUTS):
            ids, positions, labels = (make((job.batch, job.max_length // job.layout.sp_size), INT64) for _ in range(3))
            documents = self._load("attention.documents").make_documents(lengths, DEVICE, order=order, shared=shared)
        return ids, positions, labels, documents

    def step(self) -> None:
        self.meter.enter("forward")
        loss = self.module(*self._make_rows())
        scaled = loss * 1.0
        self.meter.enter("backward")
        self.hooks.run_backward(scaled)
        self.meter.enter("optimizer_step")
        self.hooks.mark("step")
        self.meter.enter(BETWEEN)

    def evaluate(self) -> None:
        with self.meter.during("evaluation"), grad_mode(False):
            self.module(*self._make_rows(), per_token=True)
            self.hooks.mark("end evaluation")


@cache
def _open_sources(*, is_gpu: bool) -> tuple[ModelSources, list[SizedModule]]:
    """Files executed once for all runs, and the modules that a run's levers want gathered whole. What has no sizes is
    replaced: streams, collectives, host buffers, and the inside of a GPU's kernels."""
    leaves: list[SizedModule] = []
    sources = ModelSources(given=_give_others(leaves.append))
    sources.load_own("ulysses_cli.prove.trace.few_tiles").keep_few_tiles()
    offload: Any = sources.load_own("ulysses_cli.train.memory.offload")
    offload.HostPool = _HostPool
    collectives = dict.fromkeys(("all_to_all_single", "all_gather"), lambda *_, **__: _Stream())
    vars(sources.torch["torch.distributed"]).update(collectives, get_backend=lambda: "fake")
    if is_gpu:
        streams = {"current_stream": _Stream, "stream": Nothing, "Event": _Stream}
        vars(sources.torch["torch"])["cuda"] = Namespace("torch.cuda", **streams)
        offload.Offloader = _put_on_streams(offload.Offloader)
    file = sources.load_own("ulysses_cli.prove.trace.few_tiles")
    file.replace_file(file.CountedFile())
    sources.keep_changes()
    return sources, leaves


def list_as_made(module: SizedModule) -> Iterator[Parameter]:
    """Parameters in the order in which modules are made: those of inner modules first."""
    for child in module.children():
        yield from list_as_made(child)
    yield from module.parameters(recurse=False)


# What each formula of a norm allocates for 5 rows of 8 numbers in bfloat16, and how many copies of its weight it makes.
ROUNDED, PRECISE = (160, 160, 20, 20, 20, 160, 80, 80), (160, 160, 20, 20, 20, 160, 160, 80)
NORMS: Mapping[tuple[tuple[int, ...], int], str] = {
    (ROUNDED, 0): "rounded",
    (PRECISE, 0): "precise",
    (PRECISE, 1): "precise",
    (PRECISE, 2): "offset",
}
OF_WEIGHT = 32


@cache
def recognise_norm(norm_class: Any) -> str | None:
    """The formula of a norm by what it allocates, where the real one is found by its numbers
    (train/elementwise/interface.py)."""
    if len(signature(norm_class.forward).parameters) != 2:
        return None
    before = Running.meter, Running.dtype, SizedModule.call
    Running.meter, Running.dtype, SizedModule.call = ByteMeter([]), BFLOAT16, None
    try:
        norm, hidden = norm_class(8), make((5, 8), BFLOAT16)
        Running.meter = ByteMeter([])
        with grad_mode(False):
            kept = norm(hidden)
        made = [change for change, *_ in Running.meter.events or () if change > 0]
        del kept
        return NORMS.get((tuple(size for size in made if size != OF_WEIGHT), made.count(OF_WEIGHT)))
    except Exception:  # noqa: BLE001 - a class that cannot be made or run so is no plain norm
        return None
    finally:
        Running.meter, Running.dtype, SizedModule.call = before


def _give_others(add_leaf: Callable[[SizedModule], None]) -> dict[str, Namespace]:
    """What this package's levers import of DeepSpeed, what compares values of ranks, which nothing here has, and types
    of rows, which numpy has made."""

    def set_leaf(module: SizedModule, flag: bool = True) -> None:
        add_leaf(module)

    linear = Namespace("linear", zero3_linear_wrap=multiply_sharded, LinearFunctionForZeroStage3=LinearOfShards)
    consistency = "ulysses_cli.train.processes.consistency"
    return {
        consistency: Namespace(consistency),
        "ulysses_cli.data.steps": Namespace("steps"),
        "deepspeed.runtime.zero": Namespace("deepspeed.runtime.zero", linear=linear),
        "deepspeed.utils": Namespace("deepspeed.utils", set_z3_leaf_module=set_leaf),
    }


class _Stream:
    """A stream, an event or a collective under way: work runs in program order."""

    def __init__(self, *_: Any, **__: Any) -> None: ...

    def __getattr__(self, name: str) -> Callable[..., bool]:
        return lambda *_, **__: True


class _HostPool:
    """train/memory/offload.py: HostPool"""

    def __init__(self, *, is_pinned: bool) -> None:
        self.num_bytes = 0

    def take(self, num_bytes: int) -> Tensor:
        return make((num_bytes,), UINT8, on_host=True)

    def give_back(self, buffer: Tensor) -> None: ...


def _put_on_streams(offloader: Any) -> Any:
    class Offloader(offloader):  # type: ignore[misc]
        """It keeps a tensor on the device until the copy on its stream is done."""

        def __init__(self, *args: Any, **named: Any) -> None:
            super().__init__(*args, **named)
            self.out_stream, self.in_stream = _Stream(), _Stream()

    return Offloader


def _count_forward(q: Tensor, k: Tensor, v: Tensor, *_: Any) -> int:
    """Where values are narrower than keys, all are filled up to one width (prove/trace/storages.py)."""
    return 0 if k.shape[2] == v.shape[2] else k.nbytes + q.nbytes - q.nbytes // q.shape[2] * v.shape[2]


def _count_backward(dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, *options: Any) -> int:
    """Besides, dq in float32, a number per token and head, and where heads share keys, dk and dv of each head."""
    kernel, num_bytes = options[4], 4 * q.numel() + 4 * q.shape[0] * q.shape[1]
    if k.shape[1] != q.shape[1]:
        is_new = kernel in ("flash_attention_3", "flash_attention_4")
        num_bytes += 8 * k.numel() if is_new else 2 * q.nbytes
    return num_bytes if k.shape[2] == v.shape[2] else num_bytes + 2 * k.nbytes - v.nbytes + 2 * q.nbytes
