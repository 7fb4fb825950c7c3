"""Holds published rows with their sources, and what the ledger and the speed model predict for them.

No constant is fitted to any row. `list_later_*` are rows that were discovered after the models were made: no term was
changed for them. A row of a program that differs from ours says how it differs, with terms read in its source. Such a
row is explained and not held to a bar.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace

from ulysses_cli.hardware_table import load_hardware
from ulysses_cli.hub import load_table
from ulysses_cli.plan.hardware import Gpu
from ulysses_cli.plan.layout import Layout
from ulysses_cli.plan.ledger import machine
from ulysses_cli.plan.ledger.job import EngineSettings, Job
from ulysses_cli.plan.ledger.ledger import measure_ledger
from ulysses_cli.plan.ledger.weights import read_weights
from ulysses_cli.plan.levers import Levers
from ulysses_cli.plan.models.shape import ModelShape, read_model_shape
from ulysses_cli.plan.speed import compute_speed

GIB, KI = 1 << 30, 1024
MEMORY_BAR, SPEED_BAR = 0.05, 0.15
BLOG = "Hugging Face blog, Ulysses Sequence Parallelism, 2026-03"
TRACE = "trace of DeepSpeed 0.19.8's own engine, no GPU"
ALST = "ALST, arXiv 2506.13996"
ARCTIC = "ArcticTraining, projects/sequence-parallelism/*.yml"
UPIPE = "UPipe, arXiv 2602.21196"
FPDT = "FPDT, arXiv 2408.16978, figure 5"
DIST = "DISTFLASHATTN, arXiv 2310.03294"
XTUNER = "XTuner, docs/zh_cn/legacy/acceleration/benchmark.rst"
XTUNER_LONG = "XTuner, docs/zh_cn/legacy/acceleration/train_extreme_long_sequence.rst"
EXAMPLES = "DeepSpeedExamples, training/bf16_master_weight"
EASY = "EasyContext, README.md"
TRL = "TRL documentation, Training Beyond 1M Tokens"
FULL = Levers(gradient_checkpointing="full")
TILED = Levers("full", 1, 32, True, True)  # for models of 32 layers: other programs offload them all
FA3 = "flash_attention_3"


@dataclass(frozen=True)
class Row:
    """A published figure. A row whose `bar` is None is explained and not held to a bar."""

    what: str
    published: float
    predicted: float
    unit: str
    source: str
    bar: float | None
    note: str = ""

    @property
    def error(self) -> float:
        return self.predicted / self.published - 1

    @property
    def is_good(self) -> bool:
        return self.bar is None or abs(self.error) <= self.bar


@dataclass(frozen=True)
class Claim:
    """A published statement that a row fits, or does not fit."""

    what: str
    fits: bool
    peak_gib: float
    capacity_gib: float
    source: str
    note: str = ""

    @property
    def is_good(self) -> bool:
        return (self.peak_gib <= self.capacity_gib) == self.fits


def get_shape(name: str, **changes: object) -> ModelShape:
    return read_model_shape({**load_table()[name.lower()]["config"], **changes}, name)


QWEN, LLAMA = get_shape("Qwen/Qwen3-4B"), get_shape("meta-llama/Meta-Llama-3-8B")
QWEN_8B, QWEN_32B = get_shape("Qwen/Qwen3-8B"), get_shape("Qwen/Qwen3-32B")
LLAMA_70B = get_shape("meta-llama/Meta-Llama-3-70B")
LLAMA_7B = get_shape(
    "meta-llama/Meta-Llama-3-8B", num_key_value_heads=32, intermediate_size=11008, vocab_size=32000
)  # the 7B of the first Llama and of Llama 2
LLAMA_2_70B = get_shape("meta-llama/Meta-Llama-3-70B", vocab_size=32000)
YI = get_shape(
    "meta-llama/Meta-Llama-3-70B",
    hidden_size=7168,
    num_hidden_layers=60,
    num_attention_heads=56,
    intermediate_size=20480,
    vocab_size=64000,
)


def get_gib(name: str) -> float:
    return load_hardware().get_gpu(name).memory_bytes / GIB


def list_memory() -> Iterator[Row]:
    def allocate(job: Job) -> float:
        return measure_ledger(job).gpu_allocated_bytes / GIB

    alone = Job(QWEN, Layout(1, 1, 1), 8192, FULL)
    yield Row("Qwen3-4B, 1 GPU, 8Ki", 76.4, allocate(alone), "GiB", BLOG, MEMORY_BAR)
    for tokens, published, traced in ((32, 35.0, 33.29), (64, 50.5, 48.77), (96, 66.0, 64.25)):
        job = Job(QWEN, Layout(1, 1, 4), tokens * KI, FULL, accumulation=8)
        float32 = replace(job, engine=EngineSettings(communication_bytes=4))
        yield Row(f"Qwen3-4B, sp 4, {tokens}Ki", published, allocate(float32), "GiB", BLOG, MEMORY_BAR)
        yield Row(f"the same, bfloat16 sums, {tokens}Ki", traced, allocate(job), "GiB", TRACE, MEMORY_BAR)
    whole = Job(QWEN, Layout(1, 1, 4), 96 * KI, Levers(gradient_checkpointing=False))
    yield Row("no recomputation, 96Ki", 207.0, allocate(whole), "GiB", TRACE, MEMORY_BAR)
    lines = list_fpdt_lines()
    why = ", ".join(f"{name.replace('_', ' ')} {size / GIB:.1f}" for name, size in lines.items() if size > 0.4 * GIB)
    why = f"GPT-2's words and Megatron's loss, as in its scripts: {why}"
    yield Row("Llama3-8B, 8 A100, 512Ki, Ulysses", 60.1, sum(lines.values()) / GIB, "GiB", FPDT, None, why)


def list_fpdt_lines() -> dict[str, int]:
    """Yields the lines in which FPDT differs. Megatron-DeepSpeed's loss (core/sequence_parallel/cross_entropy.py,
    model/gpt_model.py) has no tiles: logits, a float32 copy, its softmax and the logarithm of that, 14 V S. With Llama
    3's 128,256 words that would be 110 GiB, so the rows used another vocabulary; FPDT's scripts take GPT-2's 50,257
    words, padded to 50,304 and tied. Norms are apex's, fused; sums travel in float32, DeepSpeed's default. Its GB are
    read as GiB, as DeepSpeed's and Megatron's logs count."""
    job = make_fpdt_job()
    lines = measure_ledger(job).phases["backward"].lines
    lines = {name: size for name, size in lines.items() if name not in machine.DEVICE_LINES}
    return {**lines, "logits": 14 * job.shape.vocab_size * job.local_tokens}


def make_fpdt_job() -> Job:
    shape = get_shape("meta-llama/Meta-Llama-3-8B", vocab_size=50_304, tie_word_embeddings=True)
    levers, float32 = replace(FULL, offloaded_layers=32), EngineSettings(communication_bytes=4)
    return Job(shape, Layout(1, 1, 8), 512 * KI, levers, engine=float32, fused_norms=True)


def list_claims() -> Iterator[Claim]:
    h100 = get_gib("h100-80gb")

    def claim(what: str, job: Job, fits: bool, source: str, note: str = "") -> Claim:
        return Claim(what, fits, measure_ledger(job).gpu_peak_bytes / GIB, h100, source, note)

    blog = Job(QWEN, Layout(1, 1, 4), 128 * KI, FULL, engine=EngineSettings(communication_bytes=4))
    yield claim("Qwen3-4B, sp 4, 128Ki, plain loss", blog, False, BLOG)
    fused = {"fused_norms": True, "kernel": FA3}
    for tokens, fits in ((2048, True), (3072, True), (4096, False)):
        job = Job(LLAMA, Layout(1, 1, 8), tokens * KI, TILED, **fused)
        note = "ours would fit: 13 tensors of b h S at once, its 14.5, see below" if tokens == 4096 else ""
        yield claim(f"Llama3-8B, 8 H100, {tokens}Ki, Ulysses", job, fits, UPIPE, note)
    for tokens in (3072, 4096, 5120):
        job = Job(LLAMA, Layout(1, 1, 8), tokens * KI, replace(TILED, head_chunks=4), **fused)
        note = "ours would not: 12.3 tensors of b h S at once, its 10, see below" if tokens == 5120 else ""
        yield claim(f"Llama3-8B, 8 H100, {tokens}Ki, chunks of heads", job, True, UPIPE, note)
    for tokens, is_chunked, fits in ((3072, False, True), (4096, False, False), (4096, True, True), (5120, True, True)):
        peak = count_upipe_bytes(tokens * KI, is_chunked) / GIB
        name = "chunks of heads" if is_chunked else "Ulysses"
        yield Claim(f"the same, its own program counted, {tokens}Ki, {name}", fits, peak, h100, UPIPE)
    offload = replace(TILED, offload_optimizer="cpu")
    alone = Job(LLAMA, Layout(1, 1, 1), 500_000, replace(offload, offload_param="cpu"), fused_norms=True)
    yield claim("Llama-8B, 1 H100, 500K", alone, True, ALST)
    for ranks, tokens in ((8, 3_700_000), (32, 15_000_000)):
        job = Job(LLAMA, Layout(1, 1, ranks), tokens, offload, fused_norms=True)
        yield claim(f"Llama-8B, {ranks} H100, {tokens:,}", job, True, ALST)


def count_upipe_bytes(tokens: int, is_chunked: bool) -> int:
    """Returns the bytes of UPipe's programs (github.com/togethercomputer/Untied-Ulysses, torchtitan's FSDP) at their
    fullest: attention's backward, in tensors of b h S, of which keys and values are a quarter each."""
    # both: a layer's input, layer 0's, which is not offloaded, the normed input, the result and two gradients
    common = 6.0
    # yunchang/ring/zigzag_ring_flash_attn.py: q, k, v; dq, dk, dv; their float32 copies, made on one rank too; what a
    # rank sends to itself; and cast again
    ulysses = common + 1.5 + 1.5 + 3 + 1 + 1.5
    # untied_ulysses/fully_fused_attn.py projects queries by chunks, 8 of 32 heads, and adds each gradient to the
    # input's: neither all heads' q nor room for all gradients exists. The input's gradient; of a chunk q, result and
    # both gradients; k, v, their gradients and sums; FlashAttention 3's float32 dq
    chunked = common + 1 + 1 + 1.5 + 0.5
    # float32 states; embedding and head gathered throughout, the head's gradient; two layers gathered, one's gradients
    # and their float32 sum; the rotary table of the whole row, whose storage resize_ keeps
    hidden, layers = LLAMA.hidden_size, LLAMA.num_layers
    unit = 2 * hidden * tokens // 8
    total, embedding = read_weights(LLAMA, None).num_elements, LLAMA.vocab_size * hidden
    states = 16 * total // 8 + 6 * embedding + 10 * (total - 2 * embedding) // layers
    rotary = 8 * LLAMA.head_dim // 2 * tokens
    job = Job(LLAMA, Layout(1, 1, 8), tokens, TILED)
    beside = machine.compute_context(job) + machine.compute_nccl(job)
    return int((chunked if is_chunked else ulysses) * unit) + states + rotary + beside


