"""Real processes that are killed and made to stand still, and are let go whatever becomes of whoever holds them."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from rollyard.chaos.victims import Local

BUSY = "import time\nwhile True: time.sleep(0.001)"
HOLD = """
import asyncio, sys
from rollyard.chaos.victims import Local
asyncio.run(Local(int(sys.argv[1])).hold(60.0, 1.0))
"""


@pytest.fixture
def victim() -> Iterator[subprocess.Popen[bytes]]:
    """The leader of a process group, as every child of a run is one."""
    process = subprocess.Popen([sys.executable, "-ISE", "-c", BUSY], start_new_session=True)
    yield process
    process.kill()
    process.wait()


def still(process: subprocess.Popen[bytes]) -> bool:
    return Path(f"/proc/{process.pid}/stat").read_text().rpartition(")")[2].split()[0] == "T"


def soon(process: subprocess.Popen[bytes], wanted: bool) -> bool:
    until = time.monotonic() + 20
    while still(process) is not wanted and time.monotonic() < until:
        time.sleep(0.01)
    return still(process) is wanted


async def test_a_process_stands_still_for_a_while(victim: subprocess.Popen[bytes]) -> None:
    holding = asyncio.create_task(Local(victim.pid).hold(0.5, 1.0))
    assert await asyncio.to_thread(soon, victim, True)
    await holding
    assert not still(victim) and victim.poll() is None


async def test_a_slow_process_stands_still_for_a_share_of_the_time(victim: subprocess.Popen[bytes]) -> None:
    holding, seen = asyncio.create_task(Local(victim.pid).hold(1.5, 0.5)), list[bool]()
    assert await asyncio.to_thread(soon, victim, True)
    while not holding.done():
        seen.append(still(victim))
        await asyncio.sleep(0.005)
    assert True in seen and False in seen
    assert not still(victim) and victim.poll() is None


async def test_who_gives_up_holding_lets_go(victim: subprocess.Popen[bytes]) -> None:
    holding = asyncio.create_task(Local(victim.pid).hold(60.0, 1.0))
    assert await asyncio.to_thread(soon, victim, True)
    holding.cancel()
    await asyncio.gather(holding, return_exceptions=True)
    assert not still(victim) and victim.poll() is None


def test_a_process_goes_on_when_who_holds_it_is_killed(victim: subprocess.Popen[bytes]) -> None:
    holder = subprocess.Popen([sys.executable, "-c", HOLD, str(victim.pid)], env={**os.environ, "PYTHONPATH": os.getcwd()})
    try:
        assert soon(victim, True)
    finally:
        holder.kill()
        holder.wait()
    assert soon(victim, False) and victim.poll() is None


async def test_a_process_is_killed_also_while_it_stands_still(victim: subprocess.Popen[bytes]) -> None:
    holding = asyncio.create_task(Local(victim.pid).hold(60.0, 1.0))
    assert await asyncio.to_thread(soon, victim, True)
    Local(victim.pid).kill()
    assert await asyncio.to_thread(victim.wait, 20) == -signal.SIGKILL
    holding.cancel()
    await asyncio.gather(holding, return_exceptions=True)
    Local(victim.pid).kill()  # it is gone: nothing happens
    await Local(victim.pid).hold(1.0, 1.0)
