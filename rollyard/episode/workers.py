"""Episodes in worker processes: an environment that blocks for ever, or ends its process, costs its own verdict only.

Many episodes share a process, so those that were in it when it was lost begin again in another one, and are told what they were
told before: the policy writes nothing twice. Of those whose environments were at work then, one is why it was lost, so each of
them has a process to itself from then on; the one that does it again is known. There are as many such processes at a time as
others, at least two. Who waits for the policy in one leaves it to another suspect and begins again later: an answer may be long
in coming, and may even depend on what the other one is to do first.
"""

from __future__ import annotations

import asyncio
import itertools
from contextlib import AsyncExitStack, nullcontext, suppress
from functools import partial
from pathlib import Path
from typing import Any

from rollyard.environment import process_environment
from rollyard.episode.host import ASK, ASK_S, ORDER, PLAY, PLAYED, REPLY, STOP, Order
from rollyard.episode.stage import Answer, Played, Working
from rollyard.errors import EngineLost, RollyardError, WorkerLost
from rollyard.pool import Launch, Losses, Pool, Worker
from rollyard.prints import keep_short
from rollyard.protocols.processes import Channel
from rollyard.types import Asking, Prompt, Reply, Reward
from rollyard.verdict import cause_of

SHARED, ALONE = "environment worker", "lone environment worker"  # what each is called, with a number
GRACE_S = 2.0  # seconds in which a worker tells by itself that an environment took too long
PATIENCE_S = 2.0  # seconds of waiting for the policy in a process that others want: about what it takes to start another
SUSPECTS = 2  # processes at a time for one suspect each, at least
LOSSES = 8  # processes in a row that may be lost, for each that works at a time: those at work together may be lost together
TARGET = "rollyard.episode.host:serve"


class InWorkers:
    """Plays episodes as `Stage` does.

    Args:
        launch: starts a process.
        order: what each of them gets.
        size: processes at most; so many more for suspects, or `SUSPECTS`.
        places: episodes of one process at most.
    """

    def __init__(self, launch: Launch, order: Order, size: int, places: int) -> None:
        self.turns, self._limit_s = order.turns, order.limit_s
        content, environment = ORDER.dump_json(order), process_environment()
        self._prints = Path(order.around.prints)
        self._tidying: asyncio.Task[None] | None = None
        self._visits: dict[int, _Visit] = {}
        self._numbers = itertools.count()
        pool = partial(Pool, launch, TARGET, content, environment=environment, greet=self._greet, losses=Losses(LOSSES * size))
        self._shared = pool(name=SHARED, size=size, places=places)
        self._alone = pool(name=ALONE, size=max(size, SUSPECTS))

    def start(self) -> None:
        """Begin to start a process, so that the first episode does not wait for it."""
        self._tidying = self._tidying or asyncio.create_task(keep_short(self._prints), name="environment log")
        self._shared.start()

    async def play(self, prompt: Prompt, answer: Answer, working: Working = nullcontext) -> Played:
        """See `Stage.play`. Raises WorkersUsedUp when worker after worker was lost, ConfigError when none can be had."""
        told, pool = _Told(answer), self._shared
        try:
            while True:
                async with AsyncExitStack() as place:
                    with working():  # a process may have to start first
                        worker = await place.enter_async_context(pool.worker())
                    visit = _Visit(told)
                    try:
                        if (played := await self._visit(worker, visit, prompt, working, pool)) is not None:
                            return played
                    except WorkerLost as error:
                        if pool is self._alone:
                            return Played(Reward(None, problem=str(error)), told.text)
                        pool = self._shared if visit.asking else self._alone
                        continue
                await told.newest()
        finally:
            told.close()

    async def close(self) -> None:
        """End all processes. Closing twice is harmless."""
        if self._tidying is not None:
            self._tidying.cancel()
        await asyncio.gather(self._shared.close(), self._alone.close())

    def _greet(self, channel: Channel) -> None:
        channel.handle("ask", self._asked)

    async def _asked(self, content: bytes) -> bytes:
        number, asking = ASK.validate_json(content)
        if number not in self._visits:
            raise RollyardError("nobody plays this episode any more")
        return REPLY.dump_json((await self._visits[number].reply(asking),))

    async def _visit(self, worker: Worker, visit: _Visit, prompt: Prompt, working: Working, pool: Pool) -> Played | None:
        """The episode from its beginning, in this process of the pool. None: it has left it to another suspect.

        Raises WorkerLost, or what kept the policy from answering.
        """
        number = next(self._numbers)
        try:
            content = PLAY.dump_json((number, prompt))
        except ValueError as error:
            problem = f"a column cannot be given to a worker process: {cause_of(error)}"
            return Played(Reward(None, problem=problem), "")
        self._visits[number] = visit
        call = asyncio.ensure_future(worker.call("play", content, limit_s=ASK_S))
        call.add_done_callback(_hear)
        try:
            while not call.done():
                if visit.asking:
                    leaves = not await visit.until_changed(call, PATIENCE_S) and pool is self._alone and pool.wanted
                    if leaves and visit.asking:
                        worker.give_up()  # whatever it left behind would be another one's fault
                        return None
                    continue
                with working():
                    in_time = await visit.until_changed(call, self._limit_s + GRACE_S)
                if not in_time:
                    worker.lose(f"the environment blocked its process for {self._limit_s:g} s, which was killed")
                    await asyncio.wait((call,))
            if visit.told.error is not None:
                raise visit.told.error
            if visit.told.problem:
                return Played(Reward(None, problem=visit.told.problem), visit.told.text)
            (played,) = PLAYED.validate_json(call.result())
            return played
        finally:
            del self._visits[number]
            if not call.done():
                call.cancel()
                with suppress(EngineLost):
                    worker.process.tell("stop", STOP.dump_json(number))


