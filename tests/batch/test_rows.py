"""Rows of an episode: every sampled token once, after the very tokens that it was sampled after."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from rollyard.batch.sample import build, rows
from rollyard.types import (
    Completion,
    FinishReason,
    Group,
    Prompt,
    Reward,
    Rollout,
    Sample,
    Sampling,
    Turn,
    VersionSpan,
    WeightVersion,
)

V0, V1 = WeightVersion(0), WeightVersion(1)
STOP = FinishReason.STOP


def episode(*turns: tuple[tuple[int, ...], tuple[int, ...]], spans: tuple[VersionSpan, ...] = ()) -> tuple[Group, Rollout]:
    """One member that answered each prompt with these tokens."""
    ids = tuple(token for _, answer in turns for token in answer)
    logprobs = tuple(-0.5 - place for place in range(len(ids)))
    taken = tuple(Turn(prompt, len(answer), STOP if answer else FinishReason.CONTEXT) for prompt, answer in turns)
    done = Completion(7, 2, ids, logprobs, spans or (VersionSpan(V0, V0, len(ids)),), STOP, "", taken)
    rollout = Rollout(done, Reward(1.0))
    return Group(Prompt(7, 7, turns[0][0] if turns else (3, 4), "p"), (rollout,)), rollout


def test_what_a_tool_says_is_not_learnt():
    """Turn 2 was written half at version 0, half at version 1; the tool's answer 8 9 has mask 0."""
    spans = (VersionSpan(V0, V0, 3), VersionSpan(V1, V0, 1))
    (row,) = rows(*episode(((3, 4), (5, 6)), ((3, 4, 5, 6, 8, 9), (7, 0)), spans=spans), 2.0)
    assert row == Sample(
        group=7,
        member=2,
        token_ids=(3, 4, 5, 6, 8, 9, 7, 0),
        mask=(False, False, True, True, False, False, True, True),
        logprobs=(0.0, 0.0, -0.5, -1.5, 0.0, 0.0, -2.5, -3.5),
        advantages=(0.0, 0.0, 2.0, 2.0, 0.0, 0.0, 2.0, 2.0),
        spans=spans,
    )


def test_a_template_that_leaves_out_earlier_reasoning_makes_another_row():
    """Reasoning 5 6 is gone from the prompt of turn 2, which turn 3 goes on from."""
    spans = (VersionSpan(V0, V0, 1), VersionSpan(V1, V1, 4))
    group, rollout = episode(((3, 4), (5, 6, 7)), ((3, 4, 7, 8), (9,)), ((3, 4, 7, 8, 9, 1), (2,)), spans=spans)
    first, second = rows(group, rollout, -1.0)
    assert first.token_ids == (3, 4, 5, 6, 7) and first.mask == (False, False, True, True, True)
    assert second.token_ids == (3, 4, 7, 8, 9, 1, 2) and second.mask == (False, False, False, False, True, False, True)
    assert first.logprobs == (0.0, 0.0, -0.5, -1.5, -2.5) and second.logprobs == (0.0, 0.0, 0.0, 0.0, -3.5, 0.0, -4.5)
    assert second.advantages == (0.0, 0.0, 0.0, 0.0, -1.0, 0.0, -1.0)
    assert first.spans == (VersionSpan(V0, V0, 1), VersionSpan(V1, V1, 2)) and second.spans == (VersionSpan(V1, V1, 2),)
    assert [(row.part, row.others) for row in (first, second)] == [(0, 2), (1, 3)]


def test_turns_without_tokens_teach_nothing():
    (row,) = rows(*episode(((3, 4), (5,)), ((3, 4, 5, 9, 9, 9), ())), 1.0)
    assert row.token_ids == (3, 4, 5) and row.others == 0
    (row,) = rows(*episode(((9,) * 8, ()), ((3, 4), (5,))), 1.0)
    assert row.token_ids == (3, 4, 5) and row.mask == (False, False, True)
    (empty,) = rows(*episode(((3, 4), ())), 1.0)
    assert empty.token_ids == (3, 4) and not any(empty.mask)
    (none,) = rows(*episode(), 1.0)
    assert none.token_ids == (3, 4) and not any(none.mask)


def test_a_prompt_that_is_shorter_than_what_was_there_is_another_one():
    first, second = rows(*episode(((3, 4), (5, 6)), ((3, 4, 5), (1,))), 1.0)
    assert first.token_ids == (3, 4, 5, 6) and second.token_ids == (3, 4, 5, 1)


def test_both_rows_have_the_verdict_of_their_rollout():
    group, rollout = episode(((3, 4), (5, 6, 7)), ((3, 8), (9,)))
    other = Rollout(replace(rollout.completion, member=3, turns=(), token_ids=(1,), logprobs=(-1.0,)), Reward(0.0))
    batch = build(0, [Group(group.prompt, (rollout, other))], [(1.0, -1.0)], 100, Sampling(8))
    assert sorted((row.member, row.part, max(row.advantages, key=abs)) for row in batch.samples) == [
        (2, 0, 1.0),
        (2, 1, 1.0),
        (3, 0, -1.0),
    ]


small = st.lists(st.integers(0, 2), max_size=4).map(tuple)


@given(
    st.lists(st.tuples(st.sampled_from(("on", "anew", "cut")), small.filter(len), small), max_size=5),
    st.lists(st.integers(1, 3), max_size=8),
)
def test_the_trained_tokens_are_the_completions(said, cuts):
    """In order, with their logprobs and versions, each after what it was sampled after."""
    before: tuple[int, ...] = ()
    turns, after = [], []
    for how, new, answer in said:
        prompt = before + new if how == "on" else new if how == "anew" else before[:-1] or new
        turns.append((prompt, answer))
        after += [prompt + answer[:place] for place in range(len(answer))]
        before = prompt + answer
    ids = tuple(token for _, answer in turns for token in answer)
    spans, left = [], len(ids)
    for version, cut in enumerate([*cuts, 100]):
        if taken := min(cut, left):
            spans.append(VersionSpan(WeightVersion(version), V0, taken))
        left -= taken
    group, rollout = episode(*turns, spans=tuple(spans))
    found = rows(group, rollout, 3.0)
    trained = [(row, place) for row in found for place, mask in enumerate(row.mask) if mask]
    assert [row.token_ids[place] for row, place in trained] == list(ids)
    assert [row.logprobs[place] for row, place in trained] == list(rollout.completion.logprobs)
    assert [row.token_ids[:place] for row, place in trained] == after
    spread = [span.version for row in found for span in row.spans for _ in range(span.tokens)]
    assert spread == [span.version for span in spans for _ in range(span.tokens)]
    for part, row in enumerate(found):
        assert row.part == part and row.others + sum(row.mask) == len(ids)
        assert sum(span.tokens for span in row.spans) == sum(row.mask)
        assert not row.mask[0] and (row.mask[-1] or not ids)
