"""What the journal costs: members written at a steady rate, as a run would tell of them, and read back as its next life would.

`rollyard bench load` shows it. A member is told of in segments, as an engine streams them, then as finished, then as judged; its
group as admitted and, but for the last ones, as trained in a batch.
"""

from __future__ import annotations

import os
import random
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from rollyard.events import Admit, BatchTrained, Event, Instruction, Keep, Score, Scored, Train
from rollyard.journal.journal import Journal, RunRecord
from rollyard.journal.recover import read_past
from rollyard.lives import Wrote
from rollyard.types import (
    Completion,
    FinishReason,
    Group,
    Prompt,
    RequestId,
    Reward,
    Rollout,
    Segment,
    VersionSpan,
    WeightVersion,
)

STREAMED: Final = 16  # tokens of a segment
BATCH: Final = 64  # groups
KINDS: Final = 64  # different answers
OPEN: Final = 100_000  # members that are not trained, and are read back


@dataclass(frozen=True, slots=True)
class Written:
    """What writing, and reading back, came to."""

    members: int
    tokens: int  # of each
    seconds: float  # until the last was in the file
    per_s: float  # members
    cpu_us: float  # of this process for a member, what makes up the entries left out
    longest_s: float  # that telling the journal of one step took
    size: int  # bytes of the file
    read: int  # members
    read_s: float
    read_cpu_s: float


@dataclass(frozen=True, slots=True)
class Flow:
    """Members that come at a rate. `rate` 0: as fast as they are taken."""

    rate: float = 10_000.0  # a second
    seconds: float = 30.0
    most: int = 10_000_000  # members
    tokens: int = 100
    size: int = 8  # K

    def run(self, record: Callable[[Iterable[Event | Instruction]], None], tick: Callable[[], None]) -> tuple[int, float]:
        """Tell of them; returns how many there were, and the longest that one call took.

        Args:
            tick: called after each group.
        """
        begun, count, longest = time.perf_counter(), 0, 0.0
        for steps in self._groups():
            for step in steps:
                before = time.perf_counter()
                record(step)
                longest = max(longest, time.perf_counter() - before)
            before = time.perf_counter()
            tick()
            longest = max(longest, time.perf_counter() - before)
            count += self.size
            now = time.perf_counter() - begun
            if now >= self.seconds or count >= self.most:
                return count, longest
            if self.rate and count / self.rate > now + 0.002:
                time.sleep(count / self.rate - now)
        raise AssertionError("groups do not end")

    def _groups(self) -> Iterator[list[list[Event | Instruction]]]:
        """The steps of one group after the other, without end."""
        draw = random.Random(self.tokens)
        ids = [tuple(draw.randrange(50_000) for _ in range(self.tokens)) for _ in range(KINDS)]
        logprobs = [tuple(-draw.random() for _ in range(self.tokens)) for _ in range(KINDS)]
        version, trained, waiting = WeightVersion(0), 0, list[Group]()
        number = 0
        while True:
            prompt = Prompt(number, number, ids[number % KINDS][:30], "How many are left?", {"answer": "4"})
            steps: list[list[Event | Instruction]] = [[Admit(prompt)]]
            rollouts = []
            for member in range(self.size):
                kind = (number + member) % KINDS
                request, span = RequestId(number, member), (VersionSpan(version, version, self.tokens),)
                for start in range(0, self.tokens - STREAMED, STREAMED):
                    part = slice(start, start + STREAMED)
                    steps.append([Wrote(Segment(request, ids[kind][part], logprobs[kind][part], version, version))])
                done = Completion(number, member, ids[kind], logprobs[kind], span, FinishReason.STOP, "There are 4 left. " * 4)
                rollouts.append(Rollout(done, Reward(0.5, {"match": 0.5})))
                steps += [[Score(prompt, done)], [Scored(number, member, rollouts[-1].reward)]]
            group = Group(prompt, tuple(rollouts))
            steps.append([Keep(group)])
            if number * self.size >= OPEN:
                waiting.append(group)
            if len(waiting) == BATCH:
                steps += [[Train(trained, tuple(waiting))], [BatchTrained(WeightVersion(trained + 1))]]
                trained, waiting = trained + 1, []
            yield steps
            number += 1


def measure(flow: Flow = Flow(), folder: Path | None = None) -> Written:
    """Write a journal in a new folder (below `folder`), and read it back."""
    own = _own_cost(flow)
    with tempfile.TemporaryDirectory(dir=folder) as made:
        path = Path(made) / "journal.sqlite"
        journal = Journal(path, RunRecord("bench", "", 0, flow.size, "{}"))
        cpu, begun = time.process_time(), time.perf_counter()
        members, longest = flow.run(journal.record_step, journal.tick)
        journal.flush()
        seconds, cpu_s = time.perf_counter() - begun, time.process_time() - cpu
        journal.close()
        size, begun, cpu = os.path.getsize(path), time.perf_counter(), time.process_time()
        past = read_past(path, lambda _: True)
        read_s, read_cpu_s = time.perf_counter() - begun, time.process_time() - cpu
    read = sum(len(group.rollouts) for group in past.recovered.groups)
    cpu_us = 1e6 * cpu_s / members - own
    return Written(members, flow.tokens, seconds, members / seconds, cpu_us, longest, size, read, read_s, read_cpu_s)


def _own_cost(flow: Flow) -> float:
    """Microseconds of processor time that making up the entries of a member takes."""
    begun = time.process_time()
    members, _ = Flow(0.0, 1.0, 20_000, flow.tokens, flow.size).run(lambda entries: None, lambda: None)
    return 1e6 * (time.process_time() - begun) / members
