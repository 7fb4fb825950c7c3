"""Counts weights whose gather starts only when their module needs them, by the sizes of DeepSpeed's prefetch.

    python benchmarks/prefetch.py

The ledger's engine is run hook by hook (plan/ledger/stage3.py). A late gather is one that the module's own hook starts:
where the processor is not ahead, the GPU waits for all of it. "default": DeepSpeed's sizes. "derived": what
size_prefetch says (plan/ledger/weights.py). Rows of 64Ki on 8 ranks each, ZeRO-3, the loss in tiles, attention's
results kept.
"""

from dataclasses import replace

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


if __name__ == "__main__":
    main()
