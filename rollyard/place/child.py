"""The one spawner of processes outside Ray: a child with its own Python, spoken to over a socket, gone with its parent.

The child imports this very package, whatever else its environment holds: it finds it in a folder with one link in it. It
leads a process group, which is ended as a whole when the child is closed or ends, or when the parent's end of the socket
closes for whatever reason.
"""

from __future__ import annotations

import asyncio
import fcntl
import hashlib
import importlib
import os
import re
import signal
import socket
import sys
import tempfile
import threading
import traceback
from collections.abc import Awaitable, Callable, Mapping
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import IO

from rollyard.chaos.victims import Local, Victim
from rollyard.environment import cache_folder
from rollyard.errors import EngineLost
from rollyard.place.line import Host, serve
from rollyard.place.link import Link
from rollyard.prints import LOOK_S, append_only, shorten

LOG_LINES, LOG_BYTES = 30, 2**18  # of what it printed last, for messages
ERROR = re.compile(r"\b\w*(Error|Exception): \S")
QUIT_S = 10.0  # seconds a child may take to end by itself
GONE_S = 1.0  # seconds between the end of the line and that of the process
ALIVE_S = 0.5  # seconds between two looks at the parent
BUFFER = 2**20  # bytes read ahead
SET_SIGNAL = 10  # F_SETSIG of Linux, which Python does not name: what is sent instead of SIGIO


class Child:
    """A running child and the line to it (protocols.Channel).

    Args:
        name: for messages.
        process: the child.
        reader, writer: the socket to it.
        log: where it prints.
        leads: a process group of its own.
        keeps: the log is this child's alone, and kept short.
    """

    def __init__(
        self,
        name: str,
        process: asyncio.subprocess.Process,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        log: IO[bytes],
        leads: bool = True,
        keeps: bool = False,
    ) -> None:
        self.name = name
        self._process, self._log, self._leads, self._keeps = process, log, leads, keeps
        self._closed = False
        self._link = Link(name, reader, writer, self._find_cause, self.said)
        self._link.open()
        self._watching = asyncio.create_task(self._watch(), name=f"child {name}")

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def victim(self) -> Victim:
        """It, as faults on purpose see it."""
        return Local(self.pid)

    @property
    def closed(self) -> bool:
        return self._closed

    def handle(self, name: str, handler: Callable[[bytes], Awaitable[bytes]]) -> None:
        self._link.handle(name, handler)

    async def call(self, name: str, content: bytes = b"", *, limit_s: float) -> bytes:
        return await self._link.call(name, content, limit_s=limit_s)

    def ready(self) -> None:
        self._link.ready()

    def tell(self, name: str, content: bytes = b"") -> None:
        self._link.tell(name, content)

    async def ended(self) -> str:
        return await self._link.ended()

    async def close(self) -> None:
        """Let it end by itself for a while, then end it and all that it started. Closing twice is harmless."""
        if self._closed:
            return
        self._closed = True
        try:
            with suppress(TimeoutError, EngineLost):
                async with asyncio.timeout(QUIT_S if self._link.heard else 0):  # one that still starts has nothing to close
                    self._link.tell("quit")
                    await self._process.wait()
        finally:
            self.kill()
            self._watching.cancel()
            await self._process.wait()
            await self._link.close()
            self._log.close()

    def pass_on(self, deliver: Callable[[bytes], None]) -> Callable[[bytes], None]:
        """See `Link.pass_on`: what the child sends is for somebody else. To be called before it can have sent anything."""
        return self._link.pass_on(deliver)

    def kill(self) -> None:
        """At once, with the whole group that it leads."""
        _end(self._process, self._leads)

    def said(self) -> str:
        """The end of what it printed."""
        return last_lines(self._log)

    async def _watch(self) -> None:
        """The process may end before the line does: what it started can hold the other end of the socket open."""
        ending = asyncio.ensure_future(self._process.wait())
        try:
            while not (await asyncio.wait((ending,), timeout=LOOK_S))[0]:
                if self._keeps:
                    with suppress(OSError):
                        shorten(self._log.fileno())
        finally:
            ending.cancel()
        self.kill()
        self._link.fail(self._ending())

    async def _find_cause(self) -> str:
        """The line has ended. So has the process, or it is of no more use."""
        try:
            async with asyncio.timeout(GONE_S):
                await self._process.wait()
        except TimeoutError:
            self.kill()
            await self._process.wait()
            return f"closed its end of the line{self.said()}"
        return self._ending()

    def _ending(self) -> str:
        code = self._process.returncode or 0
        return (f"was ended by signal {-code}" if code < 0 else f"ended with exit code {code}") + self.said()


