"""The classic picture of a step, which names no hardware: what the preset of that name is, part by part."""

from __future__ import annotations

import pytest

from rollyard.plan.costs import Costs, costs_of
from rollyard.plan.scenario import Scenario
from tests.plan.scenarios import preset

Parts = dict[str, float]


def parts(scenario: Scenario, costs: Costs) -> Parts:
    """Seconds of each part of a step, when one follows the other and all sequences are as long."""
    rollout, slots, prompt = scenario.rollout, scenario.engine.slots, scenario.workload.prompt_tokens
    batch = rollout.groups_per_step * rollout.group_size
    decode = costs.engine.step(slots)
    round_s = sum(decode.at(slots * (prompt + written)) for written in range(1, rollout.max_tokens + 1))
    prefill_s = costs.engine.prefill_s(slots * prompt, slots * prompt * (prompt + 1) // 2)
    return {
        "generation": batch / slots * (round_s + prefill_s),
        "scoring": batch / scenario.costs.score_workers * costs.score_s(rollout.max_tokens),
        "training": costs.batch_s([(prompt, [rollout.max_tokens])] * batch),
        "sync": costs.moving.total_s,
    }


def test_each_part_is_as_the_picture_has_it() -> None:
    scenario = preset("classic")
    found = parts(scenario, costs_of(scenario))
    assert scenario.rollout.groups_per_step * scenario.rollout.group_size == 256
    assert 60 <= found["generation"] <= 120
    assert 5 <= found["scoring"] <= 10
    assert 10 <= found["training"] <= 30
    assert 0.6 <= found["generation"] / sum(found.values()) <= 0.8


@pytest.mark.parametrize(("transport", "least", "most"), [("checkpoint", 10, 30), ("shared_memory", 1, 2), ("broadcast", 0.5, 1)])
def test_each_transport_is_as_the_picture_has_it(transport: str, least: float, most: float) -> None:
    assert least <= costs_of(preset("classic", weights__transport=transport)).moving.total_s <= most


def test_an_engine_that_decodes_all_at_once_is_not_in_the_picture() -> None:
    """With the same hardware generation is then about as long as training."""
    scenario = preset("classic", engine__slots=256)
    found = parts(scenario, costs_of(scenario))
    assert found["generation"] < 40
    assert found["generation"] / sum(found.values()) < 0.6
