"""The one spawner of processes outside Ray: a child with its own Python, spoken to over a socket, gone with its parent.

The child imports this very package, whatever else its environment holds: it finds it in a folder with one link in it. It
leads a process group, which is ended as a whole when the child is closed, or when the parent's end of the socket closes
for whatever reason.
"""

from __future__ import annotations

import asyncio
import importlib
import os
import signal
import socket
import sys
import tempfile
import threading
from collections.abc import Awaitable, Callable, Coroutine, Mapping
from contextlib import suppress
from pathlib import Path
from typing import IO, Any

from rollyard.errors import EngineLost, TimeLimitExceeded
from rollyard.place.link import Link

LOG_LINES = 15
QUIT_S = 10.0  # seconds a child may take to end by itself
ALIVE_S = 0.5  # seconds between two looks at the parent

Host = Callable[[Link, bytes], Coroutine[Any, Any, None]]


class Child:
    """A running child and the line to it (protocols.Channel)."""

    def __init__(self, name: str, process: asyncio.subprocess.Process, link: Link, log: IO[bytes], folder: str) -> None:
        self.name = name
        self._process, self._link, self._log, self._folder = process, link, log, folder
        self._watching = asyncio.create_task(self._watch(), name=f"child {name}")

    @property
    def pid(self) -> int:
        return self._process.pid

    def handle(self, name: str, handler: Callable[[bytes], Awaitable[bytes]]) -> None:
        self._link.handle(name, handler)

    async def call(self, name: str, content: bytes = b"", *, limit_s: float) -> bytes:
        """See `Link.call`. A time limit that ran out says what the child printed last."""
        try:
            return await self._link.call(name, content, limit_s=limit_s)
        except TimeLimitExceeded as error:
            raise TimeLimitExceeded(f"{error}{self.said()}") from None

    def ready(self) -> None:
        self._link.ready()

    def tell(self, name: str, content: bytes = b"") -> None:
        self._link.tell(name, content)

    async def ended(self) -> str:
        return await self._link.ended()

    async def close(self) -> None:
        """Let it end by itself for a while, then end it and all that it started."""
        try:
            if self._process.returncode is None:
                async with asyncio.timeout(QUIT_S):
                    self._link.tell("quit")
                    await self._process.wait()
        except (TimeoutError, EngineLost):
            pass
        finally:
            self.kill()
        await self._process.wait()
        self._watching.cancel()
        await self._link.close()
        self._log.close()
        with suppress(OSError):
            os.unlink(Path(self._folder) / "rollyard")
            os.rmdir(self._folder)

    def kill(self) -> None:
        """At once, with the whole group."""
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)

    def said(self) -> str:
        """The end of what it printed."""
        # Not by seeking: the child writes at the same offset.
        size = os.fstat(self._log.fileno()).st_size
        lines = os.pread(self._log.fileno(), size, 0).decode("utf-8", "replace").rstrip().splitlines()[-LOG_LINES:]
        return "".join(f"\n  | {line}" for line in lines)

    async def _watch(self) -> None:
        code = await self._process.wait()
        cause = f"was ended by signal {-code}" if code < 0 else f"ended with exit code {code}"
        self._link.fail(cause + self.said())


async def launch(target: str, order: bytes, *, name: str, environment: Mapping[str, str], python: Path | None = None) -> Child:
    """Start a child that runs `target`.

    Args:
        target: `module:function`, a coroutine function of the link and of `order`. It sets handlers and waits.
        name: for messages.
        python: its interpreter; this one when None.
        environment: its variables.

    Raises EngineLost when it cannot be started.
    """
    folder = tempfile.mkdtemp(prefix="rollyard-child-")
    os.symlink(Path(__file__).parents[1], Path(folder) / "rollyard")
    ours, theirs = socket.socketpair()
    log = tempfile.TemporaryFile()  # noqa: SIM115 (closed with the child)
    try:
        process = await asyncio.create_subprocess_exec(
            python or Path(sys.executable),
            "-c",
            "from rollyard.place.child import main; main()",
            str(theirs.fileno()),
            target,
            stdin=asyncio.subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            pass_fds=(theirs.fileno(),),
            env={**environment, "PYTHONPATH": folder, "PYTHONSAFEPATH": "1"},
            start_new_session=True,
        )
    except OSError as error:
        log.close()
        raise EngineLost(f"{name} cannot be started with {python}: {error}") from error
    finally:
        theirs.close()
    reader, writer = await asyncio.open_connection(sock=ours)
    link = Link(name, reader, writer)
    child = Child(name, process, link, log, folder)
    link.open()
    link.tell("order", order)
    return child


# ---------------------------------------------------------------------------------------------- in the child


def main() -> None:
    """Run `TARGET` with the line to the parent: arguments are a file descriptor and TARGET."""
    descriptor, target = int(sys.argv[1]), sys.argv[2]
    module, _, function = target.partition(":")
    threading.Thread(target=_outlive_not, args=(os.getppid(),), daemon=True).start()
    host: Host = getattr(importlib.import_module(module), function)
    asyncio.run(_serve(host, descriptor))
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)  # the station is closed; taking libraries apart would only take time


async def _serve(host: Host, descriptor: int) -> None:
    reader, writer = await asyncio.open_connection(sock=socket.socket(fileno=descriptor))
    link = Link("the parent", reader, writer)
    order: asyncio.Future[bytes] = asyncio.get_running_loop().create_future()
    quitting = asyncio.Event()

    async def take_order(content: bytes) -> bytes:
        order.set_result(content)
        return b""

    async def take_quit(content: bytes) -> bytes:
        quitting.set()
        return b""

    link.handle("order", take_order)
    link.handle("quit", take_quit)
    link.open()
    hosting = asyncio.create_task(host(link, await order))
    waits = [asyncio.create_task(quitting.wait()), asyncio.create_task(link.ended())]
    await asyncio.wait((hosting, *waits), return_when=asyncio.FIRST_COMPLETED)
    if hosting.done():
        hosting.result()  # it does not end by itself but by an error, which is then the last that is printed
    hosting.cancel()
    await asyncio.gather(hosting, *(wait for wait in waits if wait.cancel()), return_exceptions=True)
    await link.close()


def _outlive_not(parent: int) -> None:
    """End the whole group once the parent is gone: also when the event loop hangs, and whatever was started meanwhile."""
    while os.getppid() == parent:
        threading.Event().wait(ALIVE_S)
    os.killpg(0, signal.SIGKILL)
