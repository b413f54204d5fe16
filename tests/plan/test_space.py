"""What may be chosen."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

from rollyard.plan.scenario import Scenario
from rollyard.plan.space import Point, Space, with_options


def base() -> Scenario:
    options = {"rollout.groups_per_step": 8, "rollout.group_size": 4, "rollout.max_tokens": 64, "model.path": "llama-1b"}
    return with_options(Scenario(), options)


def test_four_devices_counted_by_hand() -> None:
    """Widths 1 and 2; 3 and 1 ways to part the devices; 3 numbers of slots; spare prompts 2 and 4."""
    space = Space(base(), gpus=4, node=4, staleness=1, widest=2)
    found = Counter(point.placement for point in space.points())
    assert found["separate"] == (3 + 1) * 3
    assert found["async"] == (3 + 1) * 3 * 3 * 3  # prompts to spare: 0, 2, 4; rollovers
    assert found["colocated"] == (2 + 1) * (1 + 2) * 3  # with one device each the state is shared or not
    assert found["swap"] == 3
    assert len(set(space.points())) == sum(found.values())


def test_every_point_uses_as_many_devices_as_there_are() -> None:
    for gpus in (2, 4, 8):
        points = list(Space(base(), gpus, node=8, staleness=2, widest=8).points())
        assert {point.devices for point in points} == {gpus}
        assert all(point.staleness <= 2 and point.oversample <= point.staleness * 8 for point in points)


def test_slots_hold_all_that_is_under_way_or_less() -> None:
    points = [point for point in Space(base(), 2, 2, 2, 1).points() if point.placement == "async" and not point.oversample]
    assert {point.slots for point in points if point.staleness == 2} == {96, 48, 24}  # 3 batches of 32 on 1 engine
    assert {point.slots for point in points if point.staleness == 1} == {64, 32, 16}


def test_what_the_user_fixed_is_kept() -> None:
    pinned = {"place.placement": "async", "place.generate": 2, "place.train": 1, "engine.slots": 16, "weights.rollover": "keep"}
    space = Space(with_options(base(), pinned), gpus=4, node=4, staleness=2, widest=4, pinned=frozenset(pinned))
    points = list(space.points())
    assert {(each.placement, each.generate, each.train, each.slots, each.rollover) for each in points} == {
        ("async", 2, 1, 16, "keep")
    }
    assert {each.staleness for each in points} == {1, 2}


def test_what_is_given_and_what_that_leaves_out_is_counted() -> None:
    """By hand: one engine and one device that trains, of one device each; whatever is given, others are left out."""
    pinned = {"train.shard": False, "rollout.oversample": 0}
    space = Space(with_options(base(), pinned), gpus=3, node=4, staleness=1, widest=1, pinned=frozenset(pinned))
    found = list(space.points())
    assert {each.shard for each in found} == {False}
    assert {each.train for each in found if each.apart} == {1, 2}  # two trainers with all parameters each
    free = list(replace(space, pinned=frozenset({"train.shard"})).points())
    both = list(replace(space, pinned=frozenset({"rollout.oversample"})).points())
    left = space.left_out()
    assert left["rollout.oversample"] == len(free) - len(found) > 0
    assert left["train.shard"] == len(set(both) - set(found)) > 0


def test_sizes_that_are_given_leave_out_all_others() -> None:
    pinned = {"place.generate": 1, "place.train": 1}
    space = Space(with_options(base(), pinned), gpus=4, node=4, staleness=1, widest=2, pinned=frozenset(pinned))
    left, all_ = space.left_out(), set(replace(space, pinned=()).points())
    assert left["place.generate"] == left["place.train"] == len(all_ - set(space.points())) > 0


def test_what_the_user_says_of_requests_in_flight_stays_where_there_are_none() -> None:
    space = Space(with_options(base(), {"weights.rollover": "abort"}), 2, 2, 1, 1, frozenset({"weights.rollover"}))
    points = list(space.points())
    assert {each.placement for each in points} == {"colocated", "separate", "async", "swap"}
    assert {space.scenario(each).weights.rollover for each in points} == {"abort"}


def test_sizes_that_are_fixed_are_those_of_every_placement() -> None:
    pinned = {"place.generate": 1, "place.train": 1}
    space = Space(with_options(base(), pinned), gpus=2, node=2, staleness=1, widest=1, pinned=frozenset(pinned))
    assert {each.placement: each.devices for each in space.points()} == {"colocated": 1, "separate": 2, "async": 2, "swap": 2}


def test_a_scenario_has_the_options_of_its_point() -> None:
    space = Space(base(), gpus=16, node=8, staleness=2, widest=8)
    point = Point("async", 6, 4, 2, 32, staleness=1, oversample=2, rollover="abort", shard=True)
    scenario = space.scenario(point)
    assert (scenario.place.placement, scenario.place.generate, scenario.place.train) == ("async", 6, 4)
    assert (scenario.engine.kind, scenario.engine.tensor_parallel_size, scenario.engine.slots) == ("vllm", 2, 32)
    assert (scenario.weights.rollover, scenario.weights.transport) == ("abort", "broadcast")  # over two nodes
    assert (scenario.rollout.max_staleness, scenario.rollout.oversample, scenario.train.shard) == (1, 2, True)
    assert scenario.rollout.groups_per_step == 8
    mine = replace(space, pinned=frozenset({"weights.transport", "engine.kind"}))
    assert (mine.scenario(point).engine.kind, mine.scenario(point).weights.transport) == ("embedded", "auto")
