"""The scripted engine keeps every promise of an engine, and breaks them when told to."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from dataclasses import replace

import pytest

from rollyard.engine.fake import END, FakeEngine, OnLoad, Script, by_seed
from rollyard.errors import EngineError, EngineLost, RequestRejected, WeightSyncError
from rollyard.events import Rollover, WakePart
from rollyard.protocols.rollouts import Engine
from rollyard.types import Activity, FinishReason, Manifest, Request, RequestId, Sampling, Segment, WeightVersion

V0, V1 = WeightVersion(0), WeightVersion(1)


async def change(engine: Engine, version: WeightVersion) -> None:
    await engine.prepare(Manifest(version, (), 0))
    await engine.load(version)


class Clock:
    """Virtual seconds: sleeping takes no time, it only moves the clock."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now

    async def sleep(self, seconds: float) -> None:
        self.now += seconds
        await asyncio.sleep(0)


def ask(name: int, max_tokens: int = 50, *, written: tuple[int, ...] = (), priority: int = 0) -> Request:
    return Request(RequestId(name, 0), (1, 2), Sampling(max_tokens), seed=name, written_ids=written, priority=priority)


async def started(engine: FakeEngine) -> FakeEngine:
    await engine.start()
    await change(engine, V0)
    return engine


async def collect(engine: Engine, count: int) -> dict[int, list[Segment]]:
    written: dict[int, list[Segment]] = {}
    async for segments in engine.segments():
        for segment in segments:
            written.setdefault(segment.request.group, []).append(segment)
        if sum(one[-1].finish is not None for one in written.values()) == count:
            break
    return written


def tokens(segments: list[Segment]) -> tuple[int, ...]:
    return tuple(token for segment in segments for token in segment.token_ids)


def test_importing_it_imports_no_torch() -> None:
    code = "import sys, rollyard.engine.fake; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False, timeout=60).returncode == 0


async def test_it_writes_its_script() -> None:
    engine = await started(FakeEngine(script=lambda request: Script.spell("hello")))
    engine.generate([ask(0), ask(1, 3)])
    written = await collect(engine, 2)
    assert tokens(written[0]) == (*map(ord, "hello"), END) and written[0][-1].finish is FinishReason.STOP
    assert tokens(written[1]) == tuple(map(ord, "hel")) and written[1][-1].finish is FinishReason.LENGTH
    assert all(len(segment.logprobs) == len(segment.token_ids) for segment in written[0])
    await engine.close()


async def test_the_seed_alone_decides_and_a_cut_request_goes_on_elsewhere() -> None:
    whole = by_seed(ask(3)).token_ids
    assert len({by_seed(ask(name)).token_ids for name in range(20)}) == 20
    for cut in range(len(whole)):
        engine = await started(FakeEngine(slots=1 + cut % 3))
        engine.generate([ask(7), ask(3, written=whole[:cut])])
        assert tokens((await collect(engine, 2))[3]) == whole[cut:]
        await engine.close()


async def test_slots_and_priority_are_respected() -> None:
    clock = Clock()
    engine = await started(
        FakeEngine(slots=2, script=lambda request: Script((5,) * 10), token_s=1.0, sleep=clock.sleep, clock=clock)
    )
    engine.generate([ask(0), ask(1), ask(2), ask(3, priority=-1)])
    written = await collect(engine, 4)
    assert list(written) == [3, 0, 1, 2]  # in the order of their first segments
    stats = engine.stats()
    assert (stats.step_s, stats.steps, stats.generated_tokens, stats.slots_busy) == (20.0, 20, 40, 1.0)
    await engine.close()


async def test_segments_come_every_200_ms() -> None:
    clock = Clock()
    engine = await started(FakeEngine(script=lambda request: Script((5,) * 10), token_s=0.07, sleep=clock.sleep, clock=clock))
    engine.generate([ask(0)])
    assert [len(segment.token_ids) for segment in (await collect(engine, 1))[0]] == [3, 3, 3, 1]
    await engine.close()


async def test_errors_after_n_tokens() -> None:
    engine = await started(FakeEngine(script=lambda request: Script((5, 6, 7), error_after=2)))
    engine.generate([ask(0)])
    written = (await collect(engine, 1))[0]
    assert tokens(written) == (5, 6) and written[-1].finish is FinishReason.ERROR and written[-1].problem
    await engine.close()


async def test_dying_takes_everything_with_it() -> None:
    engine = await started(FakeEngine(script=lambda request: Script((5,) * 40, die_after=20 if request.id.group else None)))
    engine.generate([ask(0), ask(1)])
    received: list[Segment] = []
    with pytest.raises(EngineLost, match="scripted to kill"):
        async for segments in engine.segments():
            received += segments
    assert [len(segment.token_ids) for segment in received] == [16, 16]
    for call in (engine.load(V1), engine.pause(Rollover.DRAIN), engine.abort([RequestId(0, 0)]), engine.resume()):
        with pytest.raises(EngineLost):
            await call
    with pytest.raises(EngineLost):
        engine.generate([ask(2)])
    await asyncio.wait_for(engine.close(), 5)


async def test_death_from_outside_frees_who_drains() -> None:
    engine = await started(FakeEngine(script=lambda request: Script((5,) * 40), token_s=60))
    engine.generate([ask(0)])
    draining = asyncio.create_task(engine.pause(Rollover.DRAIN))
    await asyncio.sleep(0)
    engine.die("power cut")
    with pytest.raises(EngineLost, match="power cut"):
        await asyncio.wait_for(draining, 5)
    await engine.close()


