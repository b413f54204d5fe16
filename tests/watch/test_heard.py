"""Who follows a run's devices has, in the end, what the run itself has of them."""

from __future__ import annotations

from itertools import chain

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from rollyard.types import Activity
from rollyard.watch import accounts as accounts_module
from rollyard.watch import heard
from rollyard.watch import timeline as timeline_module
from rollyard.watch.accounts import Accounts
from rollyard.watch.heard import Lanes
from rollyard.watch.live import ASKED
from rollyard.watch.spans import SpanLog
from rollyard.watch.timeline import Phase, Timeline
from rollyard.watch.trace import DRIVER, OF_DRIVER

KINDS = (Activity.TRAIN, Activity.GENERATE, Activity.SYNC)
DEVICES, LENGTHS, SAID = st.integers(0, 2), st.integers(1, 4), st.booleans()
DOES = st.tuples(st.just("do"), DEVICES, st.sampled_from(KINDS), st.integers(0, 3), LENGTHS, SAID)
PHASE = st.tuples(st.just("phase"), st.sampled_from([Phase.TRAIN, Phase.SCORE, Phase.SETUP]), st.integers(1, 3))
OTHERS = st.tuples(st.sampled_from(["collect", "look", "step"]))


def goes_on(device: int, kind: Activity, asks: str, length: int, gap: int, said: bool) -> list[tuple]:
    """What was told goes on without a gap, and something of its kind comes after it."""
    return [
        ("do", device, kind, gap, length, True),
        (asks,),
        ("do", device, kind, 0, length, said),
        ("do", device, kind, gap, length, said),
    ]


ON = st.builds(goes_on, DEVICES, st.sampled_from(KINDS), st.sampled_from(["collect", "look"]), LENGTHS, st.integers(1, 3), SAID)
DONE = st.lists(st.one_of(st.lists(st.one_of(DOES, DOES, PHASE, OTHERS), min_size=1, max_size=4), ON), max_size=20)


class World:
    """A run's accounts on a clock of our own, and somebody who looks now and then."""

    def __init__(self, lanes: Lanes) -> None:
        self.now = 1000
        self.timeline = Timeline(lambda: self.now)
        self.accounts = Accounts(self.timeline)
        self.logs = [SpanLog(lambda: self.now) for _ in range(3)]
        for number, log in enumerate(self.logs):
            self.accounts.watch(f"engine-{number}", "engine", log)
        self.unheard: list[list[tuple[Activity, int, int]]] = [[] for _ in self.logs]
        self.lanes = lanes

    def do(self, device: int, kind: Activity, gap: int, length: int, said: bool = True) -> None:
        """`said`: the device says so at once, and what it did before."""
        start = self.now + gap
        self.now = start + length
        self.unheard[device].append((kind, start, self.now))
        if said:
            self.hear(device)

    def hear(self, device: int) -> None:
        for each in self.unheard[device]:
            self.logs[device].add(*each)
        self.unheard[device].clear()

    def phase(self, phase: Phase, length: int) -> None:
        with self.timeline.phase(phase):
            self.now += length

    def look(self, most: int) -> bool:
        """Is there more?"""
        known = ASKED.validate_json(ASKED.dump_json(self.lanes.known()))
        self.timeline.seconds()
        news = self.accounts.tell(known, most)
        self.lanes.take(news)
        return news.more


def train(gap: int, said: bool = True) -> tuple:
    return "do", 0, Activity.TRAIN, gap, 2, said


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture], derandomize=True)
@given(DONE.map(lambda parts: list(chain(*parts))), st.integers(1, 12), st.sampled_from([8, 64]))
@example([train(0), ("look",), train(0), train(1)], 12, 64)  # one that was told goes on, and is then followed by another
@example([train(0), ("do", 1, Activity.SYNC, 0, 2, True), ("look",), train(0, said=False), ("look",)], 12, 64)
@example([train(0), train(0, said=False), ("phase", Phase.SETUP, 3), ("look",)], 12, 64)  # it went on before, and says so later
@example([*[train(1), ("collect",)] * 5, ("look",), train(0), ("collect",), train(1), train(0)], 1, 64)
def test_who_follows_has_the_same_in_the_end(monkeypatch: pytest.MonkeyPatch, done: list[tuple], most: int, kept: int) -> None:
    monkeypatch.setattr(accounts_module, "MOST", kept)
    monkeypatch.setattr(timeline_module, "MOST", 6)
    world = World(Lanes())
    follow(world, done, most)
    mine, theirs = world.lanes.traced(), world.accounts.traced()
    assert mine.marks == theirs.marks and [lane.device for lane in mine.lanes] == [lane.device for lane in theirs.lanes]
    for ours, own in zip(mine.lanes, theirs.lanes, strict=True):
        assert sorted(ours.intervals) == sorted(own.intervals), ours.device


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture], derandomize=True)
@given(DONE.map(lambda parts: list(chain(*parts))), st.integers(1, 12), st.sampled_from([8, 64]))
@example([*[train(1), ("look",)] * 5, train(0), ("look",), train(1), ("look",)], 12, 64)
def test_who_keeps_little_has_no_more_and_the_same_bounds(
    monkeypatch: pytest.MonkeyPatch, done: list[tuple], most: int, kept: int
) -> None:
    monkeypatch.setattr(accounts_module, "MOST", kept)
    monkeypatch.setattr(timeline_module, "MOST", 6)
    monkeypatch.setattr(heard, "LEAST", 12)
    world = World(Lanes(most=8))
    follow(world, done, most)
    mine, theirs = world.lanes.traced(), world.accounts.traced()
    assert len(mine.marks) <= 4 and set(mine.marks) <= set(theirs.marks)
    for ours, own in zip(mine.lanes, theirs.lanes, strict=True):
        if ours.device == DRIVER:
            assert {each.activity for each in ours.intervals} == {each.activity for each in own.intervals} & {*OF_DRIVER}
            continue
        assert len(ours.intervals) <= 12 + 1, "and the setup"
        assert {each.activity for each in ours.intervals} == {each.activity for each in own.intervals}
        for which, edge in ((1, min), (2, max)):
            assert edge(each[which] for each in ours.intervals) == edge(each[which] for each in own.intervals)


def follow(world: World, done: list[tuple], most: int) -> None:
    for what, *how in done:
        match what:
            case "do":
                world.do(*how)
            case "phase":
                world.phase(*how)
            case "look":
                world.look(most)
            case "collect":
                world.accounts.collect()
            case "step":
                world.accounts.stepped(0)
    for device in range(len(world.logs)):
        world.hear(device)
    looks = 0
    while world.look(most):
        looks += 1
        assert looks < 100