class Children:
    """Starts children and closes those that it started (protocols.Launcher).

    Args:
        at_once: they have nothing to put away, and may be anywhere, in code that never returns: when this process is gone,
            the system kills them.
    """

    def __init__(self, *, at_once: bool = False) -> None:
        self._at_once = at_once
        self._started: list[Child] = []

    async def launch(
        self, target: str, order: bytes, *, name: str, environment: Mapping[str, str], python: Path | None = None
    ) -> Child:
        """See `launch`."""
        child = await launch(target, order, name=name, environment=environment, python=python, at_once=self._at_once)
        self._started = [*(one for one in self._started if not one.closed), child]
        return child

    async def close(self) -> None:
        """Close all of them. Closing twice is harmless."""
        await asyncio.gather(*(child.close() for child in self._started))


async def launch(
    target: str,
    order: bytes,
    *,
    name: str,
    environment: Mapping[str, str],
    python: Path | None = None,
    log: IO[bytes] | None = None,
    leads: bool = True,
    grace_s: float = 0.0,
    at_once: bool = False,
) -> Child:
    """Start a child that runs `target`.

    Args:
        target: `module:function`, a coroutine function of the channel and of `order`. It sets handlers and waits.
        name: for messages.
        environment: its variables.
        python: its interpreter; this one when None.
        log: where it prints, a file of its own, which is kept short, when None. Closed with the child.
        leads: a process group of its own, or it stays in that of this process, which is ended as a whole by somebody else.
        grace_s: seconds it may still take for what it has started, once this process is gone.
        at_once: the system kills it once this process is gone, whatever it does then.

    Raises EngineLost when it cannot be started.
    """
    try:
        with ExitStack() as undo:
            keeps = log is None
            log = undo.enter_context(log or tempfile.TemporaryFile())  # noqa: SIM115 (it is)
            append_only(log.fileno())
            ours, theirs = socket.socketpair()
            undo.callback(ours.close)
            with theirs:
                process = await asyncio.create_subprocess_exec(
                    python or Path(sys.executable),
                    "-c",
                    "from rollyard.place.child import main; main()",
                    str(theirs.fileno()),
                    str(os.getpid()),
                    str(grace_s),
                    target,
                    *(["at once"] if at_once else []),
                    stdin=asyncio.subprocess.PIPE if at_once else asyncio.subprocess.DEVNULL,
                    stdout=log,
                    stderr=log,
                    pass_fds=(theirs.fileno(),),
                    env={**environment, **_imports(environment)},
                    start_new_session=leads,
                )
            undo.callback(_end, process, leads)
            reader, writer = await asyncio.open_connection(sock=ours, limit=BUFFER)
            child = Child(name, process, reader, writer, log, leads, keeps)
            undo.pop_all()
    except OSError as error:  # also of what it needs here: descriptors, room for what it prints, a folder in the cache
        raise EngineLost(f"{name} cannot be started with {python or sys.executable}: {error}") from error
    child.tell("order", order)
    return child


def last_lines(log: IO[bytes], since: int = 0) -> str:
    """The end of what was printed into a file after its first `since` bytes, for messages.

    An error that was printed before that stands in front: what came first is most often the cause of the rest.
    """
    # Not by seeking: whoever prints may do so at the same offset.
    size = os.fstat(log.fileno()).st_size
    lines = os.pread(log.fileno(), LOG_BYTES, max(size - LOG_BYTES, since)).decode("utf-8", "replace").rstrip().splitlines()
    earlier = next((line for line in lines[:-LOG_LINES] if ERROR.search(line)), None)
    shown = [*([] if earlier is None else [earlier, "..."]), *lines[-LOG_LINES:]]
    return "".join(f"\n  | {line}" for line in shown)


