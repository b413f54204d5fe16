"""Relatives of K completions a prompt and batches that do not divide evenly: epochs, seeds, evaluation."""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollyard.engine.fake import Script
from rollyard.evaluate import Evaluator
from rollyard.prompts.source import Epochs, Row, Source
from rollyard.rollout.seeds import completion_seed
from rollyard.types import Completion, FinishReason, Prompt, Request, RequestId, Reward, Sampling, WeightVersion
from tests.right_values.fleet import Fleet
from tests.right_values.hand import Hand
from tests.right_values.learning import completion


async def test_epochs_repeat_rows_and_never_ids() -> None:
    """5 rows, twice, in batches of 4: 4, 4, 2. Row and id part ways after the first epoch."""
    rows = [(number, Row("p", {})) for number in range(5)]
    source = Source(Epochs(rows, shuffle=True, seed=0), lambda number, row: ((2, 3), row.prompt), limit=10)  # type: ignore[arg-type,return-value]
    fleet = Fleet(source.take(10)[0], groups_per_batch=4)
    await fleet.run()
    assert [len(batch) for batch in fleet.batches] == [4, 4, 2]
    taken = [group.prompt for batch in fleet.batches for group in batch]
    assert sorted(prompt.id for prompt in taken) == list(range(10))
    assert Counter(prompt.row for prompt in taken) == dict.fromkeys(range(5), 2)


async def test_no_two_completions_of_a_run_share_their_noise() -> None:
    """Prompts that are equal in all but their id, and the same row in another epoch, are drawn anew."""
    fleet = Fleet([Prompt(id_, 0, (2, 3), "the same") for id_ in range(8)], groups_per_batch=4, group_size=3)
    await fleet.run()
    seeds = [request.seed for request in fleet.requests]
    assert len(set(seeds)) == len(seeds) == 24


@given(st.integers(0, 2**63 - 1))
def test_seeds_are_of_one_prompt_and_member_each(seed: int) -> None:
    """1/23 is not 12/3, evaluation's negative groups are no rollouts', another run draws other noise."""
    names = [(group, member) for group in (*range(-30, 30), 123, 312) for member in (*range(12), 34, 345)]
    found = {completion_seed(seed, group, member) for group, member in names}
    assert len(found) == len(names) and all(0 <= each < 2**64 for each in found)
    assert completion_seed(seed, 1, 1) != completion_seed(seed ^ 1, 1, 1)


async def test_a_member_that_fails_is_tried_again_and_counts_once() -> None:
    """Every third request breaks once: still 3 a prompt, with the noise that each had."""
    broken: set[int] = set()

    def script(request: Request) -> Script:
        first = request.seed not in broken and request.id.member == 1
        broken.add(request.seed)
        return Script((5, 6, 0), error_after=1 if first else None)

    fleet = Fleet(4, engines=2, script=script, groups_per_batch=2)
    await fleet.run()
    done = [each.completion for batch in fleet.batches for group in batch for each in group.rollouts]
    assert Counter((one.group, one.member) for one in done) == {(p, k): 1 for p in range(4) for k in range(3)}
    assert all(one.token_ids == (5, 6, 0) for one in done) and fleet.core.counts.retries == 4
    again = [request for request in fleet.requests if request.written_ids]
    assert [request.written_ids for request in again] == [(5,)] * 4


async def test_a_batch_is_not_filled_up_with_what_was_dropped() -> None:
    """6 prompts, one of which always fails: 5 are trained, once each, and the books are even."""
    fleet = Fleet(
        6, script=lambda request: Script((5, 0), error_after=0 if request.id.group == 2 else None), groups_per_batch=4, retries=1
    )
    await fleet.run()
    assert [len(batch) for batch in fleet.batches] == [4, 1]
    assert sorted(group.id for batch in fleet.batches for group in batch) == [0, 1, 3, 4, 5]
    assert fleet.core.counts.dropped == {"failed": 1} and fleet.core.counts.members_dropped == {"failed": 3}


def test_one_token_at_most() -> None:
    hand = Hand(sampling=Sampling(1), group_size=2)
    hand.offer(0)
    hand.write(0, 0, (5,), FinishReason.LENGTH)
    hand.write(0, 1, (1,), FinishReason.STOP)
    assert [(done.token_ids, done.finish) for done in hand.completions()] == [
        ((5,), FinishReason.LENGTH),
        ((1,), FinishReason.STOP),
    ]


def test_more_tokens_than_were_asked_are_refused_whole() -> None:
    hand = Hand(sampling=Sampling(2), group_size=1, retries=1)
    hand.offer(0)
    hand.write(0, 0, (5, 6, 7), FinishReason.STOP)
    assert not hand.completions() and hand.requests[0, 0].written_ids == ()


class Answers:
    """Stands in for the controller: each completion is one token."""

    async def complete(self, requests: Sequence[Request], engines: Sequence[str], version: WeightVersion) -> list[Completion]:
        self.requests = list(requests)
        return [completion((5,), group=request.id.group, member=request.id.member) for request in requests]


class Verdicts:
    def __init__(self, *values: float | None) -> None:
        self._values = itertools.cycle(values)

    async def score(self, prompt: Prompt, done: Completion) -> Reward:
        return Reward(next(self._values))

    async def close(self) -> None:
        """Nothing is held."""


@pytest.mark.parametrize(
    ("values", "mean", "unscored"),
    [((1.0, None, 0.0, math.nan), 0.5, 4), ((None,), None, 8), ((math.inf, 1.0), 1.0, 4), ((0.25,), 0.25, 0)],
)
async def test_an_evaluation_counts_who_has_a_verdict(
    values: tuple[float | None, ...], mean: float | None, unscored: int
) -> None:
    """4 prompts, 2 completions each."""
    prompts = tuple(Prompt(i, i, (2, 3), "p") for i in range(4))
    found = await Evaluator(prompts, Sampling(4), 100, 2, 0).run(Answers(), Verdicts(*values), WeightVersion(0))  # type: ignore[arg-type]
    assert (found.mean_reward, found.samples, found.unscored) == (mean, 8, unscored)


async def test_an_evaluation_asks_for_what_the_window_leaves_and_counts_who_could_not_be_asked() -> None:
    """Window 32, up to 8 tokens: prompts of 30, 32 and 31."""
    prompts = tuple(Prompt(i, i, (2,) * n, "p") for i, n in enumerate((30, 32, 31)))
    answers = Answers()
    found = await Evaluator(prompts, Sampling(8), 32, 1, 0).run(answers, Verdicts(1.0), WeightVersion(0))  # type: ignore[arg-type]
    assert [(request.id, request.sampling.max_tokens) for request in answers.requests] == [
        (RequestId(-1, 0), 2),
        (RequestId(-3, 0), 1),
    ]
    assert (found.mean_reward, found.samples, found.unscored) == (1.0, 3, 1)
