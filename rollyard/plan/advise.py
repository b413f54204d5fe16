"""What to choose: bounds and memory for every point, a search among those that fit, and what the best few depend on."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice
from typing import Any, Final

from rollyard.config import ForecastConfig
from rollyard.errors import ConfigError
from rollyard.layers import value
from rollyard.plan.bounds import Estimate, Yard, groups_needed
from rollyard.plan.check import check_scenario, refusal
from rollyard.plan.costs import Costs, fewer_pages, formats_of, priced, shape_for
from rollyard.plan.measured import device_of
from rollyard.plan.sample import Sample, sample_of
from rollyard.plan.scenario import Scenario
from rollyard.plan.search import Candidate, Found, Rule, search
from rollyard.plan.space import Point, Space, with_options
from rollyard.plan.stations import room_of
from rollyard.plan.trace import lengths_of

SHARE: Final = 0.1  # of all points that are simulated, at most
POINTS: Final = 50_000  # that are looked at, at most
FEWEST: Final = 8  # that may be simulated, however few points there are
COMPLETIONS: Final = 50_000  # of the rounds together, about
WINDOWS: Final = (4, 8, 16)  # steps that count, in the rounds, and later
MANY: Final = 512  # completions of a step, from which on these are enough:
FEWER: Final = (2, 4, 8)
ENOUGH: Final = 4  # steps that count, to say what a choice depends on
LINKS: Final = {"costs.link", "costs.disk"}  # options of a shift that only weights under way depend on
UNSEEN: Final = 0.005  # of a step's seconds


@dataclass(frozen=True, slots=True)
class Ran:
    """One simulated choice, over the steps that count; slots are of the whole run, as in what a report sets beside a forecast.

    Attributes:
        step_s: seconds of a step.
        trained_tokens_per_s: that are trained on.
        busy: share of the time in which devices work, by role.
        slots: share of decode slots in use while engines step.
        bound: what a step waits for most.
        forecast: for the config.
    """

    step_s: float
    trained_tokens_per_s: float
    busy: Mapping[str, float]
    slots: float
    bound: str
    forecast: ForecastConfig


# A scenario, and how many of its first steps do not count. Raises ConfigError for one that ends before that, or cannot be.
Simulate = Callable[[Scenario, int], Ran]


@dataclass(frozen=True, slots=True)
class Shift:
    """The workload or the machine is otherwise than was told.

    Attributes:
        step_s: seconds of a step; None: the run does not come to its end.
        first: the choice that is best then, among the best few; 0 is the one that was best.
    """

    what: str
    step_s: float | None
    first: int


@dataclass(frozen=True, slots=True)
class Choice:
    """One of the best.

    Attributes:
        obstacle: why `rollyard run` would refuse it; empty when it would not.
        cost: money of a step; 0 where no price is given.
        shifts: how it fares where things are otherwise.
    """

    point: Point
    ran: Ran
    estimate: Estimate
    obstacle: str
    cost: float
    shifts: tuple[Shift, ...] = ()


@dataclass(frozen=True, slots=True)
class Refused:
    """Points that memory has no room for, or that cannot be for another reason, such as a simulated run that fails.

    Attributes:
        example: the one of them that is nearest to a point that fits, and what is wrong with it.
        nearest: that point.
    """

    where: str
    count: int
    example: Point
    problem: str
    remedy: str
    nearest: Point | None


@dataclass(frozen=True, slots=True)
class Kept:
    """An option that a choice would set, and that the user gave; `left_out`: points that there would be besides."""

    name: str
    value: Any
    left_out: int


@dataclass(frozen=True, slots=True)
class Plan:
    """What is advised, best first."""

    choices: tuple[Choice, ...]
    refused: tuple[Refused, ...]
    kept: tuple[Kept, ...]
    gpus: int
    points: int
    simulated: int
    excluded: int  # their lower bounds are above the best
    left: int  # not expected to win
    runs: int  # simulations, those of the shifts included


@dataclass
class Planner:
    """Plans one space.

    Attributes:
        simulate: runs a scenario.
        top: choices that are advised.
        tell: is told what is to be done.
        show: is told how far that is.
        windows: steps that count: in the rounds, of those that are kept, of the best (None: as many as it takes).
        shifts: say what the best depend on.
    """

    space: Space
    simulate: Simulate
    top: int = 3
    tell: Callable[[str], None] = lambda line: None
    show: Callable[[str], None] = lambda line: None
    windows: tuple[int, int, int] | None = None
    shifts: bool = True
    _costs: dict[tuple[object, ...], Costs | ConfigError] = field(default_factory=dict)
    _failed: dict[Point, ConfigError] = field(default_factory=dict)  # whose simulated runs came to nothing
    _runs: int = 0
    _best_s: float = math.inf

    def plan(self) -> Plan:
        """Raises ConfigError when nothing fits."""
        fitting = self.fitting()
        wrong = {point: found for point, found in self._looked.items() if isinstance(found, ConfigError)}
        if not fitting:
            raise _none(_refusals(wrong, []))
        estimates, candidates = self.candidates(fitting)
        points = len(self._looked)
        rule = self._rule(points)
        self.tell(f"{points:,} points, {len(wrong):,} refused; at most {rule.budget:,} are simulated")
        found = search(candidates, self._simulated, rule)
        if not found.best:
            raise _none(_refusals(self._failed, []))
        refused = _refusals(wrong | self._failed, [point for point in fitting if point not in self._failed])
        choices = self._choices(found, estimates)
        kept = tuple(Kept(name, value(self.space.base, name), count) for name, count in self.space.left_out().items())
        counts = points, found.simulated, found.excluded, found.left, self._runs
        return Plan(choices, tuple(refused), kept, self.space.gpus, *counts)

    def fitting(self) -> Mapping[Point, Costs]:
        """What can be, and what everything takes then. Raises ConfigError when nothing is left to choose from."""
        self.shape = shape_for(self.space.base)
        self.hardware = device_of(self.space.base.cluster, formats_of(self.space.base))
        self._check_many()
        points = list(self.space.points())
        if not points:
            problem = f"no placement has room for what is fixed on {self.space.gpus} devices"
            raise ConfigError(problem, where="--gpus", remedy="fix fewer options, or take more devices")
        if self.space.base.failures.joins:
            problem = "engines come or go, and a choice says how many there are"
            raise ConfigError(problem, where="failures.joins", remedy="leave it out, and plan for each number of devices")
        self._looked = {point: self._cost(point) for point in points}
        return {point: found for point, found in self._looked.items() if not isinstance(found, ConfigError)}

    def _check_many(self) -> None:
        """Raises ConfigError for more than are gone through in minutes; what is fixed is counted too, as it is told of."""
        many = replace(self.space, pinned=()).points()
        if sum(1 for _ in islice(many, POINTS + 1)) > POINTS:
            where = "rollout.max_staleness" if "rollout.max_staleness" in self.space.pinned else "--max-staleness"
            problem = f"with {self.space.staleness:,} there are more than {POINTS:,} choices to go through"
            raise ConfigError(problem, where=where, remedy="use less: 2 is usual")

    @property
    def first(self) -> int:
        """The step from which on steps count: by then generation runs ahead as far as it will."""
        return self.space.staleness + 1

    @property
    def members(self) -> int:
        """Completions of a step."""
        return self.space.base.rollout.groups_per_step * self.space.base.rollout.group_size

    @property
    def steps(self) -> tuple[int, int, int]:
        """Of a simulation: in the rounds, and later."""
        few, more, most = self.windows or (WINDOWS if self.members < MANY else FEWER)
        return self.first + few, self.first + more, self.first + most

    def _cost(self, point: Point) -> Costs | ConfigError:
        """Costs depend on sizes and placement. A choice that cannot be has the error instead."""
        try:
            check_scenario(self.space.scenario(point))
        except ConfigError as error:
            return error
        key = (point.placement, point.generate, point.train, point.tensor_parallel, point.slots, point.shard)
        if key not in self._costs:
            try:
                self._costs[key] = self._costs_of(point)
            except ConfigError as error:
                self._costs[key] = error
        return self._costs[key]

    def _costs_of(self, point: Point) -> Costs:
        scenario = self.space.scenario(point)
        found = priced(scenario, self.shape, self.hardware)
        room_of(found, scenario)
        return found

    def _sample(self, steps: int) -> Sample:
        rollout, lengths = self.space.base.rollout, lengths_of(self.space.base)
        groups = groups_needed(self.space.staleness, rollout.groups_per_step, steps)
        growth, window = self.space.base.workload.growth, self.space.base.engine.window or self.shape.window

        def limit(group: int) -> int:
            return min(rollout.max_tokens, max(window - lengths.prompt(group), 1)) if window else rollout.max_tokens

        def whole(group: int, member: int, longest: bool) -> int:
            last = (growth > 0) == longest  # of the versions under which it may be admitted
            return lengths.completion(group, member, group // rollout.groups_per_step if growth and last else 0)

        def completion(group: int, member: int) -> int:
            return min(whole(group, member, longest=False), limit(group))

        def left(group: int, member: int) -> bool:
            return whole(group, member, longest=True) <= limit(group)

        times = 1 if self.space.base.costs.shared_prompts else rollout.group_size
        masks = left if self.space.base.advantage.overlong == "mask" else None
        return sample_of(completion, lengths.prompt, groups, rollout.group_size, rollout.groups_per_step, times, masks)

    def candidates(self, fitting: Mapping[Point, Costs]) -> tuple[dict[Point, Estimate], list[Candidate]]:
        """With their estimates, and bounds for the steps of the rounds."""
        steps = self.steps[0]
        base = self.space.base
        lost = bool(base.failures.node_hours)
        drops = lost or base.rollout.on_stale == "drop"
        yard = Yard(self._sample(steps), base.engine.page_tokens, bool(base.rollout.moves) or lost, drops)
        estimates = {point: yard.estimate(point, costs) for point, costs in fitting.items()}
        candidates = [
            Candidate(point, estimates[point].step_s, yard.least_s(point, costs, self.first, steps), not self._refusal(point))
            for point, costs in fitting.items()
        ]
        return estimates, candidates

    def _refusal(self, point: Point) -> str:
        """Why a run would refuse it, with the pages that it is told."""
        scenario, costs = self.space.scenario(point), self._looked[point]
        if not isinstance(costs, ConfigError) and (pages := fewer_pages(costs, scenario)):
            scenario = with_options(scenario, {"engine.pages": pages})
        return refusal(scenario)

    def _rule(self, points: int) -> Rule:
        affordable = COMPLETIONS // (self.steps[0] * self.members)
        return Rule(max(min(int(SHARE * points), affordable), FEWEST), self.steps, self.top)

    def _simulated(self, point: Point, steps: int) -> Ran | None:
        """None: it comes to nothing, and why is noted."""
        try:
            ran = self._run(self.space.scenario(point), steps)
        except ConfigError as error:
            self._failed[point] = error
            return None
        self._best_s = min(self._best_s, ran.step_s)
        return ran

    def _run(self, scenario: Scenario, steps: int) -> Ran:
        """Raises ConfigError."""
        best = f", {self._best_s:.3g} s a step are the least so far" if self._best_s < math.inf else ""
        self._runs += 1
        self.show(f"simulation {self._runs:,}: {scenario.place.placement}, {steps} steps{best}")
        return self.simulate(with_options(scenario, {"run.steps": steps}), self.first)

    def _shifts(self, found: Found[Ran]) -> list[list[Shift]]:
        """What each of the best depends on: beside what it came to in as many steps."""
        steps = next((each for each in self.steps if each - self.first >= ENOUGH), self.steps[2])
        usual = [found.by_steps[steps][candidate.point].step_s for candidate, _ in found.best]
        shifts: list[list[Shift]] = [[] for _ in found.best]
        for what, options in shifted(self.space.base).items():
            taken = [
                self._shifted_s(candidate.point, options, steps, usual_s)
                for (candidate, _), usual_s in zip(found.best, usual, strict=True)
            ]
            first = min(range(len(taken)), key=lambda index: math.inf if (taken_s := taken[index]) is None else taken_s)
            for index, (_, ran) in enumerate(found.best):
                seconds = taken[index]
                shifts[index].append(Shift(what, None if seconds is None else ran.step_s * seconds / usual[index], first))
        return shifts

    def _shifted_s(self, point: Point, options: Mapping[str, Any], steps: int, usual_s: float) -> float | None:
        """Seconds of a step; as ever, without a simulation, where all that links take is less than anybody would see."""
        scenario = with_options(self.space.scenario(point), dict(options))
        if options.keys() == LINKS and self._linked_s(scenario) - self._linked_s(self.space.scenario(point)) < UNSEEN * usual_s:
            return usual_s
        try:
            return self._run(scenario, steps).step_s
        except ConfigError:
            return None

    def _linked_s(self, scenario: Scenario) -> float:
        """Seconds of a step in which weights, or the training state, are on their way."""
        costs = priced(scenario, self.shape, self.hardware)
        return costs.copy_s + costs.transfer_s + costs.load_s + costs.handoff_s + costs.sleep_s + costs.wake_s

    def _choices(self, found: Found[Ran], estimates: Mapping[Point, Estimate]) -> tuple[Choice, ...]:
        """With what they depend on."""
        shifts = self._shifts(found) if self.shifts else [[] for _ in found.best]
        price = self.space.base.cluster.price / 3600
        return tuple(
            Choice(
                point=candidate.point,
                ran=ran,
                estimate=estimates[candidate.point],
                obstacle=self._refusal(candidate.point),
                cost=price * candidate.point.devices * ran.step_s,
                shifts=tuple(own),
            )
            for (candidate, ran), own in zip(found.best, shifts, strict=True)
        )


def shifted(base: Scenario) -> dict[str, Mapping[str, Any]]:
    """What may turn out otherwise, in words, and the options that say so."""
    costs, workload, rollout = base.costs, base.workload, base.rollout
    found: dict[str, Mapping[str, Any]] = {}
    mean = workload.mean_tokens or rollout.max_tokens / 4
    if not workload.trace and 1.1 * mean < rollout.max_tokens:
        found["10 % longer answers"] = {"workload.mean_tokens": 1.1 * mean}
        found["answers more uneven (sigma + 0.2)"] = {"workload.sigma": workload.sigma + 0.2}
    found["20 % slower decoding"] = {
        "costs.decode_bandwidth": costs.decode_bandwidth / 1.2,
        "costs.decode_flops": costs.decode_flops / 1.2,
        "costs.step_s": costs.step_s * 1.2,
        "costs.sequence_s": costs.sequence_s * 1.2,
    }
    found["20 % slower training"] = {
        "costs.train_flops": costs.train_flops / 1.2,
        "costs.minibatch_s": costs.minibatch_s * 1.2,
        "costs.microbatch_s": costs.microbatch_s * 1.2,
        "costs.token_s": costs.token_s * 1.2,
    }
    found["links half as fast"] = {"costs.link": costs.link / 2, "costs.disk": costs.disk / 2}
    return found


def _none(refused: Sequence[Refused]) -> ConfigError:
    first = refused[0]
    return ConfigError(f"no choice is possible: {first.problem}", where=first.where, remedy=first.remedy)


def _refusals(wrong: Mapping[Point, ConfigError], fitting: Sequence[Point]) -> list[Refused]:
    """By what is wrong, most first."""
    by_kind: dict[tuple[str, str], list[Point]] = {}
    for point, error in wrong.items():
        by_kind.setdefault((error.where, point.placement), []).append(point)
    found = []
    for (where, _), points in by_kind.items():
        example, nearest = _nearest(points, fitting)
        error = wrong[example]
        found.append(Refused(where, len(points), example, error.problem, error.remedy, nearest))
    return sorted(found, key=lambda each: -each.count)


def _nearest(points: Collection[Point], fitting: Collection[Point]) -> tuple[Point, Point | None]:
    """The point that is nearest to one that fits, and that one: of the same placement, where there is one."""
    sizes = {(point.placement, point.generate, point.train, point.tensor_parallel): point for point in points}
    fits = {(point.placement, point.generate, point.train, point.tensor_parallel): point for point in fitting}

    def far(one: tuple[str, int, int, int], other: tuple[str, int, int, int]) -> float:
        return 1000.0 * (one[0] != other[0]) + sum(abs(a - b) for a, b in zip(one[1:], other[1:], strict=True))

    pairs = ((far(one, other), one, other) for one in sizes for other in fits)
    best = min(pairs, default=None)
    return (sizes[best[1]], fits[best[2]]) if best else (next(iter(sizes.values())), None)
