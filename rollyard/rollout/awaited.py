"""Engines that are about to take requests again, and what of all that waits is theirs (PURE).

New weights come to one engine after the other. The first one to have them could take all that waits; the others would then
idle until the next version. So while others are awaited, an engine takes requests only as long as those could not bring
all that waits to below its own load: what it has in the end is then what it would have if all had come at once.

Each request that ends meanwhile lets one more go out all the same. So the engines that are there go on with as many as they
have, and nothing waits for an engine that does not come: its turn comes after as many ends as there are requests before it.
"""

from __future__ import annotations

from rollyard.events import EngineId

Room = tuple[int, int]  # bits of a weight, slowness: of engines that are alike


class Awaited:
    """What engines hold that are awaited, alike ones together: a question costs as much as there are kinds, which are few."""

    def __init__(self) -> None:
        self._rooms: dict[EngineId, tuple[Room, int] | None] = {}  # and their weight; None: no slot is free
        self._sums: dict[Room, tuple[int, int]] = {}  # engines, and their weights together
        self._spare = 0  # requests that have ended since the first of them was awaited, less those that went out

    def __bool__(self) -> bool:
        return bool(self._rooms)

    def __contains__(self, engine: EngineId) -> bool:
        return engine in self._rooms

    def file(self, engine: EngineId, weight: int, slowness: int, free: bool) -> None:
        """It is awaited, and this is what it holds now."""
        self._drop(engine)
        self._rooms[engine] = None
        if free:
            room = weight.bit_length(), slowness
            self._rooms[engine] = room, weight
            self._add(room, 1, weight)

    def discard(self, engine: EngineId) -> None:
        """It is there, or not awaited any more."""
        self._drop(engine)
        if not self._rooms:
            self._spare = 0

    def _drop(self, engine: EngineId) -> None:
        if (found := self._rooms.pop(engine, None)) is not None:
            room, weight = found
            self._add(room, -1, -weight)

    def _add(self, room: Room, engines: int, weight: int) -> None:
        count, weights = self._sums.get(room, (0, 0))
        self._sums[room] = count + engines, weights + weight
        if not count + engines:
            del self._sums[room]

    def leave(self, weight: int, waiting: int) -> bool:
        """May an engine of this weight have one more? Not if those that are awaited can take `waiting` tokens below it."""
        if self._spare:
            return True
        below = 0
        for (_, slowness), (count, weights) in self._sums.items():
            below += max(0, count * weight - weights) // slowness
        return below < waiting

    def ended(self) -> None:
        """A request has, by itself."""
        self._spare += bool(self._rooms)

    def went(self) -> None:
        """A request has gone out."""
        self._spare = max(0, self._spare - 1)
