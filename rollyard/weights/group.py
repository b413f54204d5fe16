"""The trainer and one engine of each machine, as a torch process group that broadcasts buckets.

A collective cannot be interrupted from inside: after a failure both sides leave the group, and the next offer makes a new one.
"""

from __future__ import annotations

import asyncio
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from rollyard.events import EngineId
from rollyard.meeting import dist, failure, new_group, start_thread
from rollyard.protocols.devices import Spans
from rollyard.types import Activity
from rollyard.weights import relay
from rollyard.weights.delta import Bucket, Frame

COPY_S = 60.0  # seconds that copying up to the next bucket may take
AHEAD = 4  # buckets that are sent before the first of them is waited for
SHOWN = 32  # spans of a version at most; of more buckets, some share one
CPU = torch.device("cpu")


@dataclass(frozen=True, slots=True)
class Meeting:
    """Where a group meets, and what all its members know of it. `number`: of the group, each time another."""

    store: Any
    number: int
    members: tuple[EngineId, ...]
    device: torch.device
    limit_s: float


class Group:
    """A process group of its own, outside torch's default one, which an engine's library may use for itself.

    Args:
        engine: who comes; None: the trainer, which sends.
        address: of this machine, as the others reach it.
        place: of the engine; equal for those that can open each other's memory.

    Raises RuntimeError when not all come in time.
    """

    def __init__(self, meeting: Meeting, engine: EngineId | None, address: str, place: str = "") -> None:
        self.members = meeting.members
        store, limit_s = dist.PrefixStore(f"weights-{meeting.number}", meeting.store), meeting.limit_s
        if engine is not None:
            relay.come(store, engine, place)
        by = relay.relays(store, meeting.members, limit_s)
        leading = tuple(dict.fromkeys(by.values()))
        self.receiving = len(leading)  # machines: so often the bytes cross the network
        self.sent = 0  # bytes, of the last version, to all of them together
        self.broken = False  # it is to be left
        self.shared = self.receiving < len(by)
        self.device = CPU if self.shared else meeting.device  # of the memory that is received into
        self.board: relay.Board | None = None
        self.reader: relay.Reader | None = None
        self._group: Any = None
        if engine is not None and by[engine] != engine:
            self.reader = relay.Reader(store, by[engine], limit_s)
            return
        if engine is not None and list(by.values()).count(engine) > 1:
            self.board = relay.Board(store, engine)
        rank = 0 if engine is None else leading.index(engine) + 1
        name, size = f"weights-{meeting.number}", self.receiving + 1
        try:
            self._group = new_group(meeting.store, name, rank, size, self.device, address, limit_s)
        except BaseException:
            self.close()  # a board that stays says that its owner lives
            raise

    def send(self, buffer: Tensor, buckets: Sequence[Bucket], ready: Ready, delta: bool, spans: Spans) -> Iterator[str]:
        """Every bucket `[bytes]` uint8 as soon as it is ready. Says which one is waited for.

        Raises RuntimeError when one of the others does not take part in time.
        """
        timing, going = Timing(spans, len(buckets)), deque[tuple[int, list[Any]]]()
        self.sent = 0
        for number, (start, end) in enumerate(buckets, start=1):
            frame = ready.wait(number)
            works = [self._start(torch.tensor([-1 if frame is None else len(frame)], device=buffer.device))] if delta else []
            content = buffer[start:end] if frame is None else frame
            self.sent += len(content) * self.receiving
            if len(content):
                works.append(self._start(content))
            going.append((number, works))
            if len(going) >= AHEAD:
                yield from self._first(going, timing)
        while going:
            yield from self._first(going, timing)

    def receive(self, buffer: Tensor, buckets: Sequence[Bucket], spans: Spans | None) -> Iterator[str]:
        """All buckets as they are, into `buffer` `[bytes]` uint8; the rest as `send`."""
        timing = Timing(spans, len(buckets))
        going = deque((number, [self._start(buffer[start:end])]) for number, (start, end) in enumerate(buckets, start=1))
        while going:
            yield from self._first(going, timing)

    def receive_changed(
        self,
        buffer: Tensor,
        buckets: Sequence[Bucket],
        spans: Spans | None,
        before: Callable[[int, Tensor], None],
        then: Callable[[int, Tensor, Tensor], None],
    ) -> Iterator[str]:
        """What changed of each bucket, or the bucket as it is.

        Args:
            before: is given a bucket, counted from 0, while its frame is on the way.
            then: is given it and its frame.
        """
        timing = Timing(spans, len(buckets))
        for number, (start, end) in enumerate(buckets):
            size = torch.zeros(1, dtype=torch.int64, device=buffer.device)
            yield f"at bucket {number + 1} of {len(buckets)}"
            coming = self._start(size)
            before(number, buffer[start:end])
            coming.wait()
            if int(size) < 0:
                self._start(buffer[start:end]).wait()
            else:
                frame = torch.empty(int(size), dtype=torch.uint8, device=buffer.device)
                if len(frame):
                    self._start(frame).wait()
                then(number, buffer[start:end], frame)
            timing.done(number + 1)

    def close(self) -> None:
        """Leave: the others fail then at once."""
        self._group = None
        for side in (self.board, self.reader):
            if side is not None:
                side.close()

    def _first(self, going: deque[tuple[int, list[Any]]], timing: Timing) -> Iterator[str]:
        number, works = going.popleft()
        yield f"at bucket {number} of {timing.count}"
        for work in works:
            work.wait()
        timing.done(number)

    def _start(self, bucket: Tensor) -> Any:
        assert self._group is not None
        return self._group.broadcast(bucket, 0)


