"""What orchestration costs: the smallest cases of the benchmark, and a soak whose books must agree."""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from functools import partial
from io import StringIO

import pytest
from rich.console import Console

from rollyard.bench import beside, load, prepared, soak
from rollyard.bench.load import CORE, FLIGHT, Case, ran
from rollyard.bench.result import Spread
from rollyard.types import Request, RequestId, Sampling
from rollyard.watch import accounts, keeper, timeline
from rollyard.watch.requests import Requests

SMALL = Case(2, 8, 3, engines=2, slots=4)


@pytest.mark.parametrize("case", [SMALL, replace(SMALL, size=1), replace(SMALL, journal=True)])
async def test_a_run_of_stations_that_answer_at_once(case: Case) -> None:
    one = await ran(case)
    assert one.seconds > 0 and one.cpu_s > 0 and one.flight.now == 0
    assert one.flight.handed >= (case.steps + load.WARM) * case.groups * case.size


async def test_engines_that_hold_requests_are_full() -> None:
    case = replace(SMALL, groups=32, staleness=3, hold=True)
    one = await ran(case)
    assert 7 <= one.flight.most <= 8 and one.flight.mean > 6  # of 8 slots


def test_ten_thousand_requests_are_in_flight() -> None:
    assert FLIGHT.engines == 64 and FLIGHT.engines * FLIGHT.slots >= 10_000


@pytest.mark.parametrize("size", [1, 4])
def test_prepared_events_are_taken_again(size: int) -> None:
    """A fresh conductor says the same to them, up to its end."""
    play = prepared.Play(live=16, size=size, steps=4)
    events = prepared.World(play).prepare()
    conductor = play.conductor()
    said = [type(instruction).__name__ for event, now in events for instruction in conductor.step(event, now)]
    assert said.count("Generate") == said.count("Score") >= 4 * play.groups * size and said[-1] == "Finish"
    assert conductor.counts.trained == 4 * play.groups and conductor.counts.retries == 0
    assert prepared.fed(play, events) > 0


async def test_nothing_is_lost_in_a_small_soak() -> None:
    lines: list[str] = []
    found = await soak.bench(lines.append, 4000, traced=False)
    assert found.rollouts > 3900 and set(found.failures) == {"error", "death", "refusal"} and found.lost_engines > 3
    assert len(lines) == len(found.marks) == 4 and found.journal["prompts"] == 500
    console = Console(width=160, file=StringIO())
    console.print(soak.table(found))
    assert "nothing lost" in console.file.getvalue()
    json.dumps(asdict(found))


@pytest.mark.slow
async def test_nothing_is_lost_and_memory_is_flat_over_a_hundred_thousand_rollouts() -> None:
    found = await soak.bench(lambda line: None, traced=False)
    assert found.rollouts > 99_000 and found.growth < soak.GROWTH
    assert sum(found.failures.values()) > 900 and found.lost_engines > 100


@pytest.mark.slow
async def test_python_holds_no_more_after_thirty_thousand_rollouts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Than after ten thousand, at the last step, when nothing is live: some 1.2 MiB, and 20 bytes a rollout would be seen.

    What is kept for pictures comes and goes by megabytes within its bounds, so these are narrow here.
    """
    for module in (accounts, keeper, timeline):
        monkeypatch.setattr(module, "MOST", 500)
    monkeypatch.setattr(accounts, "Requests", partial(Requests, 500))
    await soak.bench(lambda line: None, 2_000, traced=False)  # what is held once, however many follow
    few, many = [(await soak.bench(lambda line: None, rollouts)).marks[-1] for rollouts in (10_000, 30_000)]
    assert (few.rollouts, many.rollouts) == (10_000, 30_000)
    assert many.traced - few.traced < 20 * (many.rollouts - few.rollouts)


async def test_books_that_do_not_agree_are_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    counted = soak.counted
    monkeypatch.setattr(soak, "counted", lambda path: {**counted(path), "prompts": 3})
    with pytest.raises(soak.LostError, match=r"prompts in the journal: 3 against 250"):
        await soak.bench(lambda line: None, 2000, traced=False)


def test_one_request_in_a_hundred_fails_and_always_the_same() -> None:
    failures: dict[str, int] = {}
    requests = [Request(RequestId(group, member, 0), (1,), Sampling(4), 0) for group in range(2500) for member in range(4)]
    fates = [soak.fate(request, failures) for request in requests]
    assert fates == [soak.fate(request, {}) for request in requests]
    assert 60 < sum(failures.values()) < 140 and sum(map(bool, fates)) == sum(failures.values())


def test_the_tables() -> None:
    console = Console(width=160, file=StringIO())
    rate = load.Rate(8, True, 512, Spread(10_000.0, 9_000.0, 11_000.0), 100.0, 99.0, 0.0, 0)
    core = load.CoreRate(8, 100, 5000, Spread(60_000.0, 1.0, 2.0), 16.7)
    about = {"load": load.Load(0.1, 0.2), "machine": load.machine(), "versions": {}}
    console.print(load.table(load.Loads("load", "speed", (rate,), (replace(rate, in_flight=9_876.0),), (core,), 5, **about)))
    shown = console.file.getvalue()
    assert "completions, K 8, journal" in shown and "9,876" in shown and "60,000" in shown
    assert {play.live for play in CORE} == {100, 1_000, 10_000}


async def test_areal_returns_as_many_completions_as_were_asked_for() -> None:
    class Peer:
        name = "areal"

        async def ask(self, do: str, limit_s: float, **asked: int) -> dict[str, float]:
            return {"seconds": 1.0, "cpu_s": 0.5, "completions": asked["episodes"] * asked["size"] - 1}

    with pytest.raises(beside.PeerError, match="returned 47 of 48"):
        await beside.Executor(Peer(), SMALL).run(1)  # type: ignore[arg-type]
