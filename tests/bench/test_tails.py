"""What is done about long answers, with a fixed seed: tails are halved, and nothing is left out for being long."""

from __future__ import annotations

import json
import random
from dataclasses import replace
from io import StringIO

import pytest
from rich.console import Console

from rollyard.bench import tails
from rollyard.bench.tails import HALVED, MEMBERS, ROUTINGS, UNBIASED, Crowd, Routing, kolmogorov_smirnov, sized, tail
from rollyard.cli import main

CROWD = sized(Crowd(8, 1.0), MEMBERS)
SMALL = Crowd(2, 1.0, steps=6, slots=16)


@pytest.mark.slow
def test_putting_tails_off_halves_them_and_trains_what_was_admitted():
    plain, off = (tail(name, CROWD, ROUTINGS[name]) for name in ("plain", "tails put off, S 2"))
    assert off.tail_s < HALVED * plain.tail_s and off.steps_per_s > 1.3 * plain.steps_per_s and off.slots > 1.5 * plain.slots
    assert plain.members == off.members >= MEMBERS
    assert plain.p > UNBIASED and off.p > UNBIASED
    assert plain.staleness == plain.put_off == 0 < off.put_off and off.staleness < 1


@pytest.mark.slow
def test_dropping_what_comes_late_is_biased_and_the_test_sees_it():
    """The negative control: the same prompts to spare, and those that would be too old are dropped. The config refuses it."""
    biased = tail("dropped", CROWD, Routing(staleness=1, spare=0.5, on_stale="drop"))
    assert biased.members >= MEMBERS and biased.p < 1e-10


def test_the_longest_first_where_many_wait():
    crowd = replace(SMALL, waves=12, steps=8)
    plain, longest = (tail(name, crowd, ROUTINGS[name]) for name in ("plain", "longest first"))
    assert longest.tail_s < 0.9 * plain.tail_s and longest.slots > plain.slots and longest.steps_per_s > plain.steps_per_s


def test_moving_makes_the_rest_of_a_batch_faster():
    crowd = replace(SMALL, engines=4, step_s=0.001, each_s=0.004)
    plain, moving = (tail(name, crowd, ROUTINGS[name]) for name in ("plain", "moving"))
    assert moving.moved > 0 and moving.tail_s < plain.tail_s and moving.steps_per_s > plain.steps_per_s


@pytest.mark.parametrize("name", ROUTINGS)
def test_every_routing_trains_every_batch(name: str):
    found = tail(name, SMALL, ROUTINGS[name])
    assert found.members == SMALL.steps * SMALL.groups * SMALL.size and found.p > UNBIASED and 0 < found.slots <= 1


def test_p_is_that_of_the_distribution_of_kolmogorov():
    """Golden: scipy.special.kolmogorov of the statistic of scipy.stats.ks_2samp (scipy 1.17)."""
    drawn = random.Random(0)
    one, two = [drawn.gauss(0, 1) for _ in range(400)], [drawn.gauss(0.1, 1) for _ in range(300)]
    three, four = [round(drawn.gauss(0.3, 1.2), 1) for _ in range(500)], [round(x, 1) for x in one]
    assert kolmogorov_smirnov(one, two) == pytest.approx(0.08120899154890159)
    assert kolmogorov_smirnov(four, three) == pytest.approx(0.0005381908806913226)
    assert kolmogorov_smirnov(two, three) == pytest.approx(0.002906362956855796)
    assert kolmogorov_smirnov(one, one) == 1.0


def test_the_command_prints_a_table_or_one_line_of_json(monkeypatch, capsys):
    monkeypatch.setattr(tails, "CASES", (SMALL,))
    monkeypatch.setattr(tails, "MEMBERS", 1)
    assert main(["bench", "tails", "--engines", "2", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert [row["routing"] for row in found["rows"]] == list(ROUTINGS) and found["work"]["slots"] == 16
    assert main(["bench", "tails", "--engines", "3"]) == 2


def test_the_table_shows_every_figure():
    row = tails.Tail("plain", 8, 2, 1.0, 5.5, 1.0, 0.31, 0.1046, 10240, 0.5, 0.25, 12, 34, 0.07)
    console = Console(width=250, record=True, file=StringIO())
    console.print(tails.table(tails.Tails("tails", SMALL.settings(), (row,), 1.0, tails.machine(), {}, {})))
    printed = console.export_text()
    for words in (
        "8 engines, 2 members a slot, sigma 1",
        "plain",
        "5.50 s",
        "31%",
        "0.105",
        "10,240",
        "34",
        "7%",
        "16 slots an engine",
    ):
        assert words in printed
