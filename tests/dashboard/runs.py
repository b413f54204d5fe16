"""Real runs of stations that answer at once, and a browser's questions to their dashboard, in this process."""

from __future__ import annotations

import asyncio
import shutil
import time
from collections.abc import Callable, Mapping, Sequence, Set
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from hashlib import blake2b
from pathlib import Path
from typing import Any, cast

import httpx

from rollyard.bench.doubles import DoubleTrainer, Meter
from rollyard.bench.instant import Flight, instant_stations
from rollyard.bench.load import WARM, Case, config_of
from rollyard.dashboard.app import make_app
from rollyard.dashboard.shown import Shown
from rollyard.journal.folder import RunFolder
from rollyard.journal.recover import Past
from rollyard.loop import Run
from rollyard.prompts.source import Row, Source
from rollyard.protocols.rollouts import Scorer
from rollyard.stations import Stations
from rollyard.types import Activity, Completion, Prompt, Request, Reward, TrainBatch, TrainStats, WeightVersion
from rollyard.watch.accounts import ENGINE, TRAINER
from rollyard.watch.kept import read_kept
from rollyard.watch.spans import SpanLog
from rollyard.watch.step import Step

GROUPS, SIZE = 4, 4
HERE = "http://127.0.0.1:8000"
EVIL = "<script>alert(1)</script>\x1b[2J\u202e</pre>"  # what a policy may write


def drawn(*parts: int) -> int:
    """A number that belongs to these."""
    return int.from_bytes(blake2b(repr(parts).encode(), digest_size=4).digest(), "little")


class Judge:
    """Another reward for each member, and none for some (protocols.Scorer)."""

    async def score(self, prompt: Prompt, completion: Completion) -> Reward:
        found = drawn(completion.group, completion.member)
        if found % 11 == 0:
            return Reward(None, {}, "ValueError: no number")
        return Reward(found % 5 / 4, {"match": found % 5 / 4, "form": 0.5})

    async def close(self) -> None:
        """Nothing is open."""


class Trainer(DoubleTrainer):
    """Notes when it trains."""

    def __init__(self, step_s: float, version: WeightVersion) -> None:
        super().__init__(step_s, Meter())
        self._version, self.spans = version, SpanLog()

    async def train(self, shards: Sequence[TrainBatch]) -> TrainStats:
        with self.spans.doing(Activity.TRAIN, "step"):
            return await super().train(shards)


def named(done: Set[int]) -> Source:
    """Prompts without end that have a text and a column, but for those that are done."""
    return Source(
        lambda at: (at, Row(f"prompt {at}", {"answer": EVIL})), lambda at, row: ((at + 2, 3), str(row.prompt)), None, done
    )


def run_of(scratch: Path, steps: int = 6, *, step_s: float = 0.0, engines: int = 2, **more: object) -> Run:
    """In `scratch/run`. Now and then a request fails, over and over: its member is dropped."""
    scratch.mkdir(exist_ok=True)
    case = Case(SIZE, GROUPS, steps - WARM, engines=engines, slots=8, staleness=1, journal=True)
    config = config_of(case, scratch, {"rollout.retries": 0, **{name.replace("__", "."): value for name, value in more.items()}})

    def fate(request: Request) -> str:
        return "error" if drawn(*request.id) % 13 == 0 else ""

    def stations(past: Past) -> Stations:
        made, trainer = instant_stations(engines, 8, Flight(), fate=fate), Trainer(step_s, past.version)
        return replace(
            made,
            scorer=cast(Scorer, Judge()),
            source=named(past.done),
            text=lambda ids, stop, finish: f"{EVIL} of {len(ids)}",
            trainers={None: trainer},
            spans=(("trainer", TRAINER, trainer.spans), *((name, ENGINE, engine.spans) for name, engine in made.engines.items())),
        )

    return Run(config, stations=stations)


def through(run: Run, heard: Callable[[Step], object] = lambda step: None) -> None:
    """To its end, in a thread of its own: the test may have a loop."""

    async def steps() -> None:
        async with asyncio.timeout(40):
            async for step in run:
                heard(step)

    with ThreadPoolExecutor(1) as pool:
        pool.submit(asyncio.run, steps()).result()


def leave(run: Run, place: Path) -> RunFolder:
    """What it would leave if it were killed now."""
    assert run._ring is not None
    run._ring._recorder._journal.flush()  # type: ignore[attr-defined]
    limit = time.monotonic() + 20
    while (kept := read_kept(run.folder.timeline)) is None or kept.whole:  # a thread is about to write it
        assert time.monotonic() < limit
        time.sleep(0.01)
    shutil.copytree(run.folder.path, place, ignore=shutil.ignore_patterns("*.sock"))
    return RunFolder(place)


def asking(shown: Shown | RunFolder, base: str = HERE) -> httpx.AsyncClient:
    """A browser."""
    app = make_app(shown if isinstance(shown, Shown) else Shown(shown))
    return httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url=base)


async def answers(client: httpx.AsyncClient, path: str, **asked: Any) -> Any:
    """Of an address under /api, which answers well."""
    answer = await client.get(f"/api/{path}", params=asked)
    assert answer.status_code == 200, answer.text
    return answer.json()


def contents(folder: Path) -> Mapping[str, tuple[int, bytes]]:
    """Of every file, and when it was written."""
    return {str(path): (path.stat().st_mtime_ns, path.read_bytes()) for path in sorted(folder.rglob("*")) if path.is_file()}
