"""Judges in worker processes that may be killed: one that hangs or dies costs its own verdict, and is replaced."""

from __future__ import annotations

import asyncio
import json
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from rollyard.config import RewardConfig
from rollyard.environment import process_environment
from rollyard.errors import RollyardError, ScoringError, TimeLimitExceeded, WorkersUsedUp
from rollyard.pool import Launch, Losses, Pool, Worker
from rollyard.prints import keep_short
from rollyard.reward.function import Takes
from rollyard.reward.host import Asked, Order, Source
from rollyard.reward.origin import write
from rollyard.settle import Surroundings
from rollyard.types import Completion, Prompt, Reward

ALONE, TOGETHER = "reward worker", "coroutine reward worker"  # what each is called, with a number
GRACE_S = 0.5  # seconds in which a worker tells by itself that a coroutine took too long


class Crew:
    """The processes of a run. Each has all functions; they start when they are first needed, or by `start`.

    Functions that return at once are asked one after the other in each of several processes, coroutine functions many at a
    time in one. Calls that were together in a process when it was lost are made once more, each alone: the one that hangs or
    dies then is known.

    Args:
        config: how many, and how long.
        launch: starts a process.
        functions: where each comes from, or what is to be written to a file for it.
        scratch: the run's folder.
    """

    def __init__(self, config: RewardConfig, launch: Launch, functions: Sequence[tuple[Source, bytes]], scratch: Path) -> None:
        self.config = config
        self._launch, self._functions, self._scratch = launch, functions, scratch.resolve()
        self._order = b""
        self._files: list[Path] = []
        self._pools: dict[str, Pool] = {}
        self._losses = Losses(config.give_up_after)
        self._prints = self._scratch / "reward.log"
        self._tidying: asyncio.Task[None] | None = None
        self._closed = False

    @property
    def single(self) -> Pool:
        """One call at a time in each process."""
        return self._pool(ALONE, self.config.workers, 1)

    @property
    def together(self) -> Pool:
        """Many calls at a time in one process."""
        return self._pool(TOGETHER, 1, self.config.concurrency)

    async def close(self) -> None:
        """End all of them; no more are started. Closing twice is harmless."""
        self._closed = True
        if self._tidying is not None:
            self._tidying.cancel()
        await asyncio.gather(*(pool.close() for pool in self._pools.values()))
        for file in self._files:
            file.unlink(missing_ok=True)

    def _pool(self, name: str, size: int, places: int) -> Pool:
        if name not in self._pools:
            if self._closed:
                raise WorkersUsedUp("reward workers are closed")
            self._order = self._order or self._ordered()
            self._tidying = self._tidying or asyncio.create_task(keep_short(self._prints), name="reward log")
            target, environment = "rollyard.reward.host:serve", process_environment()
            self._pools[name] = Pool(
                self._launch,
                target,
                self._order,
                name=name,
                environment=environment,
                size=size,
                places=places,
                losses=self._losses,
                start_s=self.config.start_s,
            )
        return self._pools[name]

    def _ordered(self) -> bytes:
        sources = [self._kept(number, *function) for number, function in enumerate(self._functions)]
        return json.dumps(Order(tuple(sources), Surroundings.here(self._prints, self.config.memory_mib))).encode()

    def _kept(self, number: int, source: Source, content: bytes) -> Source:
        if not content:
            return source
        file = self._scratch / f"reward-{number}.pickle"
        write(file, content)
        self._files.append(file)
        return source._replace(file=str(file))


@dataclass(frozen=True, slots=True, eq=False)
class Job:
    """One completion to be judged."""

    texts: tuple[str, str]
    arguments: Mapping[str, object]
    verdict: asyncio.Future[Reward]

    def end(self, value: float | None, problem: str, name: str) -> None:
        """Whoever asked may have gone."""
        if not self.verdict.done():
            self.verdict.set_result(Reward(None, problem=problem) if value is None else Reward(value, {name: value}))


