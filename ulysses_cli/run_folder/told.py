"""told.jsonl: what a run sent to trackers, to the hub and to the recipe's notify settings, and when."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path

from ulysses_cli.plan.files.regular_files import open_own
from ulysses_cli.plan.secrets import collect_secrets, mask_text

TOLD = "told.jsonl"


def note_told(run_dir: Path, kind: str, name: str, text: str) -> None:
    """Adds a line. A disk that is full or gone costs the line and nothing else."""
    known = collect_secrets({}, os.environ)
    now = time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime())
    line = {"time": now, "kind": kind, "name": mask_text(name, known), "text": mask_text(text, known)}
    try:
        with open(run_dir / TOLD, "a", encoding="utf-8", opener=open_own) as file:
            file.write(json.dumps(line) + "\n")
    except OSError:
        return
