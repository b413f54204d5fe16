"""A second life of a run: what the first finished is taken up again, and nothing is taken twice."""

from __future__ import annotations

import math
from collections import deque
from dataclasses import asdict, replace

from hypothesis import given, settings
from hypothesis import strategies as st

from rollyard import events as ev
from rollyard.lives import GroupsRecovered, Reuse, Wrote
from rollyard.rollout.core import RolloutCore
from rollyard.rollout.policy import RolloutPolicy
from rollyard.rollout.recovery import counts_before
from rollyard.rollout.state import Counts, TokenCounts
from rollyard.turns import Play
from rollyard.types import (
    Begun,
    Completion,
    FinishReason,
    Group,
    Partial,
    Prompt,
    RequestId,
    Reward,
    Rollout,
    Sampling,
    Segment,
    VersionSpan,
    WeightVersion,
)
from tests.rollout.lives import FirstLife, FirstPlayed, FirstWard, NextLife, NextPlayed, NextWard
from tests.rollout.test_core import policy
from tests.rollout.ward import Sick
from tests.rollout.world import Odds, heard


@settings(max_examples=150, deadline=None)
@given(
    staleness=st.integers(0, 2),
    batch=st.integers(1, 4),
    engines=st.integers(1, 3),
    prompts=st.integers(1, 30),
    overtaking=st.sampled_from(["allow", "never"]),
    on_stale=st.sampled_from(["wait", "drop"]),
    moves=st.integers(0, 1),
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
    staleness,
    batch,
    engines,
    prompts,
    overtaking,
    on_stale,
    moves,
    spare,
    rollover,
    odds,
    refills,
    mask,
    killed_after,
    every,
    tighter,
    seed,
):
    filtering = dict(filter="flat" if refills else "none", refills=refills, mask_truncated=mask)
    rules = policy(groups_per_batch=batch, max_staleness=staleness, overtaking=overtaking, batches=8, **filtering)
    rules = replace(rules, oversample=spare if staleness else 0, on_stale=on_stale, moves=moves)
    world = FirstLife(rules, prompts, engines, 4, seed, odds, rollover, every=every)
    for number, actions in enumerate(killed_after):
        world.live_for(actions)
        world = NextLife(world, seed + number, max(0, world.policy.max_staleness - tighter))
    world.run()
    in_the_end(world)


@settings(max_examples=40, deadline=None)
@given(
    staleness=st.integers(0, 2),
    batch=st.integers(1, 3),
    prompts=st.integers(1, 15),
    rollover=st.sampled_from(list(ev.Rollover)),
    odds=st.sampled_from([Odds(), Odds(0.05, 0.02, 0.1, 0.05)]),
    killed_after=st.lists(st.integers(0, 150), min_size=1, max_size=2),
    every=st.sampled_from([0, 2]),
    seed=st.integers(0, 2**32),
)
def test_episodes_of_a_run_that_was_killed(staleness, batch, prompts, rollover, odds, killed_after, every, seed):
    rules = policy(groups_per_batch=batch, max_staleness=staleness, batches=6, sampling=Sampling(4), window=100, turns=3)
    world: FirstLife = FirstPlayed(rules, prompts, 2, 3, seed, odds, rollover, every=every)
    for number, actions in enumerate(killed_after):
        world.live_for(actions)
        world = NextPlayed(world, seed + number, staleness)
    world.run()
    in_the_end(world)


@settings(max_examples=40, deadline=None)
@given(
    staleness=st.integers(0, 2),
    batch=st.integers(1, 3),
    prompts=st.integers(1, 20),
    rollover=st.sampled_from(list(ev.Rollover)),
    killed_after=st.lists(st.integers(0, 150), min_size=1, max_size=2),
    every=st.sampled_from([0, 2]),
    seed=st.integers(0, 2**32),
)
def test_what_was_not_believed_is_not_used_by_a_later_life(staleness, batch, prompts, rollover, killed_after, every, seed):
    rules = policy(groups_per_batch=batch, max_staleness=staleness, faults=3, failures=4, retries=4)
    odds = Sick(0.05, 0.01, 0.05, 0.1, lie=0.1, forget=0.2, stall=0.05)
    world: FirstLife = FirstWard(rules, prompts, 2, 3, seed, odds, rollover, every=every)
    for number, actions in enumerate(killed_after):
        world.live_for(actions)
        world = NextWard(world, seed + number, staleness)
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


