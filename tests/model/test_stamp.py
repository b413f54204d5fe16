from __future__ import annotations

import pytest

from rollyard.errors import StaleWeights
from rollyard.model.stamp import WeightStamp


def test_each_change_is_a_generation() -> None:
    stamp = WeightStamp()
    stamp.check(0)
    with stamp.writing():
        with pytest.raises(StaleWeights, match="being changed"):
            stamp.check(0)
        with pytest.raises(StaleWeights, match="being changed"), stamp.writing():
            pass
        with pytest.raises(StaleWeights, match="being changed"):
            stamp.restored()
    assert stamp.generation == 1
    stamp.check(1)
    with pytest.raises(StaleWeights, match=r"generation 0.*generation 1"):
        stamp.check(0)


def test_a_change_that_fails_leaves_torn_weights_until_restored() -> None:
    stamp = WeightStamp()
    with pytest.raises(KeyError), stamp.writing():
        raise KeyError
    assert stamp.generation == 0
    assert not stamp.whole
    with pytest.raises(StaleWeights, match="half way"):
        stamp.check(0)
    with pytest.raises(StaleWeights, match="half way"), stamp.writing():
        pass
    stamp.restored()
    stamp.check(1)
