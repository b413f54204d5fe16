"""What to choose: bounds and memory for every point, a search among those that fit, and what the best few depend on."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from rollyard.config import ForecastConfig
from rollyard.errors import ConfigError
from rollyard.plan.bounds import Estimate, Yard, groups_needed
from rollyard.plan.check import check_scenario, obstacle
from rollyard.plan.costs import Costs, priced, shape_for
from rollyard.plan.measured import device_of
from rollyard.plan.sample import Sample, sample_of
from rollyard.plan.scenario import Scenario
from rollyard.plan.search import Candidate, Found, Rule, search
from rollyard.plan.space import Point, Space, with_options
from rollyard.plan.stations import room_of
from rollyard.plan.trace import lengths_of

SHARE: Final = 0.1  # of all points that are simulated, at most
FEWEST: Final = 8  # that may be simulated, however few points there are
COMPLETIONS: Final = 100_000  # of the rounds together, about
WINDOWS: Final = (4, 8, 16)  # steps that count, in the rounds, and later
MANY: Final = 2048  # completions of a step, from which on these are enough:
FEWER: Final = (2, 4, 6)


@dataclass(frozen=True, slots=True)
class Ran:
    """One simulated choice, over the steps that count.

    Attributes:
        step_s: seconds of a step.
        tokens_per_s: trained.
        busy: share of the time in which devices work, by role.
        slots: share of decode slots in use while engines step.
        bound: what a step waits for most.
        forecast: for the config.
    """

    step_s: float
    tokens_per_s: float
    busy: Mapping[str, float]
    slots: float
    bound: str
    forecast: ForecastConfig


Simulate = Callable[[Scenario, int], Ran]  # a scenario, and how many of its first steps do not count


@dataclass(frozen=True, slots=True)
class Shift:
    """The workload or the machine is otherwise than was told.

    Attributes:
        step_s: seconds of a step.
        first: the choice that is best then, among the best few; 0 is the one that was best.
    """

    what: str
    step_s: float
    first: int


@dataclass(frozen=True, slots=True)
class Choice:
    """One of the best.

    Attributes:
        obstacle: why this version of Rollyard cannot run it; empty when it can.
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
    """Points that memory has no room for, or that cannot be for another reason.

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
class Plan:
    """What is advised, best first."""

    choices: tuple[Choice, ...]
    refused: tuple[Refused, ...]
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
        tell: is told what is done.
        windows: steps that count: in the rounds, of those that are kept, of the best (None: as many as it takes).
        shifts: say what the best depend on.
    """

    space: Space
    simulate: Simulate
    top: int = 3
    tell: Callable[[str], None] = lambda line: None
    windows: tuple[int, int, int] | None = None
    shifts: bool = True
    _costs: dict[tuple[object, ...], Costs | ConfigError] = field(default_factory=dict)

    def plan(self) -> Plan:
        """Raises ConfigError when nothing fits."""
        fitting = self.fitting()
        wrong = {point: found for point, found in self._looked.items() if isinstance(found, ConfigError)}
        refused = tuple(_refusals(wrong, list(fitting)))
        if not fitting:
            raise ConfigError(f"no choice is possible: {refused[0].problem}", where=refused[0].where, remedy=refused[0].remedy)
        estimates, candidates = self.candidates(fitting)
        points = len(self._looked)
        rule = self._rule(points)
        self.tell(f"{points:,} points, {len(wrong):,} refused; at most {rule.budget:,} are simulated")
        found = search(candidates, lambda point, steps: self._run(self.space.scenario(point), steps), rule)
        choices, more = self._choices(found, estimates)
        return Plan(choices, refused, points, found.simulated, found.excluded, found.left, found.runs + more)

    def fitting(self) -> Mapping[Point, Costs]:
        """What can be, and what everything takes then. Raises ConfigError when nothing is left to choose from."""
        self.shape = shape_for(self.space.base)
        self.hardware = device_of(self.space.base.cluster, self.space.base.model.dtype)
        points = list(self.space.points())
        if not points:
            problem = f"no placement has room for what is fixed on {self.space.gpus} devices"
            raise ConfigError(problem, where="--gpus", remedy="fix fewer options, or take more devices")
        if self.space.base.failures.joins:
            problem = "engines come or go, and a choice says how many there are"
            raise ConfigError(problem, where="failures.joins", remedy="leave it out, and plan for each number of devices")
        self._looked = {point: self._cost(point) for point in points}
        return {point: found for point, found in self._looked.items() if not isinstance(found, ConfigError)}

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
        yard = Yard(self._sample(steps), base.engine.page_tokens, bool(base.rollout.moves or base.failures.node_hours))
        estimates = {point: yard.estimate(point, costs) for point, costs in fitting.items()}
        candidates = [
            Candidate(point, estimates[point].step_s, yard.least_s(point, costs, self.first, steps), self._ready(point))
            for point, costs in fitting.items()
        ]
        return estimates, candidates

    def _ready(self, point: Point) -> bool:
        return not obstacle(self.space.scenario(point))

    def _rule(self, points: int) -> Rule:
        affordable = COMPLETIONS // (self.steps[0] * self.members)
        return Rule(max(min(int(SHARE * points), affordable), FEWEST), self.steps, self.top)

    def _run(self, scenario: Scenario, steps: int) -> Ran:
        return self.simulate(with_options(scenario, {"run.steps": steps}), self.first)

    def _choices(self, found: Found[Ran], estimates: Mapping[Point, Estimate]) -> tuple[tuple[Choice, ...], int]:
        """With what they depend on, and how many simulations that took."""
        scenarios = [self.space.scenario(candidate.point) for candidate, _ in found.best]
        steps = self.steps[0]
        shifts: list[list[Shift]] = [[] for _ in scenarios]
        told = shifted(self.space.base) if self.shifts else {}
        if told:
            usual = [self._run(scenario, steps).step_s for scenario in scenarios]
        for what, options in told.items():
            ran = [self._run(with_options(scenario, dict(options)), steps).step_s for scenario in scenarios]
            first = min(range(len(ran)), key=ran.__getitem__)
            for index, seconds in enumerate(ran):
                of_usual = seconds / usual[index]  # over as many steps
                shifts[index].append(Shift(what, found.best[index][1].step_s * of_usual, first))
        price = self.space.base.cluster.price / 3600
        choices = tuple(
            Choice(
                point=candidate.point,
                ran=ran,
                estimate=estimates[candidate.point],
                obstacle=obstacle(scenario),
                cost=price * candidate.point.devices * ran.step_s,
                shifts=tuple(own),
            )
            for (candidate, ran), scenario, own in zip(found.best, scenarios, shifts, strict=True)
        )
        return choices, (len(told) + 1) * len(scenarios) if told else 0


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
