"""What children of these tests run."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
import time

import rollyard
from rollyard.errors import ConfigError, WeightSyncError
from rollyard.protocols.processes import Channel


async def helpful(channel: Channel, order: bytes) -> None:
    """Answers what it is asked until it is closed."""

    async def about(content: bytes) -> bytes:
        found = {"order": order.decode(), "pid": os.getpid(), "rollyard": rollyard.__file__, "path": sys.path}
        return json.dumps(found).encode()

    async def start(content: bytes) -> bytes:
        return str(subprocess.Popen(["sleep", "600"]).pid).encode()  # noqa: ASYNC220

    async def fork(content: bytes) -> bytes:
        """A process that holds the socket open too."""
        pid = os.fork()
        if pid == 0:
            time.sleep(600)  # noqa: ASYNC251
        return str(pid).encode()

    async def hang(content: bytes) -> bytes:
        os.write(1, b"going to think\n")
        time.sleep(600)  # noqa: ASYNC251
        return b""

    async def fail(content: bytes) -> bytes:
        raise WeightSyncError(content.decode())

    for name, handler in (("about", about), ("start", start), ("fork", fork), ("hang", hang), ("fail", fail)):
        channel.handle(name, handler)
    channel.ready()
    await channel.ended()


async def mistaken(channel: Channel, order: bytes) -> None:
    """Finds a mistake of the user before it answers anything."""
    raise ConfigError("32 layers do not fit", where="engine.layers", remedy="use 16")


async def broken(channel: Channel, order: bytes) -> None:
    """Has a bug."""
    os.write(1, b"reading the tokenizer\n")
    await asyncio.sleep(0)
    raise KeyError("vocabulary")


async def chatting(channel: Channel, order: bytes) -> None:
    """Asks back, talks while it answers, and may never answer."""

    async def echo(content: bytes) -> bytes:
        return content

    async def ask(content: bytes) -> bytes:
        return b"heard " + await channel.call("greet", content, limit_s=20)

    async def pause(content: bytes) -> bytes:
        for number in range(500):
            channel.tell("tokens", b"%d" % number)
        return b"paused"

    told: list[bytes] = []

    async def tell(content: bytes) -> bytes:
        told.append(content)
        return b""

    async def recall(content: bytes) -> bytes:
        return b" ".join(told)

    async def never(content: bytes) -> bytes:
        await asyncio.sleep(600)
        return b""

    async def mistake(content: bytes) -> bytes:
        raise ConfigError("no GPU", where="place.device", remedy="use cpu")

    async def bug(content: bytes) -> bytes:
        raise KeyError("vocabulary")

    async def environment(content: bytes) -> bytes:
        return json.dumps(dict(os.environ)).encode()

    for handler in (echo, ask, pause, tell, recall, never, mistake, bug, environment):
        channel.handle(handler.__name__, handler)
    channel.ready()
    await channel.ended()