def list_speed() -> Iterator[Row]:
    hardware = load_hardware()
    h100, a100 = hardware.get_gpu("h100-80gb"), hardware.get_gpu("a100-80gb")
    published = {
        ("Ulysses", 1): (2320.47, 1503.80, 878.63, 475.33, 246.05, 162.41),
        ("chunks of heads", 4): (2281.05, 1487.29, 867.17, 472.53, 246.07, 166.32, 125.56, 98.25),
    }
    for (name, chunks), rates in published.items():
        for tokens, rate in zip((128, 256, 512, 1024, 2048, 3072, 4096, 5120), rates, strict=False):
            job = Job(LLAMA, Layout(1, 1, 8), tokens * KI, replace(TILED, head_chunks=chunks), fused_norms=True)
            result = job.max_length / compute_upipe_seconds(job, h100) / 8
            yield Row(f"Llama3-8B, 8 H100, {tokens}Ki, {name}", rate, result, "tokens/s", UPIPE, SPEED_BAR)
    mfu = 100 * compute_speed(make_fpdt_job(), a100).mfu
    yield Row("Llama3-8B, 8 A100, 512Ki, Ulysses", 47.2, mfu, "% MFU", FPDT, SPEED_BAR)
    for tokens, before, after in ((8, 6.93, 5.98), (16, 21.44, 17.26), (32, 76.38, 58.46)):
        job = Job(LLAMA_7B, Layout(1, 1, 8), 8 * tokens * KI, FULL)
        kept = replace(job, levers=Levers())
        ratio = compute_speed(job, a100).step_seconds / compute_speed(kept, a100).step_seconds
        what = f"7B, 8 A100, {tokens}Ki each: gain from keeping attention's result"
        yield Row(what, before / after, ratio, "x", DIST, SPEED_BAR)


