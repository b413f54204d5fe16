"""Processes that can be hit: how a process of this machine is killed, and made to stand still."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from contextlib import suppress
from typing import Protocol

SLICE_S = 0.1  # of a slowed process: it stands still for a part of each
LATE_S = 10.0  # seconds that letting it go on may take

# In a process of its own, so that nothing stands still for ever: it lets go as soon as whoever started it is gone. When it is
# itself gone, however that came, another one that it has started does.
HOLDER = """
import os, select, signal, sys, time
whom, held_s, slice_s, share = int(sys.argv[1]), float(sys.argv[2]), float(sys.argv[3]), float(sys.argv[4])
until = time.monotonic() + held_s
there, here = os.pipe()  # closed with this process
beside = os.fork()
if not beside:
    os.setsid()
    os.close(here)
    os.read(there, 1)
    try: os.kill(whom, signal.SIGCONT)
    except ProcessLookupError: pass
    os._exit(0)
def tell(number):
    try: os.kill(whom, number)
    except ProcessLookupError: sys.exit()
def wait(seconds):
    return bool(select.select([0], [], [], max(seconds, 0))[0])
gone = False
try:
    while not gone and time.monotonic() < until:
        tell(signal.SIGSTOP)
        gone = wait(min(slice_s * share, until - time.monotonic()))
        tell(signal.SIGCONT)
        if share < 1 and not gone: gone = wait(min(slice_s * (1 - share), until - time.monotonic()))
finally:
    try: os.kill(whom, signal.SIGCONT)
    except ProcessLookupError: pass
    os.close(here)
    os.waitpid(beside, 0)
"""


class Victim(Protocol):
    """A process, as faults see it."""

    def kill(self) -> None:
        """At once, without a word."""
        ...

    async def hold(self, seconds: float, share: float) -> None:
        """Let it stand still for this share of so many seconds: all of them, or short times in turn."""
        ...


class Local:
    """A process of this machine. If it leads a process group, that stands still with it.

    Args:
        pid: of the process.
    """

    def __init__(self, pid: int) -> None:
        self._pid = pid

    def kill(self) -> None:
        with suppress(ProcessLookupError):
            os.kill(self._pid, signal.SIGKILL)

    async def hold(self, seconds: float, share: float) -> None:
        try:
            whom = -self._pid if os.getpgid(self._pid) == self._pid else self._pid
        except ProcessLookupError:
            return
        await _hold(whom, seconds, share)


class Own:
    """The process of the run. What it has started goes on while it stands still."""

    def kill(self) -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    async def hold(self, seconds: float, share: float) -> None:
        await _hold(os.getpid(), seconds, share)


async def _hold(whom: int, seconds: float, share: float) -> None:
    """See `Victim.hold`. `whom`: a process, or below zero a group of them."""
    slice_s = seconds if share == 1 else SLICE_S
    numbers = [str(number) for number in (whom, seconds, slice_s, share)]
    holder = await asyncio.create_subprocess_exec(
        sys.executable, "-ISE", "-c", HOLDER, *numbers, stdin=asyncio.subprocess.PIPE, start_new_session=True
    )
    assert holder.stdin is not None
    try:
        async with asyncio.timeout(seconds + LATE_S):
            await holder.wait()
    finally:
        holder.stdin.close()  # it lets go
        try:
            async with asyncio.timeout(LATE_S):
                await holder.wait()
        except TimeoutError:
            holder.kill()
