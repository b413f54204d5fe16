from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path

import pytest
from rich.console import Console

from rollyard.bench.report import table
from rollyard.bench.result import Agreement, Difference, Figure, Load, Measured, Side, Spread, machine, ratios
from rollyard.bench.setting import Setting
from rollyard.bench.turns import Rounds


def rounds(*values: float, busy: float = 0.5) -> tuple[Measured, ...]:
    return tuple(Measured(value, (Figure("slots busy", busy * value),)) for value in values)


def test_a_ratio_above_one_is_always_better():
    assert ratios("tokens/s", (300.0, 200.0), (100.0, 400.0)) == (3.0, 0.5)
    assert ratios("s", (2.0, 8.0), (6.0, 4.0)) == (3.0, 0.5)


def test_a_side_has_medians_over_its_rounds():
    side = Side.of("a", rounds(1.0, 9.0, 2.0), [Figure("peak memory", 7.0, "MiB")])
    assert side.spread == Spread(2.0, 1.0, 9.0)
    assert side.figures == (Figure("slots busy", 1.0), Figure("peak memory", 7.0, "MiB"))


def made():
    setting = Setting(Path("models/some"), "ragged", "hf", "float32", 3, 2, {"engine.kernels": "plain"})
    found = Rounds(("rollyard", "hf"), (rounds(30.0, 20.0, 10.0), rounds(10.0, 10.0, 10.0)), (Load(0.1, 2.5),) * 3)
    return setting.result("engine", "tokens/s", found.sides(), found, Agreement(128, 100, (Difference(2, 5, 4e-5),)))


def test_a_result_becomes_one_json_object():
    result = made()
    assert result.ratios == (3.0, 2.0, 1.0) and result.ratio == Spread(2.0, 1.0, 3.0)
    line = json.loads(json.dumps(asdict(result)))
    assert line["sides"][0]["values"] == [30.0, 20.0, 10.0] and line["ratio"] == {"median": 2.0, "least": 1.0, "most": 3.0}
    assert line["agreement"]["differences"] == [{"prompt": 2, "token": 5, "gap": 4e-5}]
    assert {"rollyard", "torch", "python"} <= set(line["versions"])


def test_people_read_the_ratio_its_ends_and_the_circumstances(capsys):
    Console(width=200).print(table(made()))
    shown = capsys.readouterr().out
    for told in ("2.00 times as fast as hf (1.00 to 3.00, 3 rounds)", "100 of 128", "4e-05 nats", "0.10 to 2.50", "plain"):
        assert told in shown


def test_this_machine_is_described():
    about = machine()
    assert about.cores >= 1 and about.memory_gib > 0 and about.cpu


@pytest.mark.parametrize("unit", ["s", "tokens/s"])
def test_sides_of_different_length_are_refused(unit):
    with pytest.raises(ValueError, match="shorter"):
        ratios(unit, (1.0, 2.0), (1.0,))