def test_batches_of_an_earlier_life_are_trained_one_after_the_other():
    """Version 4, limit 1, batches of 2: with 4 and 5 taken the next prompt is due at 6, and admitted once version 5 is there."""
    batches = ((finished(9, 3), finished(11, 4)), (finished(8, 4), finished(12, 4)))
    core, out = begun(RULES, 4, GroupsRecovered((), batches))
    assert [each.prompt.id for each in said(out, ev.Admit)] == [9, 11, 8, 12]
    assert said(out, ev.BatchTaken) == [ev.BatchTaken(4, batches[0])]
    assert (core.live, core.live_tokens, core.counts.admitted) == (0, 24, 4)
    assert said(core.step(ev.GenerationOpened(), 0.0), ev.FetchPrompts) == []
    core.step(ev.GenerationClosed(), 0.0)
    assert said(core.step(ev.BatchTrained(WeightVersion(5)), 0.0), ev.BatchTaken) == []
    assert said(core.step(ev.BatchWanted(), 0.0), ev.BatchTaken) == [ev.BatchTaken(5, batches[1])], "open or not"
    assert said(core.step(ev.GenerationOpened(), 0.0), ev.FetchPrompts) == [ev.FetchPrompts(2)]
    core.step(ev.BatchTrained(WeightVersion(6)), 0.0)
    assert core.step(ev.BatchWanted(), 0.0) == [] and core.counts.trained == 4 and core.live_tokens == 0


def test_a_stop_drops_batches_that_wait_too():
    batches = ((finished(8, 4), finished(9, 4)), (finished(10, 4), finished(11, 4)))
    core, _ = begun(RULES, 4, GroupsRecovered((), batches))
    out = core.step(ev.RolloutsCancelled(), 0.0)
    drops = [(each.group, each.reason) for each in said(out, ev.Drop) if each.member is None]
    assert drops == [(id_, "stopped") for id_ in (8, 9, 10, 11)]
    assert core.counts.admitted == sum(core.counts.dropped.values()) == 4 and core.live_tokens == 0


def offered(rules: RolloutPolicy, version: int, event: GroupsRecovered, *ids: int) -> tuple[RolloutCore, list]:
    """What follows when these prompts are offered again, with an engine that has the version."""
    core, _ = begun(rules, version, event)
    core.step(ev.EngineUp("e", 9, WeightVersion(version)), 0.0)
    core.step(ev.GenerationOpened(), 0.0)
    return core, core.step(ev.PromptsOffered(tuple(finished(id_, 0).prompt for id_ in ids), exhausted=False), 0.0)


def test_members_within_the_limit_are_used_again_one_by_one():
    """Of a complete group one member has become too old: it is written anew, and the group is looked at as a new one."""
    old, new = finished(8, 3).rollouts, finished(8, 4).rollouts
    mixed = Group(finished(8, 4).prompt, (new[0], old[1], new[2]))
    core, out = offered(replace(RULES, max_staleness=0), 4, GroupsRecovered((mixed,)), 8)
    assert said(out, Reuse) == [Reuse(Begun(8, rollouts=(new[0], new[2])))] and not said(out, ev.Keep)
    assert [each.request.id[:2] for each in said(out, ev.Generate)] == [(8, 1)]
    assert (core.counts.tokens.generated, core.counts.tokens.dropped, core.live_tokens) == (6, {"stale": 2}, 4)


def partial(member: int, *spans: tuple[int, int, int]) -> Partial:
    """Of tokens 20, 21, ...; spans as version, oldest key and value, and tokens."""
    count = sum(tokens for _, _, tokens in spans)
    named = tuple(VersionSpan(WeightVersion(by), WeightVersion(oldest), tokens) for by, oldest, tokens in spans)
    return Partial(member, tuple(range(20, 20 + count)), (-0.5,) * count, named)


def test_a_partial_goes_on_from_its_tokens_and_keeps_what_they_attended_to():
    """Version 4 wrote on keys and values of version 3: that does not change, whoever writes the rest."""
    parts = (partial(0, (3, 3, 1), (4, 3, 2)), partial(1, (4, 4, 5)))
    core, out = offered(RULES, 4, GroupsRecovered((), begun=(Begun(8, partials=parts),)), 8)
    assert said(out, Reuse) == [Reuse(Begun(8, partials=parts[:1]))], "the other has no room for one token more"
    asked = {each.request.id.member: each.request for each in said(out, ev.Generate)}
    assert {k: request.written_ids for k, request in asked.items()} == {0: (20, 21, 22), 1: (), 2: ()}
    assert asked[0].sampling.max_tokens == 2 and core.counts.tokens.dropped == {"failed": 5}
    out = core.step(ev.SegmentArrived("e", Segment(asked[0].id, (9,), (-1.0,), V4, V4, FinishReason.STOP), "text"), 0.0)
    (score,) = said(out, ev.Score)
    assert score.completion.token_ids == (20, 21, 22, 9) and score.completion.text == "text"
    assert [tuple(span) for span in score.completion.spans] == [((3, 0), (3, 0), 1), ((4, 0), (3, 0), 2), ((4, 0), (4, 0), 1)]