def _hear(done: asyncio.Future[Any]) -> None:
    """What nobody waits for is no news."""
    if not done.cancelled():
        done.exception()


class _Told:
    """What an environment asked, and was told, in whichever process."""

    def __init__(self, answer: Answer) -> None:
        self._answer = answer
        self._turns: list[tuple[Asking, asyncio.Future[Reply]]] = []
        self.error: RollyardError | None = None  # what kept the policy from answering
        self.problem = ""  # of an environment that cannot begin again

    async def reply(self, place: int, asking: Asking) -> Reply:
        """Raises RollyardError when that was not what it asked in the place before, or what kept the policy from answering."""
        if place == len(self._turns):
            answer = asyncio.ensure_future(self._answer(asking))
            answer.add_done_callback(_hear)
            self._turns.append((asking, answer))
        before, reply = self._turns[place]
        if before != asking:
            self.problem = "the environment began again in another process, and did not ask as before"
            raise RollyardError(self.problem)
        try:
            return await asyncio.shield(reply)
        except RollyardError as error:
            self.error = error
            raise

    async def newest(self) -> None:
        """Wait for the answer to what it asked last. Raises what kept the policy from that."""
        await asyncio.shield(self._turns[-1][1])

    @property
    def text(self) -> str:
        said = (reply for _, reply in self._turns if reply.done() and not reply.cancelled() and not reply.exception())
        return "\n".join(reply.result().text for reply in said)

    def close(self) -> None:
        for _, reply in self._turns:
            reply.cancel()


class _Visit:
    """An episode in one process. `asking`: it waits for the policy, or did when the process was lost."""

    def __init__(self, told: _Told) -> None:
        self.told, self.asking = told, False
        self._changed = asyncio.Event()
        self._place = 0

    async def reply(self, asking: Asking) -> Reply:
        self._turn(asking=True)
        self._place += 1
        try:
            reply = await self.told.reply(self._place - 1, asking)
        except RollyardError:
            self._turn(asking=False)
            raise
        self._turn(asking=False)
        return reply

    def _turn(self, *, asking: bool) -> None:
        self.asking = asking
        self._changed.set()

    async def until_changed(self, call: asyncio.Future[bytes], limit_s: float | None) -> bool:
        """Wait until it asks, is answered, or ends. False: nothing of that came in time."""
        self._changed.clear()
        changed = asyncio.ensure_future(self._changed.wait())
        try:
            done, _ = await asyncio.wait((call, changed), timeout=limit_s, return_when=asyncio.FIRST_COMPLETED)
            return bool(done)
        finally:
            changed.cancel()
