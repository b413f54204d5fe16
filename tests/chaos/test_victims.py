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

from rollyard.chaos.victims import HOLDER, Local

BUSY = "import time\nwhile True: time.sleep(0.001)"
ITSELF = """
import asyncio, sys
from rollyard.chaos.victims import Own
asyncio.run(Own().hold(0.5, 1.0))
sys.exit(7)
"""
HOLD = """
import asyncio, sys
from rollyard.chaos.victims import HOLDER, Local
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


@pytest.mark.parametrize("whom", ["holder", "other"])
def test_a_process_goes_on_when_one_of_those_that_hold_it_is_killed(victim: subprocess.Popen[bytes], whom: str) -> None:
    """SIGKILL leaves nobody time to let go."""
    command = [sys.executable, "-ISE", "-c", HOLDER, str(-victim.pid), "1" if whom == "other" else "60", "60", "1"]
    with subprocess.Popen(command, stdin=subprocess.PIPE) as holder:
        assert soon(victim, True)
        (other,) = map(int, Path(f"/proc/{holder.pid}/task/{holder.pid}/children").read_text().split())
        os.kill(holder.pid if whom == "holder" else other, signal.SIGKILL)
        if whom == "holder":
            holder.wait()
        assert soon(victim, False) and victim.poll() is None
        until = time.monotonic() + 20
        while Path(f"/proc/{other}").exists() and time.monotonic() < until:
            time.sleep(0.01)
        assert not Path(f"/proc/{other}").exists(), "it is left"


def test_a_run_makes_itself_stand_still_and_goes_on() -> None:
    run = subprocess.Popen([sys.executable, "-c", ITSELF], env={**os.environ, "PYTHONPATH": os.getcwd()})
    try:
        assert soon(run, True) and soon(run, False)
        assert run.wait(20) == 7
    finally:
        run.kill()
        run.wait()


async def test_a_process_is_killed_also_while_it_stands_still(victim: subprocess.Popen[bytes]) -> None:
    holding = asyncio.create_task(Local(victim.pid).hold(60.0, 1.0))
    assert await asyncio.to_thread(soon, victim, True)
    Local(victim.pid).kill()
    assert await asyncio.to_thread(victim.wait, 20) == -signal.SIGKILL
    holding.cancel()
    await asyncio.gather(holding, return_exceptions=True)
    Local(victim.pid).kill()  # it is gone: nothing happens
    await Local(victim.pid).hold(1.0, 1.0)
