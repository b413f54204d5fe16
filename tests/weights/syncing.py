"""Publisher, receivers and the shell of the sync around scripted engines, driven by the rollover machine alone."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, cast

import torch

from rollyard import events as ev
from rollyard.config import WeightsConfig
from rollyard.engine.fake import FakeEngine
from rollyard.fitness import EngineUnfit
from rollyard.model.folder import load
from rollyard.model.transformer import CausalLM
from rollyard.protocols.weights import Receiver
from rollyard.rollout.controller import Controller
from rollyard.types import Manifest, Request, RequestId, Sampling, Sent, WeightVersion
from rollyard.watch.timeline import Timeline
from rollyard.weights.rollover import RolloverMachine
from rollyard.weights.sync import Sync
from tests.weights.moving import Sides, sides, step


class Receiving(FakeEngine):
    """Its tokens are scripted; its weights are real ones, from a real receiver. `happens` may break what it does."""

    def __init__(self, id: str, receiver: Receiver) -> None:
        super().__init__(id, token_s=0.001)
        self.receiver = receiver
        self.happens: Callable[[str], None] = lambda part: None
        self.answers = True
        self.weights: dict[str, torch.Tensor] = {}

    async def prepare(self, manifest: Manifest) -> None:
        self.happens("prepare")
        if not self.answers:
            await asyncio.Event().wait()
        self._check_alive()
        await asyncio.to_thread(self.receiver.prepare, manifest)
        await super().prepare(manifest)

    async def load(self, version: WeightVersion) -> None:
        self.happens("load")
        self._check_alive()
        self.weights = dict(self.receiver.take(version) or {})
        await super().load(version)

    def kill(self) -> None:
        """As the end of its process would: its ends of the lines close too."""
        self.receiver.close()
        self.die("killed")


class Driven:
    """A run's weights without the rest of the run."""

    def __init__(self, model: CausalLM, both: Sides, engines: dict[str, Receiving], config: WeightsConfig) -> None:
        self.model, self.publisher, self.device, self.engines = model, both.publisher, both.device, engines
        self.inbox: asyncio.Queue[ev.Event | BaseException] = asyncio.Queue()
        self.machine = RolloverMachine(config.rollover, config.retries)
        timeline, post = Timeline(), self.inbox.put_nowait
        text = lambda ids, stop, finish: ""  # noqa: E731
        self.controller = Controller(cast(Any, engines), cast(Any, None), cast(Any, None), text, post, post, timeline)
        self.recorder = Recording()
        publishers, prover = dict.fromkeys(engines, both.publisher), cast(Any, None)
        self.sync = Sync(publishers, prover, cast(Any, engines), config, post, timeline, cast(Any, self.recorder))
        self.tasks: set[asyncio.Task[None]] = set()
        self.silent: dict[str, str] = {}  # why, of those that were killed for it

    async def start(self) -> None:
        self.controller.listen()
        for engine in self.engines.values():
            await engine.start()
            self.machine.step(ev.EngineUp(engine.id, engine.slots, engine.version), 0.0)

    async def bring(self, number: int) -> str:
        """The parameters change, and go to the engines as version `number`. Empty, or why they did not get there."""
        step(self.model, number)
        return await self.roll(number)

    async def roll(self, number: int) -> str:
        """The same with the parameters as they are."""
        version = WeightVersion(number)
        self._carry_out([ev.Publish(version)])
        while True:
            event = await self.inbox.get()
            if isinstance(event, BaseException):
                raise event
            if isinstance(event, EngineUnfit):
                self.silent[event.engine] = event.cause
                self.engines[event.engine].kill()
            messages: deque[ev.Event | ev.Signal] = deque([event])
            if isinstance(event, ev.Published):
                messages.append(ev.RolloverWanted(event.version))
            for output in [output for message in messages for output in self.machine.step(message, 0.0)]:
                if output == ev.RolloverDone(version):
                    return ""
                if isinstance(output, ev.RolloverFailed):
                    return output.cause
                self._carry_out([output])

    def heard(self) -> list[ev.Event | BaseException]:
        """What nobody has taken out of the inbox."""
        return [self.inbox.get_nowait() for _ in range(self.inbox.qsize())]

    async def ask(self, count: int) -> int:
        """An evaluation; how many were answered."""
        requests = [Request(RequestId(-1, member), (5, 6), Sampling(8), seed=member) for member in range(count)]
        return len(await self.controller.complete(requests))

    def has(self, engine: str) -> bool:
        """Does it decode with the trainer's parameters as they are now?"""
        weights = self.engines[engine].weights
        return all(torch.equal(weights[name], parameter) for name, parameter in self.model.named_parameters())

    async def close(self) -> None:
        for task in self.tasks:
            task.cancel()
        await asyncio.gather(*self.tasks, return_exceptions=True)
        await self.controller.close()
        for engine in self.engines.values():
            await engine.close()

    def _carry_out(self, outputs: list[ev.Instruction | ev.Signal]) -> None:
        for output in outputs:
            action = self.sync.actions.get(type(output))  # type: ignore[arg-type]
            if action is not None:
                task = asyncio.create_task(action(output))
                self.tasks.add(task)
                task.add_done_callback(self._done)

    def _done(self, task: asyncio.Task[None]) -> None:
        self.tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            self.inbox.put_nowait(error)


class Recording:
    """Takes what a recorder takes."""

    def copied(self, count: int) -> None: ...

    def sent(self, sent: Sent) -> None: ...


@asynccontextmanager
async def driven(
    kind: str, folder: Path, *, engines: int = 2, limit_s: float = 5.0, retries: int = 1, rollover: ev.Rollover = ev.Rollover.KEEP
) -> AsyncIterator[Driven]:
    model = load(folder)
    config = WeightsConfig(probe=False, limit_s=limit_s, retries=retries, rollover=rollover)
    async with sides(kind, model, folder, engines=engines, limit_s=limit_s) as both:
        receiving = {name: Receiving(name, receiver) for name, receiver in both.receivers.items()}
        made = Driven(model, both, receiving, config)
        await made.start()
        try:
            yield made
        finally:
            await made.close()