def compute_upipe_seconds(job: Job, gpu: Gpu) -> float:
    """Returns the seconds of a step. UPipe's recomputation runs its tiled MLP too, and that MLP's backward runs it
    again: five passes for four (patch_torch_files/ulysses_sp.py: TiledMLP). Its offload waits (torch's save_on_cpu
    copies in the stream)."""
    speed = compute_speed(job, gpu)
    return speed.step_seconds + speed.parts["mlp"] / 4 + speed.hidden["offload"]


def list_later_memory() -> Iterator[Row]:
    """Yields later rows of memory. The first row's model is its authors' own, with as many weights as this one; its
    peak is the optimizer's step."""
    like = get_shape("meta-llama/Meta-Llama-3-8B", num_key_value_heads=32, intermediate_size=10_923, vocab_size=50_257)
    engine = EngineSettings(reduce_bucket=50_000_000, persistence_threshold=0)
    peak = measure_ledger(Job(like, Layout(1, 4, 1), 512, FULL, engine=engine, evaluates=False)).gpu_allocated_bytes
    yield Row("6.86 B weights, 4 H100, 512 tokens", 31.38, peak / GIB, "GiB", EXAMPLES, MEMORY_BAR)
    note = "its program counted; what nvidia-smi shows, torch's cache and NCCL's buffers too"
    for shape, ranks, tokens, published, levers, gpu in (
        (LLAMA, 1, 32_000, 71.91, (False, False, False), "H100"),
        (LLAMA, 1, 65_000, 137.36, (False, False, False), "H200"),
        (LLAMA, 1, 300_000, 134.96, (False, False, True), "H200"),
        (LLAMA, 1, 650_000, 126.81, (True, False, True), "H200"),
        (LLAMA, 1, 1_200_000, 136.15, (True, True, True), "H200"),
        (QWEN_32B, 32, 7_000_000, 71.55, (True, True, True), "H100"),
        (QWEN_32B, 64, 15_000_000, 71.00, (True, True, True), "H100"),
        (LLAMA_70B, 32, 4_000_000, 47.70, (True, True, True), "H100"),
        (LLAMA_70B, 64, 10_000_000, 53.83, (True, True, True), "H100"),
    ):
        result = count_arctic_bytes(make_arctic_job(shape, ranks, tokens, *levers, gpu=gpu)) / GIB
        yield Row(f"{cut_name(shape)}, {ranks} {gpu}, {tokens:,}", published, result, "GiB", ARCTIC, None, note)


