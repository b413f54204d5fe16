"""The server that agents of verifiers take for their model, in its start; without the package."""

from __future__ import annotations

import asyncio
import socket
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from rollyard import verifiers as tasks
from rollyard.episode import verifiers
from rollyard.episode.verifiers import Served, Verifiers
from rollyard.types import Prompt, Reward
from tests.episode.test_talk import Asked

pytest.importorskip("aiohttp")


class Environment:
    """One of verifiers whose servers start when they are let, or break (Env)."""

    def __init__(self, broken: bool = False) -> None:
        self.broken, self.began, self.let, self.starts = broken, asyncio.Event(), asyncio.Event(), 0

    @asynccontextmanager
    async def serving(self) -> AsyncIterator[None]:
        self.starts += 1
        self.began.set()
        if self.broken:
            raise OSError("no port is free")
        await self.let.wait()
        yield

    async def run_episode(self, task: object, context: object, on_trace: object) -> Any:
        trace = SimpleNamespace(rewards={}, metrics={}, reward=0.5, errors=[])
        return SimpleNamespace(traces=[trace], ok=True, errors=[])


@pytest.fixture
def lines(monkeypatch: pytest.MonkeyPatch) -> list[socket.socket]:
    """Those that were listened on."""
    package = ModuleType("verifiers.v1")
    package.EvalClientConfig = package.ModelContext = SimpleNamespace  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "verifiers.v1", package)
    made, create = list[socket.socket](), socket.create_server

    def create_server(address: tuple[str, int]) -> socket.socket:
        made.append(create(address))
        return made[-1]

    monkeypatch.setattr(verifiers.socket, "create_server", create_server)
    return made


async def test_a_start_that_fails_leaves_nothing_open(lines: list[socket.socket]) -> None:
    with pytest.raises(OSError, match="no port is free"):
        await Served.start(Environment(broken=True))  # type: ignore[arg-type]
    assert [line.fileno() for line in lines] == [-1]


async def test_a_start_has_a_time_limit(lines: list[socket.socket], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(verifiers, "START_S", 0.05)
    with pytest.raises(TimeoutError, match=r"servers of verifiers did not start within 0\.05 s"):
        await asyncio.wait_for(Served.start(Environment()), 10)  # type: ignore[arg-type]
    assert [line.fileno() for line in lines] == [-1]


async def test_episodes_share_a_start(lines: list[socket.socket], monkeypatch: pytest.MonkeyPatch) -> None:
    """One that ends meanwhile does not end it for the others; one that failed is tried again; other task sets do not wait."""
    stuck, broken = Environment(), Environment(broken=True)
    monkeypatch.setattr(tasks, "environment", lambda named: {"stuck": stuck, "broken": broken}[named.taskset])
    monkeypatch.setattr(tasks, "task_of", lambda column: None)
    player = Verifiers()

    def play(taskset: str) -> asyncio.Task[Reward]:
        column = {tasks.COLUMN: {"taskset": taskset, "options": ""}}
        return asyncio.create_task(player.episode(Asked(), Prompt(0, 0, (1,), "x", column)))

    first, second = play("stuck"), play("stuck")
    await asyncio.wait_for(stuck.began.wait(), 10)
    first.cancel()
    for _ in range(2):
        with pytest.raises(OSError, match="no port is free"):
            await asyncio.wait_for(play("broken"), 10)
    stuck.let.set()
    assert (await asyncio.wait_for(second, 10)).value == (await asyncio.wait_for(play("stuck"), 10)).value == 0.5
    assert first.cancelled() and (stuck.starts, broken.starts) == (1, 2)
    assert [line.fileno() == -1 for line in lines] == [False, True, True]
    (starting,) = [each for each in player._served.values() if each.exception() is None]
    await starting.result()._opened.aclose()
