"""Rows while they fill: found by the room they have left, or by how little work they hold. Used by packing.py alone.

Standard library only; each step costs a few look-ups however many rows there are.
"""

from __future__ import annotations

import heapq

NUM_TRIES = 24  # rows with the least work that a large piece is offered before the fullest that fits is taken
WORD_BITS = 1024


class Bins:
    """Rows while they fill: found by the room they have left, or by how little work they hold."""

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
        passed: list[tuple[float, int]] = []
        found = None
        while self.by_work and len(passed) < NUM_TRIES and found is None:
            entry = heapq.heappop(self.by_work)
            if entry[0] != self.works[entry[1]]:
                continue  # of an earlier time; the row stands in the heap anew
            if self.rooms[entry[1]] >= length:
                found = entry[1]
            passed.append(entry)
        for entry in passed:
            heapq.heappush(self.by_work, entry)
        return found

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
    """Whole numbers up to a bound, with the next one from any point on: a tree of words of bits."""

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