def cut_name(shape: ModelShape) -> str:
    return shape.name.rpartition("/")[2]


def count_arctic_bytes(job: Job) -> int:
    """Returns the ledger's bytes, corrected for what ArcticTraining does differently. A plain loss leaves 2 V S bytes
    of logits in the cache, too few for a float32 tensor. Its reentrant checkpoints (monkey_patches.py) hold a layer's
    result, and in attention's backward the incoming gradient; with offload they fetch one input, not two. Liger's
    SwiGLU (ops/swiglu.py) saves and uses four tensors of the inner width, transformers' uses six."""
    ledger, hidden = measure_ledger(job), job.dtype_bytes * job.shape.hidden_size * job.local_tokens
    is_attention = "self_attn" in ledger.peak.name
    result = ledger.gpu_peak_bytes + hidden * (1 + is_attention - (job.levers.offloaded_layers > 0))
    if not job.levers.tiled_loss:
        result += 2 * job.shape.vocab_size * job.local_tokens
    if job.fused_norms and not job.levers.tiled_mlp and not is_attention:
        result -= 2 * job.dtype_bytes * job.shape.intermediate_size * job.local_tokens
    return result


def make_arctic_job(
    shape: ModelShape, ranks: int, tokens: int, offloads: bool, tiles_mlp: bool, is_liger: bool, *, gpu: str = "H100"
) -> Job:
    """Returns a job as ArcticTraining's recipes set it: optimizer on the host, on one GPU weights too; sums in
    bfloat16."""
    levers = Levers("full", 1, offloads * shape.num_layers, tiles_mlp, is_liger, "cpu", "cpu" if ranks == 1 else "none")
    kernel = FA3 if gpu == "H200" else "flash_attention_2"
    return Job(shape, Layout(1, 1, ranks), tokens, levers, fused_norms=is_liger, kernel=kernel, evaluates=False)


def list_later_claims() -> Iterator[Claim]:
    for shape, ranks, tokens, levers in (
        (LLAMA, 1, 36_000, (False, False, False)),
        (LLAMA, 8, 1_100_000, (False, False, True)),
        (LLAMA, 8, 1_200_000, (False, True, True)),
        (LLAMA, 8, 2_400_000, (True, False, True)),
        (LLAMA, 16, 8_000_000, (True, True, True)),
        (QWEN_32B, 1, 230_000, (True, True, True)),
        (QWEN_32B, 8, 1_550_000, (True, True, True)),
        (QWEN_32B, 16, 4_000_000, (True, True, True)),
        (LLAMA_70B, 8, 200_000, (False, True, True)),
        (LLAMA_70B, 16, 1_200_000, (True, True, True)),
    ):
        peak = measure_ledger(make_arctic_job(shape, ranks, tokens, *levers)).gpu_peak_bytes / GIB
        yield Claim(f"{cut_name(shape)}, {ranks} H100, {tokens:,}", True, peak, get_gib("h100-80gb"), ARCTIC)
    a100 = get_gib("a100-80gb")
    for name, shape, gpus, sp_size, tokens, _ in XTUNER_ROWS:
        if tokens < 256:
            continue
        peak = measure_ledger(make_xtuner_job(shape, gpus, sp_size, tokens)).gpu_peak_bytes
        yield Claim(f"{name}, {gpus} A100, {tokens}Ki, sp {sp_size}", True, peak / GIB, a100, XTUNER)
    for gpus in (16, 32, 64):
        peak = measure_ledger(make_xtuner_job(YI, gpus, 1, 128)).gpu_peak_bytes
        yield Claim(f"Yi-34B, {gpus} A100, 128Ki, sp 1", False, peak / GIB, a100, XTUNER_LONG)


