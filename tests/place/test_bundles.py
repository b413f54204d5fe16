"""Whether hosts fit on nodes, by hand and by trying all ways."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollyard.place.bundles import Bundle, Nodes, counted, fitting, misfit

SMALL, GPU, WIDE = Bundle(), Bundle(1, 1), Bundle(4, 2)
NODE = Bundle(16, 8)


@pytest.mark.parametrize(
    ("bundles", "nodes", "one", "few", "spread"),
    [
        ([SMALL] * 3, [Bundle(2)], 2, 2, 1),
        ([SMALL] * 3, [Bundle(2), Bundle(1)], 2, 3, 2),
        ([GPU] * 2, [Bundle(8)], 0, 0, 0),
        ([WIDE], [Bundle(4, 1), Bundle(4, 1)], 0, 0, 0),  # one bundle lies on one node
        ([GPU, GPU, WIDE], [Bundle(8, 2), Bundle(8, 2)], 2, 3, 2),  # the wide one first
        ([Bundle(0.5)] * 3, [Bundle(1)], 2, 2, 1),
        ([], [], 0, 0, 0),
        ([SMALL], [], 0, 0, 0),
        ([GPU] * 16, [NODE] * 2, 8, 16, 2),
        ([SMALL, GPU], [Bundle(1, 1), Bundle(1)], 1, 2, 2),  # the small one makes room
    ],
)
def test_how_many_fit(bundles: list[Bundle], nodes: list[Bundle], one: int, few: int, spread: int) -> None:
    assert [fitting(bundles, nodes, how) for how in ("one", "few", "spread")] == [one, few, spread]


SIZES = st.builds(Bundle, st.integers(1, 3), st.integers(0, 2))


@given(st.lists(SIZES, max_size=4), st.lists(SIZES, max_size=4))
def test_as_many_find_a_node_of_their_own_as_can(bundles: list[Bundle], nodes: list[Bundle]) -> None:
    padded = [*nodes, *[None] * len(bundles)]
    every = itertools.permutations(padded, len(bundles))
    most = max(sum(node is not None and bundle.fits(node) for bundle, node in zip(bundles, way, strict=True)) for way in every)
    assert fitting(bundles, nodes, "spread") == most


@pytest.mark.parametrize(
    ("bundles", "nodes", "how", "problem", "remedy"),
    [
        (
            [GPU] * 4,
            [Bundle(8, 2)] * 2,
            "one",
            "4 hosts with 1 CPU and 1 GPU on one node were asked of Ray, which has 2 nodes with 8 CPUs and 2 GPUs, "
            "and of that 3 CPUs free",
            "2 of the 4 hosts fit on one node; use --weights.transport broadcast, by which they may lie on several",
        ),
        ([GPU] * 4, [Bundle(8, 2)], "one", "has 1 node with 8 CPUs and 2 GPUs", "2 of the 4 hosts fit; use fewer hosts"),
        ([GPU] * 5, [Bundle(8, 2)] * 2, "few", "5 hosts with 1 CPU and 1 GPU were asked", "4 of the 5 hosts fit; use fewer"),
        ([GPU, Bundle(1, 16)], [NODE] * 4, "few", "", "1 host with 1 CPU and 16 GPUs fits no node, however empty; use less"),
        ([SMALL] * 3, [NODE] * 2, "spread", "3 hosts with 1 CPU, each on a node", "2 of the 3 hosts find a node of their own"),
        ([SMALL] * 2, [NODE] * 2, "spread", "and of that 3 CPUs free", "all fit once others are done"),
        ([SMALL], [], "few", "Ray, which has no node", "0 of the 1 hosts fit"),
    ],
)
def test_what_is_said_where_there_is_no_room(
    bundles: list[Bundle], nodes: list[Bundle], how: Nodes, problem: str, remedy: str
) -> None:
    said = misfit(bundles, nodes, Bundle(3), how)
    assert problem in said[0] and remedy in said[1]


def test_what_is_asked_in_words() -> None:
    assert counted([SMALL, SMALL, WIDE]) == "2 hosts with 1 CPU, 1 host with 4 CPUs and 2 GPUs"
    assert counted([NODE], "node") == "1 node with 16 CPUs and 8 GPUs"
    assert str(Bundle(0, 1)) == "1 GPU" and str(Bundle(0, 0)) == "nothing" and str(Bundle(0.5)) == "0.5 CPUs"
