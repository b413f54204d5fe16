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
from rollyard.place.link import Link


async def helpful(link: Link, order: bytes) -> None:
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
        link.handle(name, handler)
    link.ready()
    await link.ended()


async def mistaken(link: Link, order: bytes) -> None:
    """Finds a mistake of the user before it answers anything."""
    raise ConfigError("32 layers do not fit", where="engine.layers", remedy="use 16")


async def broken(link: Link, order: bytes) -> None:
    """Has a bug."""
    os.write(1, b"reading the tokenizer\n")
    await asyncio.sleep(0)
    raise KeyError("vocabulary")
