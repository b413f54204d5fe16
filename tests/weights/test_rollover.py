"""The rollover over plain lists of events: whatever fails, and in whatever order, every engine ends open or lost."""

from __future__ import annotations

import random
from collections.abc import Iterable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollyard import events as ev
from rollyard.types import WeightVersion
from rollyard.weights.rollover import RolloverMachine

V1 = WeightVersion(1)


class World:
    """Engines and a trainer that answer what they are told, one answer at a time, in a random order."""

    def __init__(self, engines: int, asleep: int, failures: int, deaths: int, seed: int, rollover: ev.Rollover) -> None:
        self.machine = RolloverMachine(rollover, retries=failures)
        self.random = random.Random(seed)
        self.failures, self.deaths = failures, deaths
        self.living = {f"e{number}" for number in range(engines)}
        self.pending: dict[str, list[ev.Event]] = {}  # by who answers: e0, e1, ..., trainer
        self.version: dict[str, WeightVersion] = {}
        self.prepared: dict[str, WeightVersion] = {}
        self.held: set[str] = set()
        self.awaited: set[str] = set()
        self.paused: set[str] = set()
        self.forgotten: set[str] = set()
        self.done: list[WeightVersion] = []
        self.failed = ""
        for engine in sorted(self.living):
            self.tell(ev.EngineUp(engine, 1, None))
        for engine in sorted(self.living)[:asleep]:
            self.tell(ev.EngineSlept(engine))

    def bring(self, version: WeightVersion) -> None:
        self.take((ev.Publish(version),))
        for _ in range(1000):
            if not self.pending or self.failed:
                return
            self.happen()
        raise AssertionError("no end in sight")

    def happen(self) -> None:
        who = self.random.choice(sorted(self.pending))
        if who != "trainer" and self.deaths and self.random.random() < 0.1:
            self.die(who)
            return
        event, *later = self.pending.pop(who)
        if later:
            self.pending[who] = later
        match event:
            case ev.EnginePrepared(engine, version):
                self.prepared[engine] = version
            case ev.EnginePaused(engine):
                self.paused.add(engine)
            case ev.EngineLoaded(engine, version):
                assert self.prepared[engine] == version
                self.version[engine] = version
            case ev.EngineResumed(engine):
                self.paused.discard(engine)
        self.tell(event)

    def die(self, engine: str) -> None:
        self.deaths -= 1
        self.living.discard(engine)
        self.pending.pop(engine, None)
        self.tell(ev.EngineDown(engine, "killed"))

    def tell(self, event: ev.Event | ev.Signal) -> None:
        self.take(self.machine.step(event, 0.0))
        if isinstance(event, ev.Published):
            self.take(self.machine.step(ev.RolloverWanted(event.version), 0.0))

    def take(self, outputs: Iterable[ev.Instruction | ev.Signal]) -> None:
        for output in outputs:
            match output:
                case ev.EngineHeld(engine):
                    self.held.add(engine)
                case ev.EngineReleased(engine):
                    assert engine in self.awaited, "whoever gets weights was awaited"
                    self.held.discard(engine)
                    self.awaited.discard(engine)
                case ev.EnginesAwaited(engines):
                    self.awaited.update(engines)
                case ev.EnginesMissed(engines):
                    self.awaited.difference_update(engines)
                case ev.RolloverDone(version):
                    self.done.append(version)
                case ev.RolloverFailed(cause):
                    self.failed = cause
                case ev.Forget(engine):
                    self.forgotten.add(engine)
                case ev.Publish():
                    assert "trainer" not in self.pending, "offered again while the last offer is under way"
                    self.pending["trainer"] = self.publish(output)
                case _:
                    engine = output.engine  # type: ignore[union-attr]
                    assert engine in self.living
                    assert engine not in self.pending, f"{output} while {self.pending[engine]} is to come"
                    self.pending[engine] = [self.answer(output)]

    def publish(self, offer: ev.Publish) -> list[ev.Event]:
        fails = ev.SyncFailed(offer.version, "the trainer")
        if self.fails():
            return [fails]
        return [ev.Published(offer.version), fails if self.fails() else ev.Delivered(offer.version)]

    def answer(self, instruction: ev.Instruction | ev.Signal) -> ev.Event:
        match instruction:
            case ev.Prepare(engine, version):
                return ev.SyncFailed(version, engine, engine) if self.fails() else ev.EnginePrepared(engine, version)
            case ev.Pause(engine, _):
                return ev.EnginePaused(engine)
            case ev.Load(engine, version):
                return ev.SyncFailed(version, engine, engine) if self.fails() else ev.EngineLoaded(engine, version)
            case ev.Resume(engine):
                return ev.EngineResumed(engine)
            case ev.Wake(engine, part):
                return ev.EngineWoke(engine, part)
        raise AssertionError(instruction)

    def fails(self) -> bool:
        if self.failures and self.random.random() < 0.3:
            self.failures -= 1
            return True
        return False


