"""Prompts in a trace: their requests, verdicts and steps, and the flows between them."""

from __future__ import annotations

import random
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollyard import events as ev
from rollyard.types import (
    Completion,
    DropReason,
    FinishReason,
    Group,
    Prompt,
    Request,
    RequestId,
    Reward,
    Rollout,
    Sampling,
    Segment,
    WeightVersion,
)
from rollyard.watch.requests import Requests
from rollyard.watch.trace import Traced, write_trace
from rollyard.watch.tracks import LANES, side_by_side
from tests.traces import Shown, number, read_strictly

K = 2


def prompt(id_: int) -> Prompt:
    return Prompt(id_, id_, (1,), "p")


def request(group: int, member: int, attempt: int = 0) -> Request:
    return Request(RequestId(group, member, attempt), (1,), Sampling(4), 0)


def wrote(group: int, member: int, finish: FinishReason | None, attempt: int = 0, engine: str = "e0") -> ev.SegmentArrived:
    version = WeightVersion(0)
    return ev.SegmentArrived(engine, Segment(RequestId(group, member, attempt), (7, 8), (-0.1, -0.2), version, version, finish))


def done(group: int, member: int) -> Completion:
    return Completion(group, member, (7, 8), (-0.1, -0.2), (), FinishReason.STOP, "")


def group_of(id_: int, *rewards: float) -> Group:
    return Group(prompt(id_), tuple(Rollout(done(id_, member), Reward(value)) for member, value in enumerate(rewards)))


def answered(id_: int, member: int) -> list[tuple[int, ev.Event | ev.Instruction]]:
    """By the clock."""
    at = 100 * id_ + 10 * member
    return [
        (at + 1, ev.Generate("e0", request(id_, member))),
        (at + 5, wrote(id_, member, FinishReason.STOP)),
        (at + 5, ev.Score(prompt(id_), done(id_, member))),
        (at + 7, ev.Scored(id_, member, Reward(1.0))),
    ]


def shown(requests: Requests, end: int, path: Path) -> Shown:
    write_trace(path / "trace.json", Traced((), (), 0, end, requests.followed(end)))
    return read_strictly(path / "trace.json")


def heard(*told: tuple[int, ev.Event | ev.Instruction]) -> Requests:
    requests = Requests()
    for at, entry in told:
        requests.hear((entry,), at)
    return requests


def test_a_prompt_leads_to_its_step_and_that_to_the_version_in_the_engine(tmp_path: Path) -> None:
    requests = heard(
        (100, ev.Admit(prompt(1))),
        *answered(1, 0),
        *answered(1, 1),
        (130, ev.Train(4, (group_of(1, 1.0, 0.0),))),
        (150, ev.BatchTrained(WeightVersion(5))),
        (151, ev.Load("e0", WeightVersion(5))),
        (155, ev.EngineLoaded("e0", WeightVersion(5))),
    )
    trace = shown(requests, 200, tmp_path)
    ways = [[each.name for each in way] for way in trace.flows.values()]
    assert ways == [
        ["prompt 1", "prompt 1, member 0", "prompt 1, member 0", "step 5"],
        ["prompt 1", "prompt 1, member 1", "prompt 1, member 1", "step 5"],
        ["step 5", "version 5"],
    ]
    (life,), (first, _) = trace.of("prompt"), trace.of("request")
    assert (life.start_ns, life.end_ns) == (100, 128)  # less 2 ns, so that what comes next touches nothing
    assert life.args == {"fate": "trained", "step": 5, "reward_mean": 0.5, "members_dropped": 0}
    assert (first.process, first.start_ns, first.end_ns) == ("requests of e0", 101, 103)
    assert first.args == {"engine": "e0", "attempt": 0, "tokens": 2, "version": 0, "finish": "stop"}
    assert [(each.name, each.start_ns, each.end_ns) for each in trace.of("step")] == [("step 5", 130, 148)]
    assert trace.left_out == ""


def test_what_did_not_go_well_is_told(tmp_path: Path) -> None:
    """A request that failed, one lost with its engine, a member that was dropped, a prompt that was, and what goes on."""
    requests = heard(
        *((10, ev.Admit(prompt(id_))) for id_ in range(4)),
        (11, ev.Generate("e0", request(0, 0))),
        (12, ev.Generate("e1", request(0, 1))),
        (13, ev.Generate("e0", request(1, 0))),
        (14, ev.Generate("e1", request(2, 0))),
        (15, ev.Generate("e0", request(3, 0))),
        (20, ev.RequestFailed("e0", RequestId(0, 0), "boom", True)),
        (21, ev.Generate("e1", request(0, 0, 1))),
        (30, ev.EngineDown("e1", "gone")),
        (31, ev.Drop(0, 1, DropReason.FAILED)),
        (32, ev.Generate("e0", request(0, 0, 2))),
        (33, wrote(0, 0, FinishReason.STOP, 1, "e1")),  # too late: nobody heeds it
        (40, wrote(0, 0, FinishReason.STOP, 2)),
        (41, ev.Drop(1, None, DropReason.STALE)),
        (42, wrote(1, 0, FinishReason.ABORT)),
        (50, ev.Train(0, (group_of(0, 1.0),))),
        (60, ev.BatchTrained(WeightVersion(1))),
        (61, ev.Train(1, (group_of(2, 1.0),))),
    )
    trace = shown(requests, 70, tmp_path)
    assert {(each.name, each.process, each.args["finish"]) for each in trace.of("request")} == {
        ("prompt 0, member 0", "requests of e0", "failed"),
        ("prompt 0, member 0", "requests of e1", "engine lost"),
        ("prompt 0, member 0", "requests of e0", "stop"),
        ("prompt 0, member 1", "requests of e1", "engine lost"),
        ("prompt 1, member 0", "requests of e0", "abort"),
        ("prompt 2, member 0", "requests of e1", "engine lost"),
        ("prompt 3, member 0", "requests of e0", "running"),
    }
    fates = {each.name: each.args["fate"] for each in trace.of("prompt")}
    assert fates == {"prompt 0": "trained", "prompt 1": "dropped: stale", "prompt 2": "live", "prompt 3": "live"}
    assert trace.trained == {1: {0}}
    way = next(way for way in trace.flows.values() if way[0].name == "prompt 0" and way[-1].kind == "step")
    assert [each.start_ns for each in way] == [10, 11, 21, 32, 50]  # all three tries, in their order
    assert [(each.name, each.args["whole"]) for each in trace.of("step")] == [("step 1", True), ("step 2", False)]


