"""A process is killed, or stands still, at every kind of event in turn: the run goes on, or says why it cannot."""

from __future__ import annotations

from pathlib import Path
from random import Random

import pytest

from rollyard.chaos.faults import Fault
from rollyard.types import DropReason
from tests.chaos.lives import Life, uninterrupted
from tests.chaos.world import Shape

pytestmark = pytest.mark.filterwarnings("ignore:version .* is not saved")  # what only a trainer that is gone had

SHAPES = {
    "separate": Shape("separate", bound=True, held_out=2),
    "async": Shape("async", overtaking="never"),
    "keep": Shape("async", rollover="keep", overtaking="never", staleness=2, actors=True),
    "swap": Shape("swap", overtaking="never"),
}
VICTIMS = {
    "separate": ("engine", "trainer", "reward"),
    "async": ("engine", "trainer", "reward"),
    "keep": ("actor", "trainer", "reward"),
    "swap": ("engine", "reward"),
}
CASES = [(name, victim, what) for name, victims in VICTIMS.items() for victim in victims for what in ("kill", "stall", "slow")]
SHORT_S = 3.0  # of a stall or a slow time; no limit is as short


def at_every_event(shape: Shape, victim: str, what: str) -> dict[str, Fault]:
    """A fault at some occurrence of each kind of event."""
    found = {}
    for kind, times in sorted(uninterrupted(shape).entries.items()):
        random = Random(f"{shape} {victim} {what} {kind}")
        lasting = {} if what == "kill" else {"for_s": random.uniform(0.1, SHORT_S)}
        slower = {"factor": 10.0} if what == "slow" else {}
        found[kind] = Fault(what=what, which=victim, event=kind, count=random.randint(1, times), **lasting, **slower)
    return found


@pytest.mark.parametrize(("name", "victim", "what"), CASES)
def test_at_every_kind_of_event(name: str, victim: str, what: str, tmp_path: Path) -> None:
    shape = SHAPES[name]
    for kind, fault in at_every_event(shape, victim, what).items():
        folder = tmp_path / kind
        folder.mkdir()
        life = Life(shape, folder, [fault]).live()
        assert len(life.struck) == 1, f"nobody was hit at {kind}"
        try:
            survived(life, victim, what)
        except AssertionError as error:
            raise AssertionError(f"{fault.told()} at {fault.event} {fault.count}: {error}") from error


def survived(life: Life, victim: str, what: str) -> None:
    """What is to come of one fault."""
    assert life.report is not None
    ends = what == "kill" and (victim == "trainer" or (life.shape.placement == "swap" and victim == "engine"))
    if ends:
        assert not life.failed or life.struck[0].rpartition(" ")[2] in life.failed, life.failed
        return
    assert not life.failed, life.failed
    dropped = life.report.members.dropped
    unjudged = dropped.get(DropReason.NO_VERDICT, 0)  # what it was judging just then
    assert unjudged <= (victim == "reward" and what == "kill"), dropped
    assert sum(dropped.values()) <= unjudged * life.shape.size, dropped  # a group is kept with two that are judged
    if not dropped and all(len(group.rollouts) == life.shape.size for groups in life.batches.values() for group in groups):
        assert life.weights == uninterrupted(life.shape).weights
