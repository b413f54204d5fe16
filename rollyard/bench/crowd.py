"""Engines that write slower the more run on them, under the real conductor, on a clock that jumps from event to event.

There is no event loop and no shell: this carries out what the conductor says and tells it what came of that. Weights take no
time. Everything else that costs time is in `Crowd`.
"""

from __future__ import annotations

import heapq
import math
import random
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, field
from functools import cached_property
from typing import Literal

from rollyard import events as ev
from rollyard.conductor import Conductor
from rollyard.place.mode import Schedule
from rollyard.rollout.policy import RolloutPolicy
from rollyard.types import FinishReason, Group, Prompt, Request, RequestId, Reward, Sampling, Segment, WeightVersion

Step = tuple[float, RequestId]
STREAMED = 32  # tokens between two segments of a request


@dataclass(frozen=True)
class Crowd:
    """One workload and the engines for it.

    The log of a length is normal: `between` of its variance lies between prompts, the rest between members of one prompt.
    A step of an engine writes one token for each that runs there and takes `step_s` + `each_s` for each of them; whatever an
    engine has to read, prompts and tokens written elsewhere, stops it for `read_s` a token.
    """

    engines: int = 8
    sigma: float = 1.0
    steps: int = 20
    slots: int = 32  # of an engine
    waves: int = 2  # members of a batch for each slot
    size: int = 8  # K
    median: int = 64  # tokens
    cap: int = 2048  # tokens
    between: float = 0.65
    prompt: int = 128  # tokens
    step_s: float = 0.004
    each_s: float = 0.0005
    read_s: float = 0.00005
    train_s: float = 1.0
    seed: int = 0

    @property
    def groups(self) -> int:
        """B: as many members as `waves` times the slots."""
        return self.waves * self.engines * self.slots // self.size

    @cached_property
    def _lengths(self) -> dict[tuple[int, int], int]:
        return {}

    def length(self, prompt: int, member: int) -> int:
        """Tokens of one completion."""
        if (prompt, member) not in self._lengths:
            own = math.sqrt(self.between) * random.Random(f"{self.seed}/{prompt}").gauss(0, 1)
            own += math.sqrt(1 - self.between) * random.Random(f"{self.seed}/{prompt}/{member}").gauss(0, 1)
            tokens = round(math.exp(math.log(self.median) + self.sigma * own))
            self._lengths[prompt, member] = min(max(tokens, 1), self.cap)
        return self._lengths[prompt, member]

    def settings(self) -> dict[str, object]:
        """For the record, but for what differs from row to row."""
        return {name: value for name, value in asdict(self).items() if name not in ("engines", "sigma", "steps", "waves")}


@dataclass(frozen=True, slots=True)
class Routing:
    """What is done about long answers; each field is an option of the config or of the core."""

    placement: Literal["colocated", "async"] = "colocated"
    staleness: int = 0
    spare: float = 0.0  # prompts beyond a batch, as a share of it
    order: Literal["admission", "longest"] = "admission"
    moves: int = 0
    on_stale: Literal["wait", "drop"] = "wait"


@dataclass(slots=True)
class Batch:
    """A batch as it was trained."""

    began: float  # when the trainer wanted it
    taken: float
    groups: tuple[Group, ...]


