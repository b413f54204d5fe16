"""So many devices: who gets which, by hand, and all of them in any case."""

from __future__ import annotations

from collections.abc import Mapping

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollyard.errors import ConfigError
from rollyard.layers import resolve_tree
from rollyard.plan.scenario import Scenario
from rollyard.plan.split import SIZES, gpus_of, share_of, split


def scenario(placement: str, generate: int = 1, train: int = 1, parallel: int = 1) -> Scenario:
    sizes = dict(zip(SIZES, (generate, train, parallel), strict=True))
    return resolve_tree(Scenario, lambda tree: None, environment={}, overrides={"place.placement": placement} | sizes).config


@pytest.mark.parametrize(
    ("devices", "of", "given", "found"),
    [
        (8, scenario("colocated"), (), {"place.generate": 1, "place.train": 8}),
        (8, scenario("colocated", parallel=4), (), {"place.generate": 1, "place.train": 2}),
        (8, scenario("swap"), (), {"place.generate": 1, "place.train": 1, "engine.tensor_parallel_size": 4}),
        (64, scenario("async", 2, 1, 4), (), {"place.generate": 8, "place.train": 32}),
        (64, scenario("async", 15, 4, 4), (), {"place.generate": 15, "place.train": 4}),  # as they are
        (64, scenario("separate", 3, 1), ("place.train",), {"place.generate": 63, "place.train": 1}),
        (64, scenario("async", 3, 1, 8), ("place.generate",), {"place.generate": 3, "place.train": 40}),
        (64, scenario("async", 4, 32, 8), ("place.generate", "place.train"), {"place.generate": 4, "place.train": 32}),
        (9, scenario("async", 1000, 1, 8), (), {"place.generate": 1, "place.train": 1}),
    ],
)
def test_by_hand(devices: int, of: Scenario, given: tuple[str, ...], found: Mapping[str, int]) -> None:
    assert split(devices, of, given) == found


def test_so_large_a_share_generates_where_sizes_do_not_fit() -> None:
    assert share_of(scenario("async", 2, 1, 4)) == 8 / 9
    assert split(64, scenario("async", 2, 1, 4), (), share=8 / 9) == {"place.generate": 14, "place.train": 8}
    assert split(64, scenario("async", 1000, 1, 8), (), share=0.999) == {"place.generate": 7, "place.train": 8}


PLACEMENTS = st.sampled_from(["colocated", "separate", "async", "swap"])
SIZE = st.integers(1, 600)


@given(st.integers(1, 5000), PLACEMENTS, SIZE, SIZE, st.integers(1, 16))
def test_all_devices_are_used(devices: int, placement: str, generate: int, train: int, parallel: int) -> None:
    of = scenario(placement, generate, train, parallel)
    try:
        found = split(devices, of, ())
    except ConfigError as error:
        assert error.where == "--gpus" and (devices <= parallel or devices % (2 if placement == "swap" else parallel))
        return
    sizes = dict(zip(SIZES, (1, 1, parallel), strict=True)) | found
    generate, train, parallel = (sizes[name] for name in SIZES)
    match placement:
        case "colocated":
            assert train * parallel == devices
        case "swap":
            assert 2 * parallel == devices
        case _:
            assert generate * parallel + train == devices and generate > 0 and train > 0


@pytest.mark.parametrize(
    ("devices", "of", "given", "where", "told"),
    [
        (6, scenario("colocated", parallel=4), (), "--gpus", "use 4 or 8"),
        (3, scenario("colocated", parallel=4), (), "--gpus", "use 4, or another"),
        (8, scenario("colocated", 1, 3), ("place.train",), "place.train", "3 x 1 devices are not 8"),
        (7, scenario("swap"), (), "--gpus", "use 8"),
        (8, scenario("swap", parallel=2), ("engine.tensor_parallel_size",), "engine.tensor_parallel_size", "use 4 devices"),
        (1, scenario("async"), (), "--gpus", "use 2 or more"),
        (64, scenario("async", 3, 3), ("place.generate", "place.train"), "--gpus", "use 6"),
        (8, scenario("async", 2, 1, 4), ("place.generate",), "place.generate", "use at most 1"),
        (8, scenario("async", 1, 3, 4), ("place.train",), "place.train", "5 of 8 devices remain"),
        (8, scenario("async", 1, 9), ("place.train",), "place.train", "devices remain"),
    ],
)
def test_what_does_not_come_out_is_told(devices: int, of: Scenario, given: tuple[str, ...], where: str, told: str) -> None:
    with pytest.raises(ConfigError) as raised:
        split(devices, of, given)
    assert raised.value.where == where and told in str(raised.value)


def test_what_is_written() -> None:
    assert gpus_of("64xH100") == (64, "H100") and gpus_of("8") == (8, "") and gpus_of("2xA100-80") == (2, "A100-80")
    for text in ("", "0", "x", "H100", "-4", "4.5", "64x", "64 H100", "1e3", "9" * 20):
        with pytest.raises(ConfigError, match="give such as 64"):
            gpus_of(text)
