"""The optimizer steps of a batch: whole groups, the same whatever the micro-batches and ranks."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

from rollyard.train.minibatches import cut
from rollyard.train.ranks import Ranks
from rollyard.train.rows import families, tree_of
from rollyard.types import Sample

ALONE = Ranks(torch.device("cpu"))


class Others(Ranks):
    """One of several ranks, all of whose groups are known."""

    def __init__(self, groups: list[list[int]]) -> None:
        super().__init__(torch.device("cpu"), 0, len(groups))
        self._asked = 0
        self._sorted = [torch.tensor(sorted(set(own)), dtype=torch.int64) for own in groups]

    def gather(self, values: torch.Tensor) -> torch.Tensor:
        """First how many groups each has, then which."""
        self._asked += 1
        longest = max(map(len, self._sorted))
        rows = [torch.cat((own, own.new_zeros(longest - len(own)))) for own in self._sorted]
        counts = [torch.tensor([len(own)]) for own in self._sorted]
        found = torch.stack(counts if self._asked == 1 else rows)
        assert torch.equal(found[0], values)
        return found


def sample(group: int, member: int, sampled: int) -> Sample:
    ids = (3 + group % 3, 4, *range(5, 5 + sampled))
    zeros = (0.0,) * len(ids)
    return Sample(group, member, ids, (False, False) + (True,) * sampled, zeros, zeros, ())


BATCHES = st.lists(
    st.lists(st.tuples(st.integers(0, 9), st.integers(0, 9), st.integers(0, 6)), min_size=1, max_size=6), max_size=6
)


@given(BATCHES, st.integers(2, 5))
def test_every_row_is_in_one_step_with_all_of_its_group(drawn: list[list[tuple[int, int, int]]], count: int) -> None:
    micro = [tuple(sample(*row) for row in part) for part in drawn]
    steps = cut(micro, count, ALONE)
    rows = [row for parts in steps for part in parts for row in part]
    assert sorted(map(repr, rows)) == sorted(repr(row) for part in micro for row in part)
    groups = [{row.group for part in parts for row in part} for parts in steps]
    every = set().union(*groups)
    assert len(steps) == min(count, len(every)) and sum(map(len, groups)) == len(every)
    assert all(groups) and max(map(len, groups), default=0) - min(map(len, groups), default=0) <= 1
    assert [min(own) for own in groups] == sorted(min(own) for own in groups)  # by their ids
    largest = max((tokens(part) for part in micro), default=0)
    assert all(tokens(part) <= largest for parts in steps for part in parts)


def tokens(part: tuple[Sample, ...]) -> int:
    return sum(tree_of(members).tokens for members in families(part))


@given(BATCHES.filter(bool), st.lists(st.integers(0, 9), max_size=5), st.integers(2, 5))
def test_ranks_agree_where_a_group_belongs(drawn: list[list[tuple[int, int, int]]], others: list[int], count: int) -> None:
    """Whatever this rank has of it; where it has nothing of a step, that step is there and empty."""
    micro = [tuple(sample(*row) for row in part) for part in drawn]
    own = [row.group for part in micro for row in part]
    alone = cut([*micro, tuple(sample(group, 0, 1) for group in others)], count, ALONE)
    where = {row.group: number for number, parts in enumerate(alone) for part in parts for row in part}
    found = cut(micro, count, Others([own, others]))
    assert len(found) == len(alone)
    assert all(where[row.group] == number for number, parts in enumerate(found) for part in parts for row in part)
    assert sum(len(part) for parts in found for part in parts) == len(own)


def test_one_step_is_the_batch_as_it_is() -> None:
    micro = [(sample(0, 0, 2),), (sample(1, 0, 3),)]
    assert cut(micro, 1, ALONE) == [micro] and cut([], 3, ALONE) == []