def test_what_an_earlier_life_wrote_leads_to_its_step_too(tmp_path: Path) -> None:
    requests = heard(
        (10, ev.Admit(prompt(3))),
        (10, ev.Keep(group_of(3, 1.0, 0.0), recovered=True)),
        (10, ev.Train(1, (group_of(3, 1.0, 0.0),))),
        (20, ev.BatchTrained(WeightVersion(2, 1))),
    )
    trace = shown(requests, 30, tmp_path)
    assert trace.trained == {2: {3}}


@given(st.lists(st.tuples(st.integers(0, 60), st.integers(0, 20)), max_size=60))
def test_lanes_never_overlap_and_are_as_few_as_can_be(drawn: list[tuple[int, int]]) -> None:
    from rollyard.watch.requests import Judged

    pieces = [Judged(0, 0, start, start + length, None) for start, length in drawn]
    found = side_by_side(pieces)
    assert sorted(each for lane in found for each in lane) == sorted(pieces)
    ends = {each: max(each.end_ns, each.start_ns + 1) for each in pieces}
    assert all(ends[before] <= after.start_ns for lane in found for before, after in pairwise(lane))
    most = max((sum(each.start_ns <= at < ends[each] for each in pieces) for at in range(90)), default=0)
    assert len(found) == most


@pytest.mark.parametrize("engines", [3, 100])
def test_a_long_run_is_thinned_by_prompts_which_stay_whole(tmp_path: Path, engines: int) -> None:
    """10,000 prompts of 2 members each, 1,000 of them at a time: far more than is kept."""
    draw, requests, most = random.Random(0), Requests(2_000), 0
    live: list[int] = []
    now = step = 0
    for id_ in range(10_000):
        now += 3
        live.append(id_)
        names = [f"e{draw.randrange(engines)}" for _ in range(K)]
        requests.hear([ev.Admit(prompt(id_)), *(ev.Generate(name, request(id_, k)) for k, name in enumerate(names))], now)
        for member, name in enumerate(names):
            requests.hear([wrote(id_, member, FinishReason.STOP, engine=name), ev.Score(prompt(id_), done(id_, member))], now + 1)
            requests.hear([ev.Scored(id_, member, Reward(1.0))], now + 2)
        if len(live) == 1000:
            batch, live = live[:100], live[100:]
            requests.hear([ev.Train(step, tuple(group_of(each, 1.0, 1.0) for each in batch))], now)
            requests.hear([ev.BatchTrained(WeightVersion(step + 1)), ev.EngineLoaded("e0", WeightVersion(step + 1))], now)
            step += 1
        most = max(most, len(requests.followed(now).stays))
    followed = requests.followed(now)
    assert most <= 2_000 and followed.every >= 32
    trace = shown(requests, now + 5, tmp_path)
    assert trace.left_out == f"of prompts one in {followed.every} is shown, with all of its requests and verdicts"
    names = {each.process for each in trace.slices}
    assert (f"requests of all engines (one in {followed.every})" in names) == (engines > 36)
    ids = {number(each) for each in trace.of("prompt")}
    assert ids == set(range(0, 10_000, followed.every))
    assert {number(each) for each in trace.of("request")} == ids and len(trace.of("request")) == K * len(ids)
    assert all(ids >= trained for trained in trace.trained.values())
    assert set().union(*trace.trained.values()) == {id_ for id_ in ids if id_ not in live}


def test_so_many_lanes_at_most(tmp_path: Path) -> None:
    requests = heard(*((id_, ev.Admit(prompt(id_))) for id_ in range(3 * LANES)))
    trace = shown(requests, 4 * LANES, tmp_path)
    assert len({(each.process, each.lane) for each in trace.slices}) <= LANES
    assert "one in 4" in trace.left_out


def test_loads_of_very_many_versions_are_thinned(tmp_path: Path) -> None:
    requests = Requests()
    for step in range(20_000):
        requests.hear([ev.Load("e0", WeightVersion(step))], 10 * step)
        requests.hear([ev.EngineLoaded("e0", WeightVersion(step))], 10 * step + 5)
    trace = shown(requests, 200_000, tmp_path)
    assert len(trace.of("version")) <= 4096 and "of versions one in 8" in trace.left_out
