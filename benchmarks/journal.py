"""What the journal costs a run: the same run with it and with one that keeps nothing, in turns.

    python benchmarks/journal.py [--preset sort] [--steps 24] [--rounds 3]

Two figures. The share of its processor time that a run spends on the journal, which hardly depends on what else the machine does:
what the driver's thread spends in calls of the journal, and all of the journal's own thread. And the wall time of a step with the
journal over that without, which does.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import tempfile
import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

from rollyard.journal.journal import Journal
from rollyard.journal.record import Unkept
from rollyard.layers import resolve
from rollyard.loop import Run
from rollyard.types import WeightVersion

WARM = 1  # steps that are not measured


@dataclass(frozen=True)
class Spent:
    """Seconds of processor time."""

    process: float
    caller: float  # of the driver's thread, in calls of the journal
    thread: float  # of the journal's own


def minus(one: Spent, other: Spent) -> Spent:
    return Spent(*(getattr(one, name) - getattr(other, name) for name in ("process", "caller", "thread")))


def clock_s() -> float:
    """What reading the clock twice adds to what lies between."""
    found = []
    for _ in range(2000):
        cpu = time.thread_time()
        found.append(time.thread_time() - cpu)
    return statistics.median(found)


class Timed(Journal):
    """Counts what is spent on it, less what counting costs."""

    def __init__(self, *about: Any, **more: Any) -> None:
        self._caller = 0.0
        self._clock_s = clock_s()
        super().__init__(*about, **more)

    def record_step(self, entries: Any) -> None:
        """Counted."""
        cpu = time.thread_time()
        super().record_step(entries)
        self._caller += time.thread_time() - cpu - self._clock_s

    def tick(self) -> None:
        """Counted."""
        cpu = time.thread_time()
        super().tick()
        self._caller += time.thread_time() - cpu - self._clock_s

    def commit_checkpoint(
        self, version: WeightVersion, folder: str, prompt_cursor: int, counters: Mapping[str, object]
    ) -> Future[None]:
        """Counted."""
        cpu = time.thread_time()
        done = super().commit_checkpoint(version, folder, prompt_cursor, counters)
        self._caller += time.thread_time() - cpu - self._clock_s
        return done

    def spent(self) -> Spent:
        """So far."""
        own = [thread for thread in threading.enumerate() if thread.name.startswith("journal") and thread.ident is not None]
        clocks = [time.pthread_getcpuclockid(thread.ident) for thread in own if thread.ident is not None]
        return Spent(time.process_time(), self._caller, sum(map(time.clock_gettime, clocks)))


async def ran(preset: str, steps: int, opened: Callable[..., Journal | Unkept]) -> tuple[float, Spent | None]:
    """Seconds of a step, and what was spent on the journal."""
    kept: list[Journal | Unkept] = []

    def open_journal(*about: Any, **more: Any) -> Journal | Unkept:
        kept.append(opened(*about, **more))
        return kept[0]

    marks: list[tuple[float, Spent | None]] = []
    with tempfile.TemporaryDirectory(prefix="rollyard-bench-") as scratch:
        options = {"run.steps": steps + WARM, "run.out": f"{scratch}/run", "eval.every": 0}
        config = resolve(preset=preset, overrides=options).config
        async for step in Run(config, journal=open_journal):
            if step.step in (WARM, WARM + steps):
                marks.append((time.perf_counter(), kept[0].spent() if isinstance(kept[0], Timed) else None))
    (begun, before), (ended, after) = marks
    return (ended - begun) / steps, None if before is None or after is None else minus(after, before)


async def main() -> None:
    asked = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    asked.add_argument("--preset", default="sort")
    asked.add_argument("--steps", type=int, default=24)
    asked.add_argument("--rounds", type=int, default=3)
    given = asked.parse_args()
    ratios: list[float] = []
    shares: list[float] = []
    for number in range(1, given.rounds + 1):
        with_it, spent = await ran(given.preset, given.steps, Timed)
        without, _ = await ran(given.preset, given.steps, Unkept)
        assert spent is not None
        ratios.append(with_it / without)
        shares.append((spent.caller + spent.thread) / spent.process)
        caller, thread = spent.caller / spent.process, spent.thread / spent.process
        print(
            f"round {number}: {shares[-1]:.2%} of processor time (caller {caller:.2%}, own thread {thread:.2%}); "
            f"a step takes {with_it * 1e3:.0f} ms, without a journal {without * 1e3:.0f} ms"
        )
    print(f"median: {statistics.median(shares):.2%} of processor time, a step {statistics.median(ratios):.3f} of one without")


if __name__ == "__main__":
    asyncio.run(main())
