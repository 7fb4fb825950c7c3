"""Importing this lets a benchmark import this checkout's package and what tests share (`from support import ...`)."""

import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks" / "results"
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]
