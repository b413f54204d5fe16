"""Which engine is the most crowded, and which the idlest (PURE), with what is on its way between them. O(log engines)."""

from __future__ import annotations

from collections import Counter

from sortedcontainers import SortedList

from rollyard.events import EngineId
from rollyard.rollout.router import EngineLoad, Router
from rollyard.types import RequestId

Rank = tuple[int, EngineId]  # requests, each as many times as the engine is slower than the median; and whose they are


class Crowds:
    """Engines in order of what they will hold. An engine is looked at again when something of it has changed."""

    def __init__(self, router: Router) -> None:
        self._router = router
        self.going: dict[RequestId, tuple[EngineId, EngineId]] = {}  # cut, not yet heard of: from, to
        self._leave, self._come = Counter[EngineId](), Counter[EngineId]()
        self._crowded: SortedList[Rank] = SortedList()  # by what stays; those that may be left
        self._idle: SortedList[Rank] = SortedList()  # by what there will be with one more; those that take requests
        self._ranks: dict[EngineId, tuple[Rank | None, Rank | None]] = {}  # as they are in these

    def set_off(self, request: RequestId, source: EngineId, target: EngineId) -> None:
        self.going[request] = (source, target)
        self._count(source, target, 1)

    def landed(self, request: RequestId) -> None:
        """No engine holds it any more, on whichever way it was."""
        if (way := self.going.pop(request, None)) is not None:
            self._count(*way, -1)

    def _count(self, source: EngineId, target: EngineId, requests: int) -> None:
        self._leave[source] += requests
        self._come[target] += requests
        self._router.changed |= {source, target}

    def uneven(self, times: int) -> tuple[EngineLoad, EngineLoad] | None:
        """The most crowded and the idlest, if the first has at least so many times as much as the other will have."""
        for engine in self._router.changed:
            self._file(engine)
        self._router.changed.clear()
        if not self._idle:
            return None
        (most, source), (least, target) = self._crowded[-1], self._idle[0]
        if most < times * least:
            return None
        return self._router.load(source), self._router.load(target)

    def _file(self, engine: EngineId) -> None:
        """Its places are those of now."""
        crowded, idle = self._ranks.pop(engine, (None, None))
        if crowded is not None:
            self._crowded.remove(crowded)
        if idle is not None:
            self._idle.remove(idle)
        if engine not in self._router:
            return
        load = self._router.load(engine)
        if load.held or load.leaving:
            return
        stays = load.running - self._leave[engine]
        crowded = stays * load.slowness, engine
        self._crowded.add(crowded)
        if load.open:
            idle = (stays + self._come[engine] + 1) * load.slowness, engine
            self._idle.add(idle)
        self._ranks[engine] = crowded, idle if load.open else None
