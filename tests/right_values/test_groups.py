"""Relatives of uneven groups, missing verdicts and masks: what a trainer gets, whatever happened to the groups before."""

from __future__ import annotations

import asyncio
import math
import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rollyard.reward.combine import Combined, Part
from rollyard.reward.direct import Direct
from rollyard.types import FinishReason, Group, Prompt, Rollout
from rollyard.watch.step import Step
from rollyard.watch.timeline import PhaseSeconds
from tests.right_values import learning
from tests.right_values.chain import chain_folder
from tests.right_values.hand import Hand
from tests.right_values.learning import TINY, advantages, completion, judged, rewarded, trained

KINDS = ["grpo", "dr_grpo", "rloo"]
BATCH_KINDS = ["reinforce++", "reinforce++_baseline"]
REWARDS = st.one_of(st.none(), st.sampled_from([0.0, 0.1, 0.5, 1.0, math.nan, math.inf, -math.inf]))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """0, 5 and 6 are as likely after anything that is asked here."""
    same = {0: 0.0, 5: 0.0, 6: 0.0}
    return chain_folder(tmp_path_factory.mktemp("chain"), dict.fromkeys((0, 1, 3, 4, 5, 6), same), ends=(0,), pad_token_id=0)


LOGPROB = -math.log(3)


def wrote(tokens: tuple[int, ...], member: int = 0, group: int = 0, finish: FinishReason = FinishReason.STOP):
    """A completion that the folder's policy writes, with its logprobs."""
    return completion(tokens, finish, group, member, [LOGPROB] * len(tokens))


# ------------------------------------------------------------------------------------------------- groups


async def test_a_reward_that_is_no_number_is_no_verdict_whichever_it_is() -> None:
    for bad in (None, math.nan, math.inf, -math.inf):
        assert await advantages([rewarded(1.0, bad, 0.0)], kind="dr_grpo") == [[0.5, None, -0.5]]
        assert await advantages([rewarded(bad, bad)], kind="grpo") == [[None, None]]


async def test_two_groups_of_one_prompt_are_two_groups() -> None:
    """The same text and ids, drawn twice: each is compared with its own, and shares nothing but the computation."""
    first, second = rewarded(0.0, 1.0, id_=3), rewarded(1.0, 1.0, 4.0, id_=8)
    assert first.prompt.token_ids == second.prompt.token_ids
    found = await advantages([first, second], kind="dr_grpo")
    assert found == [[-0.5, 0.5], [-1.0, -1.0, 2.0]]


async def test_members_that_wrote_the_same_are_members_all_the_same(folder: Path) -> None:
    twins = judged((wrote((5, 0), 0), 1.0), (wrote((5, 0), 1), 1.0), (wrote((6, 0), 2), 0.0))
    found = await learning.rows([twins], advantage={"kind": "dr_grpo"})
    assert len(found) == 3 and found[0, 0].token_ids == found[0, 1].token_ids
    assert [found[0, k].advantages[-1] for k in range(3)] == pytest.approx([1 / 3, 1 / 3, -2 / 3])
    step = await trained(folder, [twins])
    assert step.tokens == 6 and step.ratio_mean == pytest.approx(1.0, abs=1e-5)


@pytest.mark.parametrize("kind", KINDS)
async def test_k_is_that_of_the_members_that_are_left(kind: str) -> None:
    """4 members, one lost: the numbers are those of a group of 3."""
    hand = Hand(group_size=4, min_scored=2)
    hand.offer(0)
    for member, value in ((0, 1.0), (2, 2.0), (3, 6.0)):
        hand.write(0, member)
        hand.judge(0, member, value)
    hand.fail(0, 1)
    taken = hand.take()
    assert taken is not None and [each.completion.member for each in taken.groups[0].rollouts] == [0, 2, 3]
    by_hand = {"grpo": [-2 / 7**0.5, -1 / 7**0.5, 3 / 7**0.5], "dr_grpo": [-2.0, -1.0, 3.0], "rloo": [-3.0, -1.5, 4.5]}
    assert (await advantages(taken.groups, kind=kind, eps=TINY))[0] == pytest.approx(by_hand[kind])


async def test_fewer_members_than_a_group_needs_are_dropped_and_never_trained() -> None:
    hand = Hand(group_size=3, min_scored=2)
    hand.offer(0)
    hand.write(0, 0)
    hand.judge(0, 0, 1.0)
    hand.write(0, 1)
    hand.judge(0, 1, math.nan)
    hand.fail(0, 2)
    assert hand.take() is None
    assert hand.dropped() == [(0, 1, "no_verdict"), (0, 2, "failed"), (0, 0, "failed"), (0, None, "failed")]


