"""Episodes in the core: their turns are requests like any other, and nothing of them is lost."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from rollyard import events as ev
from rollyard.fitness import EngineProbed
from rollyard.rollout.core import RolloutCore
from rollyard.rollout.policy import RolloutPolicy
from rollyard.rollout.seeds import completion_seed
from rollyard.turns import Asked, EpisodeEnded, Play, Stream, Tell
from rollyard.types import (
    Asking,
    Completion,
    FinishReason,
    Prompt,
    Reply,
    RequestId,
    Reward,
    Sampling,
    Segment,
    Turn,
    Verdict,
    VersionSpan,
    WeightVersion,
)
from tests.rollout.playground import Playground
from tests.rollout.world import Odds

V0, V1 = WeightVersion(0), WeightVersion(1)


def policy(**changes) -> RolloutPolicy:
    values = dict(
        group_size=1, groups_per_batch=1, batches=6, sampling=Sampling(5, stop=("#",)), window=40, min_scored=1, turns=3
    )
    return RolloutPolicy(**(values | dict(give_up_after=10**6) | changes))


@settings(max_examples=300, deadline=None)
@given(
    staleness=st.integers(0, 2),
    batch=st.integers(1, 4),
    size=st.integers(1, 3),
    engines=st.integers(1, 3),
    slots=st.integers(1, 4),
    prompts=st.integers(0, 25),
    turns=st.integers(1, 4),
    on_stale=st.sampled_from(["wait", "drop"]),
    spare=st.sampled_from([0, 0, 2]),
    order=st.sampled_from(["admission", "longest"]),
    moves=st.integers(0, 2),
    rollover=st.sampled_from(list(ev.Rollover)),
    window=st.sampled_from([100, 12, 5]),
    odds=st.sampled_from([Odds(), Odds(error=0.1), Odds(0.05, 0.02, 0.1, 0.05)]),
    seed=st.integers(0, 2**32),
)
def test_episodes_keep_every_rule(
    staleness, batch, size, engines, slots, prompts, turns, on_stale, spare, order, moves, rollover, window, odds, seed
):
    rules = policy(
        group_size=size,
        groups_per_batch=batch,
        sampling=Sampling(4),
        max_staleness=staleness,
        oversample=spare if staleness else 0,
        order=order,
        moves=moves,
        on_stale=on_stale,
        window=window,
        turns=turns,
    )
    world = Playground(rules, prompts, engines, slots, seed, odds, rollover)
    world.end_all()
    assert not world.playing and not world.wanted_turns


class Table:
    """A core whose engine and whose environment are this test."""

    def __init__(self, **changes) -> None:
        self.core = RolloutCore(policy(**changes))
        self.core.step(ev.GenerationOpened(), 0.0)
        for engine in ("a", "b"):
            self.core.step(ev.EngineUp(engine, 4, V0), 0.0)
        self.begun = self.core.step(ev.PromptsOffered((Prompt(0, 0, (3, 4), "p"),), exhausted=True), 0.0)

    def ask(self, *ids: int, most: int = 5, stop: tuple[str, ...] = (), member: int = 0, streams: bool = False) -> list:
        return self.core.step(Asked(0, member, Asking(ids, most, stop, streams)), 0.0)

    def write(self, request: RequestId, *ids: int, finish=FinishReason.STOP, engine: str = "a", version=V0, text="t") -> list:
        segment = Segment(request, ids, (-1.0,) * len(ids), version, version, finish, "broken")
        return self.core.step(ev.SegmentArrived(engine, segment, text), 0.0)

    def end(self, verdict: Reward | None = None) -> list:
        return self.core.step(EpisodeEnded(0, 0, verdict, "a text"), 0.0)


def one(outputs, kind):
    (found,) = [output for output in outputs if isinstance(output, kind)]
    return found


def test_an_episode_of_two_turns():
    table = Table(max_staleness=1)
    assert one(table.begun, Play).member == 0 and not [o for o in table.begun if isinstance(o, ev.Generate)]
    first = one(table.ask(3, 4, most=4, stop=(";",)), ev.Generate)
    assert first.request.prompt_ids == (3, 4) and first.request.sampling == Sampling(4, stop=("#", ";"))
    assert one(table.write(first.request.id, 5, 6, engine=first.engine), Tell).reply == Reply(
        (5, 6), "t", FinishReason.STOP, (-1.0, -1.0), (VersionSpan(V0, V0, 2),)
    )
    table.core.step(ev.EngineLoaded(first.engine, V1), 0.0)
    second = one(table.ask(3, 4, 5, 6, 8, 9), ev.Generate)
    assert second.engine == first.engine, "it has read most of this"
    assert second.request.id == RequestId(0, 0, 1) and second.request.written_ids == ()
    assert [first.request.seed, second.request.seed] == [completion_seed(0, 0, 0), completion_seed(0, 0, 0, 1)]
    assert len({first.request.seed, second.request.seed}) == 2, "no turn replays the noise of another"
    told = one(table.write(second.request.id, 7, engine=second.engine, version=V1), Tell).reply
    assert told == Reply((7,), "t", FinishReason.STOP, (-1.0,), (VersionSpan(V1, V1, 1),)), "of this turn alone"
    table.write(second.request.id, 7, engine=second.engine, version=V1)
    score = one(table.end(Reward(0.5)), ev.Score)
    spans = (VersionSpan(V0, V0, 2), VersionSpan(V1, V1, 1))
    turns = (Turn((3, 4), 2, FinishReason.STOP), Turn((3, 4, 5, 6, 8, 9), 1, FinishReason.STOP))
    assert score.completion == Completion(0, 0, (5, 6, 7), (-1.0,) * 3, spans, FinishReason.STOP, "a text", turns)
    assert score.verdict == Reward(0.5)
    kept = one(table.core.step(ev.Scored(0, 0, Reward(0.5)), 0.0), ev.Keep)
    assert kept.group.rollouts[0].completion == score.completion


def heard(outputs) -> list:
    return [(o.after, tuple(o.token_ids)) for o in outputs if isinstance(o, Stream)]


def test_who_wants_to_hear_of_a_turn_hears_of_its_tokens_as_they_come():
    """Also of those that are written elsewhere, or anew. The last ones come with the reply."""
    table = Table(max_staleness=1)
    quiet = one(table.ask(3, 4), ev.Generate)
    assert not heard(table.write(quiet.request.id, 5, finish=None, engine=quiet.engine))
    table.write(quiet.request.id, 5, engine=quiet.engine)
    asked = one(table.ask(3, 4, 5, 5, streams=True), ev.Generate)
    assert heard(table.write(asked.request.id, 6, 7, finish=None, engine=asked.engine)) == [(0, (6, 7))]
    again = one(table.core.step(ev.EngineDown(asked.engine, "gone"), 0.0), ev.Generate)
    assert again.engine != asked.engine and again.request.written_ids == (6, 7)
    assert heard(table.write(again.request.id, 8, finish=None, engine=again.engine)) == [(2, (8,))]
    last = table.write(again.request.id, 9, engine=again.engine)
    assert not heard(last) and one(last, Tell).reply.token_ids == (6, 7, 8, 9)


def test_what_was_heard_of_may_be_taken_back():
    table = Table(max_staleness=1)
    asked = one(table.ask(3, 4, streams=True), ev.Generate)
    table.write(asked.request.id, 6, 7, finish=None, engine=asked.engine)
    again = one(table.core.step(EngineProbed(asked.engine, Verdict.CONTRADICTED, "other weights"), 0.0), ev.Generate)
    assert again.request.written_ids == ()
    assert heard(table.write(again.request.id, 8, finish=None, engine=again.engine)) == [(0, (8,))]


def test_a_turn_that_was_cut_goes_on_elsewhere_with_its_own_tokens():
    table = Table(retries=1)
    first = one(table.ask(3, 4), ev.Generate)
    table.write(first.request.id, 5, 6, engine=first.engine)
    second = one(table.ask(3, 4, 5, 6, 9, most=3), ev.Generate)
    out = table.write(second.request.id, 7, engine=second.engine, finish=FinishReason.ERROR)
    again = one(out, ev.Generate)
    assert again.engine != second.engine and again.request.written_ids == (7,) and again.request.sampling.max_tokens == 2
    assert again.request.prompt_ids == (3, 4, 5, 6, 9) and again.request.seed == second.request.seed
    assert one(table.write(again.request.id, 8, engine=again.engine), Tell).reply.token_ids == (7, 8)
    third = one(table.ask(1, 2), ev.Generate)
    out = table.write(third.request.id, engine=third.engine, finish=FinishReason.ERROR)
    assert one(out, ev.Generate), "each turn may fail as often as any request"


def test_a_later_turn_goes_where_its_beginning_was_read():
    table = Table(group_size=2)
    first = one(table.ask(3, 4), ev.Generate)
    assert first.engine == "a"
    table.core.step(ev.EngineHeld("a"), 0.0)
    assert one(table.ask(3, 4, member=1), ev.Generate).engine == "b", "where the group was last"
    table.core.step(ev.EngineReleased("a"), 0.0)
    table.write(first.request.id, 5)
    assert one(table.ask(3, 4, 5, 6, 7, 8), ev.Generate).engine == "a"


def test_a_prompt_without_room_is_answered_with_no_tokens():
    table = Table(window=6)
    assert one(table.ask(*range(6)), Tell).reply == Reply((), "", FinishReason.CONTEXT)
    clamped = one(table.ask(1, 2, 3, 4), ev.Generate)
    assert clamped.request.sampling.max_tokens == 2
    told = one(table.write(clamped.request.id, 5, 6, engine=clamped.engine, finish=FinishReason.LENGTH), Tell)
    assert told.reply.finish is FinishReason.CONTEXT
    completion = one(table.end(), ev.Score).completion
    assert [(turn.tokens, turn.finish) for turn in completion.turns] == [(0, "context"), (2, "context")]


def test_turns_are_bounded():
    table = Table(turns=1)
    first = one(table.ask(3, 4), ev.Generate)
    table.write(first.request.id, 5, engine=first.engine)
    assert one(table.ask(3, 4, 5), Tell).reply == Reply((), "", FinishReason.LENGTH)
    completion = one(table.end(), ev.Score).completion
    assert completion.turns == (Turn((3, 4), 1, FinishReason.STOP), Turn((3, 4, 5), 0, FinishReason.LENGTH))
    assert completion.finish is FinishReason.LENGTH and table.ask(3, 4, 5) == [], "it is over"


def test_an_answer_that_is_given_up_is_cut_and_costs_its_member_alone():
    table = Table(group_size=2)
    first = one(table.ask(3, 4), ev.Generate)
    out = table.end(Reward(None, problem="KeyError"))
    assert one(out, ev.Abort).requests == (first.request.id,)
    drop = one(out, ev.Drop)
    assert (drop.member, drop.reason) == (0, "failed") and "KeyError" in drop.cause
    table.write(first.request.id, 5, engine=first.engine, finish=FinishReason.ABORT)
    assert one(table.ask(3, 4, member=1), ev.Generate).request.id == RequestId(0, 1)
    assert table.core.counts.tokens.dropped == {"failed": 1}


def test_what_waits_may_be_given_up_too():
    table = Table(group_size=2)
    for engine in ("a", "b"):
        table.core.step(ev.EngineHeld(engine), 0.0)
    assert table.ask(3, 4) == [] == table.ask(3, 4, member=1)
    assert one(table.end(), ev.Drop).member == 0
    assert one(table.core.step(ev.EngineReleased("a"), 0.0), ev.Generate).request.id == RequestId(0, 1)


def test_a_stop_drops_episodes_wherever_they_are():
    table = Table(group_size=2)
    table.ask(3, 4)
    out = table.core.step(ev.RolloutsCancelled(), 0.0)
    assert {drop.member for drop in out if isinstance(drop, ev.Drop)} == {0, 1, None}
    assert table.ask(3, 4, member=1) == [] == table.end()
