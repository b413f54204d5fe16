"""Conditions that last: slow and lying engines, forgotten weights, a full disk, a jumping clock, a judge that is not there."""

from __future__ import annotations

import asyncio
import json
import sqlite3
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from itertools import count
from pathlib import Path

import httpx
import pytest

from rollyard.chaos import injector
from rollyard.chaos.faults import Fault
from rollyard.config import RemoteConfig
from rollyard.engine.fake import logprob_of
from rollyard.journal.journal import Journal
from rollyard.reward.remote import Remote
from rollyard.types import Group
from rollyard.watch.step import Step
from tests.chaos import doubles
from tests.chaos.doubles import Times, judged, now
from tests.chaos.lives import Life, uninterrupted
from tests.chaos.world import Shape, World

pytestmark = pytest.mark.filterwarnings("ignore:engine.* times slower")
ASYNC = Shape("async", overtaking="never")
SHAPES = {"separate": Shape("separate", bound=True), "async": ASYNC}
BOTH = pytest.mark.parametrize("name", SHAPES)


def goes_on(life: Life) -> None:
    """As if nothing had happened, however long it took."""
    assert not life.failed, life.failed
    assert life.report is not None and not life.report.members.dropped
    assert life.weights == uninterrupted(life.shape).weights


@BOTH
def test_an_engine_that_is_ten_times_slower(name: str, tmp_path: Path) -> None:
    life = Life(SHAPES[name], tmp_path, [Fault(what="slow", which="engine-1", event="Generate", for_s=900, factor=10)]).live()
    goes_on(life)
    assert life.entries["Condemn"] == 0 and life.seconds > uninterrupted(life.shape).seconds


@pytest.mark.parametrize("how", ["short", "vocabulary", "version"])
@BOTH
def test_an_engine_that_answers_wrongly_is_taken_out_and_started_again(name: str, how: str, tmp_path: Path) -> None:
    """Nothing of what it says then is trained on."""
    fault = Fault(what="corrupt", which="engine-0", event="Generate", count=3, for_s=4, how=how)  # type: ignore[arg-type]
    life = Life(replace(SHAPES[name], size=4, restarts=3), tmp_path, [fault], options={"rollout.retries": 20}).live()
    goes_on(life)
    assert life.entries["Condemn"] >= 1 and life.entries["Restart"] >= 1
    tokens = [id for groups in life.batches.values() for group in groups for r in group.rollouts for id in r.completion.token_ids]
    assert max(tokens) < doubles.VOCABULARY


@pytest.mark.parametrize(("name", "held_out"), [("separate", 40), ("async", 8)])
def test_an_engine_that_is_lost_during_an_evaluation_is_back_before_it_is_over(name: str, held_out: int, tmp_path: Path) -> None:
    """It has no weights then: the others are asked."""
    shape = replace(SHAPES[name], held_out=held_out, steps=2, options=(("eval.every", 1),))
    life = Life(shape, tmp_path, [Fault(what="kill", which="engine-0", event="Evaluate", count=2)]).live()
    goes_on(life)
    assert life.entries["Evaluated"] == life.entries["Evaluate"] >= 2 and life.entries["Restart"] == 1


@pytest.mark.parametrize("faults", [3, 1000])
def test_wrong_answers_to_held_out_prompts_count_as_others_do(faults: int, tmp_path: Path) -> None:
    """An engine is taken out for as many of them as for others, and not believed then; else only those are asked again."""
    fault = Fault(what="corrupt", which="engine-0", event="Evaluate", count=2, for_s=0.5, how="version")
    shape = replace(SHAPES["separate"], held_out=8, steps=2, options=(("eval.every", 1), ("engine.faults", faults)))
    life = Life(shape, tmp_path, [fault]).live()
    goes_on(life)
    assert life.entries["WrongAnswer"] >= 3 and life.entries["Evaluated"] == 3
    assert life.entries["Condemn"] == life.entries["Restart"] == (faults == 3)


@BOTH
def test_an_engine_that_stands_still_is_taken_out(name: str, tmp_path: Path) -> None:
    fault = Fault(what="stall", which="engine-0", event="SegmentArrived", count=5, for_s=3000)
    life = Life(SHAPES[name], tmp_path, [fault], options={"engine.silent_s": 20}).live()
    goes_on(life)
    assert life.entries["Condemn"] == life.entries["Restart"] == 1 and life.seconds < 100


def test_an_engine_that_decodes_with_its_first_weights_again_is_taken_out(tmp_path: Path) -> None:
    """Between two loads, and while what it writes may be in the next batch: only what was taken for training by then is used."""
    forgot = list[str]()

    def forget(world: World) -> None:
        world.engines["engine-0"].forget()
        forgot.append("engine-0")

    def later(world: World, step: Step) -> None:
        if step.step == 2:
            asyncio.get_running_loop().call_later(1.0, forget, world)

    shape = Shape("async", overtaking="never", steps=8, prompts=24, times=Times(train=4.0))
    life = Life(shape, tmp_path, meddle=later, options={"weights.probe": True}).live()
    assert not life.failed and forgot and life.report is not None and not life.report.members.dropped
    assert life.entries["Condemn"] == life.entries["Restart"] == 1 and life.report.weights.probes["verified"] > 8
    told = [cause for cause in life.report.lost if "decodes with other weights" in cause]
    assert len(told) == 1 and "engine-0" in told[0]
    assert len({step for step, groups in life.batches.items() if any(map(of_others, groups))}) <= 1


