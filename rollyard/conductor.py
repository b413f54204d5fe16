"""The conductor (PURE): joins the rollout core, the placement and the rollover into one state machine.

What one machine signals to the others is delivered within the same step, in a fixed order (rollover, placement,
core); only instructions leave. The same conductor serves the real run, the tests, the simulator and recovery.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Mapping, Sequence

from rollyard.events import EngineId, Event, Instruction, Rollover, Signal
from rollyard.place.mode import Schedule
from rollyard.place.modes import MODES
from rollyard.rollout.core import RolloutCore
from rollyard.rollout.policy import RolloutPolicy
from rollyard.rollout.state import Counts
from rollyard.stats import EngineNow, SlotsNow
from rollyard.types import WeightVersion
from rollyard.weights.rollover import RolloverMachine

Step = Callable[[Event | Signal, float], Iterable[Instruction | Signal]]

MAX_SIGNALS = 10_000  # in one step; more means that the machines chase each other


class Hearers(dict[type[Event | Signal], tuple[Step, ...]]):
    """Who takes messages of a kind, in order: looked up among all once.

    Args:
        machines: what each listens to, and its step.
    """

    def __init__(self, machines: Sequence[tuple[Container[type[Event | Signal]], Step]]) -> None:
        super().__init__()
        self._machines = machines

    def __missing__(self, kind: type[Event | Signal]) -> tuple[Step, ...]:
        found = self[kind] = tuple(step for listens, step in self._machines if kind in listens)
        return found


class Conductor:
    """Events in, instructions out. Owns every decision of a run.

    Args:
        version: what the run has at its start, or goes on from.
        counts: of its earlier lives (`rollout.recovery.counts_before`).
    """

    def __init__(
        self,
        policy: RolloutPolicy,
        schedule: Schedule,
        rollover: Rollover,
        version: WeightVersion,
        placement: str = "colocated",
        retries: int = 0,
        counts: Counts | None = None,
    ) -> None:
        self._core = RolloutCore(policy, version.step, counts)
        self._mode = MODES[placement](schedule, version)
        self._rollover = RolloverMachine(rollover, retries)
        others = tuple((machine.listens, machine.step) for machine in (self._rollover, self._mode))
        self._last = Hearers((*others, (self._core.listens, self._core.step)))
        self._followed = Hearers((*others, (self._core.listens, self._core.note)))

    def step(self, event: Event, now: float) -> list[Instruction]:
        """Take one event; return what to do next, in order.

        Args:
            event: what happened.
            now: seconds on the run's clock.
        """
        return self._taken(event, now, self._last)

    def steps(self, events: Sequence[Event], now: float) -> list[Instruction]:
        """Take several events as one step: who gets which request is decided once, after the last of them.

        Args:
            events: at least one, in the order in which they happened.
            now: seconds on the run's clock.
        """
        if len(events) == 1:
            return self._taken(events[0], now, self._last)
        instructions: list[Instruction] = []
        for event in events[:-1]:
            instructions += self._taken(event, now, self._followed)
        return instructions + self._taken(events[-1], now, self._last)

    def _taken(self, event: Event, now: float, hearers: Hearers) -> list[Instruction]:
        instructions: list[Instruction] = []
        messages: list[Event | Signal] = [event]
        for message in messages:  # which grows meanwhile
            for step in hearers[type(message)]:
                for output in step(message, now):
                    if isinstance(output, Signal):
                        messages.append(output)
                    else:
                        instructions.append(output)
            if len(messages) > MAX_SIGNALS:
                raise AssertionError(f"the machines exchanged {MAX_SIGNALS} signals after {event!r}")
        return instructions

    @property
    def counts(self) -> Counts:
        """Running totals of prompts and members."""
        return self._core.counts

    @property
    def staying(self) -> frozenset[EngineId]:
        """Engines that are up and were not told to leave."""
        return self._mode.staying

    @property
    def lost(self) -> frozenset[EngineId]:
        """Engines that are lost and are not started again."""
        return self._mode.lost

    @property
    def slow(self) -> Mapping[EngineId, int]:
        """Engines that write several times slower than the median, and how many."""
        return self._core.slow

    @property
    def engines(self) -> tuple[EngineNow, ...]:
        """What each engine holds."""
        return self._core.engines

    @property
    def slots(self) -> SlotsNow:
        """How full all engines are, and how many requests wait for one. Cheap."""
        return self._core.slots

    @property
    def waiting(self) -> int:
        """Requests that no engine has."""
        return self._core.waiting

    @property
    def live(self) -> int:
        """Groups admitted and not yet taken or dropped."""
        return self._core.live

    @property
    def live_tokens(self) -> int:
        """Written by members that are live or being trained."""
        return self._core.live_tokens
