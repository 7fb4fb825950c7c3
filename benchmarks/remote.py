"""Measures what uploading a checkpoint costs, against the same bytes copied by s3fs alone, and fetching it with all of
its hashes against the same copy back.

The server is moto's, on loopback. Sides alternate; medians of pairs are compared.
"""

from __future__ import annotations

import json
import os
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from paths import RESULTS
from support.bucket_server import BUCKET, IS_INSTALLED, REASON, serve_bucket
from support.checkpoints import make_state, write_contents

from ulysses_cli.run.bucket import Bucket
from ulysses_cli.run.checkpoints import STATE, name_share
from ulysses_cli.run.remote_checkpoints import Sending, fetch_checkpoint

NUM_ROUNDS, NUM_RANKS, SHARE_BYTES, BAR = 7, 4, 16 << 20, 1.3


def measure(call: Callable[[], object]) -> float:
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


def main() -> None:
    if not IS_INSTALLED:
        raise SystemExit(REASON)
    with tempfile.TemporaryDirectory() as scratch, serve_bucket() as environ:
        os.environ |= environ
        folder = Path(scratch) / "checkpoints" / "step-1"
        folder.mkdir(parents=True)
        contents = {name_share(rank): os.urandom(SHARE_BYTES) for rank in range(NUM_RANKS)}
        write_contents(folder, contents | {STATE: json.dumps(make_state(1, NUM_RANKS)).encode()})
        num_bytes = sum(file.stat().st_size for file in folder.iterdir())
        bucket = Bucket(f"s3://{BUCKET}/ours")
        shares = [name_share(rank) for rank in range(NUM_RANKS)]
        back = Path(scratch) / "back"

        def fetch() -> None:
            assert fetch_checkpoint(bucket, 1, back) == ""

        sides: dict[str, Callable[[], object]] = {
            "s3fs, upload": lambda: bucket.files.put(str(folder), f"{BUCKET}/plain", recursive=True),
            "ours, upload": lambda: Sending(bucket).send_checkpoint(folder, shares, 0, 1),
            "s3fs, download": lambda: bucket.files.get(f"{BUCKET}/plain", str(back / "plain"), recursive=True),
            "ours, download and hashes": fetch,
        }
        seconds: dict[str, list[float]] = {name: [] for name in sides}
        for at in range(NUM_ROUNDS + 1):
            for name, call in sides.items():
                answer = measure(call)
                if at:  # the first round opens connections
                    seconds[name].append(answer)
            shutil.rmtree(back)

        def pair(ours: str, theirs: str) -> float:
            return statistics.median(a / b for a, b in zip(seconds[ours], seconds[theirs], strict=True))

        ratios = {
            "upload": pair("ours, upload", "s3fs, upload"),
            "download": pair("ours, download and hashes", "s3fs, download"),
        }
    medians = {name: statistics.median(values) for name, values in seconds.items()}
    print(f"{num_bytes / 1e6:,.0f} MB in {NUM_RANKS} shares, medians of {NUM_ROUNDS} rounds")
    for name, value in medians.items():
        print(f"  {name:<28}{value:8.3f} s")
    print(f"  upload, of s3fs             {ratios['upload']:8.3f}  (bar {BAR})")
    print(f"  download, of s3fs           {ratios['download']:8.3f}")
    result = {"bytes": num_bytes, "seconds": medians, "ratios": ratios}
    (RESULTS / "remote-cpu.json").write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
