"""Counts weights whose gather starts only when their module needs them, by the sizes of DeepSpeed's prefetch, and
reductions of gradients by the size of its bucket.

    python benchmarks/prefetch.py

The ledger's engine is run hook by hook (plan/ledger/stage3.py). A late gather is one that the module's own hook starts:
where the processor is not ahead, the GPU waits for all of it. "default": DeepSpeed's sizes. "derived": what
size_prefetch says (plan/ledger/weights.py). Rows of 64Ki on 8 ranks each, ZeRO-3, the loss in tiles, attention's
results kept. The second table: gradients that are reduced together, in millions, and those of a layer.
"""

from dataclasses import replace
from statistics import median

import paths  # noqa: F401 - finds the package
from support.late_gathers import predict_starts

from ulysses_cli.hub import load_table
from ulysses_cli.plan.layout import Layout
from ulysses_cli.plan.ledger.job import EngineSettings, Job
from ulysses_cli.plan.ledger.weights import MAX_LIVE, PREFETCH, get_weights, size_prefetch
from ulysses_cli.plan.levers import Levers
from ulysses_cli.plan.models.shape import read_model_shape

MODELS = ("meta-llama/llama-3.1-8b", "meta-llama/llama-3.1-70b", "qwen/qwen3-30b-a3b")
GIB = 1 << 30


def main() -> None:
    table = load_table()
    print(f"{'model':<26}{'ranks':>5}  {'leaves':<7}{'sizes':<9}{'prefetch':>9}{'late':>8}{'peak, GiB':>11}")
    for name in MODELS:
        shape = read_model_shape(table[name]["config"], name)
        for ranks in (8, 64):
            for leaves in (False, True):
                engine = EngineSettings(reduce_bucket=100_000_000, sub_group=125_000_000, communication_bytes=4)
                job = Job(shape, Layout(1, ranks // 8, 8), 1 << 16, Levers(tiled_loss=True), engine=engine)
                derived = size_prefetch(get_weights(job), leaf_layers=True)
                for sizes, (prefetch, live) in {"default": (PREFETCH, MAX_LIVE), "derived": derived}.items():
                    own = replace(engine, prefetch_bucket=prefetch, max_live=live)
                    levers = replace(job.levers, leaf_layers=leaves)
                    starts, peak = predict_starts(replace(job, engine=own, levers=levers))
                    share = f"{starts.late / starts.all:.1%}"
                    words = f"{name:<26}{ranks:>5}  {'yes' if leaves else 'no':<7}{sizes:<9}"
                    print(f"{words}{prefetch / 1e6:>8.0f}M{share:>8}{peak / GIB:>11.1f}")


def count_reductions() -> None:
    table = load_table()
    print(
        f"\n{'model':<26}{'layer':>7}{'bucket':>8}{'reductions a layer':>20}{'median':>8}{'last':>7}{'peak, GiB':>11}"
    )
    for name in MODELS[:2]:
        shape = read_model_shape(table[name]["config"], name)
        engine = EngineSettings(sub_group=125_000_000, communication_bytes=4)
        job = Job(shape, Layout(1, 1, 8), 1 << 16, Levers(tiled_loss=True), engine=engine)
        layer = max(sum(block) for block in get_weights(job).blocks[1:-1])
        for bucket in (25_000_000, 100_000_000, layer, 500_000_000, 2 * layer):
            starts, peak = predict_starts(replace(job, engine=replace(engine, reduce_bucket=bucket)))
            sizes = [size / 1e6 for size in starts.reduced]
            words = f"{name:<26}{layer / 1e6:>6.0f}M{bucket / 1e6:>7.0f}M{len(sizes) / shape.num_layers:>20.2f}"
            print(f"{words}{median(sizes):>7.0f}M{sizes[-1]:>6.0f}M{peak / GIB:>11.1f}")


if __name__ == "__main__":
    main()
    count_reductions()