async def test_an_empty_script_stops_at_once() -> None:
    engine = await started(FakeEngine(script=lambda request: Script(())))
    engine.generate([ask(0)])
    assert [(segment.token_ids, segment.finish) for segment in (await collect(engine, 1))[0]] == [((), FinishReason.STOP)]
    await engine.close()


async def test_a_clock_that_breaks_is_a_death() -> None:
    async def broken(seconds: float) -> None:
        if seconds:
            raise ValueError("no time left")

    engine = await started(FakeEngine(token_s=1.0, sleep=broken))
    engine.generate([ask(0)])
    with pytest.raises(EngineLost, match="no time left"):
        await collect(engine, 1)
    await engine.close()


async def test_late_answers() -> None:
    clock = Clock()
    engine = await started(
        FakeEngine(script=lambda request: Script((5,), delay_s=3.0 * request.id.group), sleep=clock.sleep, clock=clock)
    )
    engine.generate([ask(0), ask(1)])
    await collect(engine, 2)
    assert clock.now == pytest.approx(3.0, abs=0.01)
    await engine.close()


async def test_loads_are_taken_ignored_or_refused() -> None:
    engine = await started(FakeEngine())
    engine.on_load = OnLoad.IGNORE
    await change(engine, V1)
    assert engine.version == V0
    engine.on_load = OnLoad.REFUSE
    with pytest.raises(WeightSyncError):
        await change(engine, V1)
    assert engine.version == V0
    engine.on_load = OnLoad.TAKE
    await change(engine, V1)
    assert engine.version == V1
    await engine.close()


async def test_the_life_of_an_engine() -> None:
    engine = FakeEngine(script=lambda request: Script((5,) * 30), token_s=0.001)
    with pytest.raises(EngineError, match="not started"):
        engine.generate([ask(0)])
    await engine.start()
    with pytest.raises(EngineError, match="no weights"):
        engine.generate([ask(0)])
    await change(engine, V0)
    engine.generate([ask(0), ask(1)])
    with pytest.raises(RequestRejected, match="same id"):
        engine.generate([ask(0)])
    with pytest.raises(EngineError, match="requests run"):
        await engine.sleep()
    with pytest.raises(EngineError, match="pause it first"):
        await change(engine, V1)
    await engine.abort([RequestId(1, 0), RequestId(9, 0)])
    await engine.pause(Rollover.KEEP)
    with pytest.raises(EngineError, match="resume it first"):
        await engine.pause(Rollover.DRAIN)
    with pytest.raises(EngineError, match="paused"):
        engine.generate([ask(2)])
    await change(engine, V1)
    await engine.resume()
    await engine.pause(Rollover.DRAIN)
    written = await collect(engine, 2)
    assert written[1][-1].finish is FinishReason.ABORT and len(tokens(written[0])) == 30
    assert written[0][-1].version == V1
    await engine.sleep()
    await engine.wake(WakePart.WEIGHTS)
    await engine.wake(WakePart.CACHE)
    await engine.resume()
    engine.generate([ask(3)])
    await engine.close()
    with pytest.raises(EngineError, match="closed"):
        engine.generate([ask(4)])
    ends = [segment.finish async for segments in engine.segments() for segment in segments]
    assert ends[-1] is FinishReason.ABORT


async def test_keep_records_the_oldest_cache() -> None:
    engine = await started(FakeEngine(script=lambda request: Script((5,) * 30), token_s=0.001))
    engine.generate([ask(0)])
    await asyncio.sleep(0.01)
    await engine.pause(Rollover.KEEP)
    await change(engine, V1)
    await engine.resume()
    written = (await collect(engine, 1))[0]
    assert [(segment.version, segment.oldest_kv) for segment in written] == [(V0, V0), *[(V1, V0)] * (len(written) - 1)]
    assert len(written) > 1 and len(tokens(written)) == 30
    await engine.close()


async def test_the_window_ends_a_completion_or_refuses_it() -> None:
    engine = await started(FakeEngine(window=6, script=lambda request: Script((5,) * 30)))
    engine.generate([ask(0)])
    written = (await collect(engine, 1))[0]
    assert len(tokens(written)) == 4 and written[-1].finish is FinishReason.CONTEXT
    with pytest.raises(RequestRejected, match="no room"):
        engine.generate([replace(ask(1), prompt_ids=(1,) * 6)])
    await engine.close()


async def test_it_says_what_it_did_and_when() -> None:
    """Tokens take a tenth of a second each: three for a rollout, two for an evaluation; a load takes one second."""
    clock = Clock()
    engine = FakeEngine(script=lambda _: Script((5, 6, 7)), token_s=0.1, load_s=1.0, sleep=clock.sleep, clock=clock)
    await started(engine)
    engine.generate([ask(0)])
    await collect(engine, 1)
    clock.now += 5.0  # nothing to do
    engine.generate([ask(-1, max_tokens=2)])
    await collect(engine, 1)
    told = [(span.activity, round((span.end_ns - span.start_ns) / 1e9, 6), span.what) for span in engine.spans.drain()]
    assert [one for one in told if one[1]] == [
        (Activity.SYNC, 1.0, "load"),
        (Activity.GENERATE, 0.3, ""),
        (Activity.EVAL, 0.2, ""),
    ]
    await engine.close()


async def test_a_request_that_goes_on_is_computed_again_but_for_its_newest_token() -> None:
    engine = await started(FakeEngine())
    engine.generate([ask(0)])
    await collect(engine, 1)
    assert (engine.stats().prefilled_tokens, engine.stats().recomputed_tokens) == (2, 0)
    engine.generate([ask(1, written=(3, 4, 5))])
    await collect(engine, 1)
    assert (engine.stats().prefilled_tokens, engine.stats().recomputed_tokens) == (3, 4)
    await engine.close()
