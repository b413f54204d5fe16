"""One simulated run, and its report: by the very books of a real one, kept on a virtual clock."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Final

from rollyard import worker
from rollyard.conducting import policy_of, schedule_of
from rollyard.conductor import Conductor
from rollyard.config import Config
from rollyard.driver import collecting_seldom
from rollyard.journal.record import Unkept
from rollyard.plan.clock import Clock
from rollyard.plan.joins import joins_of
from rollyard.plan.scenario import Scenario
from rollyard.plan.stations import stations_of
from rollyard.plan.world import Heard, Stations, World
from rollyard.protocols.devices import Tracked
from rollyard.types import DropReason, WeightVersion
from rollyard.watch.recorder import Recorder
from rollyard.watch.report import Counts, Filtering, Report, ReportBuilder, TokenLedger
from rollyard.watch.requests import Requests
from rollyard.watch.step import Step
from rollyard.watch.terminal import QuietView
from rollyard.watch.timeline import Timeline
from rollyard.watch.trace import Traced

COLLECTING: Final = (1_000_000, 20, 50)  # as in `driver`: a simulated run makes in a second what a real one makes in minutes


@dataclass(frozen=True, slots=True)
class Simulated:
    """What came of it.

    `steps_s` says when each step was trained, in seconds from the start. `metrics` is a row a step, as a run's metrics.jsonl.
    """

    report: Report
    steps_s: tuple[float, ...]
    metrics: tuple[Mapping[str, object], ...]
    traced: Traced
    events: int  # that the conductor was told
    lengths: Mapping[int, int]  # completions that finished, by their tokens
    failures: str = ""  # of nodes, how many there were and were to be expected


class Rows:
    """Keeps metrics (protocols.Sink)."""

    takes_back = True  # nothing is done again

    def __init__(self) -> None:
        self.rows: list[Mapping[str, object]] = []

    def open(self, run: Tracked) -> str:
        """There is nothing to open."""
        return ""

    def write(self, record: Mapping[str, object]) -> None:
        self.rows.append(record)

    def evaluated(self, record: Mapping[str, object]) -> None:
        """Of steps alone."""

    def close(self, summary: Mapping[str, object], failed: bool) -> None:
        """Nothing is open."""


def simulate(
    scenario: Scenario, heard: Heard | None = None, stepped: Callable[[Step], None] | None = None, *, followed: bool = False
) -> Simulated:
    """What a scenario comes to; the same each time. It was checked (`check.check_scenario`).

    Args:
        heard, stepped: see `World`.
        followed: whether its trace has what became of each prompt.

    Raises:
        ConfigError: the model does not fit on its devices, or lengths cannot be read.
    """
    play = Play(scenario, stations_of(scenario), heard, stepped, followed=followed)
    play.world.coming.plan({join.steps: join.engines for join in joins_of(scenario)})
    return play.run()


class Play:
    """A run before it begins: its world may be given what is to happen to it.

    Args:
        config: of the run.
        stations: what stands for its stations.
        heard, stepped, followed: see `World` and `simulate`.
    """

    def __init__(
        self,
        config: Config,
        stations: Stations,
        heard: Heard | None = None,
        stepped: Callable[[Step], None] | None = None,
        *,
        followed: bool = True,
    ) -> None:
        self.clock = clock = Clock()
        self._timeline = Timeline(lambda: clock.nanoseconds)
        placement = config.place.placement
        self._builder = ReportBuilder(
            name=config.run.name,
            model=config.model.path or f"base policy of {config.prompts.task}",
            placement=placement,
            engine=config.engine.kind,
            transport=worker.transport_of(config),
            simulated=True,
            judged=stations.judged,
        )
        self._rows = Rows()
        batch = config.rollout.groups_per_step * config.rollout.group_size
        self._recorder = Recorder(Unkept(), self._builder, (self._rows,), QuietView(), self._timeline, batch)
        self._recorder.accounts.requests = Requests(judged=stations.judged) if followed else Requests(0)
        policy = policy_of(config, stations.window)
        restarts = config.place.restarts if config.place.apart else 0
        schedule = schedule_of(config, stations.engines, evaluate=bool(stations.held_out), restarts=restarts)
        rollover, version = worker.rollover_of(config), WeightVersion(0)
        conductor = Conductor(policy, schedule, rollover, version, placement, config.weights.retries)
        self._recorder.resume(version, {})
        self._steps_s: list[float] = []
        self._stepped = stepped
        self.world = World(config, conductor, clock, self._recorder, self._timeline, stations, heard, self._step)

    def _step(self, step: Step) -> None:
        self._steps_s.append(self.clock.now)
        if self._stepped is not None:
            self._stepped(step)

    def run(self) -> Simulated:
        """To its end. Raises AssertionError when that does not come."""
        with collecting_seldom(COLLECTING):
            self._recorder.begin()
            self.world.run()
            self.world.engines.note(self.clock.now)
            self._timeline.end()
        report = self._report()
        traced = self._recorder.accounts.traced()
        steps_s, rows, world = tuple(self._steps_s), tuple(self._rows.rows), self.world
        return Simulated(report, steps_s, rows, traced, world.events, self._builder.lengths, world.coming.failures)

    def _report(self) -> Report:
        conductor = self.world.conductor
        counts = conductor.counts
        return self._recorder.close(
            Counts(counts.admitted, counts.trained, dict(counts.dropped)),
            Counts(counts.members_admitted, counts.members_trained, dict(counts.members_dropped)),
            TokenLedger(counts.tokens.generated, counts.tokens.trained, dict(counts.tokens.dropped), conductor.live_tokens),
            Filtering(counts.dropped.get(DropReason.FILTERED, 0), counts.refills, counts.unfiltered),
            self.world.engines.stats(),
        )
