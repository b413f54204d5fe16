"""Who gets how much of the processors, with times found by hand."""

from __future__ import annotations

import pytest

from rollyard.plan.clock import Clock
from rollyard.plan.cores import DRIVER, KEPT, Cores, Line, Paced
from rollyard.plan.stations import Prompts
from rollyard.plan.workload import Lengths
from rollyard.types import Activity, Request, RequestId, Sampling
from rollyard.watch.spans import SpanLog


def ends(cores: int, *works: tuple[str, float, float]) -> list[float]:
    """When work ends that a process is given: which, when, and seconds of a processor; the driver's are its own thread's."""
    clock = Clock()
    shared = Cores(clock, cores)
    found: dict[int, float] = {}

    def give(number: int) -> None:
        process, _, seconds = works[number]
        line = shared.driver if process == DRIVER else Line(shared, process.removesuffix("'"))
        line.work(seconds, lambda: done(number))

    def done(number: int) -> None:
        found[number] = clock.now
        clock.stopped = len(found) == len(works)

    for number, (_, begin, _) in enumerate(works):
        clock.after(begin, lambda number=number: give(number))
    clock.run(shared.settle)
    return [found[number] for number in range(len(works))]


@pytest.mark.parametrize(
    ("cores", "works", "expected"),
    [
        (0, [("a", 0, 1), ("b", 0, 1), ("a", 0, 2)], [1, 1, 2]),  # everybody has one
        (2, [("a", 0, 1), ("b", 0, 2)], [1, 2]),
        (1, [("a", 0, 1), ("b", 0, 3)], [2, 4]),  # half each until one is done
        (2, [("a", 0, 2), ("b", 0, 2), ("c", 0, 2)], [3, 3, 3]),  # two thirds each
        (1, [("a", 0, 2), ("b", 1, 0.5)], [2.5, 2]),  # one comes later
        (2, [("a", 0, 1), ("a", 0, 1)], [2, 2]),  # two threads of one process take turns
        (4, [(DRIVER, 0, 1), (f"{DRIVER}'", 0, 2)], [1, 3]),  # a trainer in the driver's process waits for it
        (4, [(f"{DRIVER}'", 0, 2), (DRIVER, 0.5, 1), ("a", 0, 2)], [3, 1.5, 2]),
        (1, [(DRIVER, 0, 1), (f"{DRIVER}'", 0, 1), ("a", 0, 1)], [2, 3, 2]),  # while it waits it takes no part
    ],
)
def test_what_is_shared_ends_when_it_should(cores: int, works: list[tuple[str, float, float]], expected: list[float]) -> None:
    assert ends(cores, *works) == pytest.approx(expected)


class Ticks:
    """An engine that tells something each second of its own."""

    version = None

    def __init__(self, spans: SpanLog) -> None:
        self.next_s, self.spans = 1.0, spans

    def advance(self, now: float) -> list[object]:
        self.spans.add(Activity.GENERATE, int((self.next_s - 1) * 1e9), int(self.next_s * 1e9))
        self.next_s += 1
        return []


class Noted(SpanLog):
    def __init__(self) -> None:
        super().__init__(lambda: 0)
        self.seconds: list[tuple[float, float]] = []

    def add(self, activity: Activity, start_ns: int, end_ns: int, what: str = "") -> None:
        self.seconds.append((start_ns / 1e9, end_ns / 1e9))


def test_an_engine_has_a_clock_of_its_own_and_forgets_what_is_past() -> None:
    """Every other second of its own it has half of the only processor, which makes two of everybody's."""
    clock, spans = Clock(), Noted()
    shared = Cores(clock, 1)
    paced = Paced(Ticks, spans, clock, "engine", lambda: True, lambda: None)  # type: ignore[arg-type]
    shared.join(paced)
    other, due = Line(shared, "other"), -1.0

    def settle() -> None:
        nonlocal due
        shared.settle()
        if paced.next_s != due:
            due = paced.next_s
            clock.at(due, lambda asked=due: look(asked))

    def look(asked: float) -> None:
        if asked != due:
            return  # it was another time, then
        paced.advance(clock.now)
        if len(spans.seconds) % 2 == 0:
            other.work(1.0, lambda: None)
        clock.stopped = len(spans.seconds) == 1000

    other.work(1.0, lambda: None)
    clock.run(settle)
    assert spans.seconds[:5] == [pytest.approx(pair) for pair in ((0, 2), (2, 3), (3, 5), (5, 6), (6, 8))]
    assert spans.seconds[-1] == pytest.approx((1499 - 1e-9, 1500), abs=1e-3)
    assert len(paced._real) <= 2 * KEPT


def test_prompts_are_known_by_the_versions_that_admitted_them() -> None:
    """A source without end keeps a number for each version, not for each prompt; none was asked for under version 2."""

    class Steps(Lengths):
        def prompt(self, number: int) -> int:
            return 1

        def completion(self, number: int, member: int, step: int) -> int:
            return step

    prompts = Prompts(Steps())
    for step in (1, 2, 3, 4):
        prompts.take({1: 100, 2: 10, 3: 0, 4: 5}[step])
        prompts.learnt(step)
    prompts.take(7)
    asked = {number: Request(RequestId(number, 0), (1,), Sampling(9), seed=0) for number in (-1, 0, 99, 100, 109, 110, 114, 115)}
    assert [prompts.length(request) for request in asked.values()] == [0, 0, 0, 1, 1, 3, 3, 4]
    assert len(prompts._firsts) == 4
