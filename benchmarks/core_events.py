"""What the core takes for a completion, by how many groups are live and by what is asked of it.

    python benchmarks/core_events.py [--rounds 3] [--kinds KIND ...] [--live 100 1000 ...] [--json FILE]

The conductor alone is given events that were prepared before (rollyard/bench/prepared.py), in one thread; processor time of the
process. Rows take turns, so that each round has all of them; the middle round counts. Events are those of whole runs: answers,
verdicts, prompts, and what weights need.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path

from rollyard.bench.prepared import Play, Timed, World
from rollyard.driver import collecting_seldom

COMPLETIONS = 5_000  # of a row, at least
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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--kinds", nargs="+", choices=list(KINDS), default=list(KINDS))
    parser.add_argument("--live", nargs="+", type=int, default=[100, 1_000, 10_000, 100_000], help="groups")
    parser.add_argument("--json", type=Path)
    asked = parser.parse_args()
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
