"""No number of a scenario makes a simulation crash, hang, or take what memory there is: it has a range, or is refused."""

from __future__ import annotations

from typing import Any

import pytest

from rollyard.cli import STOPPED, main
from rollyard.errors import ConfigError
from rollyard.layers import options
from rollyard.plan import clock
from rollyard.plan.check import check_scenario
from rollyard.plan.kinds import resolve_scenario
from rollyard.plan.scenario import Scenario
from rollyard.plan.simulate import simulate
from rollyard.plan.world import World
from rollyard.watch.screen import Screen

OWN = ("cluster", "workload", "costs", "failures")
NUMBERS = [
    option.name
    for option in options(Scenario)
    if isinstance(option.default, int | float) and not isinstance(option.default, bool)
]
ABSURD = ("999999999999", "1e308", "1e-300", "-1")
EDGES = ("0", "1", "1e-4", "0.01", "100", "1e3", "1e5", "1e6", "1e7", "1e9", "1e15", "1e18", "1e21", "-0.9")


def scenario(preset: str = "small", **given: Any) -> Scenario:
    options = {"run.steps": 2, "rollout.groups_per_step": 2} | {name.replace("__", "."): value for name, value in given.items()}
    return resolve_scenario(check_scenario, preset=preset, overrides=options).config


@pytest.mark.parametrize("name", NUMBERS)
def test_absurd_numbers_are_refused_or_harmless(name: str) -> None:
    for value in ABSURD:
        try:
            simulate(scenario(**{name: value}))
        except ConfigError as error:
            assert error.problem and error.remedy


@pytest.mark.parametrize("name", [name for name in NUMBERS if name.partition(".")[0] in OWN])
def test_what_a_range_allows_is_simulated_or_refused_with_its_reason(name: str) -> None:
    allowed = 0
    more = {"failures.node_hours": 1} if name == "failures.restart_s" else {}
    for value in EDGES:
        try:
            found = simulate(scenario(**more, **{name: value}))
        except ConfigError as error:
            assert error.problem and error.remedy
        else:
            allowed += 1
            assert found.report.wall_s < clock.LATEST
    assert allowed


@pytest.mark.parametrize("name", [name for name in NUMBERS if name.partition(".")[0] in OWN])
def test_every_number_of_a_scenario_has_an_end(name: str) -> None:
    with pytest.raises(ConfigError, match=name.replace(".", r"\.")):
        scenario(**{name: "1e300"})


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ({"run__steps": 999_999_999_999}, "completions, of all steps and those under way, are more than are simulated"),
        ({"rollout__groups_per_step": 10**9}, "use at most 20,000,000"),
        ({"rollout__group_size": 999_999_999_999}, "use at most 16,384"),
        ({"place__generate": 999_999_999_999}, "999,999,999,999 engines are more"),
        ({"failures__joins": "1:+999999999"}, "1,000,000,001 engines are more"),
        ({"failures__node_hours": 1e-300}, "use 0, or at least 1e-06"),
        ({"costs__score_workers": 10**12}, "less than or equal to 1000000"),
        ({"costs__minibatch_s": 1e5, "run__steps": 1001}, "the run would go on for more than 100,000,000 s"),
        ({"failures__node_hours": 1e-3, "failures__restart_s": 1e9}, "the run would go on for more than 100,000,000 s"),
        ({"prompts__held_out": 1_000_000, "eval__every": 1, "run__steps": 20}, "22,000,000 completions, of all evaluations"),
        ({"engine__page_tokens": 1_000_000}, "(use 0, or more)"),
    ],
)
def test_what_is_too_large_is_told_before_it_begins(given: dict[str, Any], told: str) -> None:
    with pytest.raises(ConfigError) as raised:
        simulate(scenario(**given))
    assert told in str(raised.value)


def test_ten_times_the_scale_that_is_promised_is_no_size_to_refuse() -> None:
    scenario("thousand", run__steps=1000, place__generate=10_240, rollout__groups_per_step=512)


def test_how_far_it_is_is_told_to_a_terminal_alone(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    small = ["simulate", "--preset", "small", "--steps", "2"]
    assert main(small) == 0
    assert not capsys.readouterr().err
    monkeypatch.setattr(Screen, "is_terminal", True)
    assert main(small) == 0
    assert "simulating" in capsys.readouterr().err


def test_a_simulation_can_be_stopped(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    def stopped(*_: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(World, "run", stopped)
    assert main(["simulate", "--preset", "small"]) == STOPPED
    assert "Traceback" not in capsys.readouterr().err
