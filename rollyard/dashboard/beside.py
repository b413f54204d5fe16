"""The dashboard of a run that goes on, in a process of its own: it takes nothing of the run's, and ends with it."""

from __future__ import annotations

import asyncio
import os
import signal
import warnings
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from pydantic import TypeAdapter

from rollyard.dashboard.app import make_app
from rollyard.dashboard.serving import Server, address, bound
from rollyard.dashboard.shown import Shown
from rollyard.environment import process_environment
from rollyard.errors import EngineLost
from rollyard.journal.folder import RunFolder
from rollyard.place.child import launch
from rollyard.protocols.processes import Channel

START_S: Final = 60.0  # until it answers
LEAVE_S: Final = 4.0  # for pages to be told that the run is over
YIELDS: Final = 10  # how much it gives way to others on this machine


@dataclass(frozen=True, slots=True)
class Order:
    """What it is to show, and where."""

    folder: Path
    port: int


ORDER: Final = TypeAdapter(Order)


@asynccontextmanager
async def beside(folder: RunFolder, port: int) -> AsyncIterator[str]:
    """The address at which a run is shown while the block lasts; it answers from the beginning on.

    Raises ConfigError when the port cannot be used, EngineLost when it cannot be started.
    """
    order = ORDER.dump_json(Order(folder.path.absolute(), port))
    child = await launch("rollyard.dashboard.beside:host", order, name="the dashboard", environment=process_environment())
    try:
        child.ready()
        yield (await child.call("address", limit_s=START_S)).decode()
        try:
            child.tell("leave")
            with suppress(TimeoutError):
                async with asyncio.timeout(LEAVE_S):
                    await child.ended()
        except EngineLost as lost:  # nothing of the run's: that is how it is, whatever becomes of this
            warnings.warn(f"{lost}; the run went on without it", RuntimeWarning, stacklevel=2)
    finally:
        child.kill()  # it has nothing to put away
        await child.close()


async def host(channel: Channel, order: bytes) -> None:
    """What the child runs."""
    ordered = ORDER.validate_json(order)
    os.nice(YIELDS)
    with bound(ordered.port) as line:
        answers = asyncio.Event()

        async def told(_: bytes) -> bytes:
            await answers.wait()
            return address(line).encode()

        server = Server(make_app(Shown(RunFolder(ordered.folder))), answers.set)

        async def leave(_: bytes) -> bytes:
            server.should_exit = True
            return b""

        channel.handle("address", told)
        channel.handle("leave", leave)
        channel.ready()
        await server.serve(sockets=[line])


async def until_stopped() -> None:
    """Wait for Ctrl-C."""
    stopped, loop = asyncio.Event(), asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, stopped.set)
    await stopped.wait()
