"""One asks for one verdict at a time; a model judges batch by batch. What comes between."""

from __future__ import annotations

import asyncio
import math
from dataclasses import dataclass
from typing import Protocol

from rollyard.errors import ScoringError, TimeLimitExceeded
from rollyard.protocols.devices import Device
from rollyard.reward.budget import next_batch
from rollyard.reward.classifier import Asked, Row
from rollyard.types import Activity, Completion, Prompt, Reward


class Model(Protocol):
    """What judges rows, such as `Classifier`."""

    def row(self, asked: Asked) -> Row:
        """Raises ScoringError for what cannot be judged."""
        ...

    def judge(self, rows: list[Row]) -> list[float]: ...


class NoVerdict(ScoringError):
    """Of one text, or of one batch."""


@dataclass(frozen=True, slots=True, eq=False)
class _Waiting:
    row: Row
    began: asyncio.Future[None]  # its batch, on the device
    answer: asyncio.Future[float]


class Batched:
    """Judges by a model on a device (protocols.Scorer).

    While a batch runs, what is asked waits and makes the next ones; on a device that others use, they get their turns between.

    Args:
        model: called on the device but for `row`.
        device: where it is.
        budget: tokens of a batch at most, padding counted.
        limit_s: seconds a verdict may take from the moment on which its batch begins on the device.
        wait_s: seconds until then. Whoever is too late there is a sign of too much to judge, not of a bad text.
    """

    def __init__(self, model: Model, device: Device, budget: int, limit_s: float, wait_s: float) -> None:
        self._model, self._device, self._budget = model, device, budget
        self._limit_s, self._wait_s = limit_s, wait_s
        self._waiting: list[_Waiting] = []
        self._working: asyncio.Task[None] | None = None

    async def score(self, prompt: Prompt, completion: Completion) -> Reward:
        """See `reward`."""
        return await self.reward(Asked.of(prompt, completion))

    async def reward(self, asked: Asked) -> Reward:
        """No verdict where it takes too long, the text is too long, the model fails, or says what is no number.

        Raises ScoringError when its batch does not begin.
        """
        try:
            row = self._model.row(asked)
        except ScoringError as error:
            return Reward(None, problem=str(error))
        try:
            value = await self._value(row)
        except (NoVerdict, TimeLimitExceeded) as error:
            return Reward(None, problem=str(error))
        if not math.isfinite(value):
            return Reward(None, problem=f"the reward model says {value}")
        return Reward(value)

    async def close(self) -> None:
        """What still waits is given up. A batch that runs is not interrupted."""
        if self._working is not None:
            self._working.cancel()
            await asyncio.gather(self._working, return_exceptions=True)
        for waiting in self._waiting:
            waiting.answer.cancel()

    async def _value(self, row: Row) -> float:
        loop = asyncio.get_running_loop()
        waiting = _Waiting(row, loop.create_future(), loop.create_future())
        waiting.answer.add_done_callback(lambda done: done.cancelled() or done.exception())  # whoever asked may have gone
        self._waiting.append(waiting)
        if self._working is None or self._working.done():
            self._working = asyncio.create_task(self._work(), name="reward model")
        try:
            first, both = asyncio.FIRST_COMPLETED, (waiting.began, waiting.answer)
            if not (await asyncio.wait(both, timeout=self._wait_s, return_when=first))[0]:
                problem = f"a text waited {self._wait_s:g} s, and its batch has not begun"
                raise ScoringError(f"the reward model is overloaded, or its device is held: {problem} (reward.model.wait_s)")
            async with asyncio.timeout(self._limit_s):
                return await waiting.answer
        except TimeoutError:
            raise TimeLimitExceeded(f"the reward model gave no verdict within {self._limit_s:g} s") from None
        finally:
            waiting.answer.cancel()  # nobody waits for it any more

    async def _work(self) -> None:
        await asyncio.sleep(0)  # what is asked in the same moment belongs to the first batch
        while self._waiting:
            self._waiting = [each for each in self._waiting if not each.answer.done()]  # nobody waits for it any more
            if not self._waiting:
                return
            chosen = next_batch([len(each.row.ids) for each in self._waiting], self._budget)
            batch = [self._waiting[place] for place in chosen]
            for place in reversed(chosen):
                del self._waiting[place]
            await self._judge(batch)

    async def _judge(self, batch: list[_Waiting]) -> None:
        loop = asyncio.get_running_loop()

        def begin() -> None:
            for each in batch:
                if not each.began.done():
                    each.began.set_result(None)

        def judging(rows: list[Row]) -> list[float]:
            loop.call_soon_threadsafe(begin)  # others may have had the device until now
            return self._model.judge(rows)

        judge = self._device.spans.timed(Activity.SCORE, judging, "reward model")
        try:
            values = await self._device.run(judge, [each.row for each in batch])
        except Exception as error:  # noqa: BLE001 - whatever torch raises, those who asked are told
            values = []
            for each in batch:
                if not each.answer.done():
                    each.answer.set_exception(NoVerdict(f"the reward model failed: {type(error).__name__}: {error}"))
        for each, value in zip(batch, values, strict=False):
            if not each.answer.done():
                each.answer.set_result(value)
