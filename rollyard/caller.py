"""A caller with a training loop of its own, as the trainer of a run: it is handed batches, and gives weights back."""

from __future__ import annotations

import asyncio
import math
import warnings
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, fields, replace
from pathlib import Path
from threading import Lock
from typing import TYPE_CHECKING, Final

from rollyard.conductor import Conductor
from rollyard.errors import CheckpointError, ConfigError, RollyardError, RunFailed, TrainError
from rollyard.events import Drop, EngineId, Event, FetchPrompts, Instruction, Keep, PromptsOffered, Train
from rollyard.exchange.waiting import GivenUp
from rollyard.prompts.given import GivenSource
from rollyard.protocols.devices import Device
from rollyard.protocols.rollouts import PromptSource
from rollyard.rollout.state import Counts
from rollyard.types import Activity, DropReason, Group, Prompt, TensorInfo, TrainBatch, TrainStats, WeightVersion
from rollyard.watch.timeline import Phase, Timeline

if TYPE_CHECKING:
    from rollyard.weights.given import GivenWeights, Weights

LAG: Final = 4096  # groups that a stream of them may be behind
TOLD: Final = frozenset(each.name for each in fields(TrainStats)) - {"step", "tokens", "thread_s"}
TELL_S: Final = 10.0  # seconds without a prompt after which that is worth a word
CALLING: Final = ContextVar[int | None]("calling", default=None)  # the thread that asks, where the run has another
NAN: Final = math.nan
UNTOLD: Final = TrainStats(0, NAN, NAN, NAN, 0, NAN, NAN, NAN, NAN, NAN, NAN, NAN, NAN, NAN)


@dataclass(frozen=True, slots=True)
class Batch:
    """What one step is to learn from. Example: `for micro in batch.train.micro_batches: loss_of(micro).backward()`."""

    step: int  # trains weight version `step` into `step + 1`
    groups: tuple[Group, ...]  # with rewards, texts, and who wrote what
    train: TrainBatch  # the same as training rows with advantages, in micro-batches


