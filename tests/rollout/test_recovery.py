"""A second life of a run: what the first finished is taken up again, and nothing is taken twice."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import given, settings
from hypothesis import strategies as st

from rollyard import events as ev
from rollyard.lives import GroupsRecovered
from rollyard.rollout.core import RolloutCore
from rollyard.rollout.policy import RolloutPolicy
from rollyard.types import (
    Completion,
    FinishReason,
    Group,
    Prompt,
    Reward,
    Rollout,
    Sampling,
    Segment,
    VersionSpan,
    WeightVersion,
)
from tests.rollout.lives import FirstLife, NextLife
from tests.rollout.test_core import policy
from tests.rollout.world import Odds


@settings(max_examples=250, deadline=None)
@given(
    staleness=st.integers(0, 2),
    batch=st.integers(1, 4),
    engines=st.integers(1, 3),
    prompts=st.integers(1, 30),
    overtaking=st.sampled_from(["allow", "never"]),
    spare=st.sampled_from([0, 0, 2]),
    rollover=st.sampled_from(list(ev.Rollover)),
    odds=st.sampled_from([Odds(), Odds(0.05, 0.02, 0.1, 0.05), Odds(0.05, 0.02, 0.1, 0.05, coarse=True)]),
    refills=st.sampled_from([0, 1, 5]),
    mask=st.booleans(),
    killed_after=st.lists(st.integers(0, 150), min_size=1, max_size=3),
    every=st.sampled_from([0, 1, 2, 3]),
    tighter=st.sampled_from([0, 0, 1]),
    seed=st.integers(0, 2**32),
)
def test_killed_at_any_moment_nothing_is_lost_and_nothing_is_taken_twice(
    staleness, batch, engines, prompts, overtaking, spare, rollover, odds, refills, mask, killed_after, every, tighter, seed
):
    filtering = dict(filter="flat" if refills else "none", refills=refills, mask_truncated=mask)
    rules = policy(groups_per_batch=batch, max_staleness=staleness, overtaking=overtaking, batches=8, **filtering)
    rules = replace(rules, oversample=spare if staleness else 0)
    world = FirstLife(rules, prompts, engines, 4, seed, odds, rollover, every=every)
    for number, actions in enumerate(killed_after):
        world.live_for(actions)
        world = NextLife(world, seed + number, max(0, world.policy.max_staleness - tighter))
    world.run()
    in_the_end(world)


def in_the_end(world: NextLife) -> None:
    """In the lineage that survives each prompt is in one batch, or was dropped, and the counts say so."""
    counts = world.core.counts
    batches = [*world.past.trained, *world.batches]
    trained = [id_ for each in batches for id_ in each]
    dropped = {id_ for id_, reason in world.past.done.items() if reason} | set(world.dropped)
    assert world.records.batches() == dict(enumerate(batches)) and len(batches) == world.version
    assert len(trained) == len(set(trained)) == counts.trained and not dropped & set(trained)
    assert counts.members_admitted == world.policy.group_size * counts.admitted
    if world.finished:
        assert set(trained) | dropped == set(range(world.total)) and counts.admitted == world.total
        assert counts.members_admitted == counts.members_trained + sum(counts.members_dropped.values())


def finished(id_: int, version: int, members: int = 3) -> Group:
    span = VersionSpan(WeightVersion(version), WeightVersion(version), 2)
    done = (Completion(id_, k, (7, 8), (-1.0, -2.0), (span,), FinishReason.STOP, "ab") for k in range(members))
    return Group(Prompt(id_, id_, (1, 2), f"p{id_}"), tuple(Rollout(each, Reward(float(each.member))) for each in done))


def said(outputs: list, *kinds: type) -> list:
    return [output for output in outputs if isinstance(output, kinds)]


def begun(rules: RolloutPolicy, version: int, event: GroupsRecovered) -> tuple[RolloutCore, list]:
    core = RolloutCore(rules, version)
    return core, core.step(event, 0.0)


V4 = WeightVersion(4)
RULES = RolloutPolicy(group_size=3, groups_per_batch=2, batches=9, sampling=Sampling(5), window=100, max_staleness=1)


def test_groups_join_in_the_places_that_they_had():
    """Version 4, limit 1, batches of 2: of ids 8 to 11, 9 and 11 are there. 8 and 10 are written; then 8 and 9 are a batch."""
    old = [finished(9, 3), finished(11, 4)]
    core, out = begun(RULES, 4, GroupsRecovered(tuple(old)))
    assert out == [] and core.live == 0
    core.step(ev.EngineUp("e", 9, WeightVersion(4)), 0.0)
    core.step(ev.BatchWanted(), 0.0)
    assert said(core.step(ev.GenerationOpened(), 0.0), ev.FetchPrompts) == [ev.FetchPrompts(4)]
    out = core.step(ev.PromptsOffered(tuple(finished(id_, 0).prompt for id_ in range(8, 12)), exhausted=False), 0.0)
    assert said(out, ev.Keep) == [ev.Keep(group, recovered=True) for group in old]
    assert [each.request.id.group for each in said(out, ev.Generate)] == [8, 8, 8, 10, 10, 10]
    # 9 and 11 may be taken at once: 8 and 10 have no token yet, so neither can be too old later.
    assert [[g.id for g in taken.groups] for taken in said(out, ev.BatchTaken)] == [[9, 11]]
    assert core.counts.tokens.generated == 12 == core.live_tokens


def test_a_group_that_has_become_too_old_is_written_anew():
    """The third batch from version 4 on trains version 6: what version 4 wrote is too old for it with limit 1."""
    rules = replace(RULES, max_staleness=1, groups_per_batch=1)
    core, _ = begun(rules, 5, GroupsRecovered((finished(20, 5), finished(21, 4))))
    core.step(ev.EngineUp("e", 9, WeightVersion(5)), 0.0)
    core.step(ev.GenerationOpened(), 0.0)
    out = core.step(ev.PromptsOffered((finished(20, 0).prompt, finished(21, 0).prompt), exhausted=False), 0.0)
    assert [each.request.id.group for each in said(out, ev.Generate)] == [21, 21, 21]
    tokens = core.counts.tokens
    assert (tokens.generated, tokens.dropped, core.live_tokens) == (12, {"stale": 6}, 6)


def test_a_batch_that_was_taken_is_trained_first_and_as_it_is():
    batch = (finished(9, 3), finished(11, 4, members=2))
    core, out = begun(RULES, 4, GroupsRecovered((), (batch,)))
    assert said(out, ev.BatchTaken) == [ev.BatchTaken(4, batch)]
    assert [group.id for group in (each.prompt for each in said(out, ev.Admit))] == [9, 11]
    assert [(each.group, each.member, each.reason) for each in said(out, ev.Drop)] == [(11, 2, "failed")]
    assert core.live == 0 and core.live_tokens == 10
    assert said(core.step(ev.GenerationOpened(), 0.0), ev.FetchPrompts) == [ev.FetchPrompts(2)]  # up to version 5, less 1 batch
    core.step(ev.BatchTrained(WeightVersion(5)), 0.0)
    assert (core.counts.trained, core.counts.members_trained, core.counts.tokens.trained) == (2, 5, 10)


def test_a_flat_group_that_was_kept_in_an_earlier_life_is_not_filtered_in_this_one():
    """As many as may be had been filtered for its batch. What is written anew is looked at anew."""
    rules = replace(RULES, filter="flat", refills=9)
    old = finished(9, 4)
    flat = replace(old, rollouts=tuple(replace(each, reward=Reward(1.0)) for each in old.rollouts))
    core, _ = begun(rules, 4, GroupsRecovered((flat,)))
    core.step(ev.EngineUp("e", 9, WeightVersion(4)), 0.0)
    core.step(ev.GenerationOpened(), 0.0)
    out = core.step(ev.PromptsOffered((finished(8, 0).prompt, flat.prompt), exhausted=False), 0.0)
    assert said(out, ev.Keep) == [ev.Keep(flat, recovered=True)] and core.counts.unfiltered == 0
    for request in (each.request for each in said(out, ev.Generate)):
        core.step(ev.SegmentArrived("e", Segment(request.id, (1,), (-1.0,), V4, V4, FinishReason.STOP)), 0.0)
        out = core.step(ev.Scored(8, request.id.member, Reward(1.0)), 0.0)
    assert [(each.group, each.reason) for each in said(out, ev.Drop) if each.member is None] == [(8, "filtered")]


def test_what_was_cut_is_masked_in_a_batch_of_an_earlier_life_too():
    old = finished(9, 4)
    done = replace(old.rollouts[1].completion, finish=FinishReason.LENGTH)
    batch = replace(old, rollouts=(old.rollouts[0], replace(old.rollouts[1], completion=done), old.rollouts[2]))
    core, out = begun(replace(RULES, mask_truncated=True), 4, GroupsRecovered((), ((batch,),)))
    assert said(out, ev.BatchTaken) == [ev.BatchTaken(4, (batch,))]
    assert [(each.group, each.member, each.reason) for each in said(out, ev.Drop)] == [(9, 1, "filtered")]
    core.step(ev.BatchTrained(WeightVersion(5)), 0.0)
    assert (core.counts.trained, core.counts.members_trained, core.counts.tokens.trained) == (1, 2, 4)
