"""Flat micro-batches, by hand."""

from __future__ import annotations

import torch

from rollyard.model.attention import Tree
from rollyard.train.rows import Rows, families, pieces
from rollyard.types import Sample

CPU = torch.device("cpu")


def sample(ids: tuple[int, ...], mask: str) -> Sample:
    """Each token's logprob is minus its id, its advantage ten times its id."""
    flags = tuple(flag == "1" for flag in mask)
    logprobs = tuple(-float(id_) if flag else 0.0 for id_, flag in zip(ids, flags, strict=True))
    advantages = tuple(10.0 * id_ if flag else 0.0 for id_, flag in zip(ids, flags, strict=True))
    return Sample(0, 0, ids, flags, logprobs, advantages, ())


def rows(*samples: Sample) -> Rows:
    return Rows.of(families(samples), CPU)


def test_two_samples_of_their_own_by_hand():
    """Each trained token is predicted by the one before it, of its own row. The 9 within the second row is not sampled."""
    found = rows(sample((2, 3, 4), "011"), sample((5, 6, 9, 8), "0101"))
    assert found.ids.tolist() == [2, 3, 5, 6, 9]
    assert found.positions.tolist() == [0, 1, 0, 1, 2]
    assert found.trees == (Tree(2), Tree(3))
    assert found.predicting.tolist() == [0, 1, 2, 4]
    assert found.targets.tolist() == [3, 4, 6, 8]
    assert found.behaviour.tolist() == [-3.0, -4.0, -6.0, -8.0]
    assert found.advantages.tolist() == [30.0, 40.0, 60.0, 80.0]
    assert found.trained == (2, 2)


def test_a_shared_prompt_by_hand():
    """The prompt 2 3, continued by 4 5 6, by 7, which is no input, and by 8 9 1 of which 9 is not sampled."""
    found = rows(sample((2, 3, 4, 5, 6), "00111"), sample((2, 3, 7), "001"), sample((2, 3, 8, 9, 1), "00101"))
    assert found.ids.tolist() == [2, 3, 4, 5, 8, 9]
    assert found.positions.tolist() == [0, 1, 2, 3, 2, 3]
    assert found.trees == (Tree(2, (2, 2)),)
    assert found.predicting.tolist() == [1, 2, 3, 1, 1, 5]
    assert found.targets.tolist() == [4, 5, 6, 7, 8, 1]
    assert found.trained == (3, 1, 2)


def test_completions_of_one_token_leave_only_their_prompt():
    found = rows(sample((2, 3, 4), "001"), sample((2, 3, 5), "001"))
    assert (found.ids.tolist(), found.trees, found.predicting.tolist()) == ([2, 3], (Tree(2),), [1, 1])


def test_families_have_one_prompt_each_and_rows_without_a_trained_token_are_not_computed():
    first, other, second, longer = (
        sample((2, 3, 4), "001"),
        sample((2, 4, 4), "001"),
        sample((2, 3, 5), "001"),
        sample((2, 3, 4), "011"),
    )
    assert families([first, other, sample((2, 3), "00"), second, longer]) == [[first, second], [other], [longer]]
    assert families([sample((2, 3), "00")]) == []


def test_pieces_cut_between_families():
    """Inputs 2, 3, 7 and 2: up to 5 together, the 7 by itself."""
    samples = [sample((number,) * length, "0" + "1" * (length - 1)) for number, length in enumerate((3, 4, 8, 3))]
    found = pieces(samples, 5)
    assert [[members[0].token_ids[0] for members in piece] for piece in found] == [[0, 1], [2], [3]]
    assert pieces(samples, None) == [families(samples)]
    assert pieces([], 5) == [] and pieces([], None) == []
