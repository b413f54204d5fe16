"""A sink on a thread of its own: whoever writes never waits for it, and whatever befalls it is told, once, where the run is.

It keeps a file in the run's folder: what the run is called in the tracker, and the last step that it was told of. So a resumed
run goes on there, a step that is done again is not told twice, and a tracker that comes late is told what it missed.
"""

from __future__ import annotations

import asyncio
import json
import warnings
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from itertools import chain
from pathlib import Path
from threading import Condition, Thread
from typing import Final

from rollyard.durable import write_file
from rollyard.protocols.devices import Sink, Tracked
from rollyard.texts import in_a_line

FOLDER: Final = "trackers"  # in that of the run
ROOM: Final = 1024  # records that wait at most
LIMIT_S: Final = 30.0  # that a run waits at its end for what is not written yet

Record = Mapping[str, object]
Tell = Callable[[str], None]  # something that is no failure, from any thread


@dataclass(frozen=True, slots=True)
class Memory:
    """What is kept between lives of a run: what it is called there, and what was told last."""

    id: str = ""
    step: int = 0
    evaluated: int = -1

    @classmethod
    def read(cls, path: Path) -> Memory:
        """Raises OSError, ValueError or TypeError for a file that somebody has changed."""
        return cls(**json.loads(path.read_text(encoding="utf-8"))) if path.exists() else cls()

    def write(self, path: Path) -> None:
        """Whole or not at all."""
        write_file(path, json.dumps(asdict(self)).encode())


@dataclass(frozen=True, slots=True)
class _End:
    summary: Record
    failed: bool


class Aside:
    """Writes to a sink, on its thread.

    Args:
        name: of the sink, as in `watch.sinks`.
        make: the sink; called on the thread too, so that it may import what takes long.
        room: records that may wait; one more is dropped, and counted.
        limit_s: seconds that `closed` waits.
    """

    def __init__(self, name: str, make: Callable[[Tell], Sink], room: int = ROOM, limit_s: float = LIMIT_S) -> None:
        self._name, self._make, self._room, self._limit_s = name, make, room, limit_s
        self._orders: deque[tuple[str, Record] | _End] = deque()
        self._changed = Condition()
        self._thread: Thread | None = None
        self._news: deque[str] = deque()
        self._failed = False
        self.dropped = 0  # records, since there was no room

    # ------------------------------------------------------------------------------------------ where the run is

    @property
    def takes_back(self) -> bool:
        """Or does not take it twice."""
        return True

    def open(self, run: Tracked) -> str:
        """Begin. What the run is called there is kept here."""
        self._thread = Thread(target=self._main, args=(run,), name=f"sink {self._name}", daemon=True)
        self._thread.start()
        return ""

    def write(self, record: Record) -> None:
        """The metrics of a step."""
        self._put("write", record)

    def evaluated(self, record: Record) -> None:
        """Those of an evaluation."""
        self._put("evaluated", record)

    def close(self, summary: Record, failed: bool) -> None:
        """Nothing comes after this. `closed` waits until it is written."""
        with self._changed:
            self._orders.append(_End(summary, failed))
            self._changed.notify()

    async def closed(self) -> None:
        """Wait for the end of what was begun, for a limited time, and tell how it went."""
        if self._thread is None:
            return
        await asyncio.to_thread(self._thread.join, self._limit_s)
        self.hear()
        if self._thread.is_alive():
            self._warn(f"it is not done within {self._limit_s:g} s, and left alone: it may lack the newest records")
        if self.dropped and not self._failed:
            self._warn(f"{self.dropped} records were dropped in all")

    def _put(self, kind: str, record: Record) -> None:
        self.hear()
        if self._thread is None or self._failed:
            return
        with self._changed:
            if len(self._orders) < self._room:
                self._orders.append((kind, record))
                self._changed.notify()
                return
        self.dropped += 1
        if self.dropped == 1:
            self._warn(f"it is slow: {self._room} records wait for it, and what comes meanwhile is dropped")

    def hear(self) -> None:
        """Tell what happened on the thread meanwhile."""
        while self._news:
            self._warn(self._news.popleft())

    def _warn(self, told: str) -> None:
        warnings.warn(f"{self._name}: {told}", RuntimeWarning, stacklevel=4)

    # --------------------------------------------------------------------------------------------- on the thread

    def _main(self, run: Tracked) -> None:
        try:
            self._serve(self._make(self._news.append), run)
        except BaseException as error:  # noqa: BLE001 - whatever it is, the run goes on without it
            self._failed = True
            self._news.append(f"it failed, and is told nothing more: {_told(error)}")

    def _serve(self, sink: Sink, run: Tracked) -> None:
        path = run.folder / FOLDER / f"{self._name}.json"
        path.parent.mkdir(exist_ok=True)
        memory = Memory.read(path)
        memory = replace(memory, id=sink.open(replace(run, id=memory.id)))
        if sink.takes_back:
            memory = replace(memory, step=min(memory.step, run.begins), evaluated=min(memory.evaluated, run.begins))
        memory.write(path)
        for order in chain((("write", record) for record in run.earlier), self._coming()):
            if isinstance(order, _End):
                sink.close(order.summary, order.failed)
                return
            now = self._tell(sink, memory, *order)
            if now != memory:
                memory = now
                memory.write(path)

    def _tell(self, sink: Sink, memory: Memory, kind: str, record: Record) -> Memory:
        """What was told before is not told again."""
        step = int(str(record["step"]))
        if kind == "write" and step > memory.step:
            sink.write(record)
            return replace(memory, step=step)
        if kind == "evaluated" and step > memory.evaluated:
            sink.evaluated(record)
            return replace(memory, evaluated=step)
        return memory

    def _coming(self) -> Iterator[tuple[str, Record] | _End]:
        while True:
            with self._changed:
                while not self._orders:
                    self._changed.wait()
                order = self._orders.popleft()
            yield order


def _told(error: BaseException) -> str:
    return f"{type(error).__name__}: {in_a_line(error)}" if isinstance(error, Exception) else type(error).__name__
