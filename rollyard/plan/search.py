"""Finds a good choice among thousands, and simulates few of them (PURE).

Every candidate has an estimate and a lower bound. Rounds of simulations begin with the best estimate of each family (placement,
rollover, prompts to spare or not, can be run or not). What simulations came to, over what was estimated, corrects the estimates
of those that are like them, and the best of the corrected are next, with those that are most like the best so far. A candidate
whose bound is above what another came to cannot win, and is left out: both hold for the same steps and the same lengths. When
the budget is used up, or nothing that is left is expected to come near the best or is much like it, the best few are simulated
for more steps, and the best of these for more still (successive halving). Where the budget is enough for all, all are simulated.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final, Generic, Protocol, TypeVar

import numpy as np

from rollyard.plan.sample import Numbers
from rollyard.plan.space import Point

ROUND: Final = 8  # candidates simulated between two corrections
HOPELESS: Final = 1.25  # corrected estimates this many times the best are not simulated
NEIGHBOURS: Final = 2  # of a round, that are like the best so far, whatever their estimates are
NEAR: Final = 1.01  # what counts as like it, see `_traits`
FAR: Final = 2.5  # nor is the best estimate of a family this many times the best, before anything is corrected
RUNNABLE: Final = 3  # of a round, that can be run, where the best so far cannot be
TRUST: Final = 0.5  # of the uncorrected estimate, against a simulation of the candidate itself


@dataclass(frozen=True, slots=True)
class Candidate:
    """A choice, and seconds of a step: as estimated, and at least (over the steps of the first rounds).

    `ready`: this version of Rollyard can run it.
    """

    point: Point
    estimate_s: float
    least_s: float
    ready: bool = True


class Paced(Protocol):
    """What a simulation came to."""

    @property
    def step_s(self) -> float:
        """Seconds of a step, the first few left out."""
        ...


Outcome = TypeVar("Outcome", bound=Paced)


@dataclass(frozen=True, slots=True)
class Rule:
    """How much is simulated.

    Attributes:
        budget: candidates at most.
        steps: of a simulation, in the rounds; then for those that are kept; then for the best.
        keep: how many the last of these are.
    """

    budget: int
    steps: tuple[int, int, int]
    keep: int


@dataclass(frozen=True, slots=True)
class Found(Generic[Outcome]):
    """What was found.

    Attributes:
        best: best first, with what the longest simulations came to.
        simulated: candidates.
        excluded: candidates whose bound is above the best of the rounds: none of them is better.
        left: candidates that were not expected to win, and are only estimated.
        by_steps: what candidates came to, by how many steps were simulated.
    """

    best: tuple[tuple[Candidate, Outcome], ...]
    simulated: int
    excluded: int
    left: int
    by_steps: Mapping[int, Mapping[Point, Outcome]]


def search(candidates: Iterable[Candidate], simulate: Callable[[Point, int], Outcome | None], rule: Rule) -> Found[Outcome]:
    """The best few.

    Args:
        simulate: a point, for so many steps. None: it comes to nothing, and is no candidate any more.
    """
    rounds = _Rounds(sorted(candidates, key=lambda each: (each.estimate_s, str(each.point))), simulate, rule)
    rounds.go()
    ranked = sorted(rounds.came_to.items(), key=lambda each: each[1].step_s)
    kept = [rounds.candidates[index] for index, _ in ranked]
    outcomes = {rounds.candidates[index].point: outcome for index, outcome in ranked}
    by_steps, lost = {rule.steps[0]: dict(outcomes)}, len(rounds.lost)
    for steps, count in ((rule.steps[1], max(2 * rule.keep, len(kept) // 4)), (rule.steps[2], rule.keep)):
        ready = next((each for each in kept if each.ready), None)
        few = [*kept[:count], *([ready] if ready and ready not in kept[:count] else [])]
        if steps > rule.steps[0]:
            longer = {each.point: simulate(each.point, steps) for each in few}
            by_steps[steps] = {point: outcome for point, outcome in longer.items() if outcome is not None}
            outcomes |= by_steps[steps]
            lost += sum(outcome is None for outcome in longer.values())
            few = [each for each in few if longer[each.point] is not None]
        kept = sorted(few, key=lambda each: outcomes[each.point].step_s)
    return Found(
        best=tuple((each, outcomes[each.point]) for each in kept),
        simulated=len(ranked) + len(rounds.lost) - lost,
        excluded=rounds.excluded,
        left=len(rounds.candidates) - len(ranked) - len(rounds.lost) - rounds.excluded,
        by_steps=by_steps,
    )


@dataclass
class _Rounds(Generic[Outcome]):
    """The first part: few steps each."""

    candidates: Sequence[Candidate]  # best estimate first
    simulate: Callable[[Point, int], Outcome | None]
    rule: Rule
    came_to: dict[int, Outcome] = field(default_factory=dict)  # by place in `candidates`
    lost: set[int] = field(default_factory=set)  # came to nothing
    best_s: float = math.inf

    def go(self) -> None:
        self._like = np.array([_traits(each.point) for each in self.candidates])
        self._estimates = np.log([each.estimate_s for each in self.candidates])
        few = len(self.candidates) <= self.rule.budget
        for index in range(len(self.candidates)) if few else self._families():
            self._simulate(index)
        while self._looked_at < self.rule.budget:
            chosen = self._next()
            if not chosen:
                return
            for index in chosen:
                self._simulate(index)

    @property
    def excluded(self) -> int:
        return sum(each.least_s > self.best_s for index, each in enumerate(self.candidates) if not self._known(index))

    @property
    def _looked_at(self) -> int:
        return len(self.came_to) + len(self.lost)

    def _known(self, index: int) -> bool:
        return index in self.came_to or index in self.lost

    def _simulate(self, index: int) -> None:
        outcome = self.simulate(self.candidates[index].point, self.rule.steps[0])
        if outcome is None:
            self.lost.add(index)
            return
        self.came_to[index] = outcome
        self.best_s = min(self.best_s, outcome.step_s)

    def _families(self) -> list[int]:
        """The best estimate of each, the best first, and of what can be run the best."""
        ready = [index for index, each in enumerate(self.candidates) if each.ready][:1]
        found: dict[tuple[object, ...], int] = {}
        for index, each in enumerate(self.candidates):
            if each.estimate_s <= FAR * self.candidates[0].estimate_s:
                point = each.point
                found.setdefault((point.placement, point.rollover, bool(point.oversample), each.ready), index)
        return list(dict.fromkeys((*ready, *found.values())))[: max(1, self.rule.budget // 2)]

    def _next(self) -> list[int]:
        """Those whose corrected estimates are best, and those that are like the best so far; all of them may win."""
        if not self.came_to:
            return self._least(np.exp(self._estimates), math.inf, min(ROUND, self.rule.budget - self._looked_at))
        best = min(self.came_to, key=lambda index: self.came_to[index].step_s)
        corrected = np.exp(self._corrected())
        apart = np.sqrt(np.sum((self._like - self._like[best]) ** 2, axis=1))
        near = self._least(apart, NEAR, NEIGHBOURS)
        promising = self._least(corrected, HOPELESS * self.best_s, ROUND)
        runnable = [] if self.candidates[best].ready else self._runnable(corrected)
        chosen = list(dict.fromkeys((*runnable, *promising[: ROUND - len(near) - len(runnable)], *near)))
        return chosen[: self.rule.budget - self._looked_at]

    def _runnable(self, corrected: Numbers) -> list[int]:
        """Those whose corrected estimates are best among what can be run; all may be the best of these."""
        came_to = [outcome.step_s for index, outcome in self.came_to.items() if self.candidates[index].ready]
        best_s = min(came_to, default=math.inf)
        ready = np.array([each.ready for each in self.candidates])
        return self._least(np.where(ready, corrected, math.inf), min(HOPELESS * best_s, sys.float_info.max), RUNNABLE, best_s)

    def _least(self, numbers: Numbers, most: float, count: int, best_s: float = 0.0) -> list[int]:
        """So many at most, up to a number, the least first: of those that are not simulated yet and may win.

        Args:
            best_s: against this (0: the best of all).
        """
        found: list[int] = []
        for index in map(int, np.argsort(numbers, kind="stable")):
            if numbers[index] > most or len(found) == count:
                break
            if not self._known(index) and self.candidates[index].least_s <= (best_s or self.best_s):
                found.append(index)
        return found

    def _corrected(self) -> Numbers:
        """Logarithms: an estimate, times what simulations of like candidates came to over their estimates (a weighted mean)."""
        known = list(self.came_to)
        ratios = np.log([self.came_to[index].step_s for index in known]) - self._estimates[known]
        apart = np.sum((self._like[:, None, :] - self._like[None, known, :]) ** 2, axis=2)
        weights = np.exp(-apart)
        return np.asarray(self._estimates + weights @ ratios / (np.sum(weights, axis=1) + TRUST * np.exp(-4.0)))


def _traits(point: Point) -> tuple[float, ...]:
    """What makes candidates alike: 1 apart in one of these and what is known of one counts a third for the other."""
    placements = ("colocated", "separate", "async", "swap")
    rollovers = ("keep", "abort", "drain")
    return (
        *(2.0 * (point.placement == each) for each in placements),
        *(1.0 * (point.rollover == each) for each in rollovers),
        math.log2(point.tensor_parallel) / 2,
        math.log2(point.slots) / 2,
        math.log2(point.engines / point.training),
        0.7 * point.staleness,
        2.0 * bool(point.oversample),
    )
