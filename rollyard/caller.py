"""A caller with a training loop of its own, as the trainer of a run: it is handed batches, and gives weights back."""

from __future__ import annotations

import asyncio
import math
from collections import deque
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from rollyard.conductor import Conductor
from rollyard.errors import CheckpointError, ConfigError, RollyardError, RunFailed, TrainError
from rollyard.events import EngineId, Event, Instruction, Keep, Train
from rollyard.exchange.waiting import GivenUp
from rollyard.prompts.given import GivenSource
from rollyard.protocols.devices import Device
from rollyard.protocols.rollouts import PromptSource
from rollyard.rollout.state import Counts
from rollyard.types import Activity, Group, Prompt, TensorInfo, TrainBatch, TrainStats, WeightVersion

if TYPE_CHECKING:
    from rollyard.weights.given import GivenWeights, Weights

LAG: Final = 4096  # groups that a stream of them may be behind
TOLD: Final = frozenset(each.name for each in fields(TrainStats)) - {"step", "tokens", "thread_s"}
NAN: Final = math.nan
UNTOLD: Final = TrainStats(0, NAN, NAN, NAN, 0, NAN, NAN, NAN, NAN, NAN, NAN, NAN, NAN, NAN)


@dataclass(frozen=True, slots=True)
class Batch:
    """What one step is to learn from. Example: `for micro in batch.train.micro_batches: loss_of(micro).backward()`."""

    step: int  # trains weight version `step` into `step + 1`
    groups: tuple[Group, ...]  # with rewards, texts, and who wrote what
    train: TrainBatch  # the same as training rows with advantages, in micro-batches


