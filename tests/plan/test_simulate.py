from __future__ import annotations

from pathlib import Path

import pytest

from tests.plan.sides import Case, same

PLACEMENTS = ("colocated", "separate", "async", "swap")


@pytest.mark.parametrize("placement", PLACEMENTS)
def test_the_simulator_does_what_the_loop_does(placement: str, tmp_path: Path) -> None:
    same(Case(placement), tmp_path)
