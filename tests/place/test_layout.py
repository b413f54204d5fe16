"""Roles on devices, by hand and for all small numbers."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollyard.errors import ConfigError
from rollyard.place.layout import Host, Roles, devices, layout

PLACEMENTS = ("colocated", "separate", "async", "swap")


def test_by_hand() -> None:
    assert layout(Roles("colocated", 1, 1, 1)) == (Host("device-0", 1, "engine-0", 0),)
    assert layout(Roles("colocated", 1, 2, 1), 2) == (Host("device-0", 1, "engine-0", 0), Host("device-1", 1, "engine-1", 1))
    assert layout(Roles("async", 2, 1, 4), 9) == (
        Host("engine-0", 4, "engine-0"),
        Host("engine-1", 4, "engine-1"),
        Host("trainer-0", 1, rank=0),
    )
    judged = layout(Roles("separate", 1, 1, 1, judges=1), 3)
    assert judged == (Host("engine-0", 1, "engine-0"), Host("trainer-0", 1, rank=0), Host("reward-model", 1))
    assert layout(Roles("swap", 1, 1, 1), 8) == (Host("half-0", 1, "engine-0", 0), Host("half-1", 1, "engine-1", 0))


@pytest.mark.parametrize(
    ("roles", "available", "told"),
    [
        (Roles("async", 3, 2, 1), 4, "3 engines and 2 trainers needs 5 devices, and there are 4"),
        (Roles("async", 3, 2, 1), 4, "use --place.generate 2 --place.train 2 or --place.generate 3 --place.train 1"),
        (Roles("separate", 2, 1, 4), 8, "use --place.generate 1 --place.train 1"),
        (Roles("separate", 2, 1, 4), 4, "use --place.placement colocated"),
        (Roles("colocated", 1, 8, 1), 4, "use --place.train 4"),
        (Roles("swap", 1, 1, 1), 1, "2 halves needs 2 devices, and there are 1"),
        (Roles("colocated", 1, 4, 1, 1), 4, "4 trainers and a reward model needs 5 devices, and there are 4"),
        (Roles("colocated", 1, 4, 1, 1), 4, "use --place.train 3"),
        (Roles("separate", 1, 1, 1, 1), 2, "use --place.placement colocated"),
        (Roles("colocated", 1, 1, 1, 1), 1, "--reward.model.place colocated"),
        (Roles("colocated", 1, 1, 1, 1), 0, "use a machine that has one"),
        (Roles("swap", 1, 1, 1), 0, "use a machine that has one"),
    ],
)
def test_what_does_not_fit_is_refused_with_what_does(roles: Roles, available: int, told: str) -> None:
    with pytest.raises(ConfigError) as error:
        layout(roles, available)
    assert told in str(error.value)


SMALL = st.builds(Roles, st.sampled_from(PLACEMENTS), *(st.integers(1, most) for most in (6, 6, 4)), judges=st.integers(0, 1))


@given(SMALL, st.integers(0, 12))
def test_every_role_has_a_host_or_the_remedy_fits(roles: Roles, available: int) -> None:
    try:
        hosts = layout(roles, available)
    except ConfigError as error:
        assert devices(roles) > available
        for remedy in error.remedy.split(" or ") if available else ():
            said = dict(re.findall(r"--place\.(\w+) (\w+)", remedy))
            other = "placement" in said  # colocated, and then one of everything will do
            numbers = int(said.get("generate", 1)), int(said.get("train", 1))
            judges = 0 if "--reward.model.place colocated" in remedy else roles.judges
            nearer = Roles(said.get("placement", roles.placement), *numbers, 1, judges)
            assert devices(nearer if other else replace(nearer, tensor_parallel=roles.tensor_parallel)) <= available
        return
    assert sum(host.devices for host in hosts) == devices(roles) <= available
    assert len({host.name for host in hosts}) == len(hosts)
    engines = [host.engine for host in hosts if host.engine]
    assert len(set(engines)) == len(engines) >= 1 and any(host.rank == 0 for host in hosts)
