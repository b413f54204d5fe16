"""Flat micro-batches, by hand."""

from __future__ import annotations

import torch

from rollyard.train.rows import Rows
from rollyard.types import Sample

CPU = torch.device("cpu")


def sample(ids: tuple[int, ...], mask: str) -> Sample:
    """Each token's logprob is minus its id, its advantage ten times its id."""
    flags = tuple(flag == "1" for flag in mask)
    logprobs = tuple(-float(id_) if flag else 0.0 for id_, flag in zip(ids, flags, strict=True))
    advantages = tuple(10.0 * id_ if flag else 0.0 for id_, flag in zip(ids, flags, strict=True))
    return Sample(0, 0, ids, flags, logprobs, advantages, ())


def test_two_rows_by_hand():
    """Each trained token is predicted by the one before it, of its own row. The 9 within the second row is not sampled."""
    rows = Rows.of([sample((2, 3, 4), "011"), sample((5, 6, 9, 8), "0101")], CPU)
    assert rows is not None
    assert rows.ids.tolist() == [2, 3, 5, 6, 9]
    assert rows.positions.tolist() == [0, 1, 0, 1, 2]
    assert rows.lengths == (2, 3)
    assert rows.predicting.tolist() == [0, 1, 2, 4]
    assert rows.targets.tolist() == [3, 4, 6, 8]
    assert rows.behaviour.tolist() == [-3.0, -4.0, -6.0, -8.0]
    assert rows.advantages.tolist() == [30.0, 40.0, 60.0, 80.0]
    assert rows.trained == (2, 2)


def test_rows_without_a_trained_token_are_not_computed():
    rows = Rows.of([sample((2, 3), "00"), sample((4, 5), "01")], CPU)
    assert rows is not None
    assert (rows.ids.tolist(), rows.targets.tolist(), rows.lengths) == ([4], [5], (1,))
    assert Rows.of([sample((2, 3), "00")], CPU) is None
    assert Rows.of([], CPU) is None
