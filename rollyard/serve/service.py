"""A run, and what stands between it and its clients.

prompts ──POST──> store ──> Rollouts ──groups──> store ──stream──> readers, each at its own pace
                               │  ^
                        batches│  │weights
                               v  │
                               desk <──lease──> one trainer elsewhere
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import suppress
from http import HTTPStatus
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from pydantic import TypeAdapter

from rollyard.caller import Dropped
from rollyard.errors import ConfigError, JournalError, RollyardError
from rollyard.inspect.rows import MetricRows
from rollyard.journal.folder import RunFolder
from rollyard.prompts.given import GivenPrompt
from rollyard.rollouts import Rollouts
from rollyard.serve.desk import Desk, unsuited
from rollyard.serve.group import Groups
from rollyard.serve.records import PROMPT, ChatPrompt, GivenPromptRecord, TextPrompt
from rollyard.serve.refusals import Refused
from rollyard.serve.sessions import Sessions
from rollyard.serve.settings import ServeConfig
from rollyard.serve.store import Store
from rollyard.types import Group

GROUP, DROPPED = TypeAdapter(Group), TypeAdapter(Dropped)
PAGE = 16  # groups that are read at a time
Record = tuple[int, bytes]  # cursor, what became of a prompt


class Service:
    """Serves one run. Entered, it goes on until it is closed; the run is entered before, and left after it.

    Args:
        config: of both.
        rollouts: the run, which has begun.
        sessions: where harnesses play its members.
    """

    def __init__(self, config: ServeConfig, rollouts: Rollouts, sessions: Sessions | None = None) -> None:
        self.config, self.rollouts, self.sessions = config, rollouts, sessions
        self.desk = Desk(rollouts, config.serve.lease_s)
        self.metrics = MetricRows(RunFolder(rollouts.folder).metrics)
        self.meeting = Groups(config.serve.group_address)
        self.draining = asyncio.Event()  # no more is begun, and what waits is sent home
        self.failed = asyncio.Event()
        self.cause = ""  # why it failed
        self._submitting = asyncio.Lock()
        self._kept = asyncio.Event()
        self._keeping = asyncio.Lock()
        self._came: dict[int, Group] = {}  # that were kept as finished or in a batch, and will come as the other
        self._tasks: list[asyncio.Task[None]] = []
        self._works = set[asyncio.Future[Any]]()
        self._cursor = 0

    async def __aenter__(self) -> Self:
        """Raises JournalError when the folder's store cannot be used."""
        self._store = Store(self.rollouts.folder)
        self._cursor = await self._store.last()
        await self._go_on()
        self._tasks = [
            asyncio.create_task(work, name=name) for name, work in (("groups", self._keep()), ("batches", self._hand()))
        ]
        for task in self._tasks:
            task.add_done_callback(self._ended)
        return self

    async def __aexit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.drain()
        going = [*self._tasks, *self._works]
        for task in going:
            task.cancel()
        await asyncio.gather(*going, return_exceptions=True)
        self.meeting.close()
        self._store.close()

    def drain(self) -> None:
        """Nothing new is begun; whoever waits is told."""
        self.draining.set()
        self._change()

    def check_open(self) -> None:
        """Raises Refused when nothing new is begun any more."""
        if self.cause:
            raise Refused(HTTPStatus.SERVICE_UNAVAILABLE, f"the run has failed: {self.cause}", "failed")
        if self.draining.is_set():
            raise Refused(HTTPStatus.SERVICE_UNAVAILABLE, "the service is being stopped", "stopping", after_s=5.0)

    async def unless_draining(self, work: Any) -> Any:
        """What comes of waiting for it. Raises Refused when the service is stopped meanwhile."""
        waiting, stopping = asyncio.ensure_future(work), asyncio.ensure_future(self.draining.wait())
        try:
            self.check_open()
            await asyncio.wait((waiting, stopping), return_when=asyncio.FIRST_COMPLETED)
            if not waiting.done():
                self.check_open()
            return await waiting
        finally:
            for task in (waiting, stopping):
                task.cancel()

    # ---------------------------------------------------------------------------------------------- prompts

    async def submit(self, prompts: Sequence[GivenPromptRecord], key: str, wait_s: float) -> tuple[int, ...]:
        """Submit them, once; what was answered is sure to be asked. Raises Refused.

        It goes on when nobody waits for it any more: who is told of a limit knows that nothing was submitted.
        """
        work = asyncio.ensure_future(self._submit(prompts, key, wait_s))
        self._works.add(work)
        work.add_done_callback(self._works.discard)
        work.add_done_callback(lambda done: done.cancelled() or done.exception())  # heard, if nobody asks
        return await asyncio.shield(work)

    async def _submit(self, prompts: Sequence[GivenPromptRecord], key: str, wait_s: float) -> tuple[int, ...]:
        """They are written down before the run has them, so that what it admitted is never submitted again."""
        content, given = await asyncio.to_thread(_said, prompts)
        until = asyncio.get_running_loop().time() + wait_s
        while True:
            async with self._submitting:  # never held while it is waited for room
                if key and (before := await self._store.submission(key, content)) is not None:
                    return before
                if not self._is_full:
                    try:
                        return await self._promised(given, key, content)
                    except ConfigError as error:
                        raise unsuited(error) from error
            try:
                async with asyncio.timeout_at(until):
                    await self.rollouts.room()
            except TimeoutError:
                raise self._full from None

    async def _promised(self, given: Sequence[GivenPrompt], key: str, content: Sequence[bytes]) -> tuple[int, ...]:
        """What the run does not take is promised no longer. Raises as `Rollouts.submit`."""
        made = await self.rollouts.make(given)
        first = self.rollouts.next_prompt
        await self._store.promise(key, first, content)
        try:
            return self.rollouts.put(made)
        except RollyardError:
            await self._store.take_back(key, first)
            raise

    @property
    def _is_full(self) -> bool:
        return self.config.prompts.source == "given" and self.rollouts.status().waiting >= self.config.prompts.waiting

    @property
    def _full(self) -> Refused:
        problem, remedy = f"{self.config.prompts.waiting} prompts wait to be asked", "submit again, or with wait_s"
        return Refused(HTTPStatus.TOO_MANY_REQUESTS, problem, "full", remedy=remedy, after_s=5.0)

    async def _go_on(self) -> None:
        """What was promised in an earlier life of the service, and the run did not take."""
        if self.config.prompts.source != "given" or self.rollouts.finished:
            return
        first = self.rollouts.next_prompt
        promised = await self._store.promised(first)
        if any(id_ != wants for wants, (id_, _) in enumerate(promised, first)):
            raise JournalError(f"{self.folder}: prompt {promised[-1][0]} was promised, but not all from {first} on to it")
        if promised:
            await self.rollouts.submit([given_of(PROMPT.validate_json(content)) for _, content in promised])

    # --------------------------------------------------------------------------------------------- outcomes

    @property
    def cursor(self) -> int:
        """Of what happened last."""
        return self._cursor

    async def outcomes(self, after: int, most: int, wait_s: float) -> list[Record]:
        """What became of prompts, after a cursor; none when nothing happens in that time."""
        with suppress(TimeoutError):
            async with asyncio.timeout(wait_s):
                while after >= self._cursor and not (self.draining.is_set() or self.cause):
                    await self._kept.wait()
        return await self._store.outcomes(after, most)

    async def stream(self, after: int) -> AsyncIterator[list[Record]]:
        """All of it after a cursor, as it happens, until the run is over or the service stopped."""
        while True:
            while found := await self._store.outcomes(after, PAGE):
                after = found[-1][0]
                yield found
            if self.draining.is_set() or self.cause or all(task.done() for task in self._tasks):
                return
            if after >= self._cursor:
                await self._kept.wait()

    async def _keep(self) -> None:
        async for outcome in self.rollouts.outcomes():
            await self._keep_all([outcome])

    async def _keep_all(self, outcomes: Sequence[Group | Dropped]) -> None:
        """Groups come twice, as finished and in a batch: whichever is first."""
        async with self._keeping:
            new = [outcome for outcome in outcomes if self._is_new(outcome)]
            # One by one: making JSON of one cannot be interrupted, on whatever thread.
            kept = [await asyncio.to_thread(_kept, outcome) for outcome in new]
            await self._store.keep(kept)
            self._cursor = await self._store.last()
        self._change()

    def _is_new(self, outcome: Group | Dropped) -> bool:
        if isinstance(outcome, Dropped):
            self._came.pop(outcome.prompt, None)
            return True
        if self._came.pop(outcome.id, None) is outcome:
            return False
        self._came[outcome.id] = outcome
        return True

    # ---------------------------------------------------------------------------------------------- batches

    async def _hand(self) -> None:
        """Who trains on a batch finds its groups in the stream."""
        async for batch in self.rollouts.batches():
            await self._keep_all(batch.groups)
            await self.desk.offer(batch)
        self._over(self.rollouts.status().cause or "all steps are done")

    def _over(self, cause: str) -> None:
        self.desk.end(cause)
        if self.sessions is not None:
            self.sessions.close(cause)

    def _ended(self, task: asyncio.Task[None]) -> None:
        error = None if task.cancelled() else task.exception()
        if error is not None:
            self.cause = self.cause or (str(error) if isinstance(error, RollyardError) else f"{type(error).__name__}: {error}")
            self._over(self.cause)
            self.failed.set()
        self._change()

    def _change(self) -> None:
        self._kept.set()
        self._kept = asyncio.Event()

    @property
    def model(self) -> str:
        """Folder that this life of the run began with; empty where an earlier one has used up its prompts and saved nothing."""
        try:
            return str(self.rollouts.model.resolve())
        except ConfigError:
            return ""

    @property
    def folder(self) -> Path:
        """Of the run."""
        return self.rollouts.folder


def _said(prompts: Sequence[GivenPromptRecord]) -> tuple[list[bytes], list[GivenPrompt]]:
    """As they are written down, and as the run takes them."""
    return [prompt.model_dump_json(exclude_defaults=True).encode() for prompt in prompts], [
        given_of(prompt) for prompt in prompts
    ]


def _kept(outcome: Group | Dropped) -> tuple[int, bytes]:
    """The prompt, and a field of a record."""
    if isinstance(outcome, Group):
        return outcome.id, b'"group":' + GROUP.dump_json(outcome)
    return outcome.prompt, b'"dropped":' + DROPPED.dump_json(outcome)


def given_of(record: GivenPromptRecord) -> GivenPrompt:
    """As the run takes it."""
    match record:
        case TextPrompt():
            return GivenPrompt(record.text, columns=record.columns)
        case ChatPrompt():
            return GivenPrompt(messages=[each.model_dump() for each in record.messages], columns=record.columns)
    return GivenPrompt(token_ids=record.token_ids, columns=record.columns)
