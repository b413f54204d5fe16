"""`Rollouts`: a run whose trainer is the code that calls. It is the same run in all else: one loop, one conductor, one journal.

async with rollyard.Rollouts(config) as rollouts:
    async for batch in rollouts.batches():
        ...  # train on batch.train with whatever loop, loss and optimizer
        await rollouts.publish(model)
"""

from __future__ import annotations

import asyncio
import warnings
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import ExitStack
from contextvars import copy_context
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from threading import Thread, get_ident
from types import TracebackType
from typing import TYPE_CHECKING, Any, Final, Self, TypeVar

from rollyard.caller import CALLING, Batch, Caller, Dropped
from rollyard.checks import check_judged
from rollyard.config import Config
from rollyard.errors import ConfigError
from rollyard.loop import Run
from rollyard.prompts.given import GivenPrompt, GivenSource, given_all
from rollyard.protocols.rollouts import Environment
from rollyard.reward.open import Given
from rollyard.types import Group, Prompt, TensorInfo, WeightVersion
from rollyard.watch.report import Report
from rollyard.watch.snapshot import Header
from rollyard.watch.terminal import View

if TYPE_CHECKING:
    from rollyard.weights.given import Weights

T = TypeVar("T")

Submitted = str | Sequence[Mapping[str, str]] | GivenPrompt
LEFT: Final = "left by the caller"


@dataclass(frozen=True, slots=True)
class Status:
    """How a run stands."""

    state: str  # running, finished or failed
    version: WeightVersion  # published last
    out: int | None  # step of the batch that was handed out and not published yet
    live: int  # groups that are asked, written or judged
    waiting: int  # prompts that were submitted and not asked yet
    engines: tuple[str, ...]
    admitted: int  # prompts so far
    trained: int
    dropped: Mapping[str, int]  # by reason
    tokens: int  # sampled so far
    tokens_per_s: float  # a second of generation, as in the report
    cause: str = ""  # why it ended