def _imports(environment: Mapping[str, str]) -> dict[str, str]:
    """Variables that let a child find this package, with a folder that holds a link to it and nothing else.

    The folder stays in the cache, one for each place where the package is installed: a run that is killed leaves no other.
    """
    package = Path(__file__).parents[1]
    folder = cache_folder() / "package" / hashlib.sha256(os.fsencode(package)).hexdigest()[:16]
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    with suppress(FileExistsError):
        (folder / package.name).symlink_to(package)
    path = os.pathsep.join([str(folder), *filter(None, [environment.get("PYTHONPATH")])])
    return {"PYTHONPATH": path, "PYTHONSAFEPATH": "1"}


def _end(process: asyncio.subprocess.Process, leads: bool) -> None:
    if leads:
        _end_group(process.pid)
    elif process.returncode is None:
        process.kill()


def _end_group(leader: int) -> None:
    with suppress(ProcessLookupError):
        os.killpg(leader, signal.SIGKILL)


# ---------------------------------------------------------------------------------------------- in the child


def find(target: str) -> Host:
    """What `module:function` names."""
    module, _, function = target.partition(":")
    host: Host = getattr(importlib.import_module(module), function)
    return host


def main() -> None:
    """Run `TARGET` with the line to the parent. Arguments: a file descriptor, the parent's process id, a grace, and TARGET;
    one more, where the system shall end it with the parent."""
    descriptor, parent, grace_s, target = int(sys.argv[1]), int(sys.argv[2]), float(sys.argv[3]), sys.argv[4]
    if len(sys.argv) > 5:
        _killed_with_parent()
    threading.Thread(target=outlive_not, args=(parent, grace_s), daemon=True).start()
    failed, lost = True, False
    try:
        host = find(target)
        # Not asyncio.run, which waits for threads at the end: one may be stuck in a collective.
        lost = asyncio.new_event_loop().run_until_complete(_serve(host, descriptor))
        failed = False
    finally:
        if failed:
            traceback.print_exc()
        sys.stdout.flush()
        sys.stderr.flush()
        if lost or os.getppid() != parent:
            _end_group(0)  # nobody else will end what was started here
        os._exit(failed)  # the station is closed, or broken; taking libraries apart would only take time


async def _serve(host: Host, descriptor: int) -> bool:
    """Run the host until it fails, the parent says so, or the line ends. Whether it was the line."""
    reader, writer = await asyncio.open_connection(sock=socket.socket(fileno=descriptor), limit=BUFFER)
    link = Link("the parent", reader, writer)
    link.open()
    try:
        await serve(link, host)
        return link.lost
    finally:
        await link.close()


def _killed_with_parent() -> None:
    """Let the system kill this group as soon as the parent's end of standard input closes.

    No thread of this process has to run for it: one may hold the interpreter, in a regular expression that never ends.
    """
    line = os.dup(0)  # not inherited by what is started here
    with open(os.devnull, "rb") as nothing:
        os.dup2(nothing.fileno(), 0)
    if sys.platform != "linux":
        return  # `outlive_not` does it, as soon as it runs
    fcntl.fcntl(line, fcntl.F_SETOWN, -os.getpgrp())
    fcntl.fcntl(line, SET_SIGNAL, signal.SIGKILL)
    fcntl.fcntl(line, fcntl.F_SETFL, fcntl.fcntl(line, fcntl.F_GETFL) | os.O_ASYNC)


def outlive_not(parent: int, grace_s: float = 0.0) -> None:
    """End the whole group once the parent is gone: also when the event loop hangs, and whatever was started meanwhile."""
    while os.getppid() == parent:
        threading.Event().wait(ALIVE_S)
    threading.Event().wait(grace_s)
    _end_group(0)
