"""`Training`, the training job of an exchange: learns from batch after batch, as the generation job leaves them in a folder.

    station    consumes        waits for                          produces
    advantage  groups/ID       batches/STEP of its own version    one number a member; with gae, a token
    batch      the same        -                                  TrainBatch
    train      TrainBatch      -                                  weights/STEP+1: weights, state, stats, what the trainer says

It may be ended at any moment. What it begins with is the newest whole version and the state beside it, so a batch whose version
was not whole is trained once more, with the same result.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Coroutine
from contextlib import AsyncExitStack
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from rollyard import worker
from rollyard.builder import Builder
from rollyard.checks import check_training
from rollyard.config import Config
from rollyard.environment import cache_folder, settle_environment
from rollyard.exchange.agreed import agree, agreed
from rollyard.exchange.folder import Folder, Job
from rollyard.exchange.waiting import Waiting
from rollyard.learner import TrainerLearner
from rollyard.model.architecture import Architecture
from rollyard.place.inline import DeviceThread
from rollyard.stations import Trainers
from rollyard.types import Group, TrainStats, WeightVersion
from rollyard.warmup import architecture, base_policy

T = TypeVar("T")

LOOK_S = 0.5  # seconds between two looks whether a wait is worth a word


class Stopped(Exception):
    """The job was asked to end."""


class Training:
    """One training job. Iterating over it makes it go on: each item is what one step came to.

    Args:
        config: what to train; its `exchange.folder` says with whom.
        tell: takes a line for people, now and then.

    Raises:
        ConfigError: at once, or before the first step, when the config cannot work, or the folder belongs to another one.
        ExchangeError: while iterating, when the generation job did not leave a batch in time, or what lies there is damaged.
        TrainError, CheckpointError: while iterating. The versions that are there are untouched.
    """

    def __init__(self, config: Config, tell: Callable[[str], None] = lambda line: None) -> None:
        settle_environment()
        path = config.model.path
        self._shape = Architecture.from_folder(Path(path)) if path else architecture(config)
        check_training(config, self._shape)
        self._config, self._tell = config, tell
        self._folder = Folder(Path(config.exchange.folder))
        self._waiting = Waiting(self._folder, Job.TRAINING, config.exchange.limit_s)
        self._stopped = asyncio.Event()
        self._cause = ""

    def __aiter__(self) -> AsyncIterator[TrainStats]:
        return self.steps()

    def stop(self, cause: str) -> None:
        """End soon: a batch that is being trained is trained to the end, and its version written."""
        self._cause = cause
        self._stopped.set()

    async def steps(self) -> AsyncGenerator[TrainStats]:
        """The steps, as they are done. Once only."""
        config, folder = self._config, self._folder
        folder.make()
        seat = folder.seats[Job.TRAINING]
        seat.take(Job.TRAINING)
        cause = "left by the caller"
        try:
            agree(folder, Job.TRAINING, agreed(config, self._shape, Job.TRAINING))
            folder.clear(Job.TRAINING)
            async with AsyncExitStack() as built:
                trainers = await self._build(built)
                async for stats in self._learn(trainers):
                    yield stats
            cause = "nothing more is to be trained"
        except Stopped:
            cause = self._cause
        except Exception as error:
            cause = str(error)
            raise  # who called tells it
        finally:
            seat.leave(cause)
        self._tell(f"training ends at version {folder.newest()}: {cause}")

    # ---------------------------------------------------------------------------------------------- the start

    async def _build(self, built: AsyncExitStack) -> Trainers:
        """Trainers with the newest version that is whole, which is the base policy where there is none."""
        config, device, newest = self._config, DeviceThread(), self._folder.newest()
        built.callback(device.close)
        if newest is not None:
            await asyncio.to_thread(self._folder.check_weights, newest)
        begins = newest is None or self._config.train.kl > 0  # with what there was at first, or beside it
        origin = await self._base_policy(device) if begins else None
        checkpoint = self._folder.weights(newest) if newest is not None else None
        model = origin or checkpoint
        assert model is not None, "there is a first version or a newest one"
        trainers = await self._trainers(model, device, built, worker.Beginning(WeightVersion(newest or 0), checkpoint))
        built.push_async_callback(trainers.trainer.close)
        await asyncio.gather(*(start() for start in trainers.starts))
        if newest is None:
            await self._write(trainers, None)
        self._begun = newest or 0
        self._folder.prune(config.checkpoint.keep, self._begun)
        self._tell(f"training begins with version {newest or 0} of {config.run.steps}")
        return trainers

    async def _trainers(self, model: Path, device: DeviceThread, built: AsyncExitStack, begin: worker.Beginning) -> Trainers:
        config, nowhere = self._config, self._folder.path / "scratch"  # nothing is published but by way of the folder
        await device.run(worker.set_threads, worker.threads_of(config, self._shape))
        return await Builder(config, model, nowhere, device, built, Job.TRAINING, begin).trainers()

    async def _base_policy(self, device: DeviceThread) -> Path:
        if self._config.model.path:
            return Path(self._config.model.path)
        await device.run(worker.set_threads, 1)
        return await device.run(base_policy, self._config, cache_folder(), self._not_stopped)

    def _not_stopped(self, _: str) -> None:
        """Raises Stopped."""
        if self._cause:
            raise Stopped

    # --------------------------------------------------------------------------------------------- the circle

    async def _learn(self, trainers: Trainers) -> AsyncGenerator[TrainStats]:
        learner, keep = TrainerLearner(self._config, trainers.trainer, trainers.ranks), self._config.checkpoint.keep
        while (step := learner.version.step) < self._config.run.steps:
            self._not_stopped("")
            groups = await self._unless_stopped(self._waiting.until(partial(self._left, step), f"batch {step}"))
            if not groups:
                return
            stats = await learner.learn(step, groups)
            await self._write(trainers, stats)
            await asyncio.to_thread(self._folder.prune, keep, self._begun, (step + 1 - keep,))
            self._tell(f"version {stats.step}  loss {stats.loss:.4g}  {stats.tokens:,} tokens  {len(groups)} groups")
            yield stats
        await asyncio.to_thread(self._folder.write_done, step, "all steps are done")

    def _left(self, step: int) -> tuple[Group, ...] | None:
        """The batch that trains this version; empty when there will be none, None as long as that is open."""
        if (ids := self._folder.batch(step)) is not None:
            return tuple(self._folder.group(id_) for id_ in ids)
        return () if self._folder.done() == step else None

    async def _write(self, trainers: Trainers, stats: TrainStats | None) -> None:
        """The version that the trainer has, whole or not at all."""
        version, folder = trainers.trainer.version, self._folder
        draft = folder.draft(version.step)
        await trainers.trainer.save(draft)
        await trainers.evidence.record(WeightVersion(version.step), draft)
        await asyncio.to_thread(folder.commit_weights, version.step, stats)

    async def _unless_stopped(self, work: Coroutine[Any, Any, T]) -> T:
        """What comes of it. Raises Stopped when the job is asked to end meanwhile. Says now and then what is waited for."""
        waiting, stopping, said = asyncio.ensure_future(work), asyncio.ensure_future(self._stopped.wait()), ""
        try:
            while not waiting.done():
                await asyncio.wait((waiting, stopping), timeout=LOOK_S, return_when=asyncio.FIRST_COMPLETED)
                if self._stopped.is_set():
                    raise Stopped
                if self._waiting.text not in ("", said):
                    said = self._waiting.text
                    self._tell(said)
            return waiting.result()
        finally:
            for task in (waiting, stopping):
                task.cancel()
            await asyncio.gather(waiting, stopping, return_exceptions=True)
