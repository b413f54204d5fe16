"""Whether hosts fit on nodes, by hand."""

from __future__ import annotations

import pytest

from rollyard.place.bundles import Bundle, counted, fitting

SMALL, GPU, WIDE = Bundle(), Bundle(1, 1), Bundle(4, 2)


@pytest.mark.parametrize(
    ("bundles", "nodes", "fit"),
    [
        ([SMALL] * 3, [Bundle(2)], 2),
        ([SMALL] * 3, [Bundle(2), Bundle(1)], 3),
        ([GPU] * 2, [Bundle(8)], 0),
        ([WIDE], [Bundle(4, 1), Bundle(4, 1)], 0),  # one bundle lies on one node
        ([GPU, GPU, WIDE], [Bundle(8, 2), Bundle(8, 2)], 3),  # the wide one first
        ([Bundle(0.5)] * 3, [Bundle(1)], 2),
        ([], [], 0),
    ],
)
def test_how_many_fit(bundles: list[Bundle], nodes: list[Bundle], fit: int) -> None:
    assert fitting(bundles, nodes) == fit


def test_what_is_asked_in_words() -> None:
    assert counted([SMALL, SMALL, WIDE]) == "2 hosts with 1 CPU, 1 host with 4 CPUs and 2 GPUs"
    assert str(Bundle(0, 1)) == "1 GPU" and str(Bundle(0, 0)) == "nothing" and str(Bundle(0.5)) == "0.5 CPUs"
