"""Pools of workers with doubles of processes: what a call that hangs or dies costs, and when a pool gives up."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from rollyard.errors import ConfigError, EngineLost, TimeLimitExceeded, WorkerLost, WorkersUsedUp
from rollyard.pool import Losses, Pool
from tests.workers import Died, FakeLauncher, Hung


async def answer(name: str, content: bytes) -> bytes:
    match content.split():
        case [b"hang"]:
            raise Hung
        case [b"forever"]:
            await asyncio.sleep(3600)
        case [b"die"]:
            raise Died("it")
        case [b"slow", seconds]:
            await asyncio.sleep(float(seconds))
    return content


def pool(launcher: FakeLauncher, **how: Any) -> Pool:
    return Pool(launcher.launch, "a:target", b"", name="worker", environment={}, **how)


async def test_a_call_that_hangs_or_dies_costs_itself_alone():
    launcher = FakeLauncher(answer)
    workers = pool(launcher, size=2)
    calls = [workers.call("do", content, limit_s=60) for content in (b"hang", b"a", b"die", b"b", b"c")]
    found = await asyncio.gather(*calls, return_exceptions=True)
    assert [type(one) for one in found] == [TimeLimitExceeded, bytes, WorkerLost, bytes, bytes]
    assert [found[1], found[3], found[4]] == [b"a", b"b", b"c"] and "died of it" in str(found[2])
    await asyncio.sleep(0)
    assert len(launcher.started) >= 3 and launcher.started[0].killed
    await workers.close()
    assert all(process.closed for process in launcher.started)
    with pytest.raises(WorkersUsedUp):
        await workers.call("do", b"a", limit_s=60)


async def test_one_worker_is_enough_until_somebody_waits(monkeypatch):
    monkeypatch.setattr("rollyard.pool.GROW_S", 60.0)
    launcher = FakeLauncher(answer)
    workers = pool(launcher, size=3)
    workers.start()
    for _ in range(20):
        await workers.call("do", b"quick", limit_s=60)
    await asyncio.gather(*(workers.call("do", b"quick", limit_s=60) for _ in range(20)))
    assert len(launcher.started) == 1
    monkeypatch.setattr("rollyard.pool.GROW_S", 0.01)
    await asyncio.gather(*(workers.call("do", b"slow 0.1", limit_s=60) for _ in range(9)))
    assert len(launcher.started) == 3
    await workers.close()


async def test_what_shares_a_worker_is_told_how_many_were_lost_with_it():
    launcher = FakeLauncher(answer)
    workers = pool(launcher, places=3)
    suspects = []

    async def call(content: bytes) -> None:
        async with workers.worker() as worker:
            try:
                await worker.call("do", content, limit_s=60)
            except (TimeLimitExceeded, WorkerLost):
                suspects.append(worker.suspects)

    await asyncio.gather(*(call(content) for content in (b"die", b"slow 0.05", b"slow 0.05")))
    assert suspects == [3, 3, 3]
    await call(b"hang")
    assert suspects[-1] == 1
    await workers.close()


async def test_a_pool_gives_up_after_losses_in_a_row_and_an_answer_starts_the_count_anew():
    launcher = FakeLauncher(answer)
    workers = pool(launcher, losses=Losses(3))
    for _ in range(4):
        for content in (b"die", b"die", b"a"):
            await asyncio.gather(workers.call("do", content, limit_s=60), return_exceptions=True)
    for _ in range(3):
        with pytest.raises(WorkerLost):
            await workers.call("do", b"die", limit_s=60)
    with pytest.raises(WorkersUsedUp, match=r"3 workers in a row were lost .* the last: worker 0 died of it"):
        await workers.call("do", b"a", limit_s=60)
    assert len(launcher.started) == 4 * 2 + 3
    await workers.close()


async def test_pools_that_count_together():
    """An answer in one of them starts the count of the other anew; what is lost in either counts in both."""
    launcher, losses = FakeLauncher(answer), Losses(3)
    one, other = pool(launcher, losses=losses), pool(launcher, losses=losses)
    for _ in range(4):
        await asyncio.gather(one.call("do", b"die", limit_s=60), return_exceptions=True)
        assert await other.call("do", b"a", limit_s=60) == b"a"
    for each in (one, other, one):
        with pytest.raises(WorkerLost):
            await each.call("do", b"die", limit_s=60)
    with pytest.raises(WorkersUsedUp, match="3 workers in a row were lost"):
        await one.call("do", b"a", limit_s=60)
    await asyncio.gather(one.close(), other.close())


async def test_one_that_does_not_begin_after_some_that_were_lost_is_one_that_does_not_begin():
    launcher = FakeLauncher(answer)
    workers = pool(launcher, losses=Losses(8))
    for _ in range(4):
        with pytest.raises(WorkerLost):
            await workers.call("do", b"die", limit_s=60)
    launcher.fails = EngineLost("no memory")
    call = asyncio.create_task(workers.call("do", b"a", limit_s=60))
    with pytest.raises(WorkersUsedUp, match=r"7 workers in a row were lost .* no memory"):
        await call
    await workers.close()


async def test_workers_that_never_begin():
    late = TimeLimitExceeded("it did not answer")
    bad = ConfigError("bad", where="x", remedy="y")
    odd = RuntimeError("can't start new thread")
    lost = EngineLost("no such file")
    for fails, raised in ((lost, WorkersUsedUp), (late, WorkersUsedUp), (odd, WorkersUsedUp), (bad, ConfigError)):
        workers = pool(FakeLauncher(answer, fails), losses=Losses(2))
        calls = [workers.call("do", b"a", limit_s=60) for _ in range(3)]
        found = await asyncio.gather(*calls, return_exceptions=True)
        assert [type(one) for one in found] == [raised] * 3 and str(fails) in str(found[0])
        await workers.close()


async def test_a_call_that_is_given_up_leaves_no_worker_at_work_on_it():
    launcher = FakeLauncher(answer)
    workers = pool(launcher, losses=Losses(2))
    for _ in range(3):  # that many are no reason to give up: it was asked for
        call = asyncio.create_task(workers.call("do", b"forever", limit_s=60))
        waits = asyncio.create_task(workers.call("do", b"a", limit_s=60))
        await asyncio.sleep(0.01)
        waits.cancel()
        call.cancel()
        await asyncio.gather(call, waits, return_exceptions=True)
    assert await workers.call("do", b"b", limit_s=60) == b"b"
    assert [process.killed for process in launcher.started] == [True, True, True, False]
    await workers.close()


async def test_an_idle_worker_that_dies_is_replaced_and_costs_nothing():
    launcher = FakeLauncher(answer)
    workers = pool(launcher)
    assert await workers.call("do", b"a", limit_s=60) == b"a"
    launcher.started[0].end("was ended by signal 9")
    assert await workers.call("do", b"b", limit_s=60) == b"b"
    assert len(launcher.started) == 2
    await workers.close()
