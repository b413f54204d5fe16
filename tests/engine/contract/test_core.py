"""The real core and its shell with engines of every kind: none is asked before it has the weights of this run."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from rollyard import events as ev
from rollyard.errors import EngineError
from rollyard.protocols.rollouts import Engine
from rollyard.rollout.controller import Controller
from rollyard.rollout.core import RolloutCore
from rollyard.rollout.policy import RolloutPolicy
from rollyard.types import Completion, Prompt, Request, Reward, Sampling, WeightVersion
from rollyard.watch.timeline import Timeline
from tests.engine.contract.conftest import Shelf
from tests.engine.contract.makers import MAKERS, Maker, Options, Served
from tests.engine.contract.model import PROMPTS, WINDOW
from tests.engine.contract.talk import ask

pytestmark = pytest.mark.asyncio(loop_scope="session")

POLICY = RolloutPolicy(group_size=4, groups_per_batch=2, batches=2, sampling=Sampling(8, temperature=1.0), window=WINDOW)
V0, V1 = WeightVersion(0), WeightVersion(1)


class Watched:
    """An engine under a name of this run, and the requests that reached it."""

    def __init__(self, id: str, engine: Engine) -> None:
        self.id, self._engine = id, engine
        self.reached: list[Request] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)

    def generate(self, requests: Sequence[Request]) -> None:
        self.reached += requests
        self._engine.generate(requests)


class Source:
    cursor = 0

    def take(self, count: int) -> tuple[tuple[Prompt, ...], bool]:
        first, self.cursor = self.cursor, self.cursor + count
        return tuple(Prompt(i, i, PROMPTS[i % len(PROMPTS)], "") for i in range(first, self.cursor)), False


class Judge:
    async def score(self, prompt: Prompt, completion: Completion) -> Reward:
        return Reward(float(len(completion.token_ids)))

    async def close(self) -> None:
        pass


class Loop:
    """Core, controller and the inbox between them; whoever drives it plays trainer and weight sync."""

    def __init__(self, engines: dict[str, Watched]) -> None:
        self._inbox: asyncio.Queue[ev.Event | BaseException] = asyncio.Queue()
        self._core = RolloutCore(POLICY)
        post = self._inbox.put_nowait
        self.controller = Controller(engines, Source(), Judge(), lambda ids, stop, finish: "", post, post, Timeline())  # type: ignore[arg-type]
        self.batches: list[ev.BatchTaken] = []

    def send(self, message: ev.Event | ev.Signal) -> None:
        outputs = self._core.step(message, asyncio.get_running_loop().time())
        self.batches += [output for output in outputs if isinstance(output, ev.BatchTaken)]
        self.controller.carry_out(output for output in outputs if isinstance(output, ev.Instruction))

    async def until_batch(self, number: int) -> ev.BatchTaken:
        async with asyncio.timeout(30):
            while len(self.batches) <= number:
                event = await self._inbox.get()
                if isinstance(event, BaseException):
                    raise event
                self.send(event)
        return self.batches[number]

    async def rest(self, seconds: float) -> None:
        """Let happen what would happen."""
        with suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                while True:
                    event = await self._inbox.get()
                    assert not isinstance(event, BaseException), event
                    self.send(event)


async def test_no_request_reaches_an_engine_before_its_sync(maker: Maker, shelf: Shelf, base: Path, tmp_path: Path) -> None:
    """One that comes up with base weights has no version: the core asks it nothing, and it would refuse."""
    restarted = await shelf.fresh()
    if not restarted.engine.capabilities.train:
        assert restarted.engine.version is not None  # it is what it is: there is no sync to wait for
        return
    assert restarted.engine.version is None
    with pytest.raises(EngineError, match="acknowledged no weights"):
        restarted.engine.generate([ask(PROMPTS[0])])
    async with MAKERS[maker.partner].open(base, tmp_path, Options(slots=3)) as ready:
        await ready.change(base, V0)
        await check_order(ready, restarted, base)


async def check_order(ready: Served, restarted: Served, base: Path) -> None:
    """A batch by the engine that is ready, then one by the engine that has the next version first."""
    engines = {"ready": Watched("ready", ready.engine), "restarted": Watched("restarted", restarted.engine)}
    loop = Loop(engines)
    loop.controller.listen()
    loop.send(ev.GenerationOpened())
    loop.send(ev.BatchWanted())
    for name, engine in engines.items():
        loop.send(ev.EngineUp(name, engine.slots, engine.version))
    first = await loop.until_batch(0)
    assert [len(group.rollouts) for group in first.groups] == [4, 4]
    assert len(engines["ready"].reached) == 8 and not engines["restarted"].reached

    loop.send(ev.BatchTrained(V1))
    loop.send(ev.BatchWanted())
    await loop.rest(0.1)  # nobody has the new weights yet
    assert len(engines["ready"].reached) == 8 and not engines["restarted"].reached
    await restarted.change(base, V1)
    await loop.rest(0.1)  # it has them, and has not said so
    assert not engines["restarted"].reached
    loop.send(ev.EngineLoaded("restarted", V1))
    second = await loop.until_batch(1)
    assert len(engines["ready"].reached) == 8 and len(engines["restarted"].reached) == 8
    spans = {span[:2] for group in second.groups for rollout in group.rollouts for span in rollout.completion.spans}
    assert spans == {(V1, V1)}
    await loop.controller.close()
