"""When each prompt was live, where its requests ran, when it was judged, and which step trained it (PURE): for the trace.

Times are those at which the conductor was told, or said it. Of a long run only some prompts are kept, each with all that
belongs to it: those whose number `every` divides.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final, NamedTuple

from rollyard.events import (
    Admit,
    BatchTrained,
    Drop,
    EngineDown,
    EngineLoaded,
    Event,
    Generate,
    Instruction,
    Load,
    RequestFailed,
    Score,
    Scored,
    SegmentArrived,
    Train,
)
from rollyard.types import Group, RequestId, WeightVersion

MOST: Final = 2**14  # prompts, requests and verdicts kept: about 5 MB
LOADS: Final = 2**12  # loads of a version by an engine kept
ENGINES: Final = 64  # whose loads are kept: the first ones that load


class Life(NamedTuple):
    """A prompt, from its admission until it left. `step` that trained it; `left`: members that were dropped before."""

    group: int
    start_ns: int
    end_ns: int
    fate: str  # "trained", why it was dropped, or that it is live
    step: int | None = None
    reward: float | None = None  # mean of the verdicts
    left: frozenset[int] = frozenset()


class Stay(NamedTuple):
    """A request on an engine, from when it was handed out until its last token was heard of."""

    engine: str
    group: int
    member: int
    attempt: int
    start_ns: int
    end_ns: int
    tokens: int  # written there
    version: int | None  # step of the weights that wrote the last of them
    finish: str  # why it ended


class Judged(NamedTuple):
    """A completion, from when a verdict was asked for until it came. `value` None: there was none."""

    group: int
    member: int
    start_ns: int
    end_ns: int
    value: float | None


class Learned(NamedTuple):
    """A batch, from when it was taken until there was a new version. `whole`: there was one."""

    step: int
    groups: int
    start_ns: int
    end_ns: int
    whole: bool


class Loaded(NamedTuple):
    """An engine switched to a version."""

    engine: str
    version: WeightVersion
    start_ns: int
    end_ns: int


@dataclass(frozen=True, slots=True)
class Followed:
    """What became of prompts: of one in `every`, and of all of them where that is 1."""

    lives: Sequence[Life] = ()
    stays: Sequence[Stay] = ()
    verdicts: Sequence[Judged] = ()
    steps: Sequence[Learned] = ()
    loads: Sequence[Loaded] = ()
    every: int = 1
    loads_every: int = 1  # versions whose loads are there: those whose step this divides

    @property
    def left_out(self) -> str:
        """What is not there, in words; empty where all is."""
        told = [f"of prompts one in {self.every:,} is shown, with all of its requests and verdicts"] if self.every > 1 else []
        return "; ".join([*told, *([f"of versions one in {self.loads_every:,}"] if self.loads_every > 1 else [])])

    def thinned(self, every: int) -> Followed:
        """Only prompts whose number this divides, and steps that trained one of them."""
        lives = [life for life in self.lives if life.group % every == 0]
        trained = {life.step for life in lives}
        return replace(
            self,
            lives=lives,
            stays=[stay for stay in self.stays if stay.group % every == 0],
            verdicts=[verdict for verdict in self.verdicts if verdict.group % every == 0],
            steps=[learned for learned in self.steps if learned.step in trained or not learned.whole],
            every=every,
        )


class _Running:
    """A request that an engine holds."""

    __slots__ = ("engine", "start_ns", "tokens", "version")

    def __init__(self, engine: str, start_ns: int) -> None:
        self.engine, self.start_ns, self.tokens = engine, start_ns, 0
        self.version: int | None = None


class _Batch(NamedTuple):
    """A batch in training. `kept`: those of its groups that are followed."""

    step: int
    groups: int
    kept: tuple[Group, ...]
    start_ns: int


class Requests:
    """Follows prompts through a run. What it holds is bounded, however long that is.

    Args:
        most: prompts, requests and verdicts that are kept; 0: nobody asks for them.
        judged: verdicts say something; else only when they came is noted.
    """

    def __init__(self, most: int = MOST, *, judged: bool = True) -> None:
        self._judged = judged
        self._most, self._every, self._loads_every = most, 1, 1
        self._lives: list[Life] = []
        self._stays: list[Stay] = []
        self._verdicts: list[Judged] = []
        self._steps: list[Learned] = []
        self._loads: list[Loaded] = []
        self._live: dict[int, int] = {}  # when each was admitted
        self._left: dict[int, set[int]] = {}  # members of those that were dropped
        self._running: dict[RequestId, _Running] = {}
        self._asked: dict[tuple[int, int], int] = {}  # when a verdict was asked for
        self._taken: _Batch | None = None  # in training
        self._loading: dict[str, int] = {}
        handlers: Mapping[type[Event | Instruction], Callable[[Any, int], None]] = {
            Admit: self._admit,
            Generate: self._generate,
            SegmentArrived: self._arrived,
            RequestFailed: lambda event, now: self._ended(event.request, "failed", now),
            EngineDown: self._down,
            Score: self._score,
            Scored: self._scored,
            Drop: self._drop,
            Train: self._train,
            BatchTrained: self._trained,
            Load: self._load,
            EngineLoaded: self._loaded,
        }
        self._handlers = handlers if most else {}

    def hear(self, entries: Sequence[Event | Instruction], now: int) -> None:
        """What the conductor was told and said at one moment."""
        for entry in entries if self._handlers else ():
            if (handler := self._handlers.get(type(entry))) is not None:
                handler(entry, now)

    def followed(self, now: int) -> Followed:
        """All of it, where what has not ended ends now: after whatever else there is."""
        lives = [self._life(group, since, now, "live") for group, since in self._live.items()]
        stays = [_stay(request, running, now, "running") for request, running in self._running.items()]
        verdicts = [Judged(*key, since, now, None) for key, since in self._asked.items()]
        steps = list(self._steps)
        if self._taken is not None:
            steps.append(Learned(self._taken.step, self._taken.groups, self._taken.start_ns, now, whole=False))
        return Followed(
            [*self._lives, *lives],
            [*self._stays, *stays],
            [*self._verdicts, *verdicts],
            steps,
            list(self._loads),
            self._every,
            self._loads_every,
        )

    # ---------------------------------------------------------------------------------------------- prompts

    def _admit(self, told: Admit, now: int) -> None:
        if told.prompt.id % self._every == 0:
            self._live[told.prompt.id] = now

    def _drop(self, told: Drop, now: int) -> None:
        if told.group not in self._live:
            return
        if told.member is not None:
            self._left.setdefault(told.group, set()).add(told.member)
            self._asked.pop((told.group, told.member), None)
        else:
            self._lives.append(self._life(told.group, self._live.pop(told.group), now, f"dropped: {told.reason.value}"))
            self._left.pop(told.group, None)
            self._bound()

    def _life(self, group: int, since: int, now: int, fate: str, step: int | None = None, reward: float | None = None) -> Life:
        return Life(group, since, now, fate, step, reward, frozenset(self._left.get(group, ())))

    def _train(self, told: Train, now: int) -> None:
        kept = tuple(group for group in told.groups if group.id in self._live)
        self._taken = _Batch(told.step, len(told.groups), kept, now)

    def _trained(self, event: BatchTrained, now: int) -> None:
        if self._taken is None:
            return
        batch, self._taken = self._taken, None
        for group in batch.kept:
            if (admitted := self._live.pop(group.id, None)) is not None:
                found = [reward for reward in group.rewards if reward is not None and self._judged]
                mean = sum(found) / len(found) if found else None
                self._lives.append(self._life(group.id, admitted, batch.start_ns, "trained", batch.step, mean))
                self._left.pop(group.id, None)
        if batch.kept or self._every == 1:
            self._steps.append(Learned(batch.step, batch.groups, batch.start_ns, now, whole=True))
        self._bound()

    # --------------------------------------------------------------------------------------------- requests

    def _generate(self, told: Generate, now: int) -> None:
        request = told.request.id
        if request.group in self._live:
            self._running[request] = _Running(told.engine, now)

    def _arrived(self, event: SegmentArrived, now: int) -> None:
        segment = event.segment
        running = self._running.get(segment.request)
        if running is None or running.engine != event.engine:
            return
        if segment.token_ids:
            running.tokens += len(segment.token_ids)
            running.version = segment.version.step
        if segment.finish is not None:
            self._ended(segment.request, segment.finish.value, now)

    def _ended(self, request: RequestId, finish: str, now: int) -> None:
        if (running := self._running.pop(request, None)) is not None:
            self._stays.append(_stay(request, running, now, finish))
            self._bound()

    def _down(self, event: EngineDown, now: int) -> None:
        for request in [each for each, running in self._running.items() if running.engine == event.engine]:
            self._ended(request, "engine lost", now)
        self._loading.pop(event.engine, None)

    def _score(self, told: Score, now: int) -> None:
        if told.completion.group in self._live:
            self._asked[told.completion.group, told.completion.member] = now

    def _scored(self, event: Scored, now: int) -> None:
        since = self._asked.pop((event.group, event.member), None)
        if since is not None:
            value = event.reward.value if self._judged else None
            self._verdicts.append(Judged(event.group, event.member, since, now, value))
            self._bound()

    # ---------------------------------------------------------------------------------------------- weights

    def _load(self, told: Load, now: int) -> None:
        self._loading[told.engine] = now

    def _loaded(self, event: EngineLoaded, now: int) -> None:
        since = self._loading.pop(event.engine, now)
        if event.version.step % self._loads_every:
            return
        self._loads.append(Loaded(event.engine, event.version, since, now))
        if len(self._loads) > LOADS:
            engines = list(dict.fromkeys(load.engine for load in self._loads))[:ENGINES]
            if len(engines) == ENGINES:
                self._loads = [load for load in self._loads if load.engine in engines]
            while len(self._loads) > LOADS and self._loads_every < 2**40:
                self._loads_every *= 2
                self._loads = [load for load in self._loads if load.version.step % self._loads_every == 0]

    # ---------------------------------------------------------------------------------------------- the bound

    def _bound(self) -> None:
        """Where there is too much, every other prompt is let go of."""
        while len(self._lives) + len(self._stays) + len(self._verdicts) > self._most and self._every < 2**40:
            self._every *= 2
            kept = Followed(self._lives, self._stays, self._verdicts, self._steps).thinned(self._every)
            self._lives, self._stays, self._verdicts = list(kept.lives), list(kept.stays), list(kept.verdicts)
            self._steps = list(kept.steps)
            self._live = {group: since for group, since in self._live.items() if group % self._every == 0}
            self._left = {group: members for group, members in self._left.items() if group in self._live}
            self._running = {each: running for each, running in self._running.items() if each.group % self._every == 0}
            self._asked = {key: since for key, since in self._asked.items() if key[0] % self._every == 0}


def _stay(request: RequestId, running: _Running, now: int, finish: str) -> Stay:
    return Stay(running.engine, *request, running.start_ns, now, running.tokens, running.version, finish)