class Caller:
    """Implements `protocols.Trainer` for a run by handing each batch out and waiting for weights.

    Args:
        save: adds what training needs to go on to a checkpoint's folder, which has the published model already.
    """

    def __init__(self, save: Callable[[Path], None] = lambda folder: None) -> None:
        self._save = save
        self._version = WeightVersion(0)
        self._life = 0
        self._weights: GivenWeights | None = None
        self._device: Device | None = None
        self._groups: tuple[Group, ...] = ()  # of the batch that comes next
        self._offered: Batch | None = None
        self._out: Batch | None = None  # handed out, and nothing was published for it
        self._taking = False
        self._trained: asyncio.Future[TrainStats] | None = None
        self._gave_up = ""
        self._over: str | None = None  # why there will be no more batches
        self._failed = False
        self._changed = asyncio.Event()
        self._streams: dict[int, deque[Group]] = {}
        self._conductor: Conductor | None = None
        self._engines: Mapping[EngineId, object] = {}
        self.source: PromptSource | None = None
        self.submitted: tuple[tuple[Prompt, ...], int] = ((), 0)  # in earlier lives of the run, and the id of the next
        self.model: Path | None = None  # that this life begins with
        self.ready = asyncio.Event()  # the stations are there

    def begin(self, weights: GivenWeights, device: Device, version: WeightVersion, life: int) -> None:
        """The policy was loaded, as `version`; versions that are made from here on are of this life of the run."""
        self._weights, self._device, self._version, self._life = weights, device, version, life

    def join(self, source: PromptSource, conductor: Conductor, engines: Mapping[EngineId, object], vocabulary: int) -> None:
        """The stations are ready."""
        self.source, self._conductor, self._engines = source, conductor, engines
        if isinstance(source, GivenSource):
            source.vocabulary = vocabulary
            source.go_on(*self.submitted)
        self.ready.set()

    def heard(self, happened: Sequence[Event | Instruction]) -> None:
        """What the run does, as it does it."""
        for each in happened:
            match each:
                case Train(_, groups):
                    self._groups = groups
                case Keep(group):
                    for stream in self._streams.values():
                        stream.append(group)
                    if self._streams:
                        self._change()

    # ------------------------------------------------------------------------------------------ as a trainer

    @property
    def version(self) -> WeightVersion:
        return self._version

    @property
    def tensors(self) -> Sequence[TensorInfo]:
        """Of the policy."""
        return () if self._weights is None else self._weights.infos

    async def train(self, shards: Sequence[TrainBatch]) -> TrainStats:
        """Hand the batch out, and wait until weights were published for it. Raises GivenUp when that will not be."""
        (train,) = shards
        self._offered = Batch(train.step, self._groups, train)
        self._trained = asyncio.get_running_loop().create_future()
        if self._gave_up:
            self.give_up(self._gave_up)
        self._change()
        with self._at_work():
            return await self._trained

    async def settle(self) -> WeightVersion:
        assert self._device is not None
        await self._device.run(int)
        return self._version

    async def save(self, folder: Path) -> None:
        """Raises CheckpointError when it cannot be written."""
        assert self._device is not None and self._weights is not None
        timed = self._device.spans.timed(Activity.CHECKPOINT, self._weights.save)
        try:
            await self._device.run(timed, folder, self._save)
        except Exception as error:
            raise CheckpointError(f"{folder} cannot be written: {type(error).__name__}: {error}") from error

    async def become(self, version: WeightVersion) -> None:
        """Raises TrainError: nobody hands a state over to a caller."""
        raise TrainError("a caller's trainer takes no state from another one")

    async def close(self) -> None:
        """Nothing is held."""

    def _at_work(self) -> AbstractContextManager[None]:
        assert self._device is not None
        return self._device.spans.doing(Activity.TRAIN, "caller")

    # ------------------------------------------------------------------------------------- the caller's side

    @property
    def out(self) -> Batch | None:
        """What was handed out and not published yet."""
        return self._out

    @property
    def engines(self) -> tuple[EngineId, ...]:
        return tuple(self._engines)

    @property
    def counts(self) -> Counts:
        return Counts() if self._conductor is None else self._conductor.counts

    @property
    def live(self) -> int:
        """Groups that are asked, written or judged."""
        return 0 if self._conductor is None else self._conductor.live

    async def next(self) -> Batch | None:
        """The next batch, None when there will be none any more.

        Raises ConfigError when nothing was published for the one before, RunFailed when the run has failed.
        """
        if self._out is not None:
            problem = f"batch {self._out.step} was handed out, and nothing was published for it"
            raise ConfigError(problem, where="batches", remedy="call publish with the weights that it came to, then go on")
        while self._offered is None and self._over is None:
            await self._changed.wait()
        self._check_going()
        self._out, self._offered = self._offered, None
        return self._out

    async def publish(self, weights: Weights, told: Mapping[str, float]) -> WeightVersion:
        """Take the weights as what came of the batch that is out.

        Raises ConfigError for weights that do not suit, unknown numbers, or when no batch is out: nothing has changed then.
        RunFailed when the run has failed.
        """
        self._check_going()
        batch, trained = self._out, self._trained
        if batch is None or trained is None or self._taking:
            problem = "it is being published just now" if self._taking else "no batch is out that these weights could come of"
            raise ConfigError(problem, where="publish", remedy="take a batch, train on it, then publish once")
        stats = _stats(batch, told)
        assert self._device is not None and self._weights is not None
        self._taking = True
        try:
            await self._device.run(self._device.spans.timed(Activity.SYNC, self._weights.take, "publish"), weights)
        finally:
            self._taking = False
        if trained.done():
            raise RunFailed(f"the run ended meanwhile: {self._over or self._gave_up}")
        self._version, self._out = WeightVersion(batch.step + 1, self._life), None
        trained.set_result(stats)
        return self._version

    async def groups(self) -> AsyncIterator[Group]:
        """Groups as they are finished, from now on, until the run is over. Raises RollyardError for who is far behind."""
        stream = deque[Group]()
        self._streams[id(stream)] = stream
        try:
            while stream or self._over is None:
                if len(stream) > LAG:
                    raise RollyardError(f"a stream of groups is {len(stream)} groups behind: take them as they come")
                if not stream:
                    await self._changed.wait()
                while stream:
                    yield stream.popleft()
        finally:
            del self._streams[id(stream)]
        self._check_going()

    async def unless_over(self, work: Coroutine[Any, Any, None]) -> None:
        """Wait for it. Raises RunFailed when the run fails meanwhile, ConfigError when it has ended."""
        waiting = asyncio.ensure_future(work)
        try:
            while True:
                self._check_going()
                if self._over is not None:
                    raise ConfigError(f"the run has ended: {self._over}", where="submit", remedy="begin another one")
                if waiting.done():
                    return waiting.result()
                changed = asyncio.ensure_future(self._changed.wait())
                await asyncio.wait((waiting, changed), return_when=asyncio.FIRST_COMPLETED)
                changed.cancel()
        finally:
            waiting.cancel()

    def give_up(self, cause: str) -> None:
        """Nothing will be published any more: whatever is trained, now or next, is given up."""
        self._gave_up = cause
        if self._trained is not None and not self._trained.done():
            self._trained.set_exception(GivenUp(cause))

    def end(self, cause: str, *, failed: bool) -> None:
        """The run is over."""
        self._over, self._failed = cause, failed
        self._change()

    def _check_going(self) -> None:
        if self._failed:
            raise RunFailed(self._over)

    def _change(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()


def _stats(batch: Batch, told: Mapping[str, float]) -> TrainStats:
    """What is known of the step. Raises ConfigError for what is no number, or has a name that nobody knows."""
    for name, value in told.items():
        if name not in TOLD:
            remedy = f"give some of {', '.join(sorted(TOLD))}"
            raise ConfigError(f"nothing is told of {name!r}", where="publish", remedy=remedy)
        if not math.isfinite(value):
            raise ConfigError(f"{name} is {value}", where="publish", remedy="leave out what is no number")
    tokens = sum(sum(sample.mask) for sample in batch.train.samples)
    known = {name: float(value) for name, value in told.items()}
    return replace(UNTOLD, step=batch.step + 1, tokens=tokens, **known)
