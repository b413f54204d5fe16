"""Real runs of stations that answer at once, and a browser's questions to their dashboard, in this process."""

from __future__ import annotations

from collections.abc import Mapping
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
from rollyard.loop import Run
from rollyard.protocols.rollouts import PromptSource, Scorer
from rollyard.types import Completion, Prompt, Request, Reward

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


class Named:
    """Prompts without end that have a text and a column (protocols.PromptSource)."""

    def __init__(self) -> None:
        self.cursor = 0

    def take(self, count: int) -> tuple[tuple[Prompt, ...], bool]:
        begin, self.cursor = self.cursor, self.cursor + count
        return tuple(Prompt(at, at, (at + 2, 3), f"prompt {at}", {"answer": EVIL}) for at in range(begin, self.cursor)), False


def run_of(scratch: Path, steps: int = 6, *, step_s: float = 0.0, engines: int = 2, **more: object) -> Run:
    """In `scratch/run`. Now and then a request fails, over and over: its member is dropped."""
    scratch.mkdir(exist_ok=True)
    case = Case(SIZE, GROUPS, steps - WARM, engines=engines, slots=8, staleness=1, journal=True)
    config = config_of(case, scratch, {"rollout.retries": 0, **{name.replace("__", "."): value for name, value in more.items()}})

    def fate(request: Request) -> str:
        return "error" if drawn(*request.id) % 13 == 0 else ""

    stations = replace(
        instant_stations(engines, 8, Flight(), fate=fate),
        scorer=cast(Scorer, Judge()),
        source=cast(PromptSource, Named()),
        text=lambda ids, stop, finish: f"{EVIL} of {len(ids)}",
        trainers={None: DoubleTrainer(step_s, Meter())},
    )
    return Run(config, stations=lambda past: stations)


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
