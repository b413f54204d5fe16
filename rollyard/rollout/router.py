"""Which engine gets a request (PURE): the one with the fewest tokens in flight.

A group stays on the engine that already holds one of its members while that costs nothing: the prompt it need not
compute again is at least as long as the difference in load. What an engine holds that is several times slower than the others,
and the request that it is to get, weigh as many times as much. While others are about to come back, engines take no more than
their share (`awaited`). Each operation is O(log engines).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from heapq import heappop, heappush

from rollyard.events import EngineId
from rollyard.rollout.awaited import Awaited

Place = tuple[int, int, EngineId]  # weight, requests, and whose they are
OUTDATED = 16  # entries of heaps for each engine, at most


@dataclass(slots=True)
class EngineLoad:
    """What the router knows of one engine. `version` None: nothing acknowledged yet."""

    id: EngineId
    slots: int
    version: int | None
    held: bool = False
    leaving: bool = False
    running: int = 0  # requests
    tokens: int = 0  # prompt and written tokens of the running requests
    slowness: int = 1  # times as slow as the median
    weight: int = 0  # of what it holds, as of its last change

    @property
    def open(self) -> bool:
        return self.running < self.slots and not self.held and not self.leaving and self.version is not None


class Router:
    """Keeps the open engines in order of load: a heap for each version, whose outdated entries go when they come up."""

    def __init__(self) -> None:
        self._engines: dict[EngineId, EngineLoad] = {}
        self._open: dict[int, set[EngineId]] = {}  # by version; few are alive at once
        self._heaps: dict[int, list[Place]] = {}  # by version
        self._typical = 0  # tokens of a request
        self._slow: dict[EngineId, int] = {}
        self.awaited = Awaited()
        self.changed: set[EngineId] = set()  # for whoever looks at engines by another order, and clears it
        self._filed = 0  # entries, outdated ones too, since the heaps were made anew
        self.running = self.slots = 0  # of all engines

    def __contains__(self, engine: EngineId) -> bool:
        return engine in self._engines

    def __len__(self) -> int:
        return len(self._engines)

    def __iter__(self) -> Iterator[EngineLoad]:
        return iter(self._engines.values())

    def add(self, engine: EngineId, slots: int, version: int | None, *, held: bool) -> None:
        self.remove(engine)
        load = self._engines[engine] = EngineLoad(engine, slots, version, held)
        self.slots += slots
        self._file(load)

    def remove(self, engine: EngineId) -> None:
        if engine in self._engines:
            load = self._engines.pop(engine)
            self.running, self.slots = self.running - load.running, self.slots - load.slots
            self._unfile(load)
            self.awaited.discard(engine)
            self._slow.pop(engine, None)

    def load(self, engine: EngineId) -> EngineLoad:
        return self._engines[engine]

    def version(self, engine: EngineId) -> int | None:
        return self._engines[engine].version

    def set_version(self, engine: EngineId, version: int) -> None:
        load = self._engines[engine]
        self._unfile(load)
        load.version = version
        self._file(load)

    def hold(self, engine: EngineId, held: bool) -> None:
        load = self._engines[engine]
        self._unfile(load)
        load.held = held
        self._file(load)

    def expect(self, engine: EngineId) -> None:
        """It takes requests soon, with new weights, or those that it takes already with other ones."""
        load = self._engines[engine]
        if not load.leaving:
            self.awaited.file(engine, self._weight(load), load.slowness, load.running < load.slots)

    def leave(self, engine: EngineId) -> None:
        """It gets no request any more."""
        load = self._engines[engine]
        self._unfile(load)
        self.awaited.discard(engine)
        load.leaving = True

    def change(self, engine: EngineId, *, requests: int = 0, tokens: int = 0) -> None:
        """Account for requests and tokens that came (positive) or went (negative)."""
        load = self._engines[engine]
        load.running += requests
        self.running += requests
        load.tokens += tokens
        if engine in self.awaited:
            self.expect(engine)
        if load.open:
            self._file_open(load)
        elif requests > 0:
            self._unfile(load)
        else:
            self.changed.add(engine)

    def compare(self, slowness: Mapping[EngineId, int], typical: int) -> None:
        """Engines were measured. `typical`: tokens of a request."""
        self._typical = typical
        for load in self._engines.values():
            if load.slowness != (found := slowness.get(load.id, 1)):
                load.slowness = found
                self._file(load)
                self.changed.add(load.id)
            if load.id in self.awaited:
                self.expect(load.id)
        self._slow = {load.id: load.slowness for load in self._engines.values() if load.slowness > 1}

    @property
    def slow(self) -> Mapping[EngineId, int]:
        """How many times slower than the median engines are that are."""
        return self._slow

    @property
    def open(self) -> bool:
        """Is there an engine that takes requests?"""
        return bool(self._open)

    def serves(self, oldest: int, newest: int | None) -> bool:
        """Is there an engine that takes requests, of an allowed version?"""
        return any(version >= oldest and (newest is None or version <= newest) for version in self._open)

    def choose(
        self, oldest: int, newest: int | None, prompt_tokens: int, home: EngineId | None, avoid: EngineId | None, waiting: int
    ) -> EngineId | None:
        """The engine for a request, or None while every allowed one is full, or has its share while others are awaited.

        Args:
            oldest, newest: versions that may work for the request; None: however new.
            prompt_tokens: what staying at `home` saves, in tokens.
            home: where other members of the group are.
            avoid: where the request failed before; taken only when there is no other.
            waiting: tokens of all that waits.
        """
        best, last_resort, least = None, None, -1
        for load in self._least_loaded(oldest, newest, avoid):
            least = load.weight if least < 0 else min(least, load.weight)
            if load.id == avoid:
                last_resort = load.id
            elif best is None or (load.weight, load.running) < (best.weight, best.running):
                best = load
        if least >= 0 and self.awaited and not self.awaited.leave(least, waiting):
            return None
        if best is None:
            return last_resort
        near = self._engines.get(home) if home is not None and home != avoid else None
        if near is not None and near is not best and near.weight - best.weight <= prompt_tokens:
            return near.id if self._allowed(near, oldest, newest) else best.id
        return best.id

    def _least_loaded(self, oldest: int, newest: int | None, avoid: EngineId | None) -> Iterator[EngineLoad]:
        """The least loaded open engine of each allowed version, and the next one where that is to be avoided."""
        for version in sorted(self._open):  # where loads are equal, younger groups may need the newer one
            if version < oldest or (newest is not None and version > newest):
                continue
            first = self._first(version)
            yield first
            if first.id == avoid and len(self._open[version]) > 1:
                yield self._first(version, but=avoid)
                self._push(first, version)

    def _first(self, version: int, but: EngineId | None = None) -> EngineLoad:
        """The least loaded of a version that has open engines; entries before its own are outdated, and go."""
        heap = self._heaps[version]
        while True:
            weight, running, engine = heap[0]
            load = self._engines.get(engine)
            known = load is not None and load.version == version and load.open and engine != but
            if load is not None and known and load.weight == weight and load.running == running:
                return load
            heappop(heap)

    def may_take(self, engine: EngineId | None, oldest: int, newest: int | None) -> bool:
        """Is this engine there, open, and of an allowed version?"""
        load = self._engines.get(engine) if engine is not None else None
        return load is not None and self._allowed(load, oldest, newest)

    @staticmethod
    def _allowed(load: EngineLoad, oldest: int, newest: int | None) -> bool:
        return load.open and load.version is not None and load.version >= oldest and (newest is None or load.version <= newest)

    def _file(self, load: EngineLoad) -> None:
        """What is known of it is new."""
        if load.open:
            self._file_open(load)
        else:
            self.changed.add(load.id)

    def _file_open(self, load: EngineLoad) -> None:
        """The same of one that takes requests."""
        self.changed.add(load.id)
        assert load.version is not None
        found = self._open.get(load.version)
        if found is None:
            found = self._open[load.version] = set()
        found.add(load.id)
        if self._filed > OUTDATED * len(self._engines):
            self._heaps, self._filed = {}, 0
            for each in self._engines.values():
                if each.open and each.version is not None:
                    self._push(each, each.version)
        else:
            self._push(load, load.version)

    def _unfile(self, load: EngineLoad) -> None:
        """It takes nothing more, or is about to change."""
        self.changed.add(load.id)
        if load.version is not None and (engines := self._open.get(load.version)) is not None:
            engines.discard(load.id)
            if not engines:
                del self._open[load.version]

    def _push(self, load: EngineLoad, version: int) -> None:
        load.weight = self._weight(load)
        heap = self._heaps.get(version)
        if heap is None:
            heap = self._heaps[version] = []
        heappush(heap, (load.weight, load.running, load.id))
        self._filed += 1

    def _weight(self, load: EngineLoad) -> int:
        slow, typical = load.slowness, self._typical
        return load.tokens if slow == 1 else (load.tokens + typical) * slow - typical
