"""The data-parallel ranks of one trainer: a process group outside torch's default one.

Whoever fails leaves it, by which the others fail at once instead of at their time limit; then all join a new one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, TypeVar
from zlib import crc32

import torch
from torch import Tensor

from rollyard.errors import NonFinite, RanksApart, TrainError
from rollyard.meeting import failure, held_store, new_group, own_address, store_at
from rollyard.protocols.devices import Device, Spans

T = TypeVar("T")

MEETING = "meeting"
BUCKET = 8 * 2**20  # numbers of one collective


class Ranks:
    """One of the ranks (model.shards.Collectives); a trainer that never joined others is alone.

    Args:
        device: where the tensors are.
        rank, size: what it will be once it has joined the others, where that is known before.
    """

    def __init__(self, device: torch.device, rank: int = 0, size: int = 1) -> None:
        self._device = device
        self.rank, self.size = rank, size
        self._store: Any = None  # of rank 0, as long as it lives
        self._meetings = 0
        self._group: Any = None
        self._limit = timedelta()  # of a wait for one other rank

    # ------------------------------------------------------------------------------------------ come and go

    def open(self, address: str, limit_s: float) -> str:
        """Of rank 0: where all can meet, each time a new place. `address` is of this machine, as the others reach it.

        Raises TrainError when that is no address of this machine.
        """
        if self._store is None:
            try:
                self._store = held_store(address, limit_s)
            except OSError as error:
                raise TrainError(f"the ranks cannot meet at {address}: {error}") from error
        self._meetings += 1
        return f"{address}:{self._store.port}/{self._meetings}"

    def join(self, place: str, rank: int, size: int, limit_s: float) -> None:
        """Meet the other ranks at `place`, in a new group; a group of one needs no place.

        Raises RanksApart when not all are there within `limit_s` seconds, which then is the limit of every wait. To connect,
        once all are there, takes no more than `meeting.new_group` says.
        """
        self._group = None  # the old one is left first
        self.rank, self.size, self._limit = rank, size, timedelta(seconds=limit_s)
        if size > 1:
            self._try(MEETING, lambda: self._meet(place, limit_s))

    def leave(self) -> None:
        """The lines to the others close: theirs is a failure that they see now."""
        self._group = None

    def close(self) -> None:
        self._group = self._store = None

    @contextmanager
    def together(self) -> Iterator[None]:
        """Whoever fails in here leaves. Not with NonFinite: that all find alike."""
        try:
            yield
        except NonFinite:
            raise
        except BaseException:
            self.leave()
            raise

    # ------------------------------------------------------------------------------------------ collectives

    def gather(self, values: Tensor) -> Tensor:
        """`[n]` of every rank: `[ranks, n]`, the same everywhere. Raises RanksApart."""
        if self.size == 1:
            return values[None]
        values = values.to(self._device)
        found = [torch.empty_like(values) for _ in range(self.size)]
        self._try("comparing numbers", lambda: self._group.allgather([found], [values]).wait())
        return torch.stack(found)

    def add_up(self, flat: Tensor) -> None:
        """In place, the sum of `[n]` over all ranks: the same everywhere, to the bit. Raises RanksApart."""
        if self.size > 1:
            self._try("adding up gradients", lambda: self._add_up(flat))

    def all_gather(self, into: Tensor, own: Tensor) -> None:
        self._try("gathering parameters", lambda: self._group._allgather_base(into, own).wait())

    def reduce_scatter(self, into: Tensor, every: Tensor) -> None:
        self._try("adding up gradients", lambda: self._group._reduce_scatter_base(into, every).wait())

    def bring(self, tensor: Tensor, sender: int) -> None:
        if self.rank == sender:
            self._try("collecting a tensor", lambda: self._group.send([tensor], 0, 0).wait(self._limit))
        elif self.rank == 0:
            self._try("collecting a tensor", lambda: self._group.recv([tensor], sender, 0).wait(self._limit))

    def spread(self, tensor: Tensor) -> None:
        there = tensor.to(self._device)
        self._try("agreeing on numbers", lambda: self._group.broadcast(there, 0).wait())
        tensor.copy_(there)

    def agree(self, what: str) -> None:
        """Raises TrainError, on all alike, unless all ranks begin the same."""
        found = self.gather(torch.tensor([crc32(what.encode())]))
        if len(found.unique()) > 1:
            raise TrainError(f"rank {self.rank} was asked for {what}, and another rank for something else")

    def _add_up(self, flat: Tensor) -> None:
        for going in [self._group.allreduce([part]) for part in flat.split(BUCKET)]:
            going.wait()

    def _try(self, what: str, call: Callable[[], object]) -> None:
        """Raises RanksApart, with words only (`failure`)."""
        if self._group is None and what != MEETING:
            raise RanksApart(f"rank {self.rank} of {self.size} left the group, and has to join a new one")
        problem = failure(call)
        if problem:
            self.leave()
            raise RanksApart(f"rank {self.rank} of {self.size} lost the others, {what}: {problem}")

    def _meet(self, place: str, limit_s: float) -> None:
        where, _, number = place.partition("/")
        host, _, port = where.rpartition(":")
        store = self._store if self.rank == 0 else store_at(host, int(port), limit_s)
        own = host if self.rank == 0 else own_address(host, int(port))
        self._group = new_group(store, f"train-{number}", self.rank, self.size, self._device, own, limit_s)


class Joint:
    """A device on which all ranks do the same at the same time (protocols.Device).

    Whoever fails leaves the group, so that nobody waits for what will not come.

    Args:
        device: of this rank.
        what: is done, in a word or two.
        recover: called after a failure.
    """

    def __init__(self, device: Device, ranks: Ranks, what: str, recover: Callable[[], None]) -> None:
        self._device, self._ranks, self._what, self._recover = device, ranks, what, recover

    @property
    def spans(self) -> Spans:
        return self._device.spans

    async def run(self, call: Callable[..., T], *args: Any) -> T:
        """Raises what `call` raises, RanksApart, and TrainError when another rank does something else."""
        return await self._device.run(self._together, call, args)

    def _together(self, call: Callable[..., T], args: tuple[Any, ...]) -> T:
        try:
            with self._ranks.together():
                self._ranks.agree(self._what)
                return call(*args)
        except BaseException:
            self._recover()
            raise


def flat_gradients(parameters: Iterable[Tensor]) -> Tensor:
    """Gives every parameter a gradient of zeros, a view of the `[numbers]` that are returned."""
    every = list(parameters)
    flat = every[0].new_zeros(sum(parameter.numel() for parameter in every), requires_grad=False)
    for parameter, part in zip(every, flat.split([parameter.numel() for parameter in every]), strict=True):
        parameter.grad = part.view_as(parameter)
    return flat


def fingerprint(parameters: Iterable[Tensor]) -> Tensor:
    """A number that other parameters are unlikely to share: `[1]` int64, the sum of all bits, eight bytes at a time."""
    sums = []
    for parameter in parameters:
        data = parameter.detach().contiguous().view(-1).view(torch.uint8)
        whole = data.numel() // 8 * 8
        sums.append(data[:whole].view(torch.int64).sum() + data[whole:].sum())
    return torch.stack(sums).sum(dim=0, keepdim=True)
