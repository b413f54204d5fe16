"""The search: few simulations, a good choice, and nothing excluded that could win."""

from __future__ import annotations

import math
import random
from dataclasses import dataclass

import pytest

from rollyard.plan.scenario import Scenario
from rollyard.plan.search import Candidate, Rule, search
from rollyard.plan.space import Point, Space, with_options


@dataclass(frozen=True)
class Taken:
    step_s: float


class Made:
    """A world in which each family is off its estimates by a factor of its own, and each point by some percent."""

    def __init__(self, seed: int, points: list[Point]) -> None:
        self._random, self._seed = random.Random(seed), seed
        self._off = {family: self._random.uniform(0.8, 2.0) for family in sorted({self._family(each) for each in points})}
        self.asked: list[tuple[Point, int]] = []

    def estimate(self, point: Point) -> float:
        writing = 40 / point.engines * (1 + 8 / point.slots)
        training, late = 60 / point.training, 12 / (point.staleness + 1)
        return max(writing, training, late) if point.placement == "async" else writing + training + 4

    def true(self, point: Point) -> float:
        own = random.Random(f"{self._seed}/{point}").uniform(0.95, 1.05)
        return self.estimate(point) * self._off[self._family(point)] * own * point.tensor_parallel ** (self._seed % 3 / 10)

    def candidates(self, points: list[Point]) -> list[Candidate]:
        bounds = {point: self.true(point) * random.Random(f"bound/{point}").uniform(0.3, 1.0) for point in points}
        return [Candidate(point, self.estimate(point), bounds[point], point.placement != "async") for point in points]

    def simulate(self, point: Point, steps: int) -> Taken:
        self.asked.append((point, steps))
        return Taken(self.true(point))

    @staticmethod
    def _family(point: Point) -> tuple[str, str, bool]:
        return point.placement, point.rollover, bool(point.oversample)


def points(gpus: int) -> list[Point]:
    options = {"rollout.groups_per_step": 16, "rollout.group_size": 8, "model.path": "llama-1b"}
    return list(Space(with_options(Scenario(), options), gpus, 8, 2, 8).points())


@pytest.mark.parametrize("seed", range(6))
def test_a_tenth_is_simulated_and_the_choice_is_near_the_best(seed: int) -> None:
    grid = points(16)
    made = Made(seed, grid)
    found = search(made.candidates(grid), made.simulate, Rule(len(grid) // 10, (4, 8, 16), 3))
    assert len({point for point, _ in made.asked}) == found.simulated <= len(grid) // 10
    assert found.simulated + found.excluded + found.left == len(grid)
    assert found.best[0][1].step_s <= 1.05 * min(map(made.true, grid))
    assert [outcome.step_s for _, outcome in found.best] == sorted(outcome.step_s for _, outcome in found.best)
    runnable = min(made.true(each.point) for each in made.candidates(grid) if each.ready)
    assert min(outcome.step_s for each, outcome in found.best if each.ready) <= 1.05 * runnable  # whatever is best


def test_what_a_bound_excludes_is_not_simulated_and_does_not_win() -> None:
    grid = points(8)
    made = Made(1, grid)
    candidates = made.candidates(grid)
    found = search(candidates, made.simulate, Rule(60, (4, 8, 16), 3))
    best = min(made.true(point) for point, _ in made.asked)
    assert found.excluded == sum(each.least_s > best for each in candidates if each.point not in {p for p, _ in made.asked})
    assert found.excluded > 50
    assert all(made.true(each.point) > best for each in candidates if each.least_s > best)


def test_more_steps_for_fewer() -> None:
    grid = points(8)
    made = Made(2, grid)
    found = search(made.candidates(grid), made.simulate, Rule(40, (4, 8, 16), 3))
    many = [sum(asked == steps for _, asked in made.asked) for steps in (4, 8, 16)]
    assert many[0] == found.simulated <= 40
    assert many[0] > many[1] >= many[2] >= 3
    assert sum(many) == len(made.asked)
    assert [len(each) for each in found.by_steps.values()] == many and list(found.by_steps) == [4, 8, 16]
    assert all(found.by_steps[16][each.point] == outcome for each, outcome in found.best)


def test_what_comes_to_nothing_is_no_candidate_any_more() -> None:
    """At once, or only when it is simulated for longer: what is left is searched as ever."""
    grid = points(8)
    made = Made(2, grid)

    def simulate(point: Point, steps: int) -> Taken | None:
        taken = made.simulate(point, steps)
        return None if point.placement == "async" or (point.placement == "swap" and steps > 4) else taken

    found = search(made.candidates(grid), simulate, Rule(40, (4, 8, 16), 3))
    assert {each.point.placement for each, _ in found.best} <= {"colocated", "separate"}
    lost = {point for point, steps in made.asked if point.placement == "async" or (point.placement == "swap" and steps > 4)}
    assert lost and len({point for point, _ in made.asked}) <= 40
    assert found.simulated + found.excluded + found.left + len(lost) == len(grid)


def test_nothing_comes_to_anything() -> None:
    grid = points(8)
    asked: list[Point] = []
    found = search(Made(2, grid).candidates(grid), lambda point, steps: asked.append(point), Rule(40, (4, 8, 16), 3))
    assert not found.best and found.simulated == 0 and len(asked) == 40


def test_few_are_all_simulated() -> None:
    grid = points(8)[:8]
    made = Made(3, grid)
    found = search(made.candidates(grid), made.simulate, Rule(8, (4, 4, 4), 8))
    assert found.simulated == 8
    assert [each.point for each, _ in found.best] == sorted(grid, key=made.true)


def test_one_candidate_is_the_best() -> None:
    point = points(8)[0]
    found = search([Candidate(point, 1.0, 0.5)], lambda point, steps: Taken(2.0), Rule(8, (4, 8, 16), 3))
    assert [each.point for each, _ in found.best] == [point]
    assert (found.simulated, found.excluded, found.left) == (1, 0, 0)
    assert not math.isnan(found.best[0][1].step_s)