class Timing:
    """Spans of the buckets of a version, each from the end of the one before."""

    def __init__(self, spans: Spans | None, count: int) -> None:
        self.count, self._spans, self._each = count, spans, -(-count // SHOWN)
        self._since = 0 if spans is None else spans.now()
        self._first = 1

    def done(self, number: int) -> None:
        if self._spans is None or (number % self._each and number < self.count):
            return
        now = self._spans.now()
        which = f"bucket {number}" if number == self._first else f"buckets {self._first} to {number}"
        self._spans.add(Activity.SYNC, self._since, now, f"{which} of {self.count}")
        self._since, self._first = now, number + 1


class Ready:
    """Which buckets may be sent, told by one thread to another. `frames` of those that may from the beginning."""

    def __init__(self, frames: Sequence[Frame] = ()) -> None:
        self._frames, self._changed, self._stopped = list(frames), threading.Condition(), False

    def put(self, frame: Frame) -> None:
        """The next one."""
        with self._changed:
            self._frames.append(frame)
            self._changed.notify_all()

    def stop(self) -> None:
        """No more will come."""
        with self._changed:
            self._stopped = True
            self._changed.notify_all()

    def wait(self, number: int) -> Frame:
        """Counted from 1. Raises RuntimeError when the copy does not come so far."""
        with self._changed:
            if not self._changed.wait_for(lambda: len(self._frames) >= number or self._stopped, COPY_S):
                raise RuntimeError("the parameters were not copied in time")
            if len(self._frames) < number:
                raise RuntimeError("the parameters could not be copied")
            frame, self._frames[number - 1] = self._frames[number - 1], None  # it is needed once
            return frame


def on_thread(call: Callable[..., None], *args: Any) -> asyncio.Future[None]:
    """Run `call(*args)` on a thread that the process does not wait for when it ends: nobody can interrupt a collective."""
    loop = asyncio.get_running_loop()
    done: asyncio.Future[None] = loop.create_future()

    def settle(error: Exception | None) -> None:
        if done.done():
            return
        if error is None:
            done.set_result(None)
        else:
            done.set_exception(error)

    def work() -> None:
        failed: Exception | None = None
        try:
            call(*args)
        except Exception as error:  # noqa: BLE001 (told to whoever waits)
            failed = error
        with suppress(RuntimeError):  # the loop is closed
            loop.call_soon_threadsafe(settle, failed)

    start_thread(work)
    return done


def problem_of(broadcasting: Callable[[], Iterator[str]]) -> str:
    """Where a broadcast stopped, and why; empty when it went through."""
    step = "before the first bucket"

    def through() -> None:
        nonlocal step
        for waited_for in broadcasting():
            step = waited_for

    problem = failure(through)
    return f"{step}: {problem}" if problem else ""