@given(
    engines=st.integers(1, 4),
    asleep=st.integers(0, 4),
    failures=st.integers(0, 5),
    deaths=st.integers(0, 3),
    seed=st.integers(0, 2**32),
    rollover=st.sampled_from(ev.Rollover),
)
def test_every_engine_ends_open_with_the_newest_version_or_lost(
    engines: int, asleep: int, failures: int, deaths: int, seed: int, rollover: ev.Rollover
) -> None:
    world = World(engines, asleep, failures, deaths, seed, rollover)
    for number in (1, 2, 3):
        version = WeightVersion(number)
        world.bring(version)
        if not world.living:
            return
        assert not world.failed and world.done[-1] == version and len(world.done) == number
        assert {world.version[engine] for engine in world.living} == {version}
        assert not world.living & world.held and not world.living & world.paused
        assert world.forgotten == {f"e{number}" for number in range(engines)} - world.living


def told(machine: RolloverMachine, *events: ev.Event | ev.Signal) -> list[ev.Instruction | ev.Signal]:
    """Who is awaited left out."""
    said = [output for event in events for output in machine.step(event, 0.0)]
    return [output for output in said if not isinstance(output, ev.EnginesAwaited | ev.EnginesMissed)]


@pytest.mark.parametrize("rollover", ev.Rollover)
def test_an_engine_is_awaited_from_when_it_will_soon_be_back(rollover: ev.Rollover) -> None:
    """With drain only once it has finished what it held, which may take long; whom an offer misses is not awaited any more."""
    machine = RolloverMachine(rollover, retries=1)
    told(machine, ev.EngineUp("a", 1, None), ev.EngineUp("b", 1, None))

    def awaited(event: ev.Event | ev.Signal) -> list[ev.Instruction | ev.Signal]:
        return [said for said in machine.step(event, 0.0) if isinstance(said, ev.EnginesAwaited | ev.EnginesMissed)]

    at_once, drains = ev.EnginesAwaited(("a", "b")), rollover is ev.Rollover.DRAIN
    assert awaited(ev.RolloverWanted(V1)) == ([] if drains else [at_once])
    assert awaited(ev.EnginePrepared("a", V1)) == []
    assert awaited(ev.EnginePaused("a")) == ([ev.EnginesAwaited(("a",))] if drains else [])
    assert awaited(ev.SyncFailed(V1, "broken", "b")) == [ev.EnginesMissed(("b",))]
    assert awaited(ev.Delivered(V1)) == awaited(ev.EngineLoaded("a", V1)) == []
    assert awaited(ev.RolloverWanted(V1, ("b",))) == ([] if drains else [ev.EnginesAwaited(("b",))])


def two(retries: int = 1) -> RolloverMachine:
    machine = RolloverMachine(ev.Rollover.DRAIN, retries)
    up = [ev.EngineUp(name, 1, None) for name in ("a", "b")]
    assert told(machine, *up, ev.RolloverWanted(V1)) == [ev.Prepare("a", V1), ev.Prepare("b", V1)]
    return machine


def test_an_engine_that_has_begun_to_take_a_version_is_left_out_when_it_is_offered_again() -> None:
    machine = two()
    assert told(machine, ev.EnginePrepared("a", V1), ev.EnginePaused("a"))[-1] == ev.Load("a", V1)
    assert told(machine, ev.SyncFailed(V1, "b broke", "b"), ev.Delivered(V1)) == []  # a may still fail too
    assert told(machine, ev.EngineLoaded("a", V1)) == [ev.Resume("a"), ev.Publish(V1, ("b",))]
    assert told(machine, ev.RolloverWanted(V1)) == [ev.Prepare("b", V1)]
    assert told(machine, ev.EngineResumed("a")) == [ev.EngineReleased("a")]


def test_a_version_that_fails_too_often_says_all_that_was_wrong() -> None:
    machine = two(retries=0)
    events = [ev.SyncFailed(V1, "b broke", "b"), ev.SyncFailed(V1, "bucket 2 of 3"), ev.SyncFailed(V1, "a broke", "a")]
    assert told(machine, *events) == [ev.RolloverFailed("version 1 did not reach every engine: b broke; bucket 2 of 3; a broke")]


@pytest.mark.parametrize("late", [False, True])
def test_the_death_of_one_costs_the_others_no_retry(late: bool) -> None:
    machine = two(retries=0)
    down, failed = ev.EngineDown("b", "killed"), ev.SyncFailed(V1, "cut off by b", "a")
    outputs = told(machine, *((failed, down) if late else (down, failed)), ev.SyncFailed(V1, "bucket 2 of 3"))
    assert outputs == [ev.Forget("b"), ev.Publish(V1, ("a",))]
