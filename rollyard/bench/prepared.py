"""Events prepared for the conductor, as a world that answers everything makes them: to measure the core alone.

A world of engines, a trainer and a judge in a few lines answers every instruction; what it answered is kept, and given to a
fresh conductor again, with nothing else in the way. Conductors are deterministic, so the same events fit.
"""

from __future__ import annotations

import random
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from rollyard import events as ev
from rollyard.bench.doubles import PROMPT_TOKENS, WINDOW
from rollyard.bench.instant import IDS, LOGPROBS, TOKENS
from rollyard.conductor import Conductor
from rollyard.place.mode import Schedule
from rollyard.rollout.policy import RolloutPolicy
from rollyard.types import FinishReason, Prompt, Request, Reward, Sampling, Segment, WeightVersion

STALENESS = 3  # so that four batches are live at once


@dataclass(frozen=True, slots=True)
class Play:
    """One run of the core: so many groups are live at once, four batches of them, in as many steps."""

    live: int  # groups
    size: int  # K
    steps: int
    engines: int = 8
    seed: int = 0

    @property
    def groups(self) -> int:
        """Of a batch."""
        return max(self.live // (STALENESS + 1), 1)

    def conductor(self) -> Conductor:
        sampling = Sampling(TOKENS)
        policy = RolloutPolicy(self.size, self.groups, self.steps, sampling, WINDOW, max_staleness=STALENESS, min_scored=1)
        return Conductor(policy, Schedule(self.steps, self.engines), ev.Rollover.KEEP, WeightVersion(0), "async")

    def slots(self) -> int:
        """Of an engine: half of all members that are live run."""
        return -(-self.live * self.size // self.engines // 2)


@dataclass(slots=True)
class World:
    """Answers each instruction: requests in a random order, the rest at once."""

    play: Play
    events: list[ev.Event] = field(default_factory=list)  # that were given, in order
    _running: list[tuple[ev.EngineId, Request]] = field(default_factory=list)
    _versions: dict[ev.EngineId, WeightVersion] = field(default_factory=dict)
    _prompts: int = 0

    def prepare(self) -> Sequence[ev.Event]:
        """Play it to its end: the events."""
        conductor, drawn = self.play.conductor(), random.Random(self.play.seed)
        names = [f"engine-{number}" for number in range(self.play.engines)]
        pending: list[ev.Event] = [ev.EngineUp(name, self.play.slots(), None) for name in names]
        while pending or self._running:
            while pending:
                event = pending.pop(0)
                self.events.append(event)
                for instruction in conductor.step(event, 0.0):
                    if isinstance(instruction, ev.Finish):
                        return self.events
                    pending += self._answer(instruction)
            if self._running:
                at = drawn.randrange(len(self._running))
                self._running[at], self._running[-1] = self._running[-1], self._running[at]
                pending.append(self._written(*self._running.pop()))
        raise AssertionError("the conductor waits for something that this world does not do")

    def _written(self, engine: ev.EngineId, request: Request) -> ev.Event:
        version = self._versions[engine]
        return ev.SegmentArrived(engine, Segment(request.id, IDS, LOGPROBS, version, version, FinishReason.STOP))

    def _answer(self, instruction: ev.Instruction) -> Iterator[ev.Event]:
        match instruction:
            case ev.Generate(engine, request):
                self._running.append((engine, request))
            case ev.Score(_, done):
                yield ev.Scored(done.group, done.member, Reward(float(done.member % 2)))
            case ev.FetchPrompts(count):
                first, self._prompts = self._prompts, self._prompts + count
                ids = (1,) * PROMPT_TOKENS
                yield ev.PromptsOffered(tuple(Prompt(at, at, ids, "") for at in range(first, self._prompts)), False)
            case ev.Train(step):
                yield ev.BatchTrained(WeightVersion(step + 1))
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
            case ev.Checkpoint(version):
                yield ev.Checkpointed(version)


def fed(play: Play, events: Sequence[ev.Event]) -> float:
    """Seconds that a fresh conductor takes for them."""
    conductor = play.conductor()
    step, began = conductor.step, time.perf_counter()
    for event in events:
        step(event, 0.0)
    return time.perf_counter() - began