@settings(deadline=None, max_examples=60)
@given(
    batch=st.lists(st.lists(REWARDS, min_size=1, max_size=5), min_size=1, max_size=5),
    kind=st.sampled_from([*KINDS, *BATCH_KINDS]),
    ranks=st.integers(1, 4),
    budget=st.sampled_from([8, 11, 8192]),
    random_=st.randoms(use_true_random=False),
)
def test_neither_order_nor_ranks_nor_micro_batches_move_an_advantage(batch, kind, ranks, budget, random_: random.Random) -> None:
    """By group and member, whatever came first; members without a verdict are in no row."""
    groups = [rewarded(*rewards, id_=10 * id_) for id_, rewards in enumerate(batch)]
    lengths = {(g.id, k): 1 + (g.id + k) % 4 for g in groups for k in range(len(g.rollouts))}
    groups = [replace(g, rollouts=tuple(_longer(each, lengths) for each in g.rollouts)) for g in groups]
    shuffled = [replace(group, rollouts=tuple(random_.sample(group.rollouts, len(group.rollouts)))) for group in groups]
    random_.shuffle(shuffled)
    sections = {"advantage": {"kind": kind}, "batch": {"token_budget": budget}}
    alone = asyncio.run(learning.rows(groups, **sections))
    several = asyncio.run(learning.rows(shuffled, ranks, **sections))
    known = {(g.id, k) for g in groups for k, value in enumerate(g.rewards) if value is not None and math.isfinite(value)}
    assert alone.keys() == several.keys() == known
    for key, sample in alone.items():
        assert sum(sample.mask) == lengths[key]
        assert replace(several[key], advantages=()) == replace(sample, advantages=())
        assert several[key].advantages == pytest.approx(sample.advantages, abs=1e-9)
    for group in groups if kind in KINDS else ():
        sums = [alone[group.id, k].advantages[-1] for k in range(len(group.rollouts)) if (group.id, k) in known]
        assert math.fsum(sums) == pytest.approx(0.0, abs=1e-6) and all(map(math.isfinite, sums))


def _longer(rollout, lengths):
    done = rollout.completion
    tokens = (5,) * lengths[done.group, done.member]
    return replace(rollout, completion=completion(tokens, group=done.group, member=done.member))


@pytest.mark.parametrize("missing", ["raises", "nan", "none"])
async def test_a_verdict_that_lacks_a_part_is_none_and_the_other_parts_are_told(missing: str) -> None:
    """right + 0.5 short, and a third that only is reported: without `short` there is no sum, and it is not taken for 0."""

    def short(prompt: str, completion: str) -> float | None:
        if completion != "ab":
            return -1.0 * len(completion)
        if missing == "raises":
            raise ValueError("no length")
        return math.nan if missing == "nan" else None

    judges: dict[str, tuple[Any, float]] = {
        "right": (lambda prompt, completion: float(completion[0] == "a"), 1.0),
        "short": (short, 0.5),
        "told": (lambda prompt, completion: 7.0 if completion == "abc" else math.inf, 0.0),
    }
    scorer = Combined([Part(name, Direct(name, f, {}, 8), weight) for name, (f, weight) in judges.items()])
    done = [replace(completion(member=k), text=text) for k, text in enumerate(("abc", "ab", "b"))]
    rewards = [await scorer.score(Prompt(0, 0, (3,), "p"), each) for each in done]
    await scorer.close()
    assert [reward.value for reward in rewards] == [-0.5, None, -0.5]
    group = Group(Prompt(0, 0, (3,), "p"), tuple(Rollout(each, reward) for each, reward in zip(done, rewards, strict=True)))
    assert await advantages([group], kind="dr_grpo") == [[0.0, None, 0.0]]
    metrics = Step(1, learning.V0, (group,), learning.stats(), PhaseSeconds(), 6, {}).to_metrics()
    assert (metrics["reward_mean"], metrics["unscored"], metrics["flat_share"]) == (-0.5, 1, 1.0)
    assert metrics["reward/right/mean"] == pytest.approx(2 / 3)  # it did judge the second
    assert (metrics["reward/short/mean"], metrics["reward/told/mean"], metrics["reward/told/std"]) == (-2.0, 7.0, 0.0)


# -------------------------------------------------------------------------------------------- completions


async def test_an_end_at_once_is_one_token_to_learn(folder: Path) -> None:
    """[end] is a completion of one token and an empty text; one of no token at all has a reward and nothing to learn."""
    group = judged((wrote((0,), 0), 1.0), (wrote((), 1), 0.0), (wrote((5, 6, 0), 2), 0.5))
    found = await learning.rows([group], advantage={"kind": "dr_grpo"})
    assert [sum(found[0, k].mask) for k in range(3)] == [1, 0, 3]
    assert found[0, 0].advantages[-1] == 0.5 and found[0, 2].advantages[-1] == 0.0  # the mean is that of all three
    step = await trained(folder, [group], train={"aggregation": "sequence"})
    assert step.tokens == 4 and step.ratio_mean == pytest.approx(1.0, abs=1e-5)


