from __future__ import annotations

import statistics

import pytest

from rollyard.bench.workload import CAP, SHAPES, Shape, build, greedy, lengths


def test_members_of_a_group_share_a_prompt_and_groups_do_not():
    work = build(SHAPES["8x8"], 49152, 1)
    assert len(work.prompts) == 64 and work.size == 8
    for start in range(0, 64, 8):
        assert len(set(work.prompts[start : start + 8])) == 1
    assert len(set(work.prompts)) == 8
    assert work.lengths == (128,) * 64 and work.tokens == 8192


@pytest.mark.parametrize("name", SHAPES)
def test_rounds_differ_in_their_tokens_and_in_nothing_else(name):
    shape = SHAPES[name]
    first, again, second = build(shape, 1000, 1), build(shape, 1000, 1), build(shape, 1000, 2)
    assert first == again and first.lengths == second.lengths
    assert set(first.prompts).isdisjoint(second.prompts)
    assert [len(prompt) for prompt in first.prompts] == [len(prompt) for prompt in second.prompts]
    for prompt, length in zip(first.prompts, first.lengths, strict=True):
        assert shape.prompt[0] <= len(prompt) <= shape.prompt[1]
        assert min(prompt) >= 64 and max(prompt) < 1000
        assert len(prompt) + length <= shape.window


def test_ragged_lengths_are_lognormal_with_a_cap():
    drawn = lengths(Shape(4000, 1, (8, 48), 0))
    assert min(drawn) >= 1 and max(drawn) == CAP == 384
    assert 37 <= statistics.median(drawn) <= 43
    inside = sum(14 <= length <= 109 for length in drawn) / len(drawn)  # e^-1 to e^1 times the median: one sigma
    assert 0.66 <= inside <= 0.71


def test_a_tiny_vocabulary_is_enough():
    work = greedy(vocabulary=12)
    assert work.temperature == 0 and {token for prompt in work.prompts for token in prompt} <= set(range(6, 12))


def test_warming_up_is_the_same_work_but_short():
    work = build(SHAPES["ragged"], 1000, 0)
    short = work.shortened(4)
    assert short.prompts == work.prompts and max(short.lengths) == 4 and len(short.lengths) == 64
    assert all(length <= full for length, full in zip(short.lengths, work.lengths, strict=True))
