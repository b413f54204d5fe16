"""Two lives of a run, as its sinks see them: the second begins with step 3 of 5, does two steps again, and ends at 6."""

from __future__ import annotations

import asyncio
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path

from rollyard.protocols.devices import Sink, Tracked
from rollyard.watch.aside import Aside, Record, Tell

CONFIG = {"run": {"steps": 6, "name": "r"}, "rollout": {"stop": ["#"], "temperature": 1.0}, "reward": {"model": {"folder": ""}}}
SUMMARY: Record = {"run/steps": 6, "run/reward/last": 0.5, "run/cause": "all steps are done", "run/failed": False}


def record(step: int, life: int) -> Record:
    """Of a step: `reward_mean` says who did it."""
    odd = {"train/loss": float("nan"), "train/kl": None, "reward/judge.py:f(x)/mean": 0.25}
    return {"step": step, "incarnation": life, "reward_mean": step + life / 2, **odd}


def as_read(record: Record) -> Record:
    """From metrics.jsonl, where numbers that are not finite are texts."""
    return {name: "nan" if value != value else value for name, value in record.items()}


async def _live(sink: Callable[[Tell], Sink], name: str, run: Tracked, steps: Sequence[Record], *, ends: bool) -> None:
    writer = Aside(name, sink, limit_s=50)
    writer.open(run)
    for each in steps:
        writer.write(each)
        step = int(str(each["step"]))
        if step % 2 == 0:
            writer.evaluated({"step": step, "eval/reward_mean": step / 8})
    if ends:
        writer.close(SUMMARY, failed=False)
        await writer.closed()
    else:
        note = run.folder / "trackers" / f"{name}.json"
        while not note.exists() or '"step": 5' not in note.read_text():
            await asyncio.sleep(0.02)
            writer.hear()


def two_lives(sink: Callable[[Tell], Sink], name: str, folder: Path) -> list[str]:
    """The first one is killed. Returns what was warned of."""
    folder.mkdir()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        first = Tracked("r", folder, "rollyard", CONFIG)
        asyncio.run(asyncio.wait_for(_live(sink, name, first, [record(step, 0) for step in range(1, 6)], ends=False), 50))
        rows = [as_read(record(step, 0)) for step in range(1, 4)]
        again = Tracked("r", folder, "rollyard", CONFIG, again=True, begins=3, earlier=rows)
        asyncio.run(_live(sink, name, again, [record(step, 1) for step in range(4, 7)], ends=True))
    return [str(each.message) for each in caught]
