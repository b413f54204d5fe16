"""How long a run still takes: told while it runs, and held against how long it took."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from rollyard.watch.eta import Eta, Left
from rollyard.watch.report import Report
from rollyard.watch.snapshot import Header, Snapshot
from rollyard.watch.timeline import PhaseSeconds
from tests.resuming import live, work


def spent(wall_s: float, **parts: float) -> PhaseSeconds:
    return PhaseSeconds(wall_s=wall_s, **parts)


def test_what_is_left_is_the_rest_of_this_step_the_others_and_the_end() -> None:
    assert Left(4.0, 1.0, 2.0).seconds(3) == 3 + 2 * 4 + 2
    assert Left(4.0, 9.0, 2.0).seconds(3) == 0 + 2 * 4 + 2, "a step that takes too long takes no time from others"
    assert Left(4.0, 0.5, 2.0).seconds(0) == 1.5, "the last evaluation is under way"
    assert Left(None).seconds(3) is None


def test_before_the_first_step_the_first_batch_tells() -> None:
    eta = Eta()
    assert eta.at(spent(1.0), 0.05) == Left(None), "hardly anything is judged"
    assert eta.at(spent(5.0, eval_s=2.0, setup_s=1.0), 0.25) == Left(8.0, 2.0, 0.0, rough=True)
    assert eta.at(spent(11.0, eval_s=2.0, setup_s=1.0), 0.0) == Left(8.0, 8.0, 0.0, rough=True), "while it is trained on"


def test_a_forecast_tells_before_anything_happened() -> None:
    assert Eta(7.5).at(spent(0.5), 0.0) == Left(7.5, 0.5, 0.0, rough=True)


def test_a_first_step_counts_until_there_is_another() -> None:
    eta = Eta(99.0)
    eta.evaluated(3.0)
    eta.add(spent(13.0, eval_s=3.0))  # engines were proved, and the first policy evaluated
    assert eta.at(spent(1.0), 0.0) == Left(10.0, 1.0, 3.0)
    eta.add(spent(4.0))
    eta.add(spent(6.0))
    assert eta.at(spent(1.0), 0.0) == Left(5.0, 1.0, 3.0)


def test_what_comes_next_is_like_what_came_last() -> None:
    eta = Eta()
    for step in range(100):
        eta.add(spent(1.0 + step))
    assert eta.at(spent(0.0), 0.0).step_s == pytest.approx(1 + sum(range(84, 100)) / 16)


def test_a_run_that_goes_on_knows_what_its_steps_took() -> None:
    eta = Eta()
    eta.go_on([{"step": 1, "phase/generate_s": 1.5, "phase/train_s": 0.5, "phase/generating_s": 9.0}, {"step": 2, "reward": 1}])
    assert eta.at(spent(0.5), 0.0) == Left(2.0, 0.5, 0.0)


def moments() -> Iterator[tuple[float, float | None]]:
    """20 steps of 7 s of generation and 3 s of training, with 5 s of evaluation before and after: when, and what is told."""
    eta, now, left = Eta(), 0.0, 20
    eta.evaluated(5.0)
    for step in range(20):
        begin = 5.0 if step == 0 else 0.0
        for tenths in range(100):
            at, judged = tenths / 10, tenths / 70 if tenths < 70 else 0.0
            yield now + begin + at, eta.at(spent(begin + at, eval_s=begin), judged).seconds(left)
        eta.add(spent(begin + 10.0, eval_s=begin))
        now, left = now + begin + 10.0, left - 1


def test_told_and_happened() -> None:
    """It takes 5 + 200 + 5 s."""
    told = [(at, 210.0 - at, left) for at, left in moments()]
    assert {left for at, _, left in told if at < 5.65} == {None}
    first = [abs(left - true) / true for at, true, left in told if left is not None and at < 15]
    assert max(first) < 0.35, "without the training, of which nobody knows yet"
    assert max(abs(left - true) for at, true, left in told if left is not None and at >= 15.0) < 1e-6


class Notes:
    """A view that notes when each moment was, and how long the rest of the run was said to take."""

    def __init__(self, header: Header) -> None:
        self.steps, self.told = header.steps, list[tuple[float, float | None, Snapshot]]()

    def update(self, snapshot: Snapshot) -> None:
        self.told.append((snapshot.phases.wall_s, snapshot.eta_s(self.steps), snapshot))

    def finish(self, report: Report) -> None:
        self.whole_s = report.wall_s

    def close(self) -> None:
        """Nothing is held."""


def test_a_run_and_its_next_life_say_how_long_they_still_take(tmp_path: Path) -> None:
    """20 steps of the same length on a virtual clock, stopped after eight; what is told is held against what came."""
    of, notes = work(steps=20, groups=4), list[Notes]()

    def view(header: Header) -> Notes:
        notes.append(Notes(header))
        return notes[-1]

    first = live(tmp_path, of, length=lambda group, member: 20, stop_after=8, view=view)
    second = live(tmp_path, of, length=lambda group, member: 20, view=view)
    assert [step.step for step in (*first.steps, *second.steps)] == list(range(1, 21))
    step_s = first.steps[3].seconds
    assert {round(step.seconds, 3) for step in first.steps[1:7]} == {round(step_s, 3)}
    for wall_s, left, snapshot in notes[0].told:
        if snapshot.step:  # the rest of the run would have taken as long as its beginning
            assert left is not None and abs(left - (20 * step_s - wall_s)) < 0.1 * step_s + 0.2
    wall_s, left, snapshot = next(each for each in notes[1].told if each[2].judged)
    assert snapshot.step == 8 and left is not None and not snapshot.left.rough, "the lives before tell, from the beginning on"
    for wall_s, left, _ in notes[1].told[1:]:
        assert left is not None and abs(left - (notes[1].whole_s - wall_s)) < 0.1 * notes[1].whole_s
