"""A reward model in a process of its own, as the run sees it, and how that serves it."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

from pydantic import TypeAdapter

from rollyard.config import RewardModelConfig
from rollyard.errors import ConfigError, EngineLost, ScoringError, TimeLimitExceeded
from rollyard.protocols.devices import Spans
from rollyard.protocols.processes import Channel
from rollyard.reward.batched import Batched
from rollyard.reward.classifier import Asked
from rollyard.types import Activity, Completion, Prompt, Reward
from rollyard.watch.spans import SpanLog, hear, telling

ASKED, REWARD = TypeAdapter(Asked), TypeAdapter(Reward)
LATE_S = 5.0  # seconds beyond its own limit after which an answer is not waited for


class RemoteModel:
    """Judges by a model at the other end of a line (protocols.Scorer). A process that is lost is started again, so often.

    Args:
        launch: starts the process.
        config: the time limit, and how often it may be lost.
        start_s: seconds it may take to load.
    """

    def __init__(self, launch: Callable[[], Awaitable[Channel]], config: RewardModelConfig, start_s: float) -> None:
        self._launch, self._config, self._start_s = launch, config, start_s
        self._left = config.restarts
        self._up: asyncio.Task[Channel] | None = None  # the line to the one that is there, or what brings it
        self._watching: asyncio.Task[None] | None = None
        self._closed = False
        self.spans = SpanLog()  # of its device, whichever process has it

    async def start(self) -> None:
        """Wait until it is ready. Raises EngineLost, ConfigError, or TimeLimitExceeded when it is not."""
        self._up = asyncio.create_task(self._open(), name="reward model")
        self._watching = asyncio.create_task(self._watch(), name="reward model's end")
        await asyncio.shield(self._up)

    async def score(self, prompt: Prompt, completion: Completion) -> Reward:
        """What was under way in a process that is lost is asked of the next.

        Raises ScoringError, with the cause, once the process was lost too often, is closed, or does not judge what waits.
        """
        config = self._config
        limit_s = config.wait_s + config.limit_s + LATE_S
        asked = ASKED.dump_json(Asked.of(prompt, completion))
        while not self._closed:
            channel = await self._there()
            try:
                return REWARD.validate_json(await channel.call("judge", asked, limit_s=limit_s))
            except TimeLimitExceeded as error:
                raise ScoringError(f"the reward model's process hangs: {error}") from error
            except EngineLost as error:
                self._lose(channel, error)
        raise ScoringError("the reward model is closed")

    async def close(self) -> None:
        """End the process. Closing twice is harmless."""
        if self._closed:
            return
        self._closed = True
        if self._watching is not None:
            self._watching.cancel()
            await asyncio.gather(self._watching, return_exceptions=True)
        if self._up is not None:
            self._up.cancel()
            (up,) = await asyncio.gather(self._up, return_exceptions=True)
            if not isinstance(up, BaseException):
                await up.close()

    async def _open(self) -> Channel:
        channel = await self._launch()
        try:
            hear(channel, self.spans)
            channel.ready()
            await channel.call("start", limit_s=self._start_s)
        except BaseException:
            await channel.close()
            raise
        return channel

    async def _reopen(self, lost: Channel, cause: Exception) -> Channel:
        await lost.close()
        while self._left:
            self._left -= 1
            with self.spans.doing(Activity.RESTART):
                try:
                    return await self._open()
                except (EngineLost, TimeLimitExceeded) as error:
                    cause = error
        raise ScoringError(f"the reward model's process was lost: {cause}") from cause

    async def _there(self) -> Channel:
        assert self._up is not None, "it was started"
        return await asyncio.shield(self._up)

    def _lose(self, channel: Channel, cause: Exception) -> None:
        """Once for each line, whoever notices it first. That it was closed is no loss."""
        up = self._up
        if not self._closed and up is not None and up.done() and up.exception() is None and up.result() is channel:
            self._up = asyncio.create_task(self._reopen(channel, cause), name="reward model, again")

    async def _watch(self) -> None:
        """Its end is seen also while nobody asks."""
        while True:
            try:
                channel = await self._there()
            except (EngineLost, ScoringError, TimeLimitExceeded, ConfigError):
                return  # whoever asks is told
            self._lose(channel, EngineLost(await channel.ended()))


async def serve(model: Batched, spans: Spans, channel: Channel) -> None:
    """Answer until the line ends."""

    async def start(content: bytes) -> bytes:
        return b""

    async def judge(content: bytes) -> bytes:
        return REWARD.dump_json(await model.reward(ASKED.validate_json(content)))

    channel.handle("start", start)
    channel.handle("judge", judge)
    channel.ready()
    try:
        async with telling(spans, channel):
            await channel.ended()
    finally:
        await model.close()
