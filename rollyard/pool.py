"""Worker processes that may hang or die: a call that does costs itself alone, and its process is replaced.

A pool knows nothing of what its workers do. Whoever uses it calls them by name, and may be called by them.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager

from rollyard.errors import EngineLost, RollyardError, TimeLimitExceeded, WorkerLost, WorkersUsedUp
from rollyard.protocols.processes import Channel, Process

GROW_S = 0.05  # seconds that a call waits for one of the workers there are before one more is started
BEGINS = 3  # workers in a row that may be lost before they were ready


Launch = Callable[..., Awaitable[Process]]  # of protocols.Launcher


class Worker:
    """A process of a pool, as long as somebody has a place in it.

    Args:
        process: the line to it.
    """

    def __init__(self, process: Process, answered: Callable[[], None]) -> None:
        self.process, self._answered = process, answered
        self.busy = 0  # places that are taken
        self.suspects = 0  # places that were taken when it was lost
        self.cause = ""
        self.given_up = False  # it was killed since nobody waited for it any more

    @property
    def lost(self) -> bool:
        return bool(self.cause)

    async def call(self, name: str, content: bytes = b"", *, limit_s: float) -> bytes:
        """The worker's answer.

        Raises:
            TimeLimitExceeded: none within `limit_s` seconds. The process is killed.
            WorkerLost: the process is gone, by itself or since another call was too long.
            RollyardError: what its handler raised.
        """
        try:
            answer = await self.process.call(name, content, limit_s=limit_s)
        except TimeLimitExceeded as error:
            self.lose(str(error))
            raise
        except EngineLost as error:
            self.lose(str(error))
            raise WorkerLost(self.cause) from error
        self._answered()
        return answer

    def give_up(self) -> None:
        """End it, at work or not: nobody waits for it any more, which is no loss."""
        if not self.lost:
            self.given_up = True
            self.lose("was killed: nobody waits for it any more")

    def lose(self, cause: str) -> None:
        """It is of no more use. Only the first cause is kept."""
        if not self.lost:
            self.cause, self.suspects = cause, self.busy
            self.process.kill()


class Losses:
    """Workers that were lost one after the other, without an answer to any call in between.

    Args:
        most: of them.
    """

    def __init__(self, most: int = 8) -> None:
        self._most = most
        self._lost = self._unready = 0

    def answered(self) -> None:
        self._lost = self._unready = 0

    def count(self, *, ready: bool) -> int:
        """One more is lost. Returns how many were in a row if these were too many, else 0."""
        self._lost += 1
        self._unready = 0 if ready else self._unready + 1
        return self._lost if self._lost >= self._most or self._unready >= BEGINS else 0


class Pool:
    """Workers that run one target.

    The first is started at once, another when a call had to wait, up to `size`. A target answers the call `start` once it
    has loaded what it needs.

    Args:
        launch: starts a process, see `protocols.Launcher`.
        target: `module:function`, what it runs.
        order: what it gets.
        name: of a worker, for messages; its plural has an s at the end.
        environment: its variables.
        size: processes at most.
        places: calls that one of them has at a time.
        losses: counts them, for several pools together where they share one.
        start_s: seconds until one is ready.
        greet: sets handlers for what workers ask.
    """

    def __init__(
        self,
        launch: Launch,
        target: str,
        order: bytes,
        *,
        name: str,
        environment: Mapping[str, str],
        size: int = 1,
        places: int = 1,
        losses: Losses | None = None,
        start_s: float = 120.0,
        greet: Callable[[Channel], None] = lambda channel: None,
    ) -> None:
        self._launch, self._target, self._order = launch, target, order
        self._name, self._environment, self._greet = name, environment, greet
        self.size, self.places, self._start_s = size, places, start_s
        self._losses = losses or Losses()
        self._seats: list[asyncio.Task[None]] = []
        self._workers: list[Worker] = []
        self._waiting: deque[asyncio.Future[Worker]] = deque()
        self._starting = False  # a seat's first worker
        self._broken: RollyardError | None = None

    @property
    def wanted(self) -> bool:
        """Whether somebody waits for a place."""
        return any(not place.done() for place in self._waiting)

    def start(self) -> None:
        """Begin to start the first worker. Harmless when there is one."""
        if not self._seats:
            self._grow()

    async def call(self, name: str, content: bytes = b"", *, limit_s: float) -> bytes:
        """The answer of whichever worker is free. Raises as `Worker.call` and `worker` do."""
        async with self.worker() as worker:
            return await worker.call(name, content, limit_s=limit_s)

    @asynccontextmanager
    async def worker(self) -> AsyncIterator[Worker]:
        """A place in a worker, as soon as there is one. One that is left while a call goes on (cancelled) is killed.

        Raises WorkersUsedUp when too many were lost, ConfigError when they cannot load what they need.
        """
        while (worker := await self._place()).lost:
            self._leave(worker)  # it was lost meanwhile, and this had no part in it
        try:
            yield worker
        except asyncio.CancelledError:
            if self.places == 1:  # what it does goes on
                worker.give_up()
            raise
        finally:
            self._leave(worker)

    async def close(self) -> None:
        """End all workers, those at work at once. Closing twice is harmless."""
        self._break(WorkersUsedUp(f"{self._name}s are closed"))
        for seat in self._seats:
            seat.cancel()
        await asyncio.gather(*self._seats, return_exceptions=True)

    # ------------------------------------------------------------------------------------------------- places

    async def _place(self) -> Worker:
        if self._broken is not None:
            raise self._broken
        self.start()
        place: asyncio.Future[Worker] = asyncio.get_running_loop().create_future()
        self._waiting.append(place)
        self._hand_out()
        try:
            while not (await asyncio.wait((place,), timeout=GROW_S))[0]:
                self._grow()
            return place.result()
        except asyncio.CancelledError:
            if not place.cancel() and place.exception() is None:
                self._leave(place.result())
            raise

    def _leave(self, worker: Worker) -> None:
        worker.busy -= 1
        self._hand_out()

    def _hand_out(self) -> None:
        while self._waiting:
            free = [worker for worker in self._workers if worker.busy < self.places and not worker.lost]
            if not free:
                return
            place = self._waiting.popleft()
            if not place.done():
                worker = min(free, key=lambda each: each.busy)
                worker.busy += 1
                place.set_result(worker)

    # -------------------------------------------------------------------------------------------------- seats

    def _grow(self) -> None:
        if len(self._seats) < self.size and not self._starting and self._broken is None:
            self._starting = True
            number = len(self._seats)
            self._seats.append(asyncio.create_task(self._seat(f"{self._name} {number}"), name=f"{self._name} {number}"))

    async def _seat(self, name: str) -> None:
        """One worker after the other."""
        while self._broken is None:
            try:
                process = await self._launch(self._target, self._order, name=name, environment=self._environment)
                worker = await self._serve(process, name)
                if worker.given_up:
                    continue
                cause, ready = worker.cause, True
            except EngineLost as error:
                cause, ready = str(error), False
            except Exception as error:  # noqa: BLE001 - whatever it is, those who wait are told
                self._break(self._hopeless(name, error))
                return
            if lost := self._losses.count(ready=ready):
                several = f"{lost} {self._name}s in a row were" if lost > 1 else f"one {self._name} was"
                self._break(WorkersUsedUp(f"{several} lost without an answer in between; the last: {cause}"))

    def _hopeless(self, name: str, error: Exception) -> RollyardError:
        """Why another one would be no better: it says that it never will be ready, takes too long, or fails in an unknown way."""
        if isinstance(error, TimeLimitExceeded):
            return WorkersUsedUp(f"{name} was not ready within {self._start_s:g} s: {error}")
        if isinstance(error, RollyardError):
            return error
        failed = WorkersUsedUp(f"{name} cannot be run: {type(error).__name__}: {error}")
        failed.__cause__ = error
        return failed

    async def _serve(self, process: Process, name: str) -> Worker:
        """Let it work until it is lost. Raises RollyardError when it does not begin."""
        worker = Worker(process, self._losses.answered)
        try:
            self._greet(process)
            process.ready()
            await process.call("start", limit_s=self._start_s)
            self._workers.append(worker)
            self._starting = False
            self._hand_out()
            worker.lose(f"{name} {await process.ended()}")
            return worker
        finally:
            idle = worker in self._workers and not worker.busy and not worker.lost
            if worker in self._workers:
                self._workers.remove(worker)
            if not idle:
                process.kill()
            await process.close()

    def _break(self, error: RollyardError) -> None:
        self._broken = self._broken or error
        for place in self._waiting:
            if not place.done():
                place.set_exception(self._broken)
        self._waiting.clear()
