"""Events prepared for the conductor, as a world that answers everything makes them: to measure the core alone.

A world of engines, a trainer and a judge in a few lines answers every instruction; what it answered is kept, and given to a
fresh conductor again, with nothing else in the way. Conductors are deterministic, so the same events fit.
"""

from __future__ import annotations

import random
import time
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Literal

from rollyard import events as ev
from rollyard.bench.doubles import PROMPT_TOKENS, WINDOW
from rollyard.bench.instant import IDS, LOGPROBS, TOKENS
from rollyard.conductor import Conductor
from rollyard.place.mode import Schedule
from rollyard.rollout.policy import RolloutPolicy
from rollyard.types import FinishReason, Prompt, Request, RequestId, Reward, Sampling, Segment, WeightVersion

Timed = tuple[ev.Event, float]  # and seconds on the run's clock

ENDS_S = 1e-3  # between two ends of requests


@dataclass(frozen=True, slots=True)
class Play:
    """One run of the core: so many groups are live at once, four batches of them unless it says otherwise, in as many steps."""

    live: int  # groups
    size: int  # K
    steps: int
    engines: int = 8
    seed: int = 0
    placement: Literal["async", "colocated"] = "async"
    order: Literal["admission", "longest"] = "admission"
    moves: int = 0  # where there are some, engines have a slot for every member
    oversample: float = 0.0  # of a batch; so many batches more may be live
    filtered: float = 0.0  # share of the groups whose verdicts are all equal, and that are asked anew
    staleness: int = 3  # batches that are live beside the one that is taken next

    @property
    def groups(self) -> int:
        """Of a batch."""
        return max(self.live // (self.staleness + 1), 1)

    def conductor(self) -> Conductor:
        policy = RolloutPolicy(
            group_size=self.size,
            groups_per_batch=self.groups,
            batches=self.steps,
            sampling=Sampling(TOKENS),
            window=WINDOW,
            max_staleness=self.staleness,
            oversample=round(self.oversample * self.groups),
            order=self.order,
            moves=self.moves,
            min_scored=1,
            filter="flat" if self.filtered else "none",
            refills=self.live if self.filtered else 0,
        )
        rollover = ev.Rollover.KEEP if self.placement == "async" else ev.Rollover.DRAIN
        return Conductor(policy, Schedule(self.steps, self.engines), rollover, WeightVersion(0), self.placement)

    def slots(self) -> int:
        """Of an engine: half of all members that are live run."""
        return -(-self.live * self.size // self.engines // (1 if self.moves else 2))


class Running:
    """Requests that engines hold, of which any one is found at once: by chance, or by name."""

    def __init__(self, seed: int) -> None:
        self._drawn = random.Random(seed)
        self._places: dict[RequestId, int] = {}
        self._held: list[tuple[ev.EngineId, Request]] = []

    def __len__(self) -> int:
        return len(self._held)

    def __contains__(self, request: RequestId) -> bool:
        return request in self._places

    def add(self, engine: ev.EngineId, request: Request) -> None:
        self._places[request.id] = len(self._held)
        self._held.append((engine, request))

    def some(self) -> RequestId:
        return self._held[self._drawn.randrange(len(self._held))][1].id

    def of(self, engine: ev.EngineId) -> list[RequestId]:
        return [request.id for holder, request in self._held if holder == engine]

    def take(self, request: RequestId) -> tuple[ev.EngineId, Request]:
        place = self._places.pop(request)
        found, last = self._held[place], self._held.pop()
        if last is not found:
            self._held[place] = last
            self._places[last[1].id] = place
        return found


@dataclass(slots=True)
class World:
    """Answers each instruction: requests in a random order, the rest at once."""

    play: Play
    events: list[Timed] = field(default_factory=list)  # that were given, in order
    _versions: dict[ev.EngineId, WeightVersion] = field(default_factory=dict)
    _prompts: int = 0

    def prepare(self) -> Sequence[Timed]:
        """Play it to its end: the events."""
        play, now = self.play, 0.0
        conductor, running = play.conductor(), Running(play.seed)
        names = [f"engine-{number}" for number in range(play.engines)]
        pending = deque[ev.Event](ev.EngineUp(name, play.slots(), None) for name in names)
        while pending or running:
            while pending:
                event = pending.popleft()
                self.events.append((event, now))
                for instruction in conductor.step(event, now):
                    if isinstance(instruction, ev.Finish):
                        return self.events
                    pending += self._answer(instruction, running)
            if running:
                now += ENDS_S
                pending.append(self._written(running, running.some()))
        raise AssertionError("the conductor waits for something that this world does not do")

    def _written(self, running: Running, request: RequestId, cut: bool = False) -> ev.Event:
        engine, asked = running.take(request)
        version, left = self._versions[engine], asked.sampling.max_tokens
        tokens, finish = (min(1, left - 1), FinishReason.ABORT) if cut else (left, FinishReason.STOP)
        return ev.SegmentArrived(engine, Segment(request, IDS[:tokens], LOGPROBS[:tokens], version, version, finish))

    def _cut(self, running: Running, requests: Iterable[RequestId]) -> Iterator[ev.Event]:
        yield from (self._written(running, request, cut=True) for request in requests if request in running)

    def _answer(self, instruction: ev.Instruction, running: Running) -> Iterator[ev.Event]:
        match instruction:
            case ev.Generate(engine, request):
                running.add(engine, request)
            case ev.Score(_, done):
                yield ev.Scored(done.group, done.member, self._verdict(done.group, done.member))
            case ev.FetchPrompts(count):
                first, self._prompts = self._prompts, self._prompts + count
                ids = (1,) * PROMPT_TOKENS
                yield ev.PromptsOffered(tuple(Prompt(at, at, ids, "") for at in range(first, self._prompts)), False)
            case ev.Move(_, request, _):
                yield from self._cut(running, (request,))
            case ev.Abort(_, requests):
                yield from self._cut(running, requests)
            case ev.Train(step):
                yield ev.BatchTrained(WeightVersion(step + 1))
            case _:
                yield from self._synced(instruction, running)

    def _synced(self, instruction: ev.Instruction, running: Running) -> Iterator[ev.Event]:
        match instruction:
            case ev.Publish(version):
                yield ev.Published(version)
                yield ev.Delivered(version)
            case ev.Prepare(engine, version):
                yield ev.EnginePrepared(engine, version)
            case ev.Pause(engine):
                yield ev.EnginePaused(engine)
            case ev.Load(engine, version):
                self._versions[engine] = version
                yield ev.EngineLoaded(engine, version)
            case ev.Resume(engine):
                yield ev.EngineResumed(engine)
            case ev.Sleep(engine):
                yield from self._cut(running, running.of(engine))
                yield ev.EngineSlept(engine)
            case ev.Wake(engine, part):
                yield ev.EngineWoke(engine, part)
            case ev.Checkpoint(version):
                yield ev.Checkpointed(version)

    def _verdict(self, group: int, member: int) -> Reward:
        flat = self.play.filtered and random.Random(group).random() < self.play.filtered
        return Reward(0.0 if flat else float(member % 2))


def fed(play: Play, events: Sequence[Timed]) -> float:
    """Seconds that a fresh conductor takes for them."""
    conductor = play.conductor()
    step, began = conductor.step, time.perf_counter()
    for event, now in events:
        step(event, now)
    return time.perf_counter() - began
