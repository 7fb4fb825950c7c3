"""The real run's script, and that its two runs agree on what docs/real-run.md says."""

import json
import sys
from itertools import combinations
from pathlib import Path

from support.paths import ROOT
from support.real_run_page import load_runs

sys.path.append(str(ROOT / "benchmarks"))
import real_run


def test_both_runs_say_the_same() -> None:
    found = [real_run.list_conclusions(run) for run in load_runs().values()]
    assert [run["conclusions"] for run in load_runs().values()] == found == [found[0]] * len(found)


def test_records_name_no_place_of_the_machine() -> None:
    for file in [*real_run.RESULTS.glob("real-run*.json"), *(real_run.RESULTS / "real-run").rglob("*.json*")]:
        text = file.read_text()
        assert str(Path.home()) not in text, file
        assert '"/' not in text, file


def test_files_share_no_text(tmp_path: Path) -> None:
    data = real_run.write_data(tmp_path)
    texts = {name: [json.loads(line)["text"] for line in (tmp_path / name).read_text().splitlines()] for name in data}
    assert {name: len(own) for name, own in texts.items()} == {name: len(part["texts"]) for name, part in data.items()}
    for one, other in combinations(texts.values(), 2):
        assert not any(a[:400] in b or b[:400] in a for a in one for b in other)
