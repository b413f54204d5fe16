from __future__ import annotations

from io import StringIO

import pytest
from rich.console import Console

from rollyard.config import ForecastConfig
from rollyard.errors import ConfigError
from rollyard.layers import resolve
from rollyard.watch.devices import PoolTime
from rollyard.watch.forecast import Compared, StepMeans, busy, compare
from rollyard.watch.foretold import foretold
from rollyard.watch.timeline import PhaseSeconds

EXPECTED = ForecastConfig(
    source="rollyard 1, a scenario",
    step_s=10.0,
    generate_s=6.0,
    train_s=3.0,
    trained_tokens_per_s=100.0,
    engine_busy=0.75,
    trainer_busy=0.25,
    slots_busy=0.5,
)


def seconds(wall: float, generate: float, train: float, sync: float = 0.0) -> PhaseSeconds:
    left = wall - generate - train - sync
    return PhaseSeconds(wall_s=wall, generate_s=generate, train_s=train, sync_s=sync, unaccounted_s=left)


def test_the_first_step_is_in_no_mean_where_there_are_others() -> None:
    means = StepMeans()
    assert (means.steps, means.means()) == (0, {})
    means.add(seconds(40.0, 30.0, 5.0), 100)
    assert means.steps == 1 and means.means()["step_s"] == 40.0 and means.means()["trained_tokens_per_s"] == 2.5
    means.add(seconds(8.0, 5.0, 2.0, 0.5), 640)
    means.add(seconds(12.0, 5.0, 4.0, 1.5), 1360)
    assert means.steps == 2
    assert means.means() == {
        "step_s": 10.0,
        "generate_s": 5.0,
        "score_s": 0.0,
        "train_s": 3.0,
        "sync_s": 1.0,
        "checkpoint_s": 0.0,
        "rest_s": 1.0,
        "trained_tokens_per_s": 100.0,
    }


def test_what_was_expected_stands_beside_what_happened() -> None:
    measured = {"step_s": 12.5, "generate_s": 9.0, "train_s": 3.0, "sync_s": 0.5, "rest_s": 0.0, "trained_tokens_per_s": 80.0}
    found = compare(EXPECTED, 3, measured | busy((PoolTime("engine", 2, 0.6, {}, 0),), 0.25))
    assert found is not None and (found.source, found.steps) == ("rollyard 1, a scenario", 3)
    assert found.rows == (
        Compared("step_s", 10.0, 12.5, 1.25),
        Compared("generate_s", 6.0, 9.0, 1.5),
        Compared("score_s", 0.0, None, None),
        Compared("train_s", 3.0, 3.0, 1.0),
        Compared("sync_s", 0.0, 0.5, None),  # it was to take no time
        Compared("checkpoint_s", 0.0, None, None),
        Compared("rest_s", 1.0, 0.0, 0.0),
        Compared("trained_tokens_per_s", 100.0, 80.0, 0.8),
        Compared("engine_busy", 0.75, 0.6, 0.6 / 0.75),
        Compared("trainer_busy", 0.25, None, None),
        Compared("slots_busy", 0.5, 0.25, 0.5),
    )
    console = Console(width=80, file=StringIO())
    console.print(*foretold(found))
    lines = [line.split() for line in console.file.getvalue().splitlines()]
    assert ["step", "10", "s", "12.5", "s", "1.25"] in lines and ["sync", "0", "s", "0.5", "s", "-"] in lines
    assert not any(line[:1] in (["score"], ["checkpoint"]) for line in lines)  # of which there is nothing to say
    assert ["trainers", "busy", "25.0%", "-", "-"] in lines and ["trained", "tok/s", "100", "80", "0.80"] in lines


def test_what_rounding_leaves_is_no_forecast() -> None:
    rounded = ForecastConfig(step_s=1.00001, generate_s=0.333333, train_s=0.666667, sync_s=0.00000995, source="a")
    found = compare(rounded, 1, {"rest_s": 0.00077})
    assert found is not None and found.rows[6] == Compared("rest_s", 0.0, 0.00077, None)


def test_without_a_forecast_nothing_is_said() -> None:
    assert compare(ForecastConfig(), 3, {"step_s": 1.0}) is None
    assert foretold(None) == []


def test_a_run_that_took_no_step_measured_nothing() -> None:
    found = compare(EXPECTED, 0, {})
    assert found is not None and all(row.measured is None and row.ratio is None for row in found.rows)


def test_a_forecast_says_how_long_a_step_takes() -> None:
    with pytest.raises(ConfigError) as told:
        resolve(preset="sort", environment={}, overrides={"forecast.sync_s": 1.0})
    assert told.value.where == "forecast.step_s"