async def test_a_batch_of_nothing_but_empty_completions_is_a_step(folder: Path) -> None:
    step = await trained(folder, [judged((wrote((), 0), 1.0), (wrote((), 1), 0.0))])
    assert (step.step, step.tokens, step.loss) == (1, 0, 0.0)


async def test_an_end_within_a_completion_and_in_the_prompt(folder: Path) -> None:
    """Pad, end and an ordinary token are all 0: with `ignore_eos` it is written in the middle, a chat template puts it into
    the prompt. The mask is still where the policy wrote."""
    group = judged(
        (wrote((0, 0, 5, 0), 0, finish=FinishReason.LENGTH), 1.0), (wrote((0,), 1), 0.0), prompt=(3, 0, 4, 0)
    )  # fmt: skip
    found = await learning.rows([group])
    assert found[0, 0].mask == (False,) * 4 + (True,) * 4 and found[0, 1].mask == (False,) * 4 + (True,)
    step = await trained(folder, [group])
    assert step.tokens == 5 and step.ratio_mean == pytest.approx(1.0, abs=1e-5) and step.logprob_gap_max < 1e-5


async def test_all_truncated_is_trained_on_like_any_other(folder: Path) -> None:
    cut = FinishReason.LENGTH
    step = await trained(folder, [judged((wrote((5, 6), 0, finish=cut), 1.0), (wrote((6, 5), 1, finish=cut), 0.0))])
    assert step.tokens == 4 and step.grad_norm > 0


async def test_what_was_cut_counts_in_the_mean_and_is_not_trained_on_where_it_is_masked(folder: Path) -> None:
    cut, masked = FinishReason.CONTEXT, {"advantage": {"overlong": "mask", "kind": "dr_grpo"}}
    group = judged((wrote((5, 0), 0), 1.0), (wrote((6, 6, 5), 1, finish=cut), 0.0), (wrote((6, 0), 2), 0.5))
    found = await learning.rows([group], **masked)
    assert {key: sample.advantages[-1] for key, sample in found.items()} == {(0, 0): 0.5, (0, 2): 0.0}
    assert (await trained(folder, [group], **masked)).tokens == 4
    every = judged((wrote((5, 6), 0, finish=cut), 1.0), (wrote((6,), 1, finish=cut), 0.0))
    step = await trained(folder, [every], **masked)
    assert (step.step, step.tokens, step.loss) == (1, 0, 0.0)


@pytest.mark.parametrize("aggregation", ["token", "sequence", "fixed"])
async def test_whoever_has_no_verdict_is_in_no_denominator(folder: Path, aggregation: str) -> None:
    """The loss is the same with and without them in their groups."""
    members = [(wrote((5, 0), 0), 1.0), (wrote((6, 6, 0), 1), 0.0)]
    bare = judged(*members)
    with_them = judged(*members, (wrote((6, 5, 5, 5, 0), 2), None), (wrote((6, 5, 0), 3), math.nan))
    sections = {"train": {"aggregation": aggregation}, "rollout": {"max_tokens": 5}}
    first, second = [await trained(folder, [group], **sections) for group in (bare, with_them)]
    assert second == first and first.tokens == 5


async def test_a_rank_may_have_nothing(folder: Path) -> None:
    seen = learning.Seen()
    await learning.TrainerLearner(learning.Config(), seen, 4).learn(0, [rewarded(1.0, 0.0)])  # type: ignore[arg-type]
    sizes = sorted(len(shard.samples) for shard in seen.shards)
    assert len(sizes) == 4 and sum(sizes) == 2 and sizes[0] == 0


def test_groups_are_found_by_their_id_and_not_by_their_place() -> None:
    """Batches take what is done first: the groups' order is not that of their ids' neighbours."""
    hand = Hand(group_size=1, groups_per_batch=2, max_staleness=1)
    hand.offer(0, 1, 2, 3)
    for group, value in ((3, 30.0), (1, 10.0)):
        hand.write(group, 0, (5 + group, 1))
        hand.judge(group, 0, value)
    taken = hand.take()
    assert taken is not None
    by_id: dict[int, Group] = {group.id: group for group in taken.groups}
    assert {id_: (group.rewards, group.rollouts[0].completion.token_ids) for id_, group in by_id.items()} == {
        1: ((10.0,), (6, 1)),
        3: ((30.0,), (8, 1)),
    }


async def test_the_learning_rate_of_a_resumed_run_goes_on(folder: Path) -> None:
    """Warm-up over 10 steps: the fourth step has 4 tenths, whoever took the first three."""
    group = judged((wrote((5, 0)), 1.0))
    step = await trained(folder, [group], version=3, train={"lr": 1e-3, "warmup_steps": 10})
    assert step.learning_rate == pytest.approx(4e-4) and step.step == 4
