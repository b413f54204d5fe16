"""The core against a hostile world, and by hand. Values that must be right: tests/right_values."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from rollyard import events as ev
from rollyard.rollout.core import RolloutCore
from rollyard.rollout.policy import RolloutPolicy
from rollyard.types import FinishReason, Prompt, RequestId, Reward, Sampling, Segment, WeightVersion
from tests.right_values.hand import Hand
from tests.rollout.world import Odds, World


def policy(**changes) -> RolloutPolicy:
    values = dict(
        group_size=3, groups_per_batch=4, batches=6, sampling=Sampling(5), window=100, min_scored=2, give_up_after=10**6
    )
    return RolloutPolicy(**(values | changes))


@settings(max_examples=300, deadline=None)
@given(
    staleness=st.integers(0, 2),
    batch=st.integers(1, 5),
    size=st.integers(1, 4),
    engines=st.integers(1, 4),
    slots=st.integers(1, 6),
    prompts=st.integers(0, 40),
    cap=st.sampled_from([0, 0, 7]),
    overtaking=st.sampled_from(["allow", "never"]),
    on_stale=st.sampled_from(["wait", "drop"]),
    spare=st.sampled_from([0, 0, 1, 3]),
    order=st.sampled_from(["admission", "longest"]),
    moves=st.integers(0, 2),
    rollover=st.sampled_from(list(ev.Rollover)),
    window=st.sampled_from([100, 6, 3]),
    odds=st.sampled_from(
        [
            Odds(),
            Odds(error=0.1),
            Odds(0.05, 0.02, 0.1, 0.05),
            Odds(coarse=True),
            Odds(0.1, 0, 0.2, coarse=True),
            Odds(0.05, 0, 0.1, trickle=True),
        ]
    ),
    refills=st.sampled_from([0, 0, 1, 3, 99]),
    mask=st.booleans(),
    seed=st.integers(0, 2**32),
)
def test_nothing_lost_nothing_stale_nothing_idle(
    staleness,
    batch,
    size,
    engines,
    slots,
    prompts,
    cap,
    overtaking,
    on_stale,
    spare,
    order,
    moves,
    rollover,
    window,
    odds,
    refills,
    mask,
    seed,
):
    rules = policy(
        group_size=size,
        groups_per_batch=batch,
        max_staleness=staleness,
        max_live_groups=max(cap, batch) if cap else 0,
        oversample=spare if staleness else 0,
        order=order,
        moves=moves,
        overtaking=overtaking,
        on_stale=on_stale,
        window=window,
        min_scored=min(2, size),
        filter="flat" if refills else "none",
        refills=refills,
        mask_truncated=mask,
    )
    world = World(rules, prompts, engines, slots, seed, odds, rollover)
    world.end_all()


def test_each_token_has_its_place():
    """One of three members is trained; what the others wrote, and what nobody wanted, is dropped for its reason."""
    core = opened(policy(group_size=3, groups_per_batch=1, batches=2, max_staleness=1, retries=1, min_scored=1))
    core.step(ev.EngineUp("e", 8, WeightVersion(0)), 0.0)
    core.step(ev.PromptsOffered(prompts(0, 1), exhausted=True), 0.0)
    core.step(ev.BatchWanted(), 0.0)
    v0, books = WeightVersion(0), core.counts.tokens

    def write(member: int, tokens: int, finish: FinishReason | None, attempt: int = 0, group: int = 0, late: int = 0) -> None:
        logprobs = (-1.0,) * (tokens - late)
        core.step(
            ev.SegmentArrived("e", Segment(RequestId(group, member, attempt), (5,) * tokens, logprobs, v0, v0, finish)), 0.0
        )

    write(0, 2, FinishReason.ERROR)  # tried again, with its two tokens
    write(0, 1, FinishReason.STOP, attempt=1)
    write(1, 4, None, late=1)  # a logprob is missing: refused, and tried again from the beginning
    write(1, 1, FinishReason.ABORT)  # the rest of what was refused
    write(1, 3, FinishReason.ERROR, attempt=1)  # once too often
    write(2, 5, FinishReason.LENGTH)
    write(0, 2, None, group=1)
    write(-1, 9, None, group=-1)  # an evaluation's
    assert (books.generated, books.trained, books.dropped, core.live_tokens) == (18, 0, {"failed": 8}, 10)
    for member, value in ((0, 1.0), (2, None)):
        core.step(ev.Scored(0, member, Reward(value)), 0.0)
    assert (books.dropped, core.live_tokens) == ({"failed": 8, "no_verdict": 5}, 5)
    core.step(ev.BatchTrained(WeightVersion(1)), 0.0)
    assert (books.trained, core.live_tokens) == (3, 2)
    core.step(ev.RolloutsCancelled(), 0.0)
    write(0, 3, FinishReason.ABORT, group=1)  # written before the engine heard of it
    assert (books.generated, books.trained, core.live_tokens) == (21, 3, 0)
    assert books.dropped == {"failed": 8, "no_verdict": 5, "stopped": 5}


class opened(RolloutCore):
    """A core with generation open; `first` is what it asked for at once."""

    def __init__(self, rules: RolloutPolicy, version: int = 0) -> None:
        super().__init__(rules, version)
        self.first = asked(self.step(ev.GenerationOpened(), 0.0))


def asked(outputs) -> int:
    return sum(output.count for output in outputs if isinstance(output, ev.FetchPrompts))


def prompts(*ids: int, tokens: int = 2) -> tuple[Prompt, ...]:
    return tuple(Prompt(i, i, tuple(range(1, tokens + 1)), f"p{i}") for i in ids)


def generates(outputs) -> list[ev.Generate]:
    return [output for output in outputs if isinstance(output, ev.Generate)]


def test_retries_are_bounded_and_go_elsewhere():
    core = opened(policy(group_size=2, groups_per_batch=1, min_scored=1, retries=1))
    for engine in ("a", "b"):
        core.step(ev.EngineUp(engine, 4, WeightVersion(0)), 0.0)
    first = generates(core.step(ev.PromptsOffered(prompts(0), exhausted=False), 0.0))
    victim = first[0]
    again = generates(core.step(ev.RequestFailed(victim.engine, victim.request.id, "broken", retryable=True), 0.0))[0]
    assert again.engine != victim.engine and again.request.id == RequestId(0, victim.request.id.member, 1)
    out = core.step(ev.RequestFailed(again.engine, again.request.id, "broken again", retryable=True), 0.0)
    assert [(d.member, d.reason, d.cause) for d in out if isinstance(d, ev.Drop)] == [
        (victim.request.id.member, "failed", "broken again")
    ]


def test_a_judge_that_always_fails_ends_the_run():
    core = opened(policy(group_size=1, groups_per_batch=1, min_scored=1, give_up_after=3))
    core.step(ev.EngineUp("e", 4, WeightVersion(0)), 0.0)
    v0 = WeightVersion(0)
    for i in range(3):
        core.step(ev.PromptsOffered(prompts(i), exhausted=False), 0.0)
        core.step(ev.SegmentArrived("e", Segment(RequestId(i, 0), (1,), (-1.0,), v0, v0, FinishReason.STOP)), 0.0)
        out = core.step(ev.Scored(i, 0, Reward(None, problem="KeyError: 'answer'")), 0.0)
    failed = [o for o in out if isinstance(o, ev.RolloutsFailed)]
    assert len(failed) == 1 and "3 prompts in a row" in failed[0].cause


def test_a_group_held_by_an_old_engine_is_not_overtaken():
    """S 1, B 1, version 1: group 10 is with an engine at 0. Were 11 trained first, 10 would be due 2 and may not use 0."""
    core = opened(policy(group_size=1, groups_per_batch=1, max_staleness=1, batches=9, min_scored=1), version=1)
    core.step(ev.EngineUp("old", 1, WeightVersion(0)), 0.0)
    core.step(ev.EngineUp("new", 1, WeightVersion(1)), 0.0)
    out = core.step(ev.PromptsOffered(prompts(10, 11), exhausted=False), 0.0)
    assert {g.request.id.group: g.engine for g in generates(out)} == {10: "old", 11: "new"}
    v1 = WeightVersion(1)
    core.step(ev.SegmentArrived("new", Segment(RequestId(11, 0), (1,), (-1.0,), v1, v1, FinishReason.STOP)), 0.0)
    core.step(ev.Scored(11, 0, Reward(1.0)), 0.0)
    assert not [o for o in core.step(ev.BatchWanted(), 0.0) if isinstance(o, ev.BatchTaken)]


def test_what_a_dropped_group_still_runs_is_cut():
    core = opened(policy(group_size=2, groups_per_batch=1))
    core.step(ev.EngineUp("e", 4, WeightVersion(0)), 0.0)
    core.step(ev.PromptsOffered(prompts(0), exhausted=False), 0.0)
    out = core.step(ev.RolloutsCancelled(), 0.0)
    assert {o.requests for o in out if isinstance(o, ev.Abort)} == {(RequestId(0, 0),), (RequestId(0, 1),)}


def judged(core: RolloutCore, group: int, *values: float | None, step: int = 0) -> list:
    """All members of a group write two tokens and have these verdicts; what follows from the last of them."""
    version, out = WeightVersion(step), []
    for member, value in enumerate(values):
        segment = Segment(RequestId(group, member), (1, 2), (-1.0, -1.0), version, version, FinishReason.STOP)
        core.step(ev.SegmentArrived("e", segment), 0.0)
        out = core.step(ev.Scored(group, member, Reward(value)), 0.0)
    return out


def filtering(**changes) -> RolloutCore:
    core = opened(policy(**(dict(group_size=2, groups_per_batch=2, filter="flat", refills=2, give_up_after=1) | changes)))
    core.step(ev.EngineUp("e", 99, WeightVersion(0)), 0.0)
    core.step(ev.BatchWanted(), 0.0)
    return core


def dropped(outputs) -> list[tuple[int, str]]:
    return [(out.group, str(out.reason)) for out in outputs if isinstance(out, ev.Drop) and out.member is None]


def taken(outputs) -> list[list[int]]:
    return [[group.id for group in out.groups] for out in outputs if isinstance(out, ev.BatchTaken)]


def test_flat_groups_are_asked_anew_until_the_bound():
    """Two of them leave, and two more prompts are asked; the third is trained. With staleness 0 nothing more is ever live."""
    core = filtering()
    core.step(ev.PromptsOffered(prompts(0, 1), exhausted=False), 0.0)
    for flat in (0, 1):
        out = judged(core, flat, 0.5, 0.5)
        assert dropped(out) == [(flat, "filtered")] and asked(out) == 1 and not [o for o in out if isinstance(o, ev.Keep)]
        assert not [o for o in out if isinstance(o, ev.RolloutsFailed)], "filtering is no failure"
        core.step(ev.PromptsOffered(prompts(2 + flat), exhausted=False), 0.0)
        assert core.live == 2
    assert (core.counts.refills, core.counts.unfiltered) == (2, 0)
    assert dropped(judged(core, 2, 1.0, 1.0)) == [] and core.counts.unfiltered == 1
    assert taken(judged(core, 3, 0.0, 1.0)) == [[2, 3]]
    # The next batch may have two asked anew again.
    core.step(ev.BatchTrained(WeightVersion(1)), 0.0)
    core.step(ev.EngineLoaded("e", WeightVersion(1)), 0.0)
    core.step(ev.BatchWanted(), 0.0)
    core.step(ev.PromptsOffered(prompts(4, 5), exhausted=False), 0.0)
    assert dropped(judged(core, 4, 0.0, 0.0, step=1)) == [(4, "filtered")]
    tokens = core.counts.tokens
    assert (core.counts.dropped, tokens.dropped) == ({"filtered": 3}, {"filtered": 12})


def test_one_verdict_is_flat_and_none_is_a_failure():
    core = filtering(min_scored=1)
    core.step(ev.PromptsOffered(prompts(0, 1), exhausted=False), 0.0)
    assert dropped(judged(core, 0, 0.5, None)) == [(0, "filtered")]
    assert dropped(judged(core, 1, None, None)) == [(1, "failed")]
    assert core.counts.members_dropped == {"no_verdict": 3, "filtered": 1}


def test_with_no_prompt_left_a_batch_is_short():
    core = filtering()
    core.step(ev.PromptsOffered(prompts(0, 1), exhausted=True), 0.0)
    assert dropped(judged(core, 0, 0.0, 0.0)) == [(0, "filtered")]
    assert taken(judged(core, 1, 0.0, 1.0)) == [[1]] and core.counts.refills == 0


def test_all_of_the_last_prompts_are_flat():
    core = filtering()
    core.step(ev.PromptsOffered(prompts(0), exhausted=True), 0.0)
    assert [type(o) for o in judged(core, 0, 1.0, 1.0)][-1] is ev.RolloutsFinished


def test_failures_in_a_row_are_counted_without_what_is_filtered():
    core = filtering(refills=9, give_up_after=2)
    core.step(ev.PromptsOffered(prompts(0, 1), exhausted=False), 0.0)
    out = judged(core, 0, None, None)
    for flat in range(1, 5):
        assert not [o for o in out if isinstance(o, ev.RolloutsFailed)]
        core.step(ev.PromptsOffered(prompts(flat + 1), exhausted=False), 0.0)
        out = judged(core, flat, 1.0, 1.0)
    assert core.counts.dropped == {"failed": 1, "filtered": 4}


def test_what_was_cut_is_in_the_record_and_its_tokens_are_not_trained():
    core = filtering(groups_per_batch=1, filter="none", mask_truncated=True)
    core.step(ev.PromptsOffered(prompts(0), exhausted=False), 0.0)
    v0 = WeightVersion(0)
    for member, finish in enumerate((FinishReason.STOP, FinishReason.LENGTH)):
        core.step(ev.SegmentArrived("e", Segment(RequestId(0, member), (1,) * 5, (-1.0,) * 5, v0, v0, finish)), 0.0)
        out = core.step(ev.Scored(0, member, Reward(float(member))), 0.0)
    (batch,) = [o.groups for o in out if isinstance(o, ev.BatchTaken)]
    assert batch[0].rewards == (0.0, 1.0)
    assert [(o.member, o.reason) for o in out if isinstance(o, ev.Drop)] == [(1, "filtered")]
    core.step(ev.BatchTrained(WeightVersion(1)), 0.0)
    counts = core.counts
    assert (counts.trained, counts.members_trained, counts.members_dropped) == (1, 1, {"filtered": 1})
    assert (counts.tokens.trained, counts.tokens.dropped) == (5, {"filtered": 5})


def test_a_finished_member_is_judged_at_once_while_the_others_are_written():
    hand = Hand(group_size=3, groups_per_batch=2)
    hand.offer(0, 1)
    for group, member in ((0, 1), (1, 2), (0, 0)):
        said = hand.write(group, member)
        assert [(one.completion.group, one.completion.member) for one in said if isinstance(one, ev.Score)] == [(group, member)]
    assert hand.take() is None