class Rollouts:
    """Generates, judges and batches for a training loop that is not ours.

    Entering it starts the run, and returns once the engines are up. Leaving it ends the run: as planned after the last step,
    else it is stopped; an exception that leaves the block makes it a failed run. In both cases `report` is there afterwards, and
    the run's folder has all that any run's has.

    Args:
        config: as of any run; the section `train` is of our own trainer, and is not looked at. With `prompts.source = "given"`
            prompts come by `submit`.
        reward, environment, view: as of `Run`.
        save: called with the folder of each checkpoint, which has the published model already: adds what your training needs to
            go on. On a thread; the optimizer is at rest as long as you train only between a batch and its `publish`.

    Raises:
        ConfigError: at once, or when it is entered, when the config cannot work.
    """

    def __init__(
        self,
        config: Config,
        *,
        reward: Given | None = None,
        environment: Environment | None = None,
        view: Callable[[Header], View] | None = None,
        save: Callable[[Path], None] = lambda folder: None,
    ) -> None:
        caller = Caller(save)
        self._hold(Run(config, reward, view, environment, caller=caller), caller, reward, environment)

    @classmethod
    def resume(
        cls,
        folder: Path | str,
        overrides: Mapping[str, Any] | None = None,
        *,
        reward: Given | None = None,
        environment: Environment | None = None,
        view: Callable[[Header], View] | None = None,
        save: Callable[[Path], None] = lambda folder: None,
    ) -> Self:
        """The next life of a run that was killed, or left: it goes on from its newest whole checkpoint, as `Run.resume`.

        Your own training goes on from `model`. Prompts that had been admitted and were not trained on come again by
        themselves; those that were submitted and not admitted, whose ids are `next_prompt` and more, are to be submitted again.
        """
        rollouts, caller = cls.__new__(cls), Caller(save)
        run = Run.resume(folder, overrides, reward=reward, environment=environment, view=view, caller=caller)
        rollouts._hold(run, caller, reward, environment)
        return rollouts

    @classmethod
    def sync(cls, config: Config, **given: Any) -> SyncRollouts:
        """The same for code without async. Takes what `Rollouts` takes."""
        return SyncRollouts(cls(config, **given))

    def _hold(self, run: Run, caller: Caller, reward: Given | None, environment: Environment | None) -> None:
        self._run, self._caller = run, caller
        self._task: asyncio.Task[None] | None = None
        self._suits = cache(lambda columns: check_judged(run.config, reward, environment, columns))

    @property
    def config(self) -> Config:
        return self._run.config

    @property
    def folder(self) -> Path:
        """Of the run."""
        return self._run.folder.path

    @property
    def report(self) -> Report | None:
        """Of the whole run, once it is over."""
        return self._run.report

    @property
    def version(self) -> WeightVersion:
        """What was published last; before the first `publish` what the run began with."""
        return self._caller.version

    @property
    def finished(self) -> str:
        """Of a run that was resumed, once the block is entered: why nothing is left to do. There are no batches then."""
        return self._run.finished

    @property
    def model(self) -> Path:
        """Hugging Face folder of what the engines begin with: load your model from it. There is one once the block is entered.

        Of a run that was resumed it is a checkpoint, with what `save` had added.
        """
        if self._caller.model is None:
            raise ConfigError("the run has not begun", where="model", remedy="enter the block first")
        return self._caller.model

    @property
    def next_prompt(self) -> int:
        """The id of the next prompt that is submitted."""
        return self._source.next

    # -------------------------------------------------------------------------------------- start and end

    async def __aenter__(self) -> Self:
        """Raises ConfigError for what only loading shows, EngineError for an engine that does not start."""
        if self._task is not None:
            raise ConfigError("the block was entered before", where="rollouts", remedy="make another one for another run")
        self._caller.enter()
        self._task = asyncio.create_task(self._go(), name="rollouts")
        ready = asyncio.ensure_future(self._caller.ready.wait())
        try:
            await asyncio.wait((self._task, ready), return_when=asyncio.FIRST_COMPLETED)
        except BaseException:
            await self._leave(LEFT)
            raise
        finally:
            ready.cancel()
        if self._task.done():
            self._task.result()
        return self

    async def __aexit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        assert self._task is not None, "it was entered"
        if error is None or isinstance(error, asyncio.CancelledError | KeyboardInterrupt | GeneratorExit):
            await self._leave(LEFT if error is None else f"left by the caller: {kind.__name__ if kind else ''}")
        elif not self._task.done():
            self.fail(f"the caller failed: {type(error).__name__}: {error}")
            await asyncio.wait((self._task,))
        failure, out = self._task.exception(), self._caller.out
        if out is not None:
            told = f"batch {out.step} ({len(out.groups)} prompts) was handed out and nothing was published for it"
            warnings.warn(f"{told}: it is dropped as stopped", RuntimeWarning, stacklevel=2)
        if error is None and failure is not None:
            raise failure

    def _check_entered(self) -> None:
        """Raises ConfigError where nothing would ever come."""
        if self._task is None:
            raise ConfigError("the run has not begun", where="rollouts", remedy="enter the block first")

    async def _leave(self, cause: str) -> None:
        """The run ends as planned where nothing is left to train, else it is stopped."""
        assert self._task is not None
        if self._caller.version.step < self.config.run.steps and not self._caller.gave_up:
            self.stop(cause)
        await asyncio.wait((self._task,))

    async def _go(self) -> None:
        """The run itself."""
        run, cause, failed = self._run, "it ended in its start", True
        try:
            async for _ in run.steps():
                pass
            cause, failed = run.finished if run.report is None else run.report.finished.cause, False
        except BaseException as error:
            cause = str(error)
            raise
        finally:
            self._caller.end(cause, failed=failed)

    def stop(self, cause: str) -> None:
        """End the run cleanly: a batch that is out is dropped as stopped, what was published is saved."""
        self._caller.give_up(cause)
        self._run.stop(cause)

    def fail(self, cause: str) -> None:
        """End the run as failed."""
        self._caller.give_up(cause)
        self._run.fail(cause)

    # ------------------------------------------------------------------------------------------- the prompts

    async def submit(self, prompts: Sequence[Submitted]) -> tuple[int, ...]:
        """Submit prompts: all of them, or none. Waits first as long as `prompts.waiting` prompts or more wait to be asked.

        Returns their ids, which are those of their groups.

        Raises:
            ConfigError: one is no prompt, or lacks a column that the reward needs, or prompts come from elsewhere.
            RunFailed: the run has failed.
        """
        made = await self.make(prompts)
        await self.room()
        return self.put(made)

    async def room(self) -> None:
        """Wait as `submit` would. Raises as it does."""
        await self._caller.room(self._source)

    async def make(self, prompts: Sequence[Submitted]) -> tuple[Prompt, ...]:
        """Prompts for `put`, on a thread: of many, making token ids takes seconds. Raises ConfigError as `submit`."""
        given = given_all(prompts)
        for columns in {frozenset(each.columns) for each in given}:
            self._suits(columns)
        return await asyncio.to_thread(self._source.make, given)

    def put(self, made: Sequence[Prompt]) -> tuple[int, ...]:
        """Submit what was made, however many wait. Returns the ids. Raises as `submit`, where prompts or the run ended."""
        self._caller.check_takes()
        return self._source.put(made)

    @property
    def tensors(self) -> Sequence[TensorInfo]:
        """What `publish` wants, a tied head left out."""
        return self._caller.tensors

    def end_of_prompts(self) -> None:
        """No more prompts come: the last batches are made of those that there are, and then the run ends."""
        self._source.end()

    @property
    def _source(self) -> GivenSource:
        source = self._caller.source
        if source is None and self._caller.over is not None:
            raise ConfigError(f"the run has ended: {self._caller.over}", where="submit", remedy="begin another one")
        if source is None:
            raise ConfigError("the run has not begun", where="submit", remedy="enter the block first")
        if not isinstance(source, GivenSource):
            problem = "prompts come from a file or a task, and none are taken besides"
            raise ConfigError(
                problem, where="submit", remedy="set prompts.source to given, or submit none: batches come by themselves"
            )
        return source

    # -------------------------------------------------------------------------------------------- the circle

    async def batches(self) -> AsyncIterator[Batch]:
        """The batches, each once what the one before came to was published, until all steps are done or prompts are used up.

        Raises ConfigError when the one before was not published, RunFailed when the run has failed.
        """
        while (batch := await self.next_batch()) is not None:
            yield batch

    async def next_batch(self) -> Batch | None:
        """The next of them, None when there will be none any more. Raises as `batches`."""
        self._check_entered()
        return await self._caller.next()

    async def publish(self, weights: Weights, stats: Mapping[str, float] | None = None) -> WeightVersion:
        """Publish what training on the batch came to, for the engines to go on with.

        All is looked at before anything changes: names, shapes and formats are those of the engines' model, every number is
        finite. Tensors may be on any device; they are copied, and are yours again when this returns.

        Args:
            weights: a module, or tensors by their Hugging Face names; a head that is tied may be left out.
            stats: what your training knows of the step, such as loss, grad_norm, learning_rate: see `TrainStats`.

        Raises:
            ConfigError: the weights do not suit, or no batch is out. Nothing has changed then, and it may be called again.
            RunFailed: the run has failed.
        """
        return await self._caller.publish(weights, stats or {})

    async def groups(self) -> AsyncIterator[Group]:
        """Judged groups as they are finished, from now on, before they are batched.

        Raises RollyardError for who is thousands of groups behind, RunFailed when the run has failed.
        """
        async for outcome in self.outcomes():
            if isinstance(outcome, Group):
                yield outcome

    async def outcomes(self) -> AsyncIterator[Group | Dropped]:
        """The same, and prompts that are dropped, each with the reason. Of each prompt there is a `Dropped` at most, and at last.

        A group that is finished may be dropped later, as stale or because the run ends. Raises as `groups`.
        """
        self._check_entered()
        async for outcome in self._caller.outcomes():
            yield outcome

    def status(self) -> Status:
        caller, report = self._caller, self.report
        source, counts = caller.source, caller.counts
        state = "running" if report is None else "failed" if report.finished.failed else "finished"
        state = "finished" if self.finished else state
        return Status(
            state=state,
            version=caller.version,
            out=None if caller.out is None else caller.out.step,
            live=caller.live,
            waiting=source.waiting if isinstance(source, GivenSource) else 0,
            engines=caller.engines,
            admitted=counts.admitted,
            trained=counts.trained,
            dropped=dict(counts.dropped),
            tokens=counts.tokens.generated,
            tokens_per_s=caller.tokens_per_s,
            cause=self.finished if report is None else report.finished.cause,
        )


