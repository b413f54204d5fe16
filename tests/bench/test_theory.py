"""What placements should take, by hand."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollyard.bench.theory import Work, colocated, makespan, schedule, separate, stale_s, swap, swap_in_turn

SMALL = Work(1.0, steps=3, groups=2, size=2, generate=1, slots=2, sigma=0.0, median=10, token_s=0.1, copy_s=0.5, load_s=0.25)


def test_each_takes_the_slot_that_is_free_first():
    assert schedule((4, 1, 1, 5), 2) == [4, 1, 2, 7]
    assert makespan((4, 1, 1, 5), 2) == 7 and makespan((4, 1, 1, 5), 9) == 5


@given(st.lists(st.integers(1, 50), min_size=1, max_size=60), st.integers(1, 9))
def test_no_schedule_is_shorter_than_its_work_or_its_longest(lengths: list[int], slots: int):
    found = makespan(lengths, slots)
    assert max(sum(lengths) / slots, max(lengths)) <= found <= sum(lengths) / slots + max(lengths)


def test_lengths_belong_to_prompt_and_member_and_are_cut():
    work = Work(1.0, steps=40)
    assert work.length(3, 1) == replace(work, steps=2, ratio=3.0).length(3, 1)
    flat = sorted(length for step in work.lengths for length in step)
    assert flat[0] >= 1 and flat[-1] == work.cap and flat[len(flat) // 2] == pytest.approx(work.median, abs=1)
    assert work.cut == pytest.approx(0.085, abs=0.015)  # a lognormal of sigma 1 is rounded to 4 medians or more so often


def test_work_is_shared_out_as_the_ratio_says():
    """4 completions of 10 tokens at 0.1 s on 2 slots: 2 s a step; the training device takes as long."""
    assert (SMALL.generation_s, SMALL.training_s, SMALL.bound_s) == (2.0, 2.0, 2.0)
    thrice = replace(SMALL, ratio=3.0)
    assert thrice.training_s == pytest.approx(2 / 3) and thrice.bound_s == 2.0
    assert thrice.on(2) == pytest.approx(1 / 3)


def test_each_placement_by_hand():
    sync, load, training, handoff = 0.75 + SMALL.transfer_s, 0.25, 2.0, SMALL.handoff_s
    assert separate(SMALL) == pytest.approx(3 * (2.0 + training + sync))
    assert colocated(SMALL) == pytest.approx(3 * (1.0 + training / 2 + load))  # 4 slots; both devices train
    # Halves have 2 slots and a device each. 0 is written at 2.25 and trained at 4.25, as 1 is written. 2 is begun then, and
    # written at 6.5, when 1, handed over, is just trained.
    assert swap(SMALL) == pytest.approx(4.25 + 2 * (training + handoff) + max(0, 4.25 + load + 2.0 - (4.25 + training + handoff)))
    assert swap_in_turn(SMALL) == pytest.approx(2.0 + 2 * (2.0 + handoff) + 2.0)
    assert replace(SMALL, steps=1).half_slots == 2 and swap(replace(SMALL, steps=1)) == pytest.approx(4.25)


def test_a_staleness_limit_leaves_so_much_time_for_the_longest():
    """S = 2: three steps hold a training step, a sync and a completion of 1 s."""
    assert stale_s(SMALL) == pytest.approx((1.0 + 2.0 + SMALL.sync_s) / 3)
