"""How fast engines write (PURE), measured by what they finish: one that is far slower than the others is to get less."""

from __future__ import annotations

from collections.abc import Mapping
from statistics import median

from rollyard.events import EngineId

SHARE = 1 / 8  # of the newest measurement in the mean
LEAST = 16  # measurements of an engine before it is compared
EVERY = 16  # measurements between two comparisons, at least; and at least one for each engine
MOST = 64  # times slower that are told apart


class Speeds:
    """Tokens a second of one request, by engine, and how many times slower than the median that is."""

    def __init__(self) -> None:
        self._speeds: dict[EngineId, tuple[float, int]] = {}  # mean, measurements
        self._measured = 0  # since the last comparison

    def forget(self, engine: EngineId) -> None:
        """Another one has its name, or nobody."""
        self._speeds.pop(engine, None)

    def wrote(self, engine: EngineId, tokens: int, seconds: float) -> bool:
        """One request, or a part of it. Is it time to compare?"""
        if not tokens or seconds <= 0:
            return False
        mean, times = self._speeds.get(engine, (0.0, 0))
        mean = tokens / seconds if not times else mean + SHARE * (tokens / seconds - mean)
        self._speeds[engine] = mean, times + 1
        self._measured += 1
        if self._measured < max(EVERY, len(self._speeds)):
            return False
        self._measured = 0
        return True

    def slowness(self) -> Mapping[EngineId, int]:
        """Of every engine that was measured often enough: 1 is as fast as the median, or faster."""
        known = {engine: mean for engine, (mean, times) in self._speeds.items() if times >= LEAST}
        if not known:
            return {}
        usual = median(known.values())
        return {engine: min(MOST, max(1, round(usual / mean))) for engine, mean in known.items()}
