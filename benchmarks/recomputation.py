"""Measures on a CPU what a step gains where no layer is computed twice, as `auto` chooses where the GPU has room: runs
with `memory.gradient_checkpointing` false and true take steps in turns in one process. One rank, float32, a Llama of
four layers.

    python benchmarks/recomputation.py [--rounds 12]
"""

from __future__ import annotations

import argparse
import json
import os
from typing import Any

os.environ |= {"DS_ACCELERATOR": "cpu", "RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0"}
os.environ.setdefault("OMP_NUM_THREADS", "1")
from paired_steps import measure_in_turns, summarize
from paths import RESULTS
from train_cpu import CONFIG, connect

NUM_DOCUMENTS, DOCUMENT_TOKENS, VOCABULARY = 4, 128, 4096
SIDES = {"nothing recomputed": False, "recomputed": True, "recomputed, again": True}


def make_side(recomputes: bool) -> Any:
    from support.run_harness import RunHarness
    from support.training import MemoryRows, make_recipe

    config = {**CONFIG, "num_hidden_layers": 4, "vocab_size": VOCABULARY}
    rows = MemoryRows([[(DOCUMENT_TOKENS, 0)] * NUM_DOCUMENTS] * 4, VOCABULARY)
    length = f"data.max_length={NUM_DOCUMENTS * DOCUMENT_TOKENS}"
    words = (length, "train.lr_scheduler_type=constant", f"memory.gradient_checkpointing={recomputes}")
    return RunHarness(make_recipe(*words, config=config), rows, 10**6)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=12)
    num_rounds = parser.parse_args().rounds
    connect()
    harnesses = {side: make_side(recomputes) for side, recomputes in SIDES.items()}
    result = summarize(measure_in_turns(harnesses, num_rounds), *SIDES)
    result["losses"] = {side: harness.losses[-1] for side, harness in harnesses.items()}
    print(f"losses {result['losses']}")
    record = {"row_tokens": NUM_DOCUMENTS * DOCUMENT_TOKENS, "rounds": num_rounds, "cores": os.cpu_count(), **result}
    (RESULTS / "recomputation-cpu.json").write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
