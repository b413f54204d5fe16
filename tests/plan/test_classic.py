"""The classic picture of a step, which names no hardware: the preset of that name simulated, and its parts by hand."""

from __future__ import annotations

from typing import Any

import pytest

from rollyard.plan.check import check_scenario
from rollyard.plan.costs import costs_of
from rollyard.plan.simulate import simulate
from rollyard.watch.timeline import PhaseSeconds
from tests.plan.scenarios import preset

BEGINNING = 3  # syncs of a run beside those of its steps: the first weights, and the canary's two


def step(**values: Any) -> tuple[float, PhaseSeconds, float]:
    """Seconds of a step in the middle of the run; those of all phases; and of one sync."""
    scenario = preset("classic", **values)
    check_scenario(scenario)
    run = simulate(scenario)
    phases, steps = run.report.phases, run.report.steps
    return (run.steps_s[-1] - run.steps_s[0]) / (steps - 1), phases, phases.sync_s / (steps + BEGINNING)


def test_a_step_is_as_the_picture_has_it() -> None:
    whole_s, phases, sync_s = step(run__steps=4)
    assert 60 <= phases.generate_s / 4 <= 120
    assert 5 <= phases.score_s / 4 <= 10
    assert 10 <= phases.train_s / 4 <= 30
    assert 0.6 <= phases.generate_s / 4 / whole_s <= 0.8
    assert 0.5 <= sync_s <= 1


@pytest.mark.parametrize(("transport", "least", "most"), [("checkpoint", 10, 30), ("shared_memory", 1, 2), ("broadcast", 0.5, 1)])
def test_each_transport_is_as_the_picture_has_it(transport: str, least: float, most: float) -> None:
    """Memory is shared inside one machine alone: of 16 devices, half of which train, and that hold enough."""
    one = {"cluster__node": 16, "place__train": 8, "cluster__memory": 200e9} if transport == "shared_memory" else {}
    _, _, sync_s = step(weights__transport=transport, run__steps=2, **one)
    assert least <= sync_s <= most
    assert sync_s == pytest.approx(costs_of(preset("classic", weights__transport=transport, **one)).moving.total_s, rel=0.01)


def test_its_phases_are_those_that_the_costs_say() -> None:
    """Rounds of 32: their prompts in one chunk beside one step, which gives the first token, and 511 steps."""
    scenario = preset("classic")
    costs, prompt = costs_of(scenario), scenario.workload.prompt_tokens
    decode = costs.engine.step(32)
    decode_s = sum(decode.at(32 * (prompt + written)) for written in range(1, 512))
    begin_s = costs.engine.step(1).at(0) + costs.engine.prefill_s(32 * prompt, 32 * prompt * (prompt + 1) // 2)
    _, phases, _ = step(run__steps=2)
    assert phases.generate_s / 2 == pytest.approx(8 * (decode_s + begin_s), rel=0.01)
    assert phases.train_s / 2 == pytest.approx(costs.batch_s([(prompt, [512])] * 256))
    assert phases.score_s / 2 == pytest.approx(6)


def test_an_engine_that_decodes_all_at_once_is_not_in_the_picture() -> None:
    """With the same hardware generation is then little longer than training."""
    whole_s, phases, _ = step(engine__slots=256, run__steps=2)
    assert phases.generate_s / 2 < 40
    assert phases.generate_s / 2 / whole_s < 0.6
