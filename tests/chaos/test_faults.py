"""Files of faults, when each is due, and what is wrong with answers on purpose."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollyard.chaos.bend import OUTSIDE, bent
from rollyard.chaos.due import Due
from rollyard.chaos.faults import ALL_EVENTS, Fault, check_faults, read_faults
from rollyard.errors import ConfigError
from rollyard.events import BatchTrained, Checkpointed, Scored
from rollyard.types import RequestId, Reward, Segment, WeightVersion

V = WeightVersion(3)
KILL = '[[fault]]\nwhat = "kill"\nwhich = "engine"\n'


def file(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "faults.toml"
    path.write_text(text)
    return path


def test_a_file_of_faults(tmp_path: Path) -> None:
    slow = '[[fault]]\nwhat = "slow"\nwhich = "engine-1"\nper_minute = 2\ntimes = 3\nfor_s = 1.5\nfactor = 10\nseed = 4\n'
    kill, slowed = read_faults(file(tmp_path, f"{KILL}step = 3\n{slow}"))
    assert kill == Fault(what="kill", which="engine", step=3)
    assert (slowed.per_minute, slowed.times, slowed.for_s, slowed.factor, slowed.seed) == (2, 3, 1.5, 10, 4)


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("", "no fault is in it"),
        ("fault = 3", "no fault is in it"),
        ("x = [", "not valid TOML"),
        (f"[run]\nsteps = 3\n{KILL}step = 1", "'run' is no part of it"),
        (KILL, "fault 1: when: nothing says when it happens"),
        (f"{KILL}step = 1\nafter_s = 2", "fault 1: after_s: step and after_s both say when"),
        (f"{KILL}step = 0", "fault 1: step: 0 does not fit"),
        (f"{KILL}step = true", "fault 1: step: True does not fit"),
        (f"{KILL}step = 1\n{KILL}sept = 2", "fault 2: sept: 2 does not fit"),
        (f"{KILL}event = 'Scored'\ncount = 0", "fault 1: count: 0 does not fit"),
        (f"{KILL}event = 'scored'", "fault 1: event: there is no event 'scored'"),
        (f"{KILL}step = 1\ncount = 2", "fault 1: count: it counts events, and none is named"),
        (f"{KILL}step = 1\ntimes = 2", "fault 1: times: a step is trained once"),
        (f"{KILL}step = 1\nfor_s = 2", "fault 1: for_s: it is not for kill"),
        ("[[fault]]\nwhich = 'engine'\nstep = 1", "fault 1: what: it is missing"),
        ("[[fault]]\nwhat = 'stall'\nwhich = 'engine'\nstep = 1", "fault 1: for_s: stall needs it"),
        ("[[fault]]\nwhat = 'slow'\nwhich = 'engine'\nstep = 1\nfor_s = 1", "fault 1: factor: slow needs it"),
        ("[[fault]]\nwhat = 'slow'\nwhich = 'engine'\nstep = 1\nfor_s = 1\nfactor = 1", "fault 1: factor: 1 does not fit"),
        ("[[fault]]\nwhat = 'corrupt'\nwhich = 'engine'\nstep = 1\nfor_s = 1", "fault 1: how: corrupt needs it"),
        (
            "[[fault]]\nwhat = 'corrupt'\nwhich = 'engine'\nstep = 1\nfor_s = inf\nhow = 'short'",
            "fault 1: for_s: inf does not fit",
        ),
    ],
)
def test_what_is_wrong_with_a_file_is_told(tmp_path: Path, text: str, told: str) -> None:
    with pytest.raises(ConfigError) as raised:
        read_faults(file(tmp_path, text))
    assert told in str(raised.value) and raised.value.remedy


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot be read"):
        read_faults(tmp_path / "none.toml")


@pytest.mark.parametrize(
    ("fault", "told"),
    [
        (Fault(what="kill", which="engine-7", step=1), "there is no process 'engine-7'"),
        (Fault(what="kill", which="trainer", step=1), "it is here"),
        (Fault(what="corrupt", which="reward", step=1, for_s=1, how="short"), "only what engines answer can be corrupted"),
    ],
)
def test_processes_that_a_run_does_not_have(fault: Fault, told: str) -> None:
    there = {"engine": "", "engine-0": "", "trainer": "it is here", "reward": ""}
    with pytest.raises(ConfigError, match=told) as raised:
        check_faults((fault,), there, {"engine", "engine-0"}, Path("faults.toml"))
    assert raised.value.where == "faults.toml: fault 1: which" and "engine-0" in raised.value.remedy


def test_steps_and_events_make_faults_due() -> None:
    faults = [
        Fault(what="kill", which="engine", step=2),
        Fault(what="kill", which="engine", event="Scored", count=3, times=2),
        Fault(what="kill", which="engine", event="BatchTrained"),
    ]
    due = Due(faults, {}, 0.0)
    scored = Scored(0, 0, Reward(1.0))
    assert [due.heard(scored) for _ in range(10)] == [[], [], [1], [], [], [1], [], [], [], []]
    assert due.heard(BatchTrained(WeightVersion(1))) == [2]
    assert due.heard(BatchTrained(WeightVersion(2))) == [0]
    assert due.heard(Checkpointed(WeightVersion(2))) == due.heard(BatchTrained(WeightVersion(2))) == []


def test_what_happened_in_earlier_lives_is_not_due_again() -> None:
    fault = Fault(what="kill", which="run", event="Scored", times=3)
    due = Due([fault], {0: 2}, 0.0)
    assert [due.heard(Scored(0, 0, Reward(1.0))) for _ in range(3)] == [[0], [], []]


def test_the_clock_makes_faults_due() -> None:
    due = Due([Fault(what="kill", which="engine", after_s=2, times=2)], {}, 10.0)
    assert due.next == 12 and due.passed(11.9) == []
    assert due.passed(12.5) == [0] and due.next == 14.5
    assert due.passed(14.5) == [0] and due.next == float("inf") and due.passed(99) == []


@given(seed=st.integers(0, 100), rate=st.floats(0.5, 60))
def test_random_moments_belong_to_the_seed_and_come_so_often(seed: int, rate: float) -> None:
    def moments(seed: int) -> list[float]:
        due, found = Due([Fault(what="kill", which="engine", per_minute=rate, times=400, seed=seed)], {}, 0.0), list[float]()
        while due.next < float("inf"):
            found.append(due.next)
            due.passed(due.next)
        return found

    found = moments(seed)
    assert found == moments(seed) != moments(seed + 1) and len(found) == 400
    assert found[-1] / 400 == pytest.approx(60 / rate, rel=0.3)  # 6 standard deviations


def test_every_event_has_a_name() -> None:
    assert {"Scored", "Generate", "Asked", "Reuse", "Condemn"} <= ALL_EVENTS and "Event" not in ALL_EVENTS


def test_bent_answers_are_wrong_in_one_way() -> None:
    segment = Segment(RequestId(0, 0), (5, 6), (-0.5, -0.25), V, V)
    assert bent(segment, "short").logprobs == (-0.5,)
    assert bent(segment, "vocabulary").token_ids == (OUTSIDE, OUTSIDE)
    assert bent(segment, "version").version.step == 1003
