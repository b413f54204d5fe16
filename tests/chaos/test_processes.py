"""A process is killed, or stands still, at every kind of event in turn: the run goes on, or says why it cannot."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from random import Random

import pytest

from rollyard.chaos.faults import ALL_EVENTS, Fault
from rollyard.types import DropReason
from tests.chaos import test_resumed
from tests.chaos.lives import Life, Moment, moments, uninterrupted
from tests.chaos.world import Shape

pytestmark = [
    pytest.mark.filterwarnings("ignore:version .* is not saved"),  # what only a trainer that is gone had
    pytest.mark.filterwarnings("ignore:engine.* times slower"),
    pytest.mark.timeout(240),  # tens of runs each; a busy machine may be slow
]

PROBED = (("weights.probe", True),)
SHAPES = {
    "separate": Shape("separate", bound=True, held_out=2),
    "async": Shape("async", overtaking="never", options=PROBED),
    "keep": Shape("async", rollover="keep", overtaking="never", staleness=2, actors=True, held_out=2, options=PROBED),
    "swap": Shape("swap", overtaking="never"),
}
KILLED = (("separate", "engine"), ("separate", "reward"), ("async", "engine"), ("keep", "actor"), ("swap", "engine"))
HELD = (("separate", "trainer"), ("keep", "actor"), ("swap", "engine"), ("swap", "reward"))
SHORT_S = 3.0  # of a stall or a slow time; no limit is as short

# Events of runs to which more happens than a fault, and of worlds that these are not.
OF_FAULTS = {"EngineDown", "Restart", "Forget", "Drop"}  # see `test_at_what_follows_from_a_fault`
OF_LATER_LIVES = {"GroupsRecovered", "Reuse"}  # see test_resumed.py
ELSEWHERE = {
    "people who stop a run or let engines go": {"StopRequested", "EngineLeaving", "Retire"},
    "episodes": {"Play", "Tell", "Stream", "Asked", "EpisodeEnded"},
    "a model whose tensors are moved": {"Prove", "Proved"},
    "completions that move": {"Move"},
    "what is given up": {"Abort", "RequestFailed", "SyncFailed", "EvaluationCut", "RunBroken"},
    "engines that lie": {"Condemn", "EngineUnfit", "WrongAnswer", "Unwrite"},  # see test_conditions.py
}


def at_every_event(shape: Shape, victim: str, *, kill: bool) -> Iterator[tuple[Moment, Fault]]:
    """Faults at random moments, at which each kind of event is met."""
    random = Random(f"{shape} {victim} {kill}")
    for number, moment in enumerate(moments(shape, random)):
        kind, count = moment.kind, moment.count
        if kill:
            yield moment, Fault(what="kill", which=victim, event=kind, count=count)
        elif number % 2:
            yield moment, Fault(what="stall", which=victim, event=kind, count=count, for_s=random.uniform(0.1, SHORT_S))
        else:
            yield moment, Fault(what="slow", which=victim, event=kind, count=count, for_s=random.uniform(1, SHORT_S), factor=10)


@pytest.mark.parametrize(("name", "victim"), KILLED)
def test_killed_at_every_kind_of_event(name: str, victim: str, tmp_path: Path) -> None:
    for moment, fault in at_every_event(SHAPES[name], victim, kill=True):
        assert moment.kinds <= survived(SHAPES[name], [fault], tmp_path / moment.kind).met, fault


@pytest.mark.slow
@pytest.mark.parametrize(("name", "victim"), HELD)
def test_stalled_or_slow_at_every_kind_of_event(name: str, victim: str, tmp_path: Path) -> None:
    for moment, fault in at_every_event(SHAPES[name], victim, kill=False):
        assert moment.kinds <= survived(SHAPES[name], [fault], tmp_path / moment.kind).met, fault


@pytest.mark.parametrize("kind", sorted(OF_FAULTS - {"Drop"}))
@pytest.mark.parametrize("victim", ["engine", "trainer", "reward", "actor"])
def test_at_what_follows_from_a_fault(kind: str, victim: str, tmp_path: Path) -> None:
    """An engine is killed, and something else, or its successor, while it is replaced."""
    shape = Shape("async", overtaking="never", restarts=2, actors=victim == "actor")
    for number, what in enumerate(({"what": "kill"}, {"what": "stall", "for_s": 2.0})):
        first = Fault(what="kill", which="engine", event="Generate", count=5 + number)
        survived(shape, [first, Fault(which=victim, event=kind, **what)], tmp_path / str(number))  # type: ignore[arg-type]


def test_every_kind_of_process_was_hit_at_every_kind_of_event() -> None:
    """The table of what is tried above and in test_resumed.py, each of which asserts that it hit what it meant to hit."""
    table: dict[str, set[str]] = {}
    for name, victim in (*KILLED, *HELD):
        table.setdefault(victim, set()).update(uninterrupted(SHAPES[name]).entries)
    for name, victim in test_resumed.TRIED:
        table.setdefault(victim, set()).update(uninterrupted(test_resumed.SHAPES[name]).entries)
    for victim in ("engine", "actor", "trainer", "reward"):
        table[victim] |= OF_FAULTS - {"Drop"}
    table["run"] |= OF_LATER_LIVES
    tried = set[str]().union(*table.values())
    assert tried == ALL_EVENTS - {"Drop"} - set[str]().union(*ELSEWHERE.values())
    apart = {"HandOver", "HandedOver", "Sleep", "Wake", "EngineSlept", "EngineWoke"}  # where trainer and engine share a device
    evaluated = {"Evaluate", "Evaluated"}
    probed = {"Probe", "EngineProbed"}
    usual = tried - apart - evaluated - probed - OF_FAULTS - OF_LATER_LIVES
    assert usual <= set.intersection(*table.values()) and set(table) == {"engine", "actor", "trainer", "reward", "run"}
    assert apart | evaluated | probed <= table["engine"] and evaluated | probed <= table["actor"]
    assert apart <= table["reward"] and apart <= table["run"] and evaluated <= table["trainer"]


def survived(shape: Shape, faults: list[Fault], folder: Path) -> Life:
    """What is to come of faults."""
    folder.mkdir()
    life = Life(shape, folder, faults).live()
    told = [f"{fault.what} {fault.which} at {fault.event} {fault.count}" for fault in faults]
    assert len(life.struck) == len(faults), (told, life.survival)
    kills = {each.process for each in life.survival if each.what == "kill"}
    if any(name.startswith(("trainer", "half")) for name in kills):  # the run ends with it, unless it had ended by then
        assert not life.failed or any(name.rpartition(" ")[2] in life.failed for name in kills), (told, life.failed)
        return life
    assert not life.failed and life.report is not None, (told, life.failed)
    dropped = life.report.members.dropped
    unjudged = dropped.get(DropReason.NO_VERDICT, 0)  # what a reward worker was judging just then
    assert unjudged <= sum(name.startswith("reward") for name in kills), (told, dropped)
    assert sum(dropped.values()) <= unjudged * shape.size, (told, dropped)  # a group is kept with two that are judged
    if not dropped:
        assert life.weights == uninterrupted(shape).weights, told
    return life
