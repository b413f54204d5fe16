"""The event loop on a virtual clock."""

from __future__ import annotations

import asyncio
import os
import threading
import time

import pytest

from rollyard.bench.virtual import run


def now() -> float:
    return asyncio.get_running_loop().time()


def test_an_hour_of_sleep_takes_no_time_and_the_clock_says_that_it_passed():
    async def main() -> tuple[float, float]:
        began = now()
        await asyncio.sleep(3600)
        return began, now()

    began = time.monotonic()
    assert run(main()) == (0.0, pytest.approx(3600))
    assert time.monotonic() - began < 1


def test_timers_come_in_their_order_and_those_of_one_moment_in_the_order_they_were_set():
    async def main() -> list[tuple[str, float]]:
        seen: list[tuple[str, float]] = []

        async def after(name: str, seconds: float) -> None:
            await asyncio.sleep(seconds)
            seen.append((name, round(now(), 6)))

        await asyncio.gather(after("late", 2.0), after("first", 0.5), after("second", 0.5), after("none", 0.0))
        return seen

    assert run(main()) == [("none", 0.0), ("first", 0.5), ("second", 0.5), ("late", 2.0)]


def test_many_small_sleeps_add_up():
    async def main() -> float:
        for _ in range(1000):
            await asyncio.sleep(0.01)
        return now()

    assert run(main()) == pytest.approx(10.0, abs=1e-6)


def test_a_time_limit_ends_what_never_ends():
    async def main() -> float:
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(300):
                await asyncio.Event().wait()
        return now()

    assert run(main()) == pytest.approx(300)


def test_the_clock_stands_still_while_a_thread_works():
    """Also where a time limit is running, which would otherwise be over at once."""

    async def main() -> tuple[float, float]:
        async with asyncio.timeout(300):
            await asyncio.to_thread(time.sleep, 0.05)
        return now(), await asyncio.get_running_loop().run_in_executor(None, time.monotonic)

    began = time.monotonic()
    passed, ended = run(main())
    assert passed == 0.0 and ended - began >= 0.05


def test_a_call_from_another_thread_wakes_a_loop_that_has_nothing_else():
    async def main() -> str:
        loop, done = asyncio.get_running_loop(), asyncio.Event()
        threading.Timer(0.05, loop.call_soon_threadsafe, (done.set,)).start()
        await done.wait()
        return "woken"

    assert run(main()) == "woken"


def test_files_are_heard():
    async def main() -> bytes:
        reading, writing = os.pipe()
        came: asyncio.Future[bytes] = asyncio.get_running_loop().create_future()
        asyncio.get_running_loop().add_reader(reading, lambda: came.set_result(os.read(reading, 9)))
        threading.Timer(0.02, os.write, (writing, b"hello")).start()
        try:
            return await came
        finally:
            asyncio.get_running_loop().remove_reader(reading)
            os.close(reading)
            os.close(writing)

    assert run(main()) == b"hello"