XTUNER_ROWS = (
    ("Llama2-7B", LLAMA_7B, 8, 1, 8, 3028.3),
    ("Llama2-7B", LLAMA_7B, 8, 1, 32, 2234.2),
    ("Llama2-7B", LLAMA_7B, 8, 8, 128, 948.6),
    ("Llama2-7B", LLAMA_7B, 8, 8, 256, 540.1),
    ("Llama2-7B", LLAMA_7B, 32, 16, 1024, 133.6),
    ("Yi-34B", YI, 32, 1, 8, 485.1),
    ("Yi-34B", YI, 32, 2, 32, 491.5),
    ("Yi-34B", YI, 32, 8, 128, 251.1),
    ("Yi-34B", YI, 32, 8, 256, 119.7),
    ("Llama2-70B", LLAMA_2_70B, 32, 1, 8, 216.8),
    ("Llama2-70B", LLAMA_2_70B, 32, 4, 32, 300.9),
    ("Llama2-70B", LLAMA_2_70B, 32, 8, 128, 144.7),
    ("Llama2-70B", LLAMA_2_70B, 32, 16, 256, 63.8),
    ("Llama2-70B", LLAMA_2_70B, 64, 64, 1024, 21.8),
)


def make_xtuner_job(shape: ModelShape, gpus: int, sp_size: int, kibi_tokens: int) -> Job:
    """Returns a job as configs/llama_speed_benchmark sets it: a row for each sp group, as many micro-steps as it has
    ranks, ZeRO-3, plain loss."""
    layout = Layout(1, gpus // sp_size, sp_size)
    return Job(shape, layout, kibi_tokens * KI, FULL, accumulation=sp_size, evaluates=False)


def list_later_speed() -> Iterator[Row]:
    """Yields later rows of speed. XTuner's rows of one machine are held to a bar. No source says what joined the
    machines of the others: with 100 to 200 Gbit/s for each, an eighth of the table's network, exchanges and gathers
    would take as long as most of these rows are slower."""
    a100, h100 = load_hardware().get_gpu("a100-80gb"), load_hardware().get_gpu("h100-80gb")
    for name, shape, gpus, sp_size, tokens, published in XTUNER_ROWS:
        result = compute_speed(make_xtuner_job(shape, gpus, sp_size, tokens), a100).tokens_per_second / gpus
        what = f"{name}, {gpus} A100, {tokens}Ki, sp {sp_size}"
        bar, note = (SPEED_BAR, "") if gpus == 8 else (None, "its network is not named")
        yield Row(what, published, result, "tokens/s", XTUNER, bar, note)
    offload = replace(TILED, tiled_mlp=False, offload_optimizer="cpu", offload_param="cpu")
    alone = compute_speed(Job(LLAMA_7B, Layout(1, 8, 1), 64 * KI, offload), a100).tokens_per_second
    yield Row("Llama2-7B, 8 A100, 64Ki each", 10240, alone, "tokens/s", EASY, SPEED_BAR)
    for tokens, published in ((64, 7816), (128, 4266), (512, 2133), (700, 1603)):
        result = compute_speed(Job(LLAMA_7B, Layout(1, 1, 8), tokens * KI, offload), a100).tokens_per_second
        note = "ring attention; the mean of five first steps"
        yield Row(f"Llama2-7B, 8 A100, {tokens}Ki, ring", published, result, "tokens/s", EASY, None, note)
    offload = replace(FULL, offloaded_layers=QWEN_8B.num_layers, tiled_loss=True)
    ring = Job(QWEN_8B, Layout(1, 1, 8), 1024 * KI, offload)
    seconds = compute_speed(ring, h100).step_seconds
    yield Row("Qwen3-8B, 8 H100, 1Mi, ring", 380.0, seconds, "s/step", TRL, None, "ring attention, FSDP")
