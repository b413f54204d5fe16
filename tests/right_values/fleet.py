"""The real core and its shell over fake engines; whoever drives it plays trainer and weight sync."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Sequence
from itertools import count

from rollyard import events as ev
from rollyard.engine.fake import FakeEngine, Script, by_seed
from rollyard.rollout.controller import Controller
from rollyard.rollout.core import RolloutCore
from rollyard.rollout.policy import RolloutPolicy
from rollyard.types import Completion, Group, Manifest, Prompt, Request, Reward, Sampling, WeightVersion
from rollyard.watch.timeline import Timeline
from tests.right_values.hand import prompts


class Source:
    """So many prompts, once."""

    def __init__(self, left: Sequence[Prompt]) -> None:
        self._left = list(left)

    def take(self, count: int) -> tuple[tuple[Prompt, ...], bool]:
        given, self._left = self._left[:count], self._left[count:]
        return tuple(given), not self._left


class Judge:
    async def score(self, prompt: Prompt, completion: Completion) -> Reward:
        return Reward(float(len(completion.token_ids)))

    async def close(self) -> None:
        """Nothing is held."""


class Fleet:
    """A whole loop without weights. `run` trains until the prompts are used up.

    Args:
        asked_for: prompts, or how many.
        engines: how many.
        rules: of the core.
    """

    def __init__(
        self,
        asked_for: int | Sequence[Prompt],
        engines: int = 1,
        script: Callable[[Request], Script] = by_seed,
        window: int = 100,
        **rules: object,
    ) -> None:
        policy = dict(group_size=3, groups_per_batch=10, batches=100, sampling=Sampling(40), window=window, min_scored=2) | rules
        self.engines = {f"e{i}": FakeEngine(f"e{i}", slots=4, script=script) for i in range(engines)}
        self.core = RolloutCore(RolloutPolicy(**policy))  # type: ignore[arg-type]
        self._inbox: asyncio.Queue[ev.Event | BaseException] = asyncio.Queue()
        post = self._inbox.put_nowait
        source = Source(prompts(*range(asked_for)) if isinstance(asked_for, int) else asked_for)
        self._controller = Controller(
            self.engines, source, Judge(), lambda ids, stop, finish: "", post, post, Timeline()  # type: ignore[arg-type]
        )  # fmt: skip
        self.batches: list[tuple[Group, ...]] = []
        self.most_live = 0
        self.asked: Counter[str] = Counter()  # requests by engine
        self.requests: list[Request] = []
        self.finished = False
        self._versions = count(1)

    async def run(self) -> None:
        for engine in self.engines.values():
            await engine.start()
        self._controller.listen()
        await self._load(0)
        self._send(ev.GenerationOpened())
        for name, engine in self.engines.items():
            self._send(ev.EngineUp(name, engine.slots, engine.version))
        self._send(ev.BatchWanted())
        try:
            async with asyncio.timeout(30):
                while not self.finished:
                    event = await self._inbox.get()
                    if isinstance(event, BaseException):
                        raise event
                    if self._send(event):
                        await self._train()
        finally:
            await self._controller.close()
            for engine in self.engines.values():
                await engine.close()

    def _send(self, message: ev.Event | ev.Signal) -> bool:
        """Whether a batch was taken."""
        said = self.core.step(message, 0.0)
        taken = [each for each in said if isinstance(each, ev.BatchTaken)]
        self.batches += [each.groups for each in taken]
        asked = [each for each in said if isinstance(each, ev.Generate)]
        self.asked.update(each.engine for each in asked)
        self.requests += [each.request for each in asked]
        self.most_live = max(self.most_live, self.core.live)
        self.finished |= any(isinstance(each, ev.RolloutsFinished) for each in said)
        self._controller.carry_out(each for each in said if isinstance(each, ev.Instruction))
        return bool(taken)

    async def _train(self) -> None:
        version = next(self._versions)
        self._send(ev.BatchTrained(WeightVersion(version)))
        for name in self.engines:
            self._send(ev.EngineHeld(name))
        await self._load(version)
        for name in self.engines:
            self._send(ev.EngineLoaded(name, WeightVersion(version)))
            self._send(ev.EngineReleased(name))
        self._send(ev.BatchWanted())

    async def _load(self, version: int) -> None:
        for engine in self.engines.values():
            await engine.pause(ev.Rollover.KEEP)
            await engine.prepare(Manifest(WeightVersion(version), (), 0))
            await engine.load(WeightVersion(version))
            await engine.resume()
