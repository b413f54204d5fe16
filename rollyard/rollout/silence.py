"""Which engines stand still (PURE): they have something to write, and neither write nor make any step towards it."""

from __future__ import annotations

from rollyard.events import EngineId


class Silence:
    """Told what is heard of engines; asked now and then how long nothing was.

    Args:
        limit_s: seconds of silence that are too many.
    """

    def __init__(self, limit_s: float) -> None:
        self.limit_s = limit_s
        self._heard: dict[EngineId, float] = {}  # when it was heard of, or had something to write for the first time
        self._marks: dict[EngineId, object] = {}  # what it had done by then
        self._excused: set[EngineId] = set()  # those that were told to stand still

    def heard(self, engine: EngineId, now: float) -> None:
        self._heard[engine] = now

    def stands(self, engine: EngineId) -> None:
        """It was told to."""
        self._excused.add(engine)

    def goes_on(self, engine: EngineId) -> None:
        """It was told to, or is a new one."""
        self._excused.discard(engine)
        self._heard.pop(engine, None)

    def forgive(self) -> None:
        """Nobody listened for a while."""
        self._heard.clear()

    def look(self, engine: EngineId, busy: bool, mark: object, now: float) -> float:
        """Seconds that the engine was silent, if they are too many; else 0.

        Args:
            busy: it has something to write.
            mark: changes with every step that it takes.
        """
        if not busy or engine in self._excused:
            self._heard.pop(engine, None)
            return 0.0
        if engine not in self._heard or mark != self._marks.get(engine):
            self._heard[engine], self._marks[engine] = now, mark
        seconds = now - self._heard[engine]
        return seconds if seconds > self.limit_s else 0.0