def test_a_partial_that_is_too_old_for_its_place_is_begun_anew():
    begun_ = Begun(8, partials=(partial(0, (3, 3, 1), (4, 3, 2)), partial(1, (4, 4, 2))))
    core, out = offered(replace(RULES, max_staleness=0), 4, GroupsRecovered((), begun=(begun_,)), 8)
    assert said(out, Reuse) == [Reuse(Begun(8, partials=begun_.partials[1:]))]
    assert [each.request.written_ids for each in said(out, ev.Generate)] == [(), (20, 21), ()]
    assert core.counts.tokens.dropped == {"stale": 3} and core.live_tokens == 2


def test_a_group_whose_members_were_all_judged_is_looked_at_now():
    """Its last verdict was the last thing that the earlier life did: nobody has looked whether the group is flat."""
    whole = finished(8, 4).rollouts
    flat = tuple(replace(each, reward=Reward(1.0)) for each in whole)
    rules = replace(RULES, filter="flat", refills=1)
    event = GroupsRecovered((), begun=(Begun(8, rollouts=flat), Begun(9, rollouts=finished(9, 4).rollouts)))
    _, out = offered(rules, 4, event, 8, 9)
    assert [(each.group, each.reason) for each in said(out, ev.Drop) if each.member is None] == [(8, "filtered")]
    assert said(out, ev.Keep) == [ev.Keep(finished(9, 4))]


def test_the_bound_on_refills_goes_on():
    """One may be filtered for each batch, and one was for the batch that is taken next."""
    flat = tuple(replace(each, reward=Reward(1.0)) for each in finished(8, 4).rollouts)
    event = GroupsRecovered((), begun=(Begun(8, rollouts=flat),), filtered=1)
    core, out = offered(replace(RULES, filter="flat", refills=1), 4, event, 8)
    assert said(out, ev.Keep) == [ev.Keep(Group(finished(8, 4).prompt, flat))] and core.counts.unfiltered == 1


def test_a_member_without_a_verdict_is_tried_again():
    judged = replace(finished(8, 4).rollouts[0], reward=Reward(None, problem="the judge was down"))
    core, out = offered(RULES, 4, GroupsRecovered((), begun=(Begun(8, rollouts=(judged,)),)), 8)
    assert not said(out, Reuse) and len(said(out, ev.Generate)) == 3 and not said(out, ev.Drop)
    assert core.counts.tokens.dropped == {"failed": 2}


def test_an_episode_that_was_not_judged_is_played_anew():
    judged, ended, _ = finished(8, 4).rollouts
    event = GroupsRecovered((), begun=(Begun(8, (judged,), (ended.completion,), (partial(2, (4, 4, 2)),)),))
    core, out = offered(replace(RULES, turns=3), 4, event, 8)
    assert said(out, Reuse) == [Reuse(Begun(8, rollouts=(judged,)))] and not said(out, ev.Score)
    assert [each.member for each in said(out, Play)] == [1, 2]
    assert core.counts.tokens.dropped == {"failed": 4} and core.live_tokens == 2


def test_what_a_member_goes_on_from_is_recorded_and_nothing_else():
    core, out = offered(replace(RULES, retries=1), 4, GroupsRecovered(()), 8)
    first, second, third = (each.request.id for each in said(out, ev.Generate))

    def wrote(request: RequestId, tokens: int, finish: FinishReason | None = None, logprob: float = -1.0) -> bool:
        segment = Segment(request, (5,) * tokens, (logprob,) * tokens, V4, V4, finish, "a reason")
        recorded = said(core.step(heard("e", segment), 0.0), Wrote)
        assert recorded in ([], [Wrote(segment)])
        return bool(recorded)

    assert wrote(first, 2) and not wrote(first, 0) and not wrote(first, 1, FinishReason.STOP)
    assert not wrote(first, 1), "late news"
    assert wrote(second, 1, FinishReason.ABORT) and wrote(second._replace(attempt=1), 1, FinishReason.ERROR)
    assert not wrote(second._replace(attempt=2), 1, FinishReason.ERROR), "it is dropped"
    assert not wrote(third, 2, logprob=math.nan), "refused"


