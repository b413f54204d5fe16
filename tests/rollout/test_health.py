"""Engines that lie, fail, stand still and forget their weights, under random orders of events; and each rule by hand."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rollyard import events as ev
from rollyard.fitness import Condemn, EngineProbed, EngineUnfit, Unwrite
from rollyard.rollout.health import Health
from rollyard.rollout.silence import Silence
from rollyard.types import FinishReason, RequestId, Reward, Segment, Verdict, WeightVersion
from tests.rollout.test_core import opened, policy, prompts
from tests.rollout.ward import Sick, Ward
from tests.rollout.world import heard

V0 = WeightVersion(0)


@settings(max_examples=60, deadline=None)
@given(
    staleness=st.integers(0, 2),
    batch=st.integers(1, 3),
    size=st.integers(1, 3),
    engines=st.integers(1, 3),
    slots=st.integers(1, 4),
    count=st.integers(0, 30),
    moves=st.integers(0, 1),
    rollover=st.sampled_from(list(ev.Rollover)),
    odds=st.sampled_from(
        [
            Sick(lie=0.2),
            Sick(forget=0.2),
            Sick(forget=0.2, loose=True),
            Sick(stall=0.1),
            Sick(0.1, 0.01, 0.05, 0.1, lie=0.1, forget=0.1, stall=0.05),
        ]
    ),
    seed=st.integers(0, 2**32),
)
def test_whoever_is_not_fit_is_taken_out_and_the_run_goes_on(
    staleness, batch, size, engines, slots, count, moves, rollover, odds, seed
):
    rules = policy(
        group_size=size,
        groups_per_batch=batch,
        max_staleness=staleness,
        moves=moves,
        window=100,
        min_scored=min(2, size),
        faults=3,
        failures=4,
        retries=4,
    )
    world = Ward(rules, count, engines, slots, seed, odds, rollover)
    world.end_all()


def test_all_of_it_happens():
    """The odds above are such that the rules are used."""
    seen = Counter()
    for seed in range(12):
        odds = Sick(lie=0.2, forget=0.2, stall=0.05)
        rules = policy(group_size=3, groups_per_batch=2, max_staleness=1, faults=3, failures=4, retries=4)
        world = Ward(rules, 30, 2, 4, seed, odds, ev.Rollover.KEEP)
        world.end_all()
        seen += Counter(
            condemned=world.condemnations, unwritten=world.unwritten, distrusted=world.distrusted, batches=len(world.batches)
        )
    assert all(seen[name] > 10 for name in ("condemned", "unwritten", "distrusted", "batches")), seen


def written(
    member: int, ids: tuple[int, ...], finish: FinishReason | None = None, *, group: int = 0, attempt: int = 0
) -> Segment:
    return Segment(RequestId(group, member, attempt), ids, (-0.5,) * len(ids), V0, V0, finish)


def begun(**changes):
    """A core with a group of three, all of whose members run on engine a; b came later."""
    core = opened(policy(group_size=3, groups_per_batch=2, max_staleness=1, **{"faults": 2, "failures": 2} | changes))
    core.step(ev.EngineUp("a", 8, V0), 0.0)
    told = core.step(ev.PromptsOffered(prompts(0), exhausted=False), 0.0)
    assert [each.engine for each in told if isinstance(each, ev.Generate)] == ["a"] * 3
    core.step(ev.EngineUp("b", 8, V0), 0.0)
    return core


def test_what_an_engine_wrote_is_taken_back_as_far_as_it_is_in_doubt():
    core, home = begun(), "a"
    send = lambda event: core.step(event, 0.0)  # noqa: E731
    send(heard(home, written(0, (1, 2), FinishReason.STOP), "x"))  # proved below
    send(heard(home, written(1, (3,))))
    send(EngineProbed(home, Verdict.VERIFIED))
    send(heard(home, written(1, (4,))))  # of the same attempt as a token that was proved: written anew with it
    send(heard(home, written(2, (5,), FinishReason.STOP), "x"))  # in doubt, and waits for its verdict
    told = send(EngineProbed(home, Verdict.CONTRADICTED, "other weights"))
    assert told[0] == Condemn(home, "other weights") and Unwrite(0, 1, 0) in told
    assert [(each.member, each.reason) for each in told if isinstance(each, ev.Drop)] == [(2, "distrusted")]
    (again,) = [each for each in told if isinstance(each, ev.Generate)]
    assert (again.engine, again.request.id, again.request.written_ids) == ("b", RequestId(0, 1, 1), ())
    books = core.counts.tokens
    assert (books.generated, books.dropped, core.live_tokens) == (5, {"distrusted": 3}, 2)
    send(ev.Scored(0, 0, Reward(1.0)))
    send(ev.Scored(0, 2, Reward(1.0)))  # too late: it is not wanted any more
    told = send(heard("b", written(1, (6,), FinishReason.STOP, attempt=1), "x"))
    told += send(ev.Scored(0, 1, Reward(0.0)))
    (kept,) = [each.group for each in told if isinstance(each, ev.Keep)]
    assert [each.completion.token_ids for each in kept.rollouts] == [(1, 2), (6,)]
    assert not send(EngineProbed(home, Verdict.CONTRADICTED, "other weights")), "once is enough"


def test_a_complete_group_leaves_with_what_is_in_doubt_and_another_prompt_is_asked():
    core, home = begun(), "a"
    for member in range(3):
        core.step(heard(home, written(member, (1,), FinishReason.STOP), "x"), 0.0)
        core.step(ev.Scored(0, member, Reward(float(member))), 0.0)
    assert core.live == 1
    told = core.step(EngineProbed(home, Verdict.CONTRADICTED, "other weights"), 0.0)
    assert [each.reason for each in told if isinstance(each, ev.Drop) and each.member is None] == ["distrusted"]
    assert core.live == 0 and core.counts.tokens.dropped == {"distrusted": 3}


def test_tokens_of_an_engine_that_stands_still_are_kept():
    core, home = begun(), "a"
    core.step(heard(home, written(1, (3, 4))), 0.0)
    told = core.step(EngineUnfit(home, "it wrote nothing"), 0.0)
    assert told[0] == Condemn(home, "it wrote nothing")
    again = {each.request.id.member: each.request.written_ids for each in told if isinstance(each, ev.Generate)}
    assert again == {0: (), 1: (3, 4), 2: ()}
    assert not core.step(ev.EngineDown(home, "killed"), 0.0), "all that followed has followed"
    told = core.step(ev.EngineUp(home, 8, None), 0.0)
    assert not told and core.counts.retries == 3


@pytest.mark.parametrize(
    "lie",
    [
        Segment(RequestId(0, 0, 0), (1, 2), (-0.5,), V0, V0),
        Segment(RequestId(0, 0, 0), (1,), (0.01,), V0, V0),
        Segment(RequestId(0, 0, 0), (1,), (float("nan"),), V0, V0),
        Segment(RequestId(0, 0, 0), (1,), (-1e39,), V0, V0),
        Segment(RequestId(0, 0, 0), (50,), (-0.5,), V0, V0),
        Segment(RequestId(0, 0, 0), (-1,), (-0.5,), V0, V0),
        Segment(RequestId(0, 0, 0), (1,), (-0.5,), WeightVersion(1), V0),
        Segment(RequestId(0, 0, 0), (1,), (-0.5,), WeightVersion(0, 1), V0),
        Segment(RequestId(0, 0, 9), (1,), (-0.5,), V0, V0),
        Segment(RequestId(7, 0, 0), (1,), (-0.5,), V0, V0, FinishReason.STOP),
    ],
    ids=["logprobs", "positive", "nan", "too low", "vocabulary", "negative", "version", "incarnation", "attempt", "prompt"],
)
def test_an_answer_that_cannot_be_is_refused_and_an_engine_that_gives_too_many_goes(lie: Segment):
    core, home = begun(faults=1), "a"
    told = core.step(heard(home, lie), 0.0)
    (condemned,) = [each for each in told if isinstance(each, Condemn)]
    assert condemned.engine == home and "wrong answers" in condemned.cause
    assert len([each for each in told if isinstance(each, ev.Generate)]) == 3 and core.live_tokens == 0


def test_answers_that_are_right():
    """The last words of the version before, a logprob that rounding lifted above 0, and answers outside the rollouts."""
    core, home = begun(faults=1), "a"
    core.step(ev.EngineLoaded(home, WeightVersion(1)), 0.0)
    for segment in (
        written(0, (1,)),
        Segment(RequestId(0, 0, 0), (49,), (1e-6,), WeightVersion(1), V0),
        Segment(RequestId(-5, 0, 0), (1,), (-0.5,), V0, V0, FinishReason.LENGTH),
        written(0, (), FinishReason.STOP),
    ):
        assert not any(isinstance(each, Condemn) for each in core.step(heard(home, segment), 0.0))


def test_right_answers_make_up_for_wrong_ones():
    health = Health(policy(faults=2))
    health.up("a", V0)
    for _ in range(20):  # one in eleven, for ever
        assert health.wrong("a", "?") == ""
        for _ in range(10):
            health.right("a")
    for _ in range(9):
        assert health.wrong("a", "?") == "" or _ > 0
    assert "the last one: why" in health.wrong("a", "why")
    health.up("a", None)
    assert health.wrong("a", "?") == "", "a new one has a clean record"
    assert health.wrong("nobody", "?") == health.failed("nobody", 0, "?") == ""


def test_a_prompt_that_fails_everywhere_speaks_against_nobody():
    health = Health(policy(failures=3))
    health.up("a", V0)
    assert not any(health.failed("a", 7, "?") for _ in range(50))
    assert not health.failed("a", 8, "?")
    health.right("a")
    assert not health.failed("a", 9, "?") and not health.failed("a", 10, "?")
    assert health.failed("a", 11, "no room") == "it failed at 3 prompts in a row, the last time: no room"


def test_nobody_is_judged_without_rules():
    health = Health(policy())
    health.up("a", V0)
    assert not any(health.wrong("a", "?") or health.failed("a", prompt, "?") for prompt in range(500))


def test_who_is_silent():
    silence = Silence(10.0)
    look = lambda now, busy=True, mark=0: silence.look("a", busy, mark, now)  # noqa: E731
    assert not look(0.0, busy=False) and not look(100.0), "its time begins when it has something to write"
    assert not look(110.0) and look(111.0) == 11.0
    silence.heard("a", 112.0)
    assert not look(120.0) and look(123.0) == 11.0
    assert not look(124.0, mark=1) and not look(134.0, mark=1) and look(135.0, mark=1) == 11.0, "a step is a sign of life"
    silence.stands("a")
    assert not look(200.0), "it was told to stand still"
    silence.goes_on("a")
    assert not look(201.0) and not look(211.0) and look(212.0) == 11.0
    silence.forgive()
    assert not look(300.0), "nobody listened"
    assert not look(400.0, busy=False) and not look(401.0)