@dataclass(frozen=True, slots=True)
class Dropped:
    """A prompt that left without being trained on."""

    prompt: int  # its id
    reason: DropReason
    cause: str


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
        self._waits_ns: int | None = None  # since when the batch waits to be taken; None: it does not
        self._taken_ns = 0
        self._timeline: Timeline | None = None
        self._speed: float | None = None  # of a run that is over: there is no loop any more whose clock tells time
        self._taking = self._copying = False
        self._deciding = Lock()  # between the thread that copies and who gives up
        self._trained: asyncio.Future[TrainStats] | None = None
        self._gave_up = ""
        self._over: str | None = None  # why there will be no more batches
        self._failed = False
        self._changed = asyncio.Event()
        self._streams: list[deque[Group | Dropped]] = []
        self._asking = False  # the run wants prompts
        self._trainer: object = None  # who takes batches, or else who began the run: see `who`
        self._warned = False
        self._began = (0, 0.0)  # tokens, and seconds of generation, when the stations were ready
        self._conductor: Conductor | None = None
        self._engines: Mapping[EngineId, object] = {}
        self.source: PromptSource | None = None
        self.submitted: tuple[tuple[Prompt, ...], int] = ((), 0)  # in earlier lives of the run, and the id of the next
        self.model: Path | None = None  # that this life begins with
        self.ready = asyncio.Event()  # the stations are there

    def begin(self, weights: GivenWeights, device: Device, version: WeightVersion, life: int) -> None:
        """The policy was loaded, as `version`; versions that are made from here on are of this life of the run."""
        self._weights, self._device, self._version, self._life = weights, device, version, life

    def has_ended(self, version: WeightVersion, model: Path | None) -> None:
        """Nothing is left to do: an earlier life published this version last. `model`: its folder, where one was saved."""
        self._version, self.model = version, model

    def join(
        self,
        source: PromptSource,
        conductor: Conductor,
        engines: Mapping[EngineId, object],
        vocabulary: int,
        timeline: Timeline,
    ) -> None:
        """The stations are ready."""
        self.source, self._conductor, self._engines, self._timeline = source, conductor, engines, timeline
        if isinstance(source, GivenSource):
            source.vocabulary = vocabulary
            source.go_on(*self.submitted)
        self._began = self.counts.tokens.generated, timeline.seconds().generating_s
        self.ready.set()

    def heard(self, happened: Sequence[Event | Instruction]) -> None:
        """What the run does, as it does it."""
        for each in happened:
            match each:
                case Train(_, groups):
                    self._groups = groups
                case FetchPrompts() | PromptsOffered():
                    self._asking = isinstance(each, FetchPrompts)
                    self._change()
                case Keep(group):
                    self._tell(group)
                case Drop(id_, None, reason, cause):
                    self._tell(Dropped(id_, reason, cause))

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

    @contextmanager
    def _at_work(self) -> Iterator[None]:
        """Within the run's phase of training, which is left until the batch is taken."""
        assert self._device is not None and self._timeline is not None
        spans = self._device.spans
        self._timeline.close(Phase.TRAIN)
        self._waits_ns = spans.now()
        try:
            yield
        finally:
            if self._waits_ns is None:
                spans.add(Activity.TRAIN, self._taken_ns, spans.now(), "caller")
            self._taken_up()  # where it is given up, and nobody took it

    def _taken_up(self) -> None:
        """The batch waits no more. At once: who takes it may keep the event loop from then on."""
        if self._waits_ns is not None and self._timeline is not None:
            self._taken_ns = self._timeline.spans.now()
            self._timeline.spans.add(Activity.CALLER, self._waits_ns, self._taken_ns, "takes no batch")
            self._timeline.open(Phase.TRAIN)
            self._waits_ns = None

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

    @property
    def tokens_per_s(self) -> float:
        """Sampled in this life of the run, per second in which an engine held a request of it: as in the report."""
        if self._speed is not None:
            return self._speed
        tokens, generating_s = self._began
        spent = 0.0 if self._timeline is None else self._timeline.seconds().generating_s - generating_s
        return (self.counts.tokens.generated - tokens) / spent if spent else 0.0

    @property
    def over(self) -> str | None:
        """Why the run is over; None as long as it is not."""
        return self._over

    @property
    def gave_up(self) -> bool:
        """It was said already that nothing will be published any more."""
        return bool(self._gave_up)

    async def next(self) -> Batch | None:
        """The next batch, None when there will be none any more.

        Raises ConfigError when nothing was published for the one before, RunFailed when the run has failed.
        """
        if self._out is not None:
            problem = f"batch {self._out.step} was handed out, and nothing was published for it"
            raise ConfigError(problem, where="batches", remedy="call publish with the weights that it came to, then go on")
        self._trainer = who()
        while self._offered is None and self._over is None:
            await self._news()
        self._check_going()
        self._out, self._offered = self._offered, None
        self._taken_up()
        return self._out

    async def _news(self) -> None:
        """Wait for something to happen. Says so when that takes long because nobody submits prompts."""
        try:
            async with asyncio.timeout(TELL_S):
                await self._changed.wait()
        except TimeoutError:
            source = self.source
            if isinstance(source, GivenSource) and self._asking and not (source.waiting or self._warned):
                self._warned = True
                problem = f"since {TELL_S:g} s a batch is waited for, and no prompt is submitted: {self.live} are under way"
                warnings.warn(f"{problem}; submit more, or end_of_prompts()", RuntimeWarning, stacklevel=2)

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
        self._taking = True
        taking = asyncio.ensure_future(self._take(batch, trained, weights, stats))
        taking.add_done_callback(lambda done: done.cancelled() or done.exception())  # also where nobody waits for it any more
        return await asyncio.shield(taking)

    async def _take(
        self, batch: Batch, trained: asyncio.Future[TrainStats], weights: Weights, stats: TrainStats
    ) -> WeightVersion:
        """Once weights are being copied, they are what the batch came to, whatever becomes of whoever waits for it."""
        assert self._device is not None
        took = False
        try:
            await self._device.run(self._device.spans.timed(Activity.SYNC, self._copy, "publish"), weights)
            took = True
        except GivenUp as given_up:
            raise RunFailed(f"the run ended meanwhile: {given_up}") from None
        finally:
            self._taking = self._copying = False
            if not took and self._gave_up:
                self.give_up(self._gave_up)  # which waited for what would come of it
        self._version, self._out = WeightVersion(batch.step + 1, self._life), None
        trained.set_result(stats)
        return self._version

    def _copy(self, weights: Weights) -> None:
        """On the policy's device. Raises GivenUp when nobody wants them any more; nothing has changed then."""
        assert self._weights is not None
        with self._deciding:
            if self._gave_up:
                raise GivenUp(self._gave_up)
            self._copying = True
        self._weights.take(weights)

    async def outcomes(self) -> AsyncIterator[Group | Dropped]:
        """What becomes of prompts, from now on, until the run is over. Raises RollyardError for who is far behind."""
        stream = deque[Group | Dropped]()
        self._streams.append(stream)
        try:
            while stream or self._over is None:
                if len(stream) > LAG:
                    raise RollyardError(f"a stream of groups is more than {LAG} groups behind: take them as they come")
                if stream:
                    yield stream.popleft()
                else:
                    await self._changed.wait()
        finally:
            self._streams = [each for each in self._streams if each is not stream]
        self._check_going()

    def _tell(self, outcome: Group | Dropped) -> None:
        for stream in self._streams:
            if len(stream) <= LAG:  # one more than it may have, which its reader is told of
                stream.append(outcome)
        if self._streams:
            self._change()

    async def room(self, source: GivenSource) -> None:
        """Wait until prompts may be submitted.

        Raises RunFailed when the run fails meanwhile, ConfigError when it has ended, or when who trains would wait for itself.
        """
        while True:
            self.check_takes()
            if not source.full:
                return
            if not self._asking and (self._out or self._offered) and who() == self._trainer:
                problem = f"{source.waiting} prompts wait, and none is asked until batch {self.next_step} is published"
                remedy = "submit fewer ahead, or from another task than the one that trains, or use a larger prompts.waiting"
                raise ConfigError(f"{problem}: this would wait for itself", where="submit", remedy=remedy)
            await self._changed.wait()

    def check_takes(self) -> None:
        """Raises RunFailed or ConfigError when no prompt is taken any more."""
        self._check_going()
        if self._over is not None:
            raise ConfigError(f"the run has ended: {self._over}", where="submit", remedy="begin another one")

    @property
    def next_step(self) -> int:
        """Of the batch that is out, or comes next."""
        return self._version.step

    def enter(self) -> None:
        """Who calls this begins the run; the same will take batches, unless somebody else does."""
        self._trainer = who()

    def give_up(self, cause: str) -> None:
        """Nothing will be published any more: whatever is trained, now or next, is given up."""
        with self._deciding:
            self._gave_up = cause
            copying = self._copying  # then it is trained in a moment
        if not copying and self._trained is not None and not self._trained.done():
            self._trained.set_exception(GivenUp(cause))

    def end(self, cause: str, *, failed: bool) -> None:
        """The run is over."""
        self._speed = self.tokens_per_s
        self._over, self._failed = cause, failed
        self._change()

    def _check_going(self) -> None:
        if self._failed:
            raise RunFailed(self._over)

    def _change(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()


def who() -> object:
    """Who calls: the thread that is named, or the task."""
    return CALLING.get() or asyncio.current_task()


def _stats(batch: Batch, told: Mapping[str, float]) -> TrainStats:
    """What is known of the step. Raises ConfigError as `numbers_of`."""
    known = numbers_of(told)
    tokens = sum(sum(sample.mask) for sample in batch.train.samples)
    return replace(UNTOLD, step=batch.step + 1, tokens=tokens, **known)


def numbers_of(told: Mapping[str, float]) -> dict[str, float]:
    """What is told of a step, a tensor of one number as that number.

    Raises ConfigError for what is no number, or has a name that nobody knows.
    """
    if not isinstance(told, Mapping):
        problem = f"a {type(told).__name__} says no numbers by name"
        raise ConfigError(problem, where="publish", remedy='give such as {"loss": 0.1}')
    found = {}
    for name, value in told.items():
        if name not in TOLD:
            remedy = f"give some of {', '.join(sorted(TOLD))}"
            raise ConfigError(f"nothing is told of {name!r}", where="publish", remedy=remedy)
        number = _number(value)
        if not math.isfinite(number):
            what = value if isinstance(value, float) else f"a {type(value).__name__}"
            raise ConfigError(f"{name} is {what}, no finite number", where="publish", remedy="leave out what is no number")
        found[name] = number
    return found


def _number(value: object) -> float:
    """Not a number where it is none."""
    try:
        return NAN if isinstance(value, str | bytes) else float(value)  # type: ignore[arg-type]
    except (TypeError, ValueError, OverflowError, RuntimeError):  # of a tensor with several numbers the last one
        return NAN
