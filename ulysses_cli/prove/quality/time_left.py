"""How long an evaluation still takes, from the seconds of answered questions and the operations of the rest."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Mapping

FROM_FILES = 0  # stands for a length: questions of files, whose tokens are not counted before they are asked


class TimeLeft:
    """`left`: how many questions of each length are left; `cost`: of reading so many tokens, in any unit. Lengths come
    in rising order, and a long question takes more than its share of the tokens: a mean over those that are answered
    would promise far too little."""

    def __init__(self, left: Mapping[int, int], cost: Callable[[int], float]) -> None:
        self.left, self.cost = Counter(left), cost
        self.seconds: dict[int, list[float]] = defaultdict(list)

    def note(self, length: int, seconds: float) -> None:
        """A question was answered so many seconds after the one before it."""
        self.left[length] -= 1
        self.seconds[length].append(seconds)

    def drop(self, length: int) -> None:
        """A question was answered before this start, or is too long to be asked."""
        self.left[length] -= 1

    def estimate(self) -> float:
        return sum(number * self._expect(length) for length, number in self.left.items() if number > 0)

    def _expect(self, length: int) -> float:
        if length in self.seconds:
            return _mean(self.seconds[length])
        known = [each for each in self.seconds if each != FROM_FILES]
        if length == FROM_FILES or not known:
            return _mean([second for each in self.seconds.values() for second in each])
        nearest = min(known, key=lambda each: abs(each - length))
        return _mean(self.seconds[nearest]) * self.cost(length) / self.cost(nearest)


def _mean(seconds: list[float]) -> float:
    return sum(seconds) / max(1, len(seconds))
