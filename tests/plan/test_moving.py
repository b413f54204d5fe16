"""Weight sync: each transport by hand, and what may only grow."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rollyard.errors import ConfigError
from rollyard.plan.costs import Costs, costs_of
from rollyard.plan.moving import Weights, bound_s
from tests.plan.scenarios import scenario

BYTES = 2 * 70_553_706_496  # of llama-70b in 16 bits
VALUES = {
    "model__path": "llama-70b", "model__dtype": "bfloat16", "place__placement": "separate", "place__train": 32,
    "train__shard": True, "engine__tensor_parallel_size": 8, "costs__barrier_s": 0,
}  # fmt: skip
OWN = 3.35e12  # bytes/s of an H100's memory


def costs(**values: object) -> Costs:
    return costs_of(scenario(**({"weights__transport": "broadcast"} | VALUES | values)))


def test_broadcast_is_bound_by_the_cards_of_those_who_receive() -> None:
    """An eighth of 141 GB to each device, at 0.8 of 50 GB/s: 0.44 s."""
    found = costs(weights__transport="broadcast", costs__parts=True).moving
    assert found.transfer_s == pytest.approx(BYTES / 8 / (0.8 * 50e9))
    assert found.copy_s == pytest.approx(2 * BYTES / 32 / OWN)
    assert found.load_s == pytest.approx(2 * BYTES / 8 / OWN)


def test_broadcast_brings_all_to_one_device_of_each_machine_so_far() -> None:
    assert costs(weights__transport="broadcast").moving.transfer_s == pytest.approx(BYTES / (0.8 * 50e9))


def test_broadcast_is_bound_by_the_cards_of_those_who_send() -> None:
    """Two devices have all of the 16 GB that four receive."""
    values = {"model__path": "llama-8b", "weights__transport": "broadcast", "place__train": 2, "engine__tensor_parallel_size": 4,
              "costs__parts": True, "place__nodes": "spread"}  # fmt: skip
    assert costs(**values).moving.transfer_s == pytest.approx(2 * 8_030_261_248 / 2 / (0.8 * 50e9))


def test_broadcast_inside_a_node_goes_over_links() -> None:
    """4 and 4 of a node: all of 16 GB by links of 450 GB/s, whoever asks for parts; hosts that lie apart by a card of 50."""
    values = {"model__path": "llama-8b", "place__train": 4, "engine__tensor_parallel_size": 4}
    whole = 2 * 8_030_261_248
    assert costs(**values).moving.transfer_s == pytest.approx(whole / (0.8 * 450e9))
    assert costs(costs__parts=True, **values).moving.transfer_s == pytest.approx(whole / 4 / (0.8 * 450e9))
    apart = costs(place__nodes="spread", place__runtime="ray", **values).moving
    assert apart.transfer_s == pytest.approx(whole / (0.8 * 50e9))


def test_a_trainer_that_sends_stands_still_as_long() -> None:
    copied, sent = costs().moving, costs(costs__trainer_sends=True).moving
    assert sent.copy_s == copied.copy_s + copied.transfer_s
    assert sent.transfer_s == 0
    assert sent.load_s == copied.load_s
    assert sent.total_s == copied.total_s


def test_broadcast_by_all_cards_of_a_machine() -> None:
    """8 of 50 GB/s, and no faster than a link."""
    assert costs(costs__cards=8).moving.transfer_s == pytest.approx(BYTES / (0.8 * 400e9))
    assert costs(costs__cards=99).moving.transfer_s == costs(costs__cards=8).moving.transfer_s
    assert costs(costs__cards=8, cluster__link=1e11).moving.transfer_s == pytest.approx(BYTES / (0.8 * 1e11))


@pytest.mark.parametrize("transport", ["auto", "shared_memory"])
def test_the_memory_of_one_node_reaches_no_other(transport: str) -> None:
    with pytest.raises(ConfigError, match="lies on 5 nodes of 8 H100, and what goes through the memory of one") as error:
        costs(weights__transport=transport)
    assert (error.value.where, error.value.remedy) == ("weights.transport", "use broadcast, or fewer devices")
    halves = {"place__placement": "swap", "place__train": 1, "train__shard": False, "model__path": "llama-8b"}
    assert costs(weights__transport=transport, engine__tensor_parallel_size=4, **halves).handoff_s > 0
    with pytest.raises(ConfigError, match="lies on 2 nodes"):
        costs(weights__transport=transport, **halves)
    spread = costs(weights__transport="auto", place__nodes="spread", place__runtime="ray", place__ray_address="auto")
    assert spread.moving == costs(weights__transport="broadcast").moving


def test_shared_memory_goes_out_of_all_that_train_and_into_all_of_an_engine() -> None:
    found = costs(weights__transport="shared_memory", cluster__node=40).moving
    assert (found.copy_s, found.transfer_s) == (pytest.approx(BYTES / 32 / (0.8 * 63e9)), 0)
    assert found.load_s == pytest.approx(BYTES / 8 / (0.8 * 63e9) + 2 * BYTES / 8 / OWN)


def test_checkpoint_goes_to_the_disk_and_back() -> None:
    found = costs(weights__transport="checkpoint", costs__disk=10e9).moving
    assert found.transfer_s == pytest.approx(BYTES / 10e9)
    assert found.copy_s == pytest.approx(BYTES / 10e9 + 2 * BYTES / 32 / OWN)


def test_a_delta_is_what_changed_with_where_it_lies_and_a_scan() -> None:
    found = costs(weights__transport="broadcast", weights__delta=True, costs__changed=0.01, costs__parts=True).moving
    assert found.bytes == pytest.approx(BYTES / 2 * 0.01 * 4)
    assert found.transfer_s == pytest.approx(found.bytes / 8 / (0.8 * 50e9))
    assert found.copy_s == pytest.approx((3 * BYTES + found.bytes) / 32 / OWN)


def test_a_delta_is_never_longer_than_all() -> None:
    assert Weights(1000, 2, 2, changed=0.9).sent == 2000
    assert Weights(1000, 2, 2, changed=0.1).sent == 400


def test_in_place_only_rounds() -> None:
    values = {"model__path": "smollm2-135m", "place__placement": "colocated", "place__train": 1, "train__shard": False,
              "engine__tensor_parallel_size": 1}  # fmt: skip
    same, rounded = costs(**values).moving, costs(model__dtype="float32", engine__dtype="bfloat16", **(values)).moving
    assert same.total_s == same.bytes == 0
    assert rounded.total_s == rounded.load_s == pytest.approx((4 + 2) * 134_515_008 / OWN)


def test_colocated_engines_gather_what_their_devices_train_parts_of() -> None:
    """A half of all for each of two devices, from the eight that share one copy; at 0.8 of a link."""
    values = {"model__path": "llama-8b", "place__placement": "colocated", "place__train": 4, "engine__tensor_parallel_size": 2}
    found = costs(**values).moving
    half = 2 * 8_030_261_248 / 2
    assert found.total_s == found.load_s == pytest.approx(half / (0.8 * 450e9) + 2 * half / OWN)


def test_a_half_hands_over_weights_and_moments() -> None:
    """12 bytes a parameter in float32, at 0.8 of a link."""
    values = {"model__path": "llama-8b", "model__dtype": "float32", "place__placement": "swap", "place__train": 1}
    found = costs(train__shard=False, engine__tensor_parallel_size=4, **values)
    assert found.handoff_s == pytest.approx(12 * 8_030_261_248 / 4 / (0.8 * 450e9))
    far = costs(train__shard=False, engine__tensor_parallel_size=8, **values)
    assert far.handoff_s == pytest.approx(12 * 8_030_261_248 / 8 / (0.8 * 50e9))


@given(st.floats(0, 1e13), st.floats(0, 1e13), st.floats(1e9, 1e12))
def test_no_sync_beats_its_cards(received: float, sent: float, rate: float) -> None:
    found = bound_s(received, sent, rate)
    assert found >= received / rate
    assert found >= sent / rate
    assert found in (received / rate, sent / rate)


@settings(max_examples=20, deadline=None)
@given(st.sampled_from(["checkpoint", "shared_memory", "broadcast"]), st.floats(0.01, 1), st.floats(0.01, 1))
def test_more_changes_and_slower_links_never_take_less(transport: str, changed: float, link: float) -> None:
    values = {"weights__transport": transport, "weights__delta": True, "cluster__node": 40}
    found = costs(**values, costs__changed=changed, costs__link=link).moving
    assert found.total_s <= costs(**values, costs__changed=min(1, changed * 1.1), costs__link=link).moving.total_s * (1 + 1e-9)
    assert found.total_s >= costs(**values, costs__changed=changed, costs__link=min(1, link * 1.1)).moving.total_s * (1 - 1e-9)
