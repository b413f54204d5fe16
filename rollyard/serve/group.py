"""Weights by a torch process group of two, the trainer (rank 0) and the service: gloo, no file, and no copy by HTTP."""

from __future__ import annotations

import asyncio
import itertools
import threading
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from http import HTTPStatus
from typing import Any

import torch
from torch import Tensor

from rollyard.errors import WeightSyncError
from rollyard.meeting import has_come, held_store, new_group, own_address, store_at
from rollyard.serve.refusals import Refused
from rollyard.types import TensorInfo
from rollyard.weights.group import CPU, on_thread, problem_of
from rollyard.weights.layout import compare

TRAINER, SERVICE, SIZE = 0, 1, 2  # ranks
LIMIT_S = 120.0  # seconds that one tensor may take, and the other side to come


@dataclass(frozen=True, slots=True)
class Invitation:
    """Where a trainer finds the group that was made for it."""

    host: str
    port: int
    name: str
    limit_s: float


@dataclass(frozen=True, slots=True)
class Offer:
    """What a trainer is about to send, and who it is by its lease."""

    lease: str
    step: int
    sent: tuple[TensorInfo, ...]
    stats: Mapping[str, float]


@dataclass(slots=True)
class _Coming:
    offer: Offer
    invitation: Invitation
    tensors: dict[str, Tensor] = field(default_factory=dict)  # once the trainer has come
    left: threading.Event = field(default_factory=threading.Event)  # nobody wants them any more
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

    def invite(self, offer: Offer, wanted: Sequence[TensorInfo]) -> Invitation:
        """Be ready to receive these tensors, in this order; nobody waits for an earlier group any more.

        Who has not heard the invitation is given the same one again.

        Raises Refused when they are not those that are wanted, or when there is no such address.
        """
        for name, coming in self._coming.items():
            if coming.offer == offer and not coming.done.done() and not has_come(self._store, name, TRAINER):
                return coming.invitation
        try:
            compare(offer.sent, wanted)
            self._store = self._store or held_store(self._address, self._limit_s)
        except WeightSyncError as error:
            raise Refused(HTTPStatus.UNPROCESSABLE_ENTITY, str(error), "unsuited", "tensors") from None
        except OSError as error:
            problem = f"nobody can meet at {self._address}: {error.strerror}"
            raise Refused(HTTPStatus.SERVICE_UNAVAILABLE, problem, "group", remedy="set serve.group_address") from None
        self._leave()
        name = f"serve-{next(self._numbers)}"
        coming = _Coming(offer, Invitation(self._address, self._store.port, name, self._limit_s))
        coming.done = on_thread(self._receive, self._store, coming)
        coming.done.add_done_callback(lambda done: done.cancelled() or done.exception())
        self._coming = {name: coming}
        return coming.invitation

    async def arrived(self, name: str, step: int) -> tuple[Mapping[str, Tensor], Mapping[str, float]]:
        """What came by this group, and what was told of the step. Raises Refused when it did not all come."""
        coming = self._coming.get(name)
        if coming is None or coming.offer.step != step:
            raise Refused(HTTPStatus.NOT_FOUND, "there is no such group", "no_group", "name")
        try:
            await asyncio.shield(coming.done)
        except WeightSyncError as error:
            self._coming.pop(name, None)
            raise Refused(HTTPStatus.UNPROCESSABLE_ENTITY, str(error), "cut", "name", "send the weights again") from None
        return coming.tensors, coming.offer.stats

    def forget(self, name: str) -> None:
        """They were published, or will not be."""
        self._coming.pop(name, None)

    def close(self) -> None:
        self._leave()
        self._store = None

    def _leave(self) -> None:
        """Who waits for a trainer goes at once, who receives from one before the next tensor."""
        for coming in self._coming.values():
            coming.left.set()
        self._coming.clear()

    def _receive(self, store: Any, coming: _Coming) -> None:
        """On a thread. There is memory for the tensors once the trainer has come."""
        invited, left = coming.invitation, coming.left

        def broadcasting() -> Iterator[str]:
            group = new_group(store, invited.name, SERVICE, SIZE, CPU, invited.host, invited.limit_s, left)
            coming.tensors = {info.name: torch.empty(info.shape, dtype=_dtype(info)) for info in coming.offer.sent}
            for place in _each(group, list(coming.tensors.values())):
                yield place
                if left.is_set():
                    raise RuntimeError("nobody wants them any more")

        if problem := problem_of(broadcasting):
            raise WeightSyncError(f"the weights did not come, {problem}")


def _dtype(info: TensorInfo) -> torch.dtype:
    found: torch.dtype = getattr(torch, info.dtype.removeprefix("torch."))
    return found


def send(invited: Invitation, tensors: Sequence[Tensor]) -> None:
    """The trainer's side: send these, on the CPU, in the order that was told. Raises WeightSyncError."""

    def broadcasting() -> Iterator[str]:
        store = store_at(invited.host, invited.port, invited.limit_s)
        own = own_address(invited.host, invited.port)
        group = new_group(store, invited.name, TRAINER, SIZE, CPU, own, invited.limit_s)
        yield from _each(group, [tensor.detach().contiguous() for tensor in tensors])

    if problem := problem_of(broadcasting):
        raise WeightSyncError(f"the weights were not sent, {problem}")


def _each(group: Any, tensors: Sequence[Tensor]) -> Iterator[str]:
    for number, tensor in enumerate(tensors, start=1):
        yield f"at tensor {number} of {len(tensors)}"
        group.broadcast(tensor, 0).wait()
