"""Whole runs on a virtual clock, with an engine that is not fit: it lies, stands still, forgets its weights, or is slow."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest

import rollyard
from rollyard.bench import virtual
from rollyard.bench.doubles import DoubleEngine, Meter
from rollyard.bench.placements import config_of
from rollyard.bench.theory import Work
from rollyard.engine.fake import Lie, logprob_of
from rollyard.errors import RunFailed
from rollyard.events import EngineId, Rollover
from rollyard.types import Answer, Probed, Verdict, WeightVersion
from tests.test_fleet import doubled, engine_events

LATER_S = 0.02  # half a step
Harm = Callable[[DoubleEngine], None]


class Knows:
    """Evidence of a trainer that knows what doubles say (protocols.Evidence); nothing else is asked of it."""

    async def prompts(self) -> tuple[tuple[int, ...], ...]:
        return ((1, 2), (3, 4))

    async def published(self, version: WeightVersion, engines: Sequence[EngineId]) -> None: ...

    async def check(self, engine: EngineId, answers: Sequence[Answer]) -> Probed:
        gap = max(abs(answer.logprob - logprob_of(answer.token)) for answer in answers)
        return Probed(Verdict.CONTRADICTED if gap else Verdict.VERIFIED, gap, math.inf)


def harmed(placement: str, scratch: Path, harm: Harm, at: int = 3, again: int = 0, **options: Any) -> tuple[rollyard.Run, Meter]:
    """A run of two engines, the first of which comes to harm after a step, and once more after another."""
    work, meter = Work(3.0, steps=12, groups=4, size=4, generate=2, slots=4, staleness=1), Meter()

    async def going() -> rollyard.Run:
        asked = config_of(placement, Rollover.KEEP, work, scratch)
        weights = asked.weights.model_copy(update={"probe": True, "limit_s": 2.0})
        engine = asked.engine.model_copy(update={"silent_s": 2.0} | options)

        async def later() -> None:  # than the weights that follow from the step
            await asyncio.sleep(LATER_S)
            harm(cast(DoubleEngine, made.engines["engine-0"]))

        made = replace(doubled(placement, work, meter), vocabulary=97, evidence=cast(Any, Knows()))
        run = rollyard.Run(asked.model_copy(update={"weights": weights, "engine": engine}), stations=lambda past: made)
        harms = list[asyncio.Task[None]]()
        async for step in run:
            if step.step in (at, again):
                harms.append(asyncio.create_task(later()))
        await asyncio.gather(*harms)
        return run

    return virtual.run(going()), meter


def lies(lie: Lie) -> Harm:
    return lambda engine: setattr(engine, "lie", lie)


HARMS: dict[str, tuple[Harm, str]] = {
    **{lie: (lies(lie), "") for lie in Lie if lie is not Lie.NONE},
    "stall": (DoubleEngine.stall, ""),
    "forget": (DoubleEngine.forget, "decodes with other weights"),
}


@pytest.mark.parametrize(
    ("name", "placement"), [*((name, "async") for name in HARMS), ("stall", "separate"), ("forget", "separate")]
)
def test_it_is_replaced_and_the_run_goes_on(placement: str, name: str, tmp_path: Path) -> None:
    harm, told = HARMS[name]
    run, meter = harmed(placement, tmp_path, harm)
    report = run.report
    assert report is not None and not report.finished.failed and report.steps == 12
    assert set(report.prompts.dropped) <= {"stopped", "distrusted"}
    tokens = report.tokens
    assert tokens.generated == tokens.trained + sum(tokens.dropped.values()) + tokens.live
    assert len(meter.engines) == 3 and meter.engines[0]._cause and told in meter.engines[0]._cause
    own = [event for engine, event in engine_events(run) if engine == "engine-0"]
    assert own.count("down") == 1 and own.index("down") < own.index("up", 1) < own.index("loaded", own.index("down"))
    assert meter.engines[2].stats().generated_tokens > 0


def test_one_that_decodes_with_other_weights_a_second_time_ends_the_run(tmp_path: Path) -> None:
    with pytest.raises(RunFailed, match=r"engine engine-0 .*decodes with other weights"):
        harmed("async", tmp_path, DoubleEngine.forget, at=3, again=8)


def test_all_engines_lie_and_the_run_ends_with_the_cause(tmp_path: Path) -> None:
    """Also those that take their places."""
    with pytest.MonkeyPatch.context() as patch, pytest.raises(RunFailed, match=r"no engine is left.*wrong answers"):
        patch.setattr(DoubleEngine, "_flush", lying(DoubleEngine._flush))
        harmed("async", tmp_path, lambda engine: None)


def lying(flush: Callable[..., Any]) -> Callable[..., Any]:
    return lambda engine, job, finish: replace(flush(engine, job, finish), token_ids=(2**40,) * 2, logprobs=(-1.0, -1.0))


@pytest.mark.parametrize("placement", ["separate", "async"])
def test_a_slow_engine_gets_less_and_delays_the_run_little(placement: str, tmp_path: Path) -> None:
    """One of four, ten times slower from the second step on: three quarters of the capacity are left."""

    async def timed(pace: float, scratch: Path) -> tuple[float, list[int], rollyard.Run]:
        work, meter = Work(9.0, steps=24, groups=8, size=8, generate=4, slots=64, staleness=1), Meter()
        asked = config_of(placement, Rollover.KEEP, work, scratch)
        asked = asked.model_copy(update={"rollout": asked.rollout.model_copy(update={"moves": 2})})
        run, began, before = rollyard.Run(asked, stations=lambda past: doubled(placement, work, meter)), 0.0, [0]
        async for step in run:
            if step.step == 2:
                meter.engines[0].pace, began = pace, asyncio.get_running_loop().time()
            if step.step == 6:
                before = [engine.stats().generated_tokens for engine in meter.engines]
        wrote = [engine.stats().generated_tokens - old for engine, old in zip(meter.engines, before, strict=True)]
        return asyncio.get_running_loop().time() - began, wrote, run

    usual, even, run = virtual.run(timed(1.0, tmp_path))
    assert run.report is not None and run.report.slow == {} and max(even) < 1.3 * min(even)
    slow, wrote, run = virtual.run(timed(10.0, tmp_path / "run"))
    report = run.report
    assert report is not None and not report.finished.failed and report.prompts.dropped.keys() <= {"stopped"}
    assert wrote[0] < 0.25 * min(wrote[1:]), wrote
    assert slow < 2 * usual + 1, (slow, usual)  # what it held as it became slow takes up to two seconds
    assert report.slow.keys() == {"engine-0"} and 5 <= report.slow["engine-0"] <= 20
