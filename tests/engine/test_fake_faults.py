"""What the scripted engine does wrong when it is told to: wrong answers, forgotten weights, standstills, slowness."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable

import pytest

from rollyard.engine.fake import BASE_GAP, FakeEngine, Lie, Script, logprob_of
from rollyard.errors import EngineLost
from rollyard.events import Rollover
from rollyard.types import Manifest, Segment, WeightVersion
from tests.engine.test_fake import V1, Clock, ask, change, collect, started, tokens

LIES: dict[Lie, Callable[[Segment], bool]] = {
    Lie.LOGPROBS: lambda segment: len(segment.logprobs) == len(segment.token_ids) - 1,
    Lie.POSITIVE: lambda segment: max(segment.logprobs) > 0,
    Lie.NAN: lambda segment: math.isnan(segment.logprobs[-1]),
    Lie.TOKENS: lambda segment: max(segment.token_ids) == 2**40,
    Lie.MORE: lambda segment: len(segment.token_ids) == len(segment.logprobs) > 1000,
    Lie.VERSION: lambda segment: segment.version.step == 1000,
}


@pytest.mark.parametrize("lie", LIES)
async def test_it_lies_while_it_is_told_to(lie: Lie) -> None:
    engine = await started(FakeEngine(script=lambda _: Script((5, 6, 7))))
    engine.lie = lie
    engine.generate([ask(0)])
    assert LIES[lie]((await collect(engine, 1))[0][0])
    engine.lie = Lie.NONE
    engine.generate([ask(1)])
    (honest,) = (await collect(engine, 1))[1]
    assert honest.token_ids == (5, 6, 7) and honest.logprobs == tuple(map(logprob_of, (5, 6, 7)))
    assert not any(found(honest) for found in LIES.values())
    await engine.close()


async def test_it_speaks_of_requests_that_nobody_made() -> None:
    engine = await started(FakeEngine(script=lambda _: Script((5, 6, 7))))
    engine.lie = Lie.STRANGER
    engine.generate([ask(0)])
    assert (await collect(engine, 1))[0][0].request.member == 1000
    await engine.close()


async def test_it_forgets_its_weights_and_says_nothing_of_it_until_the_next_load() -> None:
    engine = await started(FakeEngine(script=lambda _: Script((5,))))
    said = []
    for name in range(3):
        if name == 1:
            engine.forget()
        if name == 2:
            await change(engine, V1)
        engine.generate([ask(name)])
        said.append((await collect(engine, 1))[name][0])
    assert [segment.version for segment in said] == [WeightVersion(0), WeightVersion(0), V1]
    right = logprob_of(5)
    assert [segment.logprobs for segment in said] == [(right,), (right - BASE_GAP,), (right,)]
    await engine.close()


async def test_a_standstill_writes_nothing_and_answers_nothing_until_it_goes_on() -> None:
    engine = await started(FakeEngine(script=lambda _: Script((5,) * 40), token_s=0.001))
    engine.stall()
    engine.generate([ask(0)])
    collecting = asyncio.create_task(collect(engine, 1))
    calls = [
        asyncio.create_task(call)
        for call in (engine.abort([]), engine.pause(Rollover.KEEP), engine.prepare(Manifest(V1, (), 0)), engine.resume())
    ]
    await asyncio.sleep(0.05)
    assert not collecting.done() and not any(call.done() for call in calls) and not engine.stats().steps
    engine.go_on()
    await asyncio.gather(*calls)
    assert len(tokens((await collecting)[0])) == 40
    await engine.close()


async def test_whoever_waits_for_a_standstill_hears_that_it_was_condemned() -> None:
    engine = await started(FakeEngine())
    engine.stall()
    engine.generate([ask(0)])
    waiting = asyncio.create_task(engine.pause(Rollover.DRAIN))
    await asyncio.sleep(0)
    engine.condemn("it stood still")
    with pytest.raises(EngineLost, match="it stood still"):
        await asyncio.wait_for(waiting, 5)
    with pytest.raises(EngineLost, match="it stood still"):
        await collect(engine, 1)
    await engine.close()


async def test_a_standstill_can_be_closed() -> None:
    engine = await started(FakeEngine())
    engine.stall()
    engine.generate([ask(0)])
    await asyncio.wait_for(engine.close(), 5)


async def test_ten_times_slower() -> None:
    clock, took = Clock(), []
    engine = FakeEngine(script=lambda _: Script((5,) * 10), token_s=1.0, load_s=2.0, sleep=clock.sleep, clock=clock)
    await started(engine)
    for pace in (1.0, 10.0):
        engine.pace, began = pace, clock.now
        engine.generate([ask(int(pace))])
        await collect(engine, 1)
        await change(engine, V1)
        took.append(clock.now - began)
    assert took == [12.0, 120.0]
    await engine.close()
