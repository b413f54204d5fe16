"""The run's end of the line to an actor, whose other end is a double: no cluster."""

from __future__ import annotations

import asyncio
import time

import pytest

from rollyard.errors import EngineLost
from rollyard.place import actor as actors
from rollyard.place.actor import Actor, Hold

SILENT_S = 0.3


class Node:
    """Where an actor may be: it answers, is cut off, or is gone."""

    def __init__(self) -> None:
        self.killed = 0
        self.gone = False
        self._linked = asyncio.Event()
        self._linked.set()

    def cut(self) -> None:
        self._linked.clear()

    def heal(self) -> None:
        self._linked.set()

    async def pulse(self) -> None:
        await asyncio.to_thread(time.sleep, 0.02)  # the answer comes from outside, and over some turns of the loop
        for _ in range(3):
            await asyncio.sleep(0)
        await self._linked.wait()
        if self.gone:
            raise ConnectionResetError

    async def fetch(self) -> bytes:
        while True:
            await self.pulse()

    async def take(self, batch: bytes) -> None:
        await self.pulse()

    async def hurt(self, seconds: float, share: float) -> None:
        await self.pulse()

    def kill(self) -> None:
        self.killed += 1
        self.gone = True

    def actor(self) -> Actor:
        failures = (ConnectionError,)
        hold = Hold(self.take, self.fetch, self.pulse, self.kill, self.hurt, failures, lambda error: type(error).__name__)
        return Actor("the station", hold, {"pid": 1, "logs": []}, SILENT_S)


@pytest.fixture(autouse=True)
def _often(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(actors, "PULSE_S", 0.02)


async def test_an_actor_that_cannot_be_reached_is_lost_with_the_cause() -> None:
    node = Node()
    actor = node.actor()
    waiting = asyncio.create_task(actor.call("ask", limit_s=60))
    await asyncio.sleep(0.1)
    assert not actor.lost
    node.cut()
    began = time.monotonic()
    assert await actor.ended() == "was silent for 0.3 s"
    assert SILENT_S - 0.05 < time.monotonic() - began < 2
    with pytest.raises(EngineLost, match=r"the station was silent for 0\.3 s"):
        await waiting
    assert node.killed  # whenever it can be reached again
    began = time.monotonic()
    await actor.close()
    assert time.monotonic() - began < 1


async def test_a_moment_of_silence_is_nothing() -> None:
    node = Node()
    actor = node.actor()
    for _ in range(3):
        node.cut()
        await asyncio.sleep(SILENT_S / 2)
        node.heal()
        await asyncio.sleep(0.05)
    assert not actor.lost and not node.killed
    node.gone = True
    assert await actor.ended() == "died: ConnectionResetError"
    await actor.close()


async def test_closing_while_it_is_cut_off_takes_no_longer_than_its_silence() -> None:
    node = Node()
    actor = node.actor()
    await asyncio.sleep(0.05)
    node.cut()
    began = time.monotonic()
    await actor.close()
    assert time.monotonic() - began < SILENT_S + 1 and node.killed


async def test_a_run_that_stood_still_itself_takes_nobody_for_silent() -> None:
    node = Node()
    actor = node.actor()
    for _ in range(3):
        await asyncio.sleep(0.05)
        time.sleep(2 * SILENT_S)  # noqa: ASYNC251 (that is what it is about)
    await asyncio.sleep(0.1)
    assert not actor.lost and not node.killed
    node.gone = True  # else it would be waited for as long as a host may take to end
    assert await actor.ended() == "died: ConnectionResetError"
    await actor.close()