class SyncRollouts:
    """`Rollouts` for code without async: in a plain loop, a notebook, or a trainer's hook. The run has a thread of its own.

        with rollyard.Rollouts.sync(config) as rollouts:
            for batch in rollouts.batches():
                ...  # generation goes on meanwhile, as far as the placement and the staleness limit allow
                rollouts.publish(model)

    Its methods are those of `Rollouts`, and block; any thread may call them. Ctrl-C leaves the block, and stops the run.
    """

    def __init__(self, rollouts: Rollouts) -> None:
        self._rollouts = rollouts
        self._loop: asyncio.AbstractEventLoop | None = None
        self._left = asyncio.Event()
        self._thread: Thread | None = None

    def __enter__(self) -> Self:
        """Raises as entering `Rollouts`."""
        began: Future[None] = Future()
        self._thread = Thread(target=self._turn, args=(began,), name="rollouts", daemon=True)
        self._thread.start()
        began.result()
        with ExitStack() as failing:
            failing.callback(self._end)
            self._call(self._rollouts.__aenter__())
            failing.pop_all()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        try:
            self._call(self._rollouts.__aexit__(kind, error, trace))
        finally:
            self._end()

    def submit(self, prompts: Sequence[Submitted]) -> tuple[int, ...]:
        return self._call(self._rollouts.submit(prompts))

    def end_of_prompts(self) -> None:
        self._now(self._rollouts.end_of_prompts)

    def batches(self) -> Iterator[Batch]:
        while (batch := self.next_batch()) is not None:
            yield batch

    def next_batch(self) -> Batch | None:
        return self._call(self._rollouts.next_batch())

    def publish(self, weights: Weights, stats: Mapping[str, float] | None = None) -> WeightVersion:
        return self._call(self._rollouts.publish(weights, stats))

    def groups(self) -> Iterator[Group]:
        return self._each(self._rollouts.groups())

    def outcomes(self) -> Iterator[Group | Dropped]:
        return self._each(self._rollouts.outcomes())

    def _each(self, stream: AsyncIterator[T]) -> Iterator[T]:
        async def following() -> T | None:
            return await anext(stream, None)

        while (found := self._call(following())) is not None:
            yield found

    def status(self) -> Status:
        return self._now(self._rollouts.status)

    def stop(self, cause: str) -> None:
        self._now(lambda: self._rollouts.stop(cause))

    @property
    def config(self) -> Config:
        return self._rollouts.config

    @property
    def folder(self) -> Path:
        return self._rollouts.folder

    @property
    def report(self) -> Report | None:
        return self._rollouts.report

    @property
    def version(self) -> WeightVersion:
        return self._rollouts.version

    @property
    def model(self) -> Path:
        return self._rollouts.model

    @property
    def next_prompt(self) -> int:
        return self._now(lambda: self._rollouts.next_prompt)

    def _turn(self, began: Future[None]) -> None:
        """The thread."""

        async def until_left() -> None:
            self._loop = asyncio.get_running_loop()
            began.set_result(None)
            await self._left.wait()

        asyncio.run(until_left())

    def _end(self) -> None:
        assert self._loop is not None and self._thread is not None
        self._loop.call_soon_threadsafe(self._left.set)
        self._thread.join()
        self._loop = None

    def _now(self, call: Callable[[], T]) -> T:
        """On the run's thread; here where that is over."""

        async def called() -> T:
            return call()

        return call() if self._loop is None else self._call(called())

    def _call(self, work: Coroutine[Any, Any, T]) -> T:
        """What comes of it, on the run's thread; given up when this is interrupted. Raises ConfigError outside the block."""
        if self._loop is None:
            work.close()
            raise ConfigError("the run is not going on", where="rollouts", remedy="use it inside `with Rollouts.sync(...)`")
        calling = copy_context()
        calling.run(CALLING.set, get_ident())
        future = calling.run(asyncio.run_coroutine_threadsafe, work, self._loop)
        try:
            return future.result()
        finally:
            future.cancel()
