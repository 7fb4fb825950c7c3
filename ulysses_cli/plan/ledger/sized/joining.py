"""What tensors take and what an engine holds, together: the fullest moment of each phase, and its lines."""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter
from collections.abc import Iterator, Mapping

from ulysses_cli.plan.ledger.memory_snapshot import MemorySnapshot
from ulysses_cli.plan.ledger.sized.depth import AGAIN_PASS, LOAD, Depth, Recorded, Turn, Window, join_path, split_path
from ulysses_cli.plan.ledger.sized.lines import AGAIN, FORWARD, join_lines, name_moment
from ulysses_cli.plan.ledger.sized.walk import EngineBytes, EngineWalk
from ulysses_cli.plan.sizes.autograd import GRADIENT
from ulysses_cli.plan.sizes.meter import Tag

# Work of the engine at no module.
WORKS = {"step": "the optimizer's work", "end backward": "the last gradients leave", "end evaluation": "its end"}


class Joined:
    def __init__(self, recorded: Recorded, depth: Depth, walk: EngineWalk) -> None:
        self.recorded, self.depth = recorded, depth
        self.turns: dict[str, dict[Turn, tuple[Window, int]]] = {}
        self.peaks: dict[str, tuple[int, int, EngineBytes]] = {}  # bytes, the event that is the last before, the engine
        for phase in recorded.phases:
            self.turns[phase] = dict(self._list_turns(phase))
            alike = _group_layers(self.turns[phase])
            most, fullest = -1, None
            for holding in walk.holdings[phase]:
                for turn in _list_highest(holding, alike):
                    window, base = self.turns[phase][turn]
                    at = window.marks[holding.mark].at
                    end = window.marks[holding.mark + 1].at if holding.mark + 1 < len(window.marks) else window.end
                    if holding.after:
                        at = recorded.find_fullest(min(at + 1, end), end)
                    elif holding.is_added:
                        at = min(at + 1, end)
                    total = base + recorded.levels[at] + holding.num_bytes
                    if total > most:
                        most, fullest = total, (total, at, holding._replace(turn=turn))
            if fullest is not None:
                self.peaks[phase] = fullest

    def _list_turns(self, phase: str) -> Iterator[tuple[Turn, tuple[Window, int]]]:
        """Each turn's window, and by how much tensors take more when it begins than in the run of a few layers."""
        levels, windows = self.recorded.levels, self.recorded.phases[phase]
        now = levels[windows[0].first]
        if phase == "backward":
            window, base = list(self.turns["forward"].values())[-1]
            now = base + levels[window.end]
        for window, turn in self.depth.list_windows(phase, windows):
            base = now - levels[window.first]
            yield turn, (window, base)
            now = base + levels[window.end]

    def measure(self) -> dict[str, int]:
        """The bytes of each phase's fullest moment."""
        found = {phase: num_bytes for phase, (num_bytes, *_) in self.peaks.items()}
        again = found.pop(LOAD + AGAIN_PASS, 0)
        return {**found, LOAD: max(found[LOAD], again)}

    def describe(self) -> dict[str, MemorySnapshot]:
        moments = {phase: self._describe(phase, *peak) for phase, peak in self.peaks.items()}
        again = moments.pop(LOAD + AGAIN_PASS, None)
        if again is not None and again.num_bytes > moments[LOAD].num_bytes:
            moments[LOAD] = again._replace(phase=LOAD)
        return moments

    def _describe(self, phase: str, num_bytes: int, at: int, holding: EngineBytes) -> MemorySnapshot:
        recorded, window = self.recorded, self.turns[phase][holding.turn][0]
        tags = recorded.held + recorded.count_tags(0, recorded.phases[phase][0].first)
        if phase == "backward":
            tags = recorded.held + recorded.count_tags(0, recorded.phases["forward"][0].first)
            self._add_windows(tags, "forward", None)
        self._add_windows(tags, phase, holding)
        for found in (recorded.count_tags(window.first, at), holding.tags):
            for tag, size in found.items():
                tags[tag] += size
        kind, path, before = self._find_last(phase, at, holding)
        own, layer = window.layer, holding.turn.layer
        if own is not None and layer is not None:
            path = join_path(split_path(path, own), layer)
        mark = window.marks[holding.mark]
        if not holding.after and mark.work in WORKS:
            name = WORKS[mark.work]
        else:
            name = name_moment((kind, path)) if before == phase else f"before the {phase.replace('_', ' ')}"
        return MemorySnapshot(phase, name, join_lines(tags, phase))

    def _add_windows(self, tags: Counter[Tag], phase: str, until: EngineBytes | None) -> None:
        """What changes in the windows of a phase, up to the one of this holding."""
        for turn, (window, _) in self.turns[phase].items():
            if until is not None and turn == until.turn:
                return
            for tag, size in self.recorded.count_tags(window.first, window.end).items():
                tags[tag] += size

    def _find_last(self, phase: str, at: int, holding: EngineBytes) -> tuple[str, str, str]:
        """Kind of work, module and phase of what the fullest moment comes with: a tensor, or work of the engine."""
        mark = self.turns[phase][holding.turn][0].marks[holding.mark]
        if not holding.after:
            passes = AGAIN if mark.is_forward else GRADIENT
            return passes if phase == "backward" else FORWARD, mark.path, phase
        if not at:
            return "", "", ""
        _, before, (kind, path) = self.recorded.events[at - 1]
        return kind, path, before


Alike = dict[int, list[tuple[list[int], list[Turn]]]]


def _group_layers(turns: Mapping[Turn, tuple[Window, int]]) -> Alike:
    """By work, the layers for which one window stands, lowest first, with their turns."""
    groups: dict[tuple[int, int], list[tuple[int, Turn]]] = {}
    for turn, (window, _) in turns.items():
        if turn.layer is not None:
            groups.setdefault((window.work, window.first), []).append((turn.layer, turn))
    alike: Alike = {}
    for (work, _), group in groups.items():
        layers, own = zip(*sorted(group), strict=True)
        alike.setdefault(work, []).append(([*layers], [*own]))
    return alike


def _list_highest(holding: EngineBytes, alike: Alike) -> Iterator[Turn]:
    """Of each group of layers with the same tensors, the highest one that the holding is of: in the lower ones tensors
    take no more."""
    last = holding.turn.layer
    if holding.first is None or last is None:
        yield holding.turn
        return
    for layers, turns in alike[holding.work]:
        at = bisect_right(layers, last) - 1
        if at >= 0 and layers[at] >= holding.first:
            yield turns[at]