def of_others(group: Group) -> bool:
    """Is a token's logprob not that of the weights that are said to have written it?"""
    done = [rollout.completion for rollout in group.rollouts]
    return any(logprob_of(id) != logprob for each in done for id, logprob in zip(each.token_ids, each.logprobs, strict=True))


class Full(Journal):
    """On a disk with room for so many pages."""

    def __init__(self, *args: object, pages: int, **named: object) -> None:
        super().__init__(*args, **named)  # type: ignore[arg-type]
        (now_there,) = self._connection.execute("PRAGMA page_count").fetchone()
        self._connection.execute(f"PRAGMA max_page_count = {now_there + pages}")


@pytest.mark.filterwarnings("ignore:version .* is not saved")
@pytest.mark.parametrize("pages", [0, 1, 2])
def test_a_full_disk_ends_the_run_with_its_name_and_costs_nothing(pages: int, tmp_path: Path) -> None:
    shape = replace(ASYNC, groups=4, size=4, slots=16, prompts=24)
    life = Life(shape, tmp_path, journal=partial(Full, pages=pages)).live()
    assert "journal.sqlite" in life.failed and "full" in life.failed
    goes_on(Life(shape, tmp_path, again=True).live())


@pytest.mark.filterwarnings("ignore:version .* is not saved")
def test_a_disk_without_room_for_a_checkpoint_ends_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def write(folder: Path, state: object, write: Callable[..., None] = doubles.write) -> None:
        write(folder, state)
        if json.loads((folder / doubles.STATE).read_text())["step"] == 3:
            raise OSError(28, "No space left on device")

    monkeypatch.setattr(doubles, "write", write)
    life = Life(ASYNC, tmp_path).live()
    assert "No space left on device" in life.failed
    monkeypatch.undo()
    goes_on(Life(ASYNC, tmp_path, again=True).live())


def test_a_clock_that_jumps_changes_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The wall clock is for people; all limits are on one that never jumps."""
    jumps: Iterator[int] = count()

    def jumping() -> float:
        return 1.7e9 + (-1) ** next(jumps) * 86_400.0

    monkeypatch.setattr(injector.time, "time", jumping)
    fault = Fault(what="stall", which="engine-0", after_s=2, for_s=1)
    life = Life(ASYNC, tmp_path, [fault], journal=partial(Journal, clock=jumping)).live()
    monkeypatch.undo()
    goes_on(life)
    assert next(jumps) > 10 and life.survival[0].at_s == pytest.approx(2) and life.seconds < 20
    with sqlite3.connect(tmp_path / "run" / "journal.sqlite") as connection:
        times = [time for (time,) in connection.execute("SELECT finished_at FROM completions ORDER BY rowid")]
    assert times == sorted(times) and times[0] > 1.7e9, "they follow each other all the same"


class Service:
    """A judge behind an address, which is not there from one second to another."""

    def __init__(self, begin: float, end: float) -> None:
        self._begin, self._end, self.refused = begin, end, 0

    async def __call__(self, request: httpx.Request) -> httpx.Response:
        if self._begin <= now() < self._end:
            self.refused += 1
            raise httpx.ConnectError("connection refused")
        asked = json.loads(request.content)
        return httpx.Response(200, content=json.dumps({"reward": judged(asked["prompt"], asked["completion"])}))


@BOTH
def test_a_judge_that_is_away_for_a_minute_is_waited_for(name: str, tmp_path: Path) -> None:
    service = Service(3.0, 63.0)
    config = RemoteConfig(url="http://judge.test/score", retries=30, limit_s=300)
    life = Life(SHAPES[name], tmp_path, scorer=lambda: Remote(config, "", httpx.MockTransport(service))).live()
    goes_on(life)
    assert service.refused > 3 and 63 < life.seconds < 120


def test_a_judge_that_is_away_for_longer_ends_the_run_which_is_resumed_when_it_is_back(tmp_path: Path) -> None:
    """Prompts without verdicts are dropped, until there were as many as the config allows."""
    shape, config = Shape("async", prompts=60, steps=8), RemoteConfig(url="http://judge.test/score", retries=1, limit_s=10)

    def judge(begin: float, end: float) -> Remote:
        return Remote(config, "", httpx.MockTransport(Service(begin, end)))

    life = Life(shape, tmp_path, scorer=lambda: judge(3.0, 63.0), options={"rollout.give_up_after": 20}).live()
    assert "20 prompts in a row were dropped" in life.failed and "judge.test" in life.failed
    after = Life(shape, tmp_path, again=True, scorer=lambda: judge(0.0, 0.0)).live()
    assert not after.failed and after.report is not None and after.report.prompts.trained == 16
    assert life.report is not None and after.report.prompts.dropped["failed"] == life.report.prompts.dropped["failed"] >= 20