class CrowdedEngine:
    """Sequences that are all written at the pace of one step."""

    def __init__(self, name: str, crowd: Crowd) -> None:
        self.name, self._crowd = name, crowd
        self.version = WeightVersion(0)
        self._at = 0.0  # until when it is known what it wrote; ahead of now while it reads
        self._noted = 0.0
        self._steps = 0.0  # done so far
        self._running: dict[RequestId, tuple[float, int, int]] = {}  # step of the first token, tokens in all, tokens told
        self._ends: list[Step] = []  # heap: the step of the last token
        self._report = math.inf  # the step after which all are told of
        self.busy_slot_s = 0.0

    @property
    def _step_s(self) -> float:
        return self._crowd.step_s + self._crowd.each_s * len(self._running)

    def advance(self, now: float) -> None:
        self.busy_slot_s += len(self._running) * (now - self._noted)
        self._noted = now
        if now > self._at:
            if self._running:
                self._steps += (now - self._at) / self._step_s
            self._at = now

    def add(self, request: Request, now: float) -> None:
        self.advance(now)
        written = len(request.written_ids)
        length = self._crowd.length(request.id.group, request.id.member)
        self._at += (len(request.prompt_ids) + written) * self._crowd.read_s
        if not self._running:
            self._report = self._steps + STREAMED
        self._running[request.id] = (self._steps - written, length, written)
        heapq.heappush(self._ends, (self._steps + length - written, request.id))

    def next(self) -> float:
        """When it has something to tell."""
        while self._ends and self._ends[0][1] not in self._running:
            heapq.heappop(self._ends)
        if not self._ends:
            return math.inf
        return self._at + (min(self._ends[0][0], self._report) - self._steps) * self._step_s

    def tell(self, now: float) -> list[ev.Event]:
        """What came to an end, or what all have written since they were told of."""
        self.advance(now)
        if self._ends[0][0] <= self._report:
            self._steps, request = heapq.heappop(self._ends)
            return [self._segment(request, FinishReason.STOP)]
        self._steps = self._report
        self._report += STREAMED
        return [self._segment(request, None) for request in list(self._running)]

    def cut(self, now: float, requests: Iterable[RequestId] | None = None) -> list[ev.Event]:
        """All of them, or those that are named, with what they have."""
        self.advance(now)
        held = list(self._running) if requests is None else [request for request in requests if request in self._running]
        return [self._segment(request, FinishReason.ABORT) for request in held]

    def _segment(self, request: RequestId, finish: FinishReason | None) -> ev.Event:
        first, length, told = self._running[request]
        written = length if finish is FinishReason.STOP else max(min(int(self._steps - first + 1e-6), length - 1), told)
        if finish is None:
            self._running[request] = (first, length, written)
        else:
            del self._running[request]
        new = written - told
        return ev.SegmentArrived(self.name, Segment(request, (1,) * new, (-1.0,) * new, self.version, self.version, finish))


