"""What the core takes for a completion, by how many groups are live and by what is asked of it.

    python benchmarks/core_events.py [--rounds 3] [--kinds KIND ...] [--live 100 1000 ...] [--json FILE]
    python benchmarks/core_events.py --profile --rounds 30 --kinds "K 8" --live 1000

The conductor alone is given events that were prepared before (rollyard/bench/prepared.py), in one thread; processor time of the
process. Rows take turns, so that each round has all of them; the middle round counts. Events are those of whole runs: answers,
verdicts, prompts, and what weights need. --profile says in which functions the time goes instead: the line that runs is looked at
every 4 ms of processor time, which does not slow what is called often, as a tracing profiler does.
"""

from __future__ import annotations

import argparse
import json
import signal
import statistics
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, replace
from pathlib import Path
from types import FrameType

from rollyard.bench.prepared import Play, Timed, World
from rollyard.driver import collecting_seldom

COMPLETIONS = 5_000  # of a row, at least
SAMPLED_S = 4e-3  # of processor time; Linux is seldom finer
SHOWN = 20  # functions of a profile
KINDS = {
    "as it comes": Play(100, 1, 0),
    "K 8": Play(100, 8, 0),
    "colocated": Play(100, 1, 0, placement="colocated", staleness=0),
    "longest first": Play(100, 1, 0, order="longest"),
    "moves": Play(100, 1, 0, moves=1),
    "over-sampled by half": Play(100, 1, 0, oversample=0.5),
    "three in ten filtered": Play(100, 2, 0, filtered=0.3),
    "40 batches under way": Play(100, 1, 0, staleness=39),
}


def rows(kinds: Sequence[str], lives: Sequence[int]) -> dict[tuple[str, int], Play]:
    """Runs of each kind with more and more groups live, of as many batches as are live at least."""
    found = {}
    for kind, play in ((kind, KINDS[kind]) for kind in kinds):
        for live in lives:
            sized = replace(play, live=live)
            found[kind, live] = replace(sized, steps=max(COMPLETIONS // (sized.groups * sized.size), sized.staleness + 1))
    return found


def fed(play: Play, events: Sequence[Timed]) -> float:
    """Seconds of processor time that a fresh conductor takes for them."""
    step = play.conductor().step
    with collecting_seldom():
        began = time.process_time()
        for event, now in events:
            step(event, now)
        return time.process_time() - began


@contextmanager
def sampled(seen: Counter[tuple[str, str]]) -> Iterator[None]:
    """Counts the functions that run, by name and module, and C that they call as theirs."""

    def look(_: int, frame: FrameType | None) -> None:
        if frame is None:
            return
        name, module = frame.f_code.co_qualname, str(frame.f_globals.get("__name__"))
        if frame.f_code.co_filename == "<string>" and (self := frame.f_locals.get("self")) is not None:  # made by dataclasses
            name, module = f"{type(self).__name__}.{frame.f_code.co_name}", type(self).__module__
        elif frame.f_code.co_filename == "<string>":  # a named tuple that is made
            name, module = module, "collections"
        seen[name, module] += 1

    before = signal.signal(signal.SIGPROF, look)
    signal.setitimer(signal.ITIMER_PROF, SAMPLED_S, SAMPLED_S)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.signal(signal.SIGPROF, before)


def profile(play: Play, rounds: int) -> None:
    """Prints the functions and the modules that take most of it."""
    events, seen, seconds = World(play).prepare(), Counter[tuple[str, str]](), 0.0
    for _ in range(rounds):
        with sampled(seen):
            seconds += fed(play, events)
    modules = Counter[str]()
    for (_, module), times in seen.items():
        modules[module] += times
    print(f"{seen.total()} samples of {seconds:.1f} s, {rounds * len(events) / seconds:,.0f} events/s")
    for (name, module), times in seen.most_common(SHOWN):
        print(f"| `{name}` | `{module}` | {times / seen.total():.1%} |")
    for module, times in modules.most_common(SHOWN):
        print(f"| `{module}` | {times / seen.total():.1%} |")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--kinds", nargs="+", choices=list(KINDS), default=list(KINDS))
    parser.add_argument("--live", nargs="+", type=int, default=[100, 1_000, 10_000, 100_000], help="groups")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--profile", action="store_true", help="once for each row, fed as many times as there are rounds")
    asked = parser.parse_args()
    if asked.profile:
        for (kind, live), play in rows(asked.kinds, asked.live).items():
            print(f"{kind}, {live:,} live")
            profile(play, asked.rounds)
        return
    plays, seconds, events = rows(asked.kinds, asked.live), dict[tuple[str, int], list[float]](), dict[tuple[str, int], int]()
    for _ in range(asked.rounds):
        for row, play in plays.items():
            prepared = World(play).prepare()  # again each time: all of them at once would fill the memory
            events[row] = len(prepared)
            seconds.setdefault(row, []).append(fed(play, prepared))
            print(f"{row[0]}, {row[1]:,} live: {len(prepared) / seconds[row][-1]:,.0f} events/s", flush=True)
    found = []
    for row, play in plays.items():
        middle = statistics.median(seconds[row])
        completions = play.groups * play.steps * play.size
        found.append({"kind": row[0], "live": row[1], "events_per_s": events[row] / middle, "us": middle / completions * 1e6})
        print(f"| {row[0]} | {row[1]:,} | {events[row] / middle:,.0f} | {middle / completions * 1e6:.1f} |")
    if asked.json is not None:
        kinds = {kind: asdict(play) for kind, play in KINDS.items()}
        asked.json.write_text(json.dumps({"rows": found, "kinds": kinds, "rounds": asked.rounds}, indent=1) + "\n")


if __name__ == "__main__":
    main()
