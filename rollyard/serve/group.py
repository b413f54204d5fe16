"""Weights by a torch process group of two, the trainer (rank 0) and the service: gloo, no file, and no copy by HTTP."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from http import HTTPStatus
from typing import Any

import torch
from torch import Tensor

from rollyard.errors import WeightSyncError
from rollyard.meeting import held_store, new_group, own_address, store_at
from rollyard.serve.refusals import Refused
from rollyard.types import TensorInfo
from rollyard.weights.group import CPU, on_thread, problem_of
from rollyard.weights.layout import compare

SIZE = 2
LIMIT_S = 120.0  # seconds that one tensor may take, and the other side to come


@dataclass(frozen=True, slots=True)
class Invitation:
    """Where a trainer finds the group that was made for it."""

    host: str
    port: int
    name: str
    limit_s: float


@dataclass(slots=True)
class _Coming:
    step: int
    stats: Mapping[str, float]
    tensors: dict[str, Tensor]
    done: asyncio.Future[None] = field(default_factory=lambda: asyncio.get_running_loop().create_future())


class Groups:
    """Receives weights, one version at a time.

    Args:
        address: of this machine, where the trainer meets it.
        limit_s: seconds until it has come, and for each tensor.
    """

    def __init__(self, address: str, limit_s: float = LIMIT_S) -> None:
        self._address, self._limit_s = address, limit_s
        self._store: Any = None
        self._numbers = itertools.count()
        self._coming: dict[str, _Coming] = {}

    def invite(
        self, step: int, sent: Sequence[TensorInfo], wanted: Sequence[TensorInfo], stats: Mapping[str, float]
    ) -> Invitation:
        """Be ready to receive these tensors, in this order; nobody waits for an earlier group any more.

        Raises Refused when they are not those that are wanted, or when there is no such address.
        """
        try:
            compare(sent, wanted)
            self._store = self._store or held_store(self._address, self._limit_s)
        except WeightSyncError as error:
            raise Refused(HTTPStatus.UNPROCESSABLE_ENTITY, str(error), "unsuited", "tensors") from None
        except OSError as error:
            problem = f"nobody can meet at {self._address}: {error.strerror}"
            raise Refused(HTTPStatus.SERVICE_UNAVAILABLE, problem, "group", remedy="set serve.group_address") from None
        name = f"serve-{next(self._numbers)}"
        tensors = {info.name: torch.empty(info.shape, dtype=getattr(torch, info.dtype.removeprefix("torch."))) for info in sent}
        coming = _Coming(step, stats, tensors)
        coming.done = on_thread(self._receive, name, list(tensors.values()))
        coming.done.add_done_callback(lambda done: done.cancelled() or done.exception())
        self._coming = {name: coming}
        return Invitation(self._address, self._store.port, name, self._limit_s)

    async def arrived(self, name: str, step: int) -> tuple[Mapping[str, Tensor], Mapping[str, float]]:
        """What came by this group, and what was told of the step. Raises Refused when it did not all come."""
        coming = self._coming.get(name)
        if coming is None or coming.step != step:
            raise Refused(HTTPStatus.NOT_FOUND, "there is no such group", "no_group", "name")
        try:
            await asyncio.shield(coming.done)
        except WeightSyncError as error:
            self._coming.pop(name, None)
            raise Refused(HTTPStatus.UNPROCESSABLE_ENTITY, str(error), "cut", "name", "send the weights again") from None
        return coming.tensors, coming.stats

    def forget(self, name: str) -> None:
        """They were published, or will not be."""
        self._coming.pop(name, None)

    def close(self) -> None:
        self._coming.clear()
        self._store = None

    def _receive(self, name: str, tensors: Sequence[Tensor]) -> None:
        def broadcasting() -> Iterator[str]:
            group = new_group(self._store, name, 1, SIZE, CPU, self._address, self._limit_s)
            yield from _each(group, tensors)

        if problem := problem_of(broadcasting):
            raise WeightSyncError(f"the weights did not come, {problem}")


def send(invited: Invitation, tensors: Sequence[Tensor]) -> None:
    """The trainer's side: send these, on the CPU, in the order that was told. Raises WeightSyncError."""

    def broadcasting() -> Iterator[str]:
        store = store_at(invited.host, invited.port, invited.limit_s)
        own = own_address(invited.host, invited.port)
        group = new_group(store, invited.name, 0, SIZE, CPU, own, invited.limit_s)
        yield from _each(group, [tensor.detach().contiguous() for tensor in tensors])

    if problem := problem_of(broadcasting):
        raise WeightSyncError(f"the weights were not sent, {problem}")


def _each(group: Any, tensors: Sequence[Tensor]) -> Iterator[str]:
    for number, tensor in enumerate(tensors, start=1):
        yield f"at tensor {number} of {len(tensors)}"
        group.broadcast(tensor, 0).wait()
