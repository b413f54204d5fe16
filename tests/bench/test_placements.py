"""All placements with doubles, smaller than the benchmark: what they take is what theory says."""

from __future__ import annotations

import json
from dataclasses import asdict
from io import StringIO

import pytest
from rich.console import Console

from rollyard.bench import placements, shown
from rollyard.bench.placements import Choice, Doubled, Expected, doubled
from rollyard.bench.real import measure_real
from rollyard.bench.theory import Work
from rollyard.cli import main
from rollyard.events import Rollover

SMALL = {"steps": 30, "groups": 8, "size": 4, "generate": 2, "slots": 8, "median": 8, "cap": 24}


@pytest.mark.parametrize("ratio", [3.0, 1.0, 1 / 3])
@pytest.mark.parametrize("placement", ["separate", "colocated", "swap"])
def test_a_placement_in_turn_takes_what_a_schedule_of_its_lengths_takes(placement: str, ratio: float):
    work = Work(ratio, **(SMALL | {"steps": 6}))
    found = doubled("1:1", placement, Rollover.DRAIN, work)
    assert found.expected[0].share == pytest.approx(1.0, abs=0.02)
    assert found.tokens_per_s / found.steps_per_s * work.steps == pytest.approx(work.tokens)
    assert set(found.staleness) == ({0, 1} if placement == "swap" else {0})


@pytest.mark.parametrize(("ratio", "least"), [(3.0, 0.93), (1.0, 0.88), (1 / 3, 0.95)])
def test_async_comes_near_the_larger_of_generation_and_training(ratio: float, least: float):
    """30 steps only: the first fill and the last tail weigh more than in the benchmark."""
    work = Work(ratio, **SMALL)
    found = doubled("1:1", "async", Rollover.KEEP, work)
    assert least <= found.expected[0].share <= 1.0
    assert max(found.staleness) <= work.staleness and sum(found.staleness.values()) == work.tokens
    busy = found.slots if ratio > 1 else found.training
    assert busy >= least


def test_draining_costs_slots_and_cutting_costs_reading():
    work = Work(3.0, **(SMALL | {"steps": 10}))
    drained, cut = (doubled("3:1", "async", rollover, work) for rollover in (Rollover.DRAIN, Rollover.ABORT))
    assert drained.slots < 0.8 * cut.slots and drained.read_again == 0 < cut.read_again
    assert drained.expected[0].least is None and cut.expected[0].least == 0.95


def test_the_longest_completion_bounds_what_staleness_allows():
    work = Work(1.0, **(SMALL | {"steps": 8, "cap": 200, "staleness": 1}))
    found = doubled("1:1", "async", Rollover.KEEP, work)
    bound, stale = found.expected
    assert bound.share < stale.share <= 1.0


def test_a_figure_says_whether_it_reaches_what_is_asked_for():
    assert Expected("f", 1.0, 0.94, 0.95).reached is False and Expected("f", 1.0, 1.2, 0.95).reached is True
    assert Expected("f", 1.0, 1.06, 0.95, 1.05).reached is False and Expected("f", 1.0, 0.5).reached is None


def test_the_command_prints_a_table_or_one_line_of_json(monkeypatch, capsys):
    monkeypatch.setattr(placements, "RATIOS", {"1:1": 1.0})
    monkeypatch.setattr(placements, "ROLLOVERS", {"async": (Rollover.KEEP,)})
    command = ["bench", "placements", "--only", "doubles", "--steps", "1"]
    assert main([*command, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert [one["placement"] for one in found["doubles"]] == ["colocated", "separate", "async", "swap"]
    assert found["real"] == [] and found["options"] == {"steps": 1, "real": False} and found["work"]["slots"] == 16


def test_the_table_shows_what_was_found_beside_what_was_expected():
    one = Doubled("3:1", "async", "keep", 2.0, 100.0, 0.9, 0.8, 0.3, {0: 25, 1: 75}, 0, (Expected("a bound", 2.1, 0.94, 0.95),))
    result = placements.Placements(
        "placements", Choice().work(1.0).settings(), (one,), (), 1.0, placements.Load(0, 0), placements.machine(), {}, {}
    )
    console = Console(width=250, record=True, file=StringIO())
    console.print(shown.table(result))
    printed = console.export_text()
    for words in ("async keep", "25% 75%", "94.0%", "missed (95%)", "a bound", "4 generation devices of 16 slots", "half of all"):
        assert words in printed
    assert json.loads(json.dumps(asdict(result)))["doubles"][0]["expected"][0]["share"] == 0.94


@pytest.mark.slow
@pytest.mark.timeout(300)
async def test_the_tiny_model_under_all_placements():
    found = await measure_real(2, lambda line: None, steps=3)
    assert [one.placement for one in found] == ["colocated", "separate", "async", "swap"]
    for one in found:
        assert one.steps == 3 and one.steps_per_s > 0 and 0 < one.generating <= 1 and 0 < one.training <= 1
        assert one.reward_last is not None and one.eval_last is not None
    assert found[3].handed_s > 0 and max(found[2].staleness) <= 2
