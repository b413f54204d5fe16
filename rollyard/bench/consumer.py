"""The other process of `bench sync`'s raw bounds: it copies, reads and receives bytes, and knows nothing of weights."""

from __future__ import annotations

import asyncio
import json
import mmap
import os
from datetime import timedelta
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor

from rollyard.protocols.processes import Channel

dist: Any = torch.distributed  # its classes written in C++ have no types
LIMIT = timedelta(seconds=120)


class Consumer:
    """Does one thing at a time, on a thread, so that the line stays open."""

    def __init__(self, channel: Channel) -> None:
        self._shared = torch.empty(0, dtype=torch.uint8)
        self._own = torch.empty(0, dtype=torch.uint8)
        self._parts: list[Tensor] = []
        self._group: Any = None
        for name, work in (("map", self._map), ("copy", self._copy), ("read", self._read), ("join", self._join)):
            channel.handle(name, self._on_thread(work))
        channel.handle("each", self._on_thread(self._each))
        channel.handle("flat", self._on_thread(self._flat))
        channel.ready()

    @staticmethod
    def _on_thread(work: Any) -> Any:
        async def answer(content: bytes) -> bytes:
            await asyncio.to_thread(work, json.loads(content or b"null"))
            return b""

        return answer

    def _map(self, order: dict[str, Any]) -> None:
        handle = os.open(order["path"], os.O_RDWR)
        shared = mmap.mmap(handle, order["size"], mmap.MAP_SHARED | mmap.MAP_POPULATE)
        os.close(handle)
        self._shared = torch.frombuffer(shared, dtype=torch.uint8)
        self._own = torch.zeros(order["size"], dtype=torch.uint8)
        self._parts = [torch.zeros(size, dtype=torch.uint8) for size in order["parts"]]
        torch.set_num_threads(order["threads"])

    def _copy(self, _: None) -> None:
        self._own.copy_(self._shared)

    def _read(self, path: str) -> None:
        load_file(path)

    def _join(self, port: int) -> None:
        self._group = gloo(dist.TCPStore("127.0.0.1", port, is_master=False, timeout=LIMIT), 1)

    def _each(self, _: None) -> None:
        for part in self._parts:
            self._group.broadcast(part, 0).wait()

    def _flat(self, _: None) -> None:
        self._group.broadcast(self._own, 0).wait()


def gloo(store: Any, rank: int) -> Any:
    """A group of two on this machine."""
    options = dist.ProcessGroupGloo._Options()
    options._devices = [dist.ProcessGroupGloo.create_device(hostname="127.0.0.1")]
    options._timeout = LIMIT
    return dist.ProcessGroupGloo(store, rank, 2, options)


async def serve(channel: Channel, order: bytes) -> None:
    """What the child runs."""
    Consumer(channel)
    await channel.ended()