def test_counts_go_on_from_what_has_left_for_good():
    """At the checkpoint 8 of 14 prompts were trained, 2 dropped, one of them by a stop, 4 live; one was filtered since."""
    tokens = TokenCounts(100, 60, {"failed": 7, "stopped": 9})
    at = Counts(14, 8, {"failed": 1, "stopped": 1}, 42, 23, {"failed": 5, "stopped": 3}, 4, 0, 2, tokens)
    counts = counts_before(asdict(at), {"failed": 1, "filtered": 1}, {"failed": 4, "filtered": 3})
    assert counts == Counts(
        10, 8, {"failed": 1, "filtered": 1}, 30, 23, {"failed": 4, "filtered": 3}, 4, 0, 2, TokenCounts(67, 60, {"failed": 7})
    )
    core = RolloutCore(RULES, 4, counts)
    core.step(ev.GenerationOpened(), 0.0)
    core.step(ev.PromptsOffered(tuple(finished(id_, 0).prompt for id_ in (10, 11)), exhausted=False), 0.0)
    assert (core.counts.admitted, core.counts.refills) == (12, 1), "the first is in the place of the one that was filtered"


def test_twenty_prompts_eight_trained_three_waiting_four_in_flight():
    """The other twelve are in one batch each; what was written of them is not written again."""
    span = VersionSpan(WeightVersion(2), WeightVersion(2), 2)
    groups = tuple(finished(id_, 2) for id_ in (8, 9, 10))
    whole = finished(11, 2).rollouts
    in_flight = (
        Begun(11, rollouts=whole[:1], completions=(whole[1].completion,), partials=(Partial(2, (7, 8), (-1.0, -2.0), (span,)),)),
        Begun(12, partials=(Partial(0, (7, 8), (-1.0, -2.0), (span,)),)),
        Begun(13, completions=tuple(each.completion for each in finished(13, 2).rollouts)),
    )  # of 14 nothing was written yet
    prompts = tuple(finished(id_, 0).prompt for id_ in range(8, 20))
    core, heard = begun(replace(RULES, groups_per_batch=4, batches=5), 2, GroupsRecovered(groups, begun=in_flight))
    todo: deque = deque([ev.EngineUp("e", 9, WeightVersion(2)), ev.GenerationOpened(), ev.BatchWanted()])
    version, given, asked, scored = 2, 0, {}, []
    while todo:
        for each in core.step(todo.popleft(), 0.0):
            heard.append(each)
            match each:
                case ev.FetchPrompts(count):
                    todo.append(ev.PromptsOffered(prompts[given : given + count], given + count >= len(prompts)))
                    given += count
                case ev.Generate(engine, request):
                    asked[request.id[:2]] = request.written_ids
                    segment = Segment(request.id, (5,), (-1.0,), *[WeightVersion(version)] * 2, FinishReason.STOP)
                    todo.append(ev.SegmentArrived(engine, segment))
                case ev.Score(_, done):
                    scored.append((done.group, done.member))
                    todo.append(ev.Scored(done.group, done.member, Reward(float(done.member))))
                case ev.BatchTaken():
                    version += 1
                    todo.extend((ev.BatchTrained(WeightVersion(version)), ev.EngineLoaded("e", WeightVersion(version))))
                    todo.append(ev.BatchWanted())
    assert said(heard, Reuse) == [Reuse(each) for each in in_flight]
    assert sorted(group.id for batch in said(heard, ev.BatchTaken) for group in batch.groups) == list(range(8, 20))
    assert set(asked) == {(11, 2), *((id_, k) for id_ in (12, *range(14, 20)) for k in range(3))}
    assert {key: ids for key, ids in asked.items() if ids} == {(11, 2): (7, 8), (12, 0): (7, 8)}
    assert len(scored) == len(set(scored)) == 2 + 3 + 3 + 18
    trained = [each.completion for batch in said(heard, ev.BatchTaken) for group in batch.groups for each in group.rollouts]
    assert next(done for done in trained if (done.group, done.member) == (12, 0)).spans == (span._replace(tokens=3),)
    assert core.counts.trained == 12 and core.counts.tokens.generated == core.counts.tokens.trained