@dataclass
class Simulation:
    """One run of a workload under one routing."""

    crowd: Crowd
    routing: Routing
    batches: list[Batch] = field(default_factory=list)
    done: dict[tuple[int, int], float] = field(default_factory=dict)  # when each member was finished
    admitted: list[int] = field(default_factory=list)  # groups
    moved: int = 0
    put_off: int = 0  # members cut because a batch was full without them
    read_again: int = 0  # tokens
    now: float = 0.0
    trained_at: float = 0.0

    def run(self) -> None:
        """To its end. Raises AssertionError when that does not come."""
        crowd = self.crowd
        self._engines = {f"engine-{n}": CrowdedEngine(f"engine-{n}", crowd) for n in range(crowd.engines)}
        self._inbox = deque[ev.Event](ev.EngineUp(name, crowd.slots, WeightVersion(0)) for name in self._engines)
        self._timers: list[tuple[float, ev.Event]] = []
        self._due: list[tuple[float, str]] = []  # heap of engines; entries may be out of date
        self._touched: set[str] = set()
        self._cursor, self._finished = 0, False
        self._conductor = self._conduct()
        self._answers: dict[type[ev.Instruction], Callable[..., Iterable[ev.Event]]] = self._actions()
        while not self._finished:
            while self._inbox and not self._finished:
                for instruction in self._conductor.step(self._inbox.popleft(), self.now):
                    answer = self._answers.get(type(instruction))
                    self._inbox.extend(answer(instruction) if answer is not None else ())
            if not self._finished:
                self._wait()

    def _conduct(self) -> Conductor:
        crowd, routing = self.crowd, self.routing
        policy = RolloutPolicy(
            group_size=crowd.size,
            groups_per_batch=crowd.groups,
            batches=crowd.steps,
            sampling=Sampling(crowd.cap),
            window=crowd.cap + crowd.prompt,
            max_staleness=routing.staleness,
            oversample=round(routing.spare * crowd.groups),
            order=routing.order,
            moves=routing.moves,
            on_stale=routing.on_stale,
        )
        rollover = ev.Rollover.KEEP if routing.placement == "async" else ev.Rollover.DRAIN
        return Conductor(policy, Schedule(crowd.steps, crowd.engines), rollover, WeightVersion(0), routing.placement)

    def _wait(self) -> None:
        """Until the next thing happens."""
        for name in self._touched:
            heapq.heappush(self._due, (self._engines[name].next(), name))
        self._touched.clear()
        while self._due and self._engines[self._due[0][1]].next() != self._due[0][0]:
            heapq.heappop(self._due)
        timer = self._timers[0][0] if self._timers else math.inf
        if self._due and self._due[0][0] <= timer:
            self.now, name = heapq.heappop(self._due)
            self._touched.add(name)
            self._inbox.extend(self._engines[name].tell(self.now))
        else:
            assert self._timers, "everybody waits"
            self.now, event = self._timers.pop(0)
            self._inbox.append(event)

    # -------------------------------------------------------------------------------------- the instructions

    def _actions(self) -> dict[type[ev.Instruction], Callable[..., Iterable[ev.Event]]]:
        return {
            ev.FetchPrompts: self._fetch,
            ev.Admit: self._admit,
            ev.Generate: self._generate,
            ev.Move: self._move,
            ev.Abort: lambda told: self._cut(told.engine, told.requests),
            ev.Score: self._score,
            ev.Train: self._train,
            ev.Publish: lambda told: (ev.Published(told.version), ev.Delivered(told.version)),
            ev.Prepare: lambda told: (ev.EnginePrepared(told.engine, told.version),),
            ev.Pause: lambda told: (ev.EnginePaused(told.engine),),
            ev.Load: self._load,
            ev.Resume: lambda told: (ev.EngineResumed(told.engine),),
            ev.Sleep: self._sleep,
            ev.Wake: lambda told: (ev.EngineWoke(told.engine, told.part),),
            ev.Checkpoint: lambda told: (ev.Checkpointed(told.version),),
            ev.Finish: self._finish,
        }

    def _fetch(self, told: ev.FetchPrompts) -> Iterable[ev.Event]:
        ids = range(self._cursor, self._cursor + told.count)
        self._cursor = ids.stop
        yield ev.PromptsOffered(tuple(Prompt(i, i, (1,) * self.crowd.prompt, "") for i in ids), False)

    def _admit(self, told: ev.Admit) -> Iterable[ev.Event]:
        self.admitted.append(told.prompt.id)
        return ()

    def _generate(self, told: ev.Generate) -> Iterable[ev.Event]:
        self._engines[told.engine].add(told.request, self.now)
        self._touched.add(told.engine)
        if told.request.written_ids:
            self.read_again += len(told.request.prompt_ids) + len(told.request.written_ids)
        return ()

    def _move(self, told: ev.Move) -> Iterable[ev.Event]:
        self.moved += 1
        return self._cut(told.engine, (told.request,))

    def _cut(self, engine: str, requests: Iterable[RequestId] | None) -> list[ev.Event]:
        self._touched.add(engine)
        return self._engines[engine].cut(self.now, requests)

    def _score(self, told: ev.Score) -> Iterable[ev.Event]:
        done = told.completion
        self.done[done.group, done.member] = self.now
        yield ev.Scored(done.group, done.member, Reward(float(done.member % 2)))

    def _train(self, told: ev.Train) -> Iterable[ev.Event]:
        self.batches.append(Batch(self.trained_at, self.now, told.groups))
        self.trained_at = self.now + self.crowd.train_s
        self._timers.append((self.trained_at, ev.BatchTrained(WeightVersion(told.step + 1))))
        return ()

    def _load(self, told: ev.Load) -> Iterable[ev.Event]:
        self._engines[told.engine].version = told.version
        yield ev.EngineLoaded(told.engine, told.version)

    def _sleep(self, told: ev.Sleep) -> Iterable[ev.Event]:
        cut = self._cut(told.engine, None)
        self.put_off += len(cut)
        return [*cut, ev.EngineSlept(told.engine)]

    def _finish(self, told: ev.Finish) -> Iterable[ev.Event]:
        assert not told.failed, told.cause
        self._finished = True
        return ()

    @property
    def slots_busy(self) -> float:
        """Share of the slots, over the time in which engines may write."""
        crowd, busy = self.crowd, sum(engine.busy_slot_s for engine in self._engines.values())
        idle = crowd.train_s * len(self.batches) if self.routing.placement == "colocated" else 0.0
        return busy / (crowd.engines * crowd.slots * (self.trained_at - idle))
