"""Where a trainer elsewhere gets its batches, and brings what became of them: one trainer at a time.

A batch is handed out until weights were published for it, as often as it is asked for: a trainer that was started again gets it
again.
"""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import Callable, Coroutine, Mapping
from dataclasses import dataclass, replace
from http import HTTPStatus
from typing import TYPE_CHECKING, Any, TypeVar

from rollyard.caller import Batch
from rollyard.errors import ConfigError
from rollyard.rollouts import Rollouts
from rollyard.serve.refusals import Refused
from rollyard.types import WeightVersion

if TYPE_CHECKING:
    from torch import Tensor

T = TypeVar("T")
Load = Callable[[], "Mapping[str, Tensor]"]


@dataclass(frozen=True, slots=True)
class Lease:
    """Who trains. `until`: seconds of the monotonic clock."""

    id: str
    trainer: str
    until: float


@dataclass(frozen=True, slots=True)
class Published:
    """What came of weights. `again`: they had been published before."""

    version: WeightVersion
    again: bool = False


class Desk:
    """Hands batches to whoever has the lease.

    Args:
        rollouts: where batches come from, and weights go to.
        lease_s: seconds that the trainer may say nothing.
        clock: seconds.
    """

    def __init__(self, rollouts: Rollouts, lease_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._rollouts, self._lease_s, self._clock = rollouts, lease_s, clock
        self._lease: Lease | None = None
        self._batch: Batch | None = None
        self._over = ""  # why no more batches come
        self._last = ""  # digest of the weights that were published last
        self._publishing = asyncio.Lock()
        self._changed = asyncio.Event()

    # ---------------------------------------------------------------------------------------- from the run

    async def offer(self, batch: Batch) -> None:
        """Hand it out; returns when weights were published for it, or will not be."""
        self._batch = batch
        self._change()
        while self._batch is batch and not self._over:
            await self._changed.wait()

    def end(self, cause: str) -> None:
        """No more batches come."""
        self._over = cause
        self._change()

    # ------------------------------------------------------------------------------------- from the trainer

    @property
    def trainer(self) -> str | None:
        """Who has the lease."""
        return self._lease.trainer if self._lease is not None and self._clock() < self._lease.until else None

    def take(self, trainer: str, over: bool) -> Lease:
        """The lease, for this trainer. Raises Refused while another one has it, unless it is taken `over`."""
        held = self._lease
        if self.trainer not in (None, trainer) and held is not None and not over:
            problem, remedy = f"{held.trainer} trains already", "wait until its lease is over, or take it over"
            raise Refused(HTTPStatus.CONFLICT, problem, "leased", "trainer", remedy, after_s=held.until - self._clock())
        self._lease = Lease(secrets.token_urlsafe(16), trainer, self._clock() + self._lease_s)
        self._change()  # who had it hears that
        return self._lease

    def renew(self, lease: str) -> Lease:
        """Whoever has it has said something. Raises Refused."""
        held = self._lease
        if held is None or not secrets.compare_digest(held.id.encode(), lease.encode()) or self._clock() >= held.until:
            problem, remedy = "this is not the lease, or not any more", "take it with POST /v1/trainer"
            raise Refused(HTTPStatus.CONFLICT, problem, "lease", "x-rollyard-lease", remedy)
        self._lease = replace(held, until=self._clock() + self._lease_s)
        return self._lease

    async def hold(self, lease: str, work: Coroutine[Any, Any, T]) -> T:
        """What comes of it. As long as its trainer waits for that, it is there. Raises Refused when another one takes over."""
        waiting = asyncio.ensure_future(work)
        try:
            while not waiting.done():
                self.renew(lease)
                await asyncio.wait((waiting,), timeout=self._lease_s / 3)
            return await waiting
        finally:
            waiting.cancel()

    def leave(self, lease: str) -> None:
        """Its trainer does not train any more. Raises Refused."""
        self.renew(lease)
        self._lease = None

    async def next(self, lease: str, wait_s: float) -> Batch | None:
        """The batch that is to be trained on; None when there is none in that time. Raises Refused when no more come."""
        try:
            async with asyncio.timeout(wait_s):
                while True:
                    self.renew(lease)
                    if self._over:
                        raise Refused(HTTPStatus.GONE, f"no more batches come: {self._over}", "over")
                    if self._batch is not None:
                        return self._batch
                    await self._changed.wait()
        except TimeoutError:
            self.renew(lease)
            return None

    def expect(self, lease: str, step: int) -> None:
        """Raises Refused unless version `step` is what is wanted now, or was published last."""
        self.renew(lease)
        if self._batch is not None and step == self._batch.step + 1:
            return
        if step == self._rollouts.version.step and self._last:
            return
        wants = "none: no batch is out" if self._batch is None else str(self._batch.step + 1)
        problem = f"these are weights of version {step}, and the one that is wanted is {wants}"
        raise Refused(HTTPStatus.CONFLICT, problem, "step", "step", "train on the batch that /v1/batch gives")

    async def publish(self, lease: str, step: int, digest: str, load: Load, stats: Mapping[str, float]) -> Published:
        """Publish what `load` gives, on another thread, as version `step`. What was published so before is so already.

        Raises Refused when the weights do not suit, or are not wanted; nothing has changed then.
        """
        async with self._publishing:
            self.expect(lease, step)
            if (before := self.published(step, digest)) is not None:
                return before
            if self._batch is None or step != self._batch.step + 1:
                problem = f"version {step} was published, and these are other weights"
                raise Refused(HTTPStatus.CONFLICT, problem, "step", "step")
            try:
                version = await self._rollouts.publish(await asyncio.to_thread(load), stats)
            except ConfigError as error:
                raise unsuited(error) from error
            self._batch, self._last = None, digest
            self._change()
            return Published(version)

    def published(self, step: int, digest: str) -> Published | None:
        """What came of these very weights, where they were published last."""
        version = self._rollouts.version
        return Published(version, again=True) if (version.step, self._last) == (step, digest) else None

    @property
    def step(self) -> int | None:
        """Of the batch that is out."""
        return None if self._batch is None else self._batch.step

    def _change(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()


def unsuited(error: ConfigError) -> Refused:
    """What was sent does not suit."""
    return Refused(HTTPStatus.UNPROCESSABLE_ENTITY, error.problem, "unsuited", error.where, error.remedy)
