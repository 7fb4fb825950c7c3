"""A data structure for `packing.py`: rows being filled, found by the room they have left or the work they hold.

Standard library only; each step costs a few look-ups, whatever the number of rows.
"""

from __future__ import annotations

import heapq

NUM_TRIES = 24  # rows with the least work that are tried for a large piece before the fullest row that fits
WORD_BITS = 1024


class Bins:
    """Rows while they are filled. `by_room` and `by_work` may hold outdated entries, which look-ups skip."""

    def __init__(self, num_rows: int, capacity: int) -> None:
        self.capacity = capacity
        self.rooms = [capacity] * num_rows
        self.works = [0.0] * num_rows
        self.members: list[list[int]] = [[] for _ in range(num_rows)]
        self.by_room: dict[int, list[int]] = {capacity: list(range(num_rows - 1, -1, -1))}
        self.present = NumberSet(capacity)
        self.present.add(capacity)
        self.by_work = [(0.0, row) for row in range(num_rows)]

    def find_lightest(self, length: int) -> int | None:
        """Among the few rows with the least work, the first that has room."""
        tried: list[tuple[float, int]] = []
        lightest = None
        while self.by_work and len(tried) < NUM_TRIES and lightest is None:
            work, row = heapq.heappop(self.by_work)
            if work != self.works[row]:
                continue  # outdated: the heap holds a newer entry of this row
            if self.rooms[row] >= length:
                lightest = row
            tried.append((work, row))
        for entry in tried:
            heapq.heappush(self.by_work, entry)
        return lightest

    def find_fullest(self, length: int) -> int:
        """The row with the smallest room that suffices; a new one when there is none."""
        while True:
            room = self.present.find_from(length)
            if room is None:
                self.rooms.append(self.capacity)
                self.works.append(0.0)
                self.members.append([])
                heapq.heappush(self.by_work, (0.0, len(self.rooms) - 1))
                return len(self.rooms) - 1
            rows = self.by_room[room]
            while rows and self.rooms[rows[-1]] != room:
                rows.pop()
            if rows:
                return rows[-1]
            del self.by_room[room]
            self.present.remove(room)

    def put(self, member: int, length: int, work: float, row: int) -> None:
        self.members[row].append(member)
        self.rooms[row] -= length
        self.works[row] += work
        room = self.rooms[row]
        if room:
            heapq.heappush(self.by_work, (self.works[row], row))
            if room not in self.by_room:
                self.by_room[room] = []
                self.present.add(room)
            self.by_room[room].append(row)


class NumberSet:
    """A set of whole numbers up to a bound that finds the next member from any number on: a tree of words of bits."""

    def __init__(self, bound: int) -> None:
        self.levels: list[dict[int, int]] = [{}]
        while bound >= WORD_BITS:
            bound //= WORD_BITS
            self.levels.append({})

    def add(self, number: int) -> None:
        for level in self.levels:
            number, bit = divmod(number, WORD_BITS)
            level[number] = level.get(number, 0) | 1 << bit

    def remove(self, number: int) -> None:
        for level in self.levels:
            number, bit = divmod(number, WORD_BITS)
            level[number] &= ~(1 << bit)
            if level[number]:
                return
            del level[number]

    def find_from(self, number: int) -> int | None:
        """The smallest member that is at least `number`."""
        for depth, level in enumerate(self.levels):
            word, bit = divmod(number, WORD_BITS)
            rest = level.get(word, 0) >> bit
            if rest:
                number += (rest & -rest).bit_length() - 1
                for lower in reversed(self.levels[:depth]):
                    lowest = lower[number]
                    number = number * WORD_BITS + (lowest & -lowest).bit_length() - 1
                return number
            number = word + 1
        return None