class InWorkers:
    """One function (protocols.Scorer).

    Args:
        name: of the judge.
        number: of the function in the crew.
        takes: what the function is given.
        settings: what it is given besides columns.
        crew: the processes.
        max_tokens: of a completion.
    """

    def __init__(self, name: str, number: int, takes: Takes, settings: Mapping[str, object], crew: Crew, max_tokens: int) -> None:
        self._name, self._number, self._takes, self._settings = name, number, takes, settings
        self._crew, self._max_tokens = crew, max_tokens
        self._limit_s = crew.config.time_limit_s
        self._batch = crew.config.batch if takes.batched else 1
        self._waiting: deque[Job] = deque()
        self._asking: set[asyncio.Task[None]] = set()

    def start(self) -> None:
        """Begin to start a process, so that the first judgement does not wait for it."""
        self._pool.start()

    async def score(self, prompt: Prompt, completion: Completion) -> Reward:
        """See `ask`."""
        arguments = {**self._takes.arguments(prompt, completion, self._max_tokens), **self._settings}
        return await self.ask((prompt.text, completion.text), arguments)

    async def ask(self, texts: tuple[str, str], arguments: Mapping[str, object]) -> Reward:
        """What the function says of two texts.

        Raises ScoringError when worker after worker was lost, ConfigError when none can load the function.
        """
        job = Job(texts, arguments, asyncio.get_running_loop().create_future())
        self._waiting.append(job)
        if len(self._asking) < self._pool.size * self._pool.places:
            self._asking.add(asyncio.create_task(self._ask_all(), name=f"reward {self._name}"))
        try:
            return await job.verdict
        finally:
            job.verdict.cancel()  # nobody waits for it any more

    async def close(self) -> None:
        asking, self._asking = self._asking, set()
        for task in asking:
            task.cancel()
        await asyncio.gather(*asking, return_exceptions=True)
        await self._crew.close()

    @property
    def _pool(self) -> Pool:
        return self._crew.together if self._takes.asynchronous else self._crew.single

    async def _ask_all(self) -> None:
        """What waits, as long as something does."""
        jobs: list[Job] = []
        try:
            while self._waiting:
                jobs = []
                async with self._pool.worker() as worker:
                    jobs = self._next()
                    suspects = await self._ask(worker, jobs) if jobs else []
                if suspects:
                    await asyncio.gather(*(self._ask_alone(job) for job in suspects))
        except Exception as error:  # noqa: BLE001 - whatever it is, those who wait are told
            self._fail([*jobs, *self._waiting], error)
            self._waiting.clear()
        finally:  # with no pause since it saw that nothing waits: what comes next finds a place to be asked in
            self._asking = {task for task in self._asking if task is not asyncio.current_task()}

    def _next(self) -> list[Job]:
        """What goes together."""
        jobs: list[Job] = []
        while self._waiting and len(jobs) < self._batch:
            job = self._waiting.popleft()
            if not job.verdict.done():
                jobs.append(job)
        return jobs

    async def _ask_alone(self, job: Job) -> None:
        try:
            async with self._crew.single.worker() as worker:
                await self._ask(worker, [job])
        except Exception as error:  # noqa: BLE001 - as above
            self._fail([job], error)

    async def _ask(self, worker: Worker, jobs: list[Job]) -> list[Job]:
        """Those that are to be asked once more, each alone: one of them may be why the others have no verdict."""
        limit_s = self._limit_s + (GRACE_S if self._takes.asynchronous else 0)
        asked = Asked(self._number, self._limit_s, [job.texts for job in jobs], [job.arguments for job in jobs])
        try:
            content = json.dumps(asked).encode()
        except (TypeError, ValueError, RecursionError) as error:
            if len(jobs) > 1:
                return jobs
            problem = f"a column cannot be given to a worker process: {error}"
            return self._end(jobs, [(None, problem)] * len(jobs))
        try:
            verdicts = json.loads(await worker.call("judge", content, limit_s=limit_s))
        except RollyardError as error:
            if len(jobs) > 1 or worker.suspects > 1:
                return jobs
            late = isinstance(error, TimeLimitExceeded)
            return self._end(jobs, [(None, f"no verdict within {self._limit_s:g} s" if late else str(error))])
        return self._end(jobs, verdicts) if len(verdicts) == len(jobs) else jobs

    def _end(self, jobs: list[Job], verdicts: Sequence[tuple[float | None, str]]) -> list[Job]:
        for job, (value, problem) in zip(jobs, verdicts, strict=True):
            job.end(value, problem, self._name)
        return []

    def _fail(self, jobs: list[Job], error: Exception) -> None:
        if isinstance(error, WorkersUsedUp):
            error = ScoringError(f"{self._name}: {error}")
        elif not isinstance(error, RollyardError):
            failed = ScoringError(f"{self._name} cannot be asked: {type(error).__name__}: {error}")
            failed.__cause__ = error
            error = failed
        for job in jobs:
            if not job.verdict.done():
                job.verdict.set_exception(error)
