"""Importing this lets a benchmark import this checkout's package and what tests share (`from support import ...`). Its
ranks take DeepSpeed's operators from where commands build them: torch's own folder may hold a killed build's lock."""

import os
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks" / "results"
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]

from ulysses_cli.run.host import FOLDER, get_builds_folder  # noqa: E402 - needs the path

os.environ[FOLDER] = str(get_builds_folder(os.environ))
