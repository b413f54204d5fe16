"""What an actor is, in its own process: the other end of its line, and the target. It needs nothing of Ray."""

from __future__ import annotations

import asyncio
import json
import os
import sys
import threading
import traceback
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from importlib import metadata
from pathlib import Path

from rollyard.chaos.victims import Local
from rollyard.environment import adopt, process_environment
from rollyard.errors import EngineLost
from rollyard.place.child import Child, find, last_lines, launch, outlive_not
from rollyard.place.line import Line, serve
from rollyard.place.mailed import Mailed, split

VERSION = metadata.version("rollyard")
WAIT_S = 10.0  # seconds a long poll waits


class Body:
    """What the actor is: the other end of the line, and the target.

    Args:
        name: of the host, for messages.
        variables: of its environment.
        folder: the run's; it works there, too, where its node has that.
        address: of its node.
    """

    def __init__(self, name: str, variables: Mapping[str, str], folder: str, address: str) -> None:
        self._name, self._address, self._logs = name, address, _logs()
        adopt(variables)
        if Path(folder).is_dir():
            os.chdir(folder)
        if _leads():  # Ray's workers notice the end of Ray itself only after seconds
            threading.Thread(target=outlive_not, args=(os.getppid(),), daemon=True).start()

    async def begin(self, target: str, order: bytes, python: str) -> str:
        """Start the target. Returns JSON: what the run has to know of this process, or the problem."""
        self._line = Mailed("the run")
        self._deliver: Callable[[bytes], None] = self._line.take
        if python:
            try:
                child = await self._launch(target, order, Path(python))
            except EngineLost as error:
                return json.dumps({"problem": str(error)})
            self._deliver = child.pass_on(self._line.forward)
            self._hosting = asyncio.create_task(self._relay(child))
        else:
            self._hosting = asyncio.create_task(self._host(target, order))
        return json.dumps({"pid": os.getpid(), "logs": self._logs, "address": self._address, "version": VERSION})

    async def take(self, batch: bytes) -> None:
        """What the run sent."""
        with suppress(ValueError):  # the line has failed with it
            for frame in split(batch):
                self._deliver(frame)

    async def fetch(self) -> bytes:
        """What is there for the run, once there is something; nothing after a while."""
        try:
            async with asyncio.timeout(WAIT_S):
                return await self._line.batch()
        except TimeoutError:
            return b""

    async def pulse(self) -> None:
        """A sign of life."""

    async def hurt(self, seconds: float, share: float) -> None:
        """A fault on purpose: this process is killed, or begins to stand still for this share of so many seconds."""
        own = Local(os.getpid())
        if seconds:
            self._holding = asyncio.create_task(own.hold(seconds, share))
        else:
            own.kill()

    async def _host(self, target: str, order: bytes) -> None:
        serving = asyncio.create_task(_found(self._line, target, order))
        await asyncio.wait((serving,))
        if (error := serving.exception()) is not None:
            traceback.print_exception(error)
        sys.stdout.flush()
        sys.stderr.flush()
        self._line.end_because(f"failed{printed(self._logs)}" if error is not None else "ended")
        await self._line.close()

    async def _launch(self, target: str, order: bytes, python: Path) -> Child:
        """A child that prints where this process does, and is in the process group that Ray ends with it."""
        log = open(self._logs[-1][0], "ab+") if self._logs else None  # noqa: ASYNC230, SIM115 (closed with the child)
        own = process_environment()
        return await launch(target, order, name=self._name, environment=own, python=python, log=log, leads=not _leads())

    async def _relay(self, child: Child) -> None:
        self._line.end_because(await child.ended())
        await child.close()


async def _found(line: Line, target: str, order: bytes) -> None:
    await serve(line, find(target), order)


def _leads() -> bool:
    """Whether this process leads a process group, as Ray's workers do; Ray ends the group when the worker ends."""
    return os.getpgrp() == os.getpid()


def _logs() -> list[tuple[str, int]]:
    """Where this process prints (Ray gives each worker two files), and how much is there already."""
    paths = [os.readlink(f"/proc/self/fd/{descriptor}") for descriptor in (1, 2)]
    return [(path, os.stat(path).st_size) for path in paths if os.path.isfile(path)]


def printed(logs: Sequence[tuple[str, int]]) -> str:
    """The end of what was printed since, or where that is."""
    said = ""
    for path, since in logs:
        try:
            with open(path, "rb") as log:
                said += last_lines(log, since)
        except OSError:
            said += f"\n  (what it printed is in {path} on its node)"
    return said
