"""Who follows a run's devices has, in the end, what the run itself has of them."""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from rollyard.dashboard.feed import Lanes
from rollyard.types import Activity
from rollyard.watch import accounts as accounts_module
from rollyard.watch import timeline as timeline_module
from rollyard.watch.accounts import Accounts
from rollyard.watch.live import ASKED, Live, Look
from rollyard.watch.report import Counts, EvalRewards
from rollyard.watch.spans import SpanLog
from rollyard.watch.timeline import Phase, Timeline

NONE = Counts(0, 0, {})
NUMBERS = dict.fromkeys(
    ("step", "planned", "wall_s", "tokens", "tokens_per_s", "queue", "live", "judged", "wanted", "version"), 0
)
EMPTY = {"activity": "", "waiting": "", "phases": {}, "beside": {}, "engines": (), "states": {}, "staleness": {}, "lost": ()}
UNKNOWN = {"reward_first": None, "reward_last": None, "slots_busy": None, "eta_s": None, "eval": EvalRewards(None, None)}
LIVE = Live(**NUMBERS, **EMPTY, **UNKNOWN, prompts=NONE, members=NONE)

KINDS = (Activity.TRAIN, Activity.GENERATE, Activity.SYNC)
DOES = st.tuples(st.just("do"), st.integers(0, 2), st.sampled_from(KINDS), st.integers(0, 3), st.integers(1, 4))
PHASE = st.tuples(st.just("phase"), st.sampled_from([Phase.TRAIN, Phase.SCORE, Phase.SETUP]), st.integers(1, 3))
OTHERS = st.tuples(st.sampled_from(["collect", "look", "step"]))


class World:
    """A run's accounts on a clock of our own, and somebody who looks now and then."""

    def __init__(self) -> None:
        self.now = 1000
        self.timeline = Timeline(lambda: self.now)
        self.accounts = Accounts(self.timeline)
        self.logs = [SpanLog(lambda: self.now) for _ in range(3)]
        for number, log in enumerate(self.logs):
            self.accounts.watch(f"engine-{number}", "engine", log)
        self.lanes = Lanes()

    def do(self, device: int, kind: Activity, gap: int, length: int) -> None:
        start = self.now + gap
        self.now = start + length
        self.logs[device].add(kind, start, self.now)

    def phase(self, phase: Phase, length: int) -> None:
        with self.timeline.phase(phase):
            self.now += length

    def look(self, most: int) -> bool:
        """Is there more?"""
        known = ASKED.validate_json(ASKED.dump_json(self.lanes.known()))
        self.timeline.seconds()
        lanes = self.accounts.news(known.places, known.since_ns, most)
        start, now = self.timeline.bounds_ns
        more = self.accounts.more(lanes)
        self.lanes.take(Look(LIVE, start, now, None, tuple(self.accounts.marks[known.marks :]), lanes, more))
        return more


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture], derandomize=True)
@given(st.lists(st.one_of(DOES, DOES, PHASE, OTHERS), max_size=60), st.integers(1, 12))
def test_who_follows_has_the_same_in_the_end(monkeypatch: pytest.MonkeyPatch, done: list[tuple], most: int) -> None:
    monkeypatch.setattr(accounts_module, "MOST", 8)
    monkeypatch.setattr(timeline_module, "MOST", 6)
    world = World()
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
                world.accounts.stepped(len(world.accounts.marks) + 1)
    looks = 0
    while world.look(most):
        looks += 1
        assert looks < 100
    mine, theirs = world.lanes.traced(), world.accounts.traced()
    assert mine.marks == theirs.marks and [lane.device for lane in mine.lanes] == [lane.device for lane in theirs.lanes]
    for ours, own in zip(mine.lanes, theirs.lanes, strict=True):
        assert sorted(ours.intervals) == sorted(own.intervals), ours.device
