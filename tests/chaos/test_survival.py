"""What came of a fault, by hand."""

from __future__ import annotations

from rollyard import events as ev
from rollyard.chaos.survival import Record, Survival, Survived, Tally
from rollyard.lives import Reuse
from rollyard.types import (
    Begun,
    Completion,
    DropReason,
    FinishReason,
    Group,
    Partial,
    Prompt,
    Request,
    RequestId,
    Reward,
    Rollout,
    Sampling,
    Segment,
    VersionSpan,
    WeightVersion,
)

V = WeightVersion(0)
PROMPT = Prompt(0, 0, (1, 2), "x")


def generate(member: int, written: int = 0, engine: str = "a", group: int = 0) -> ev.Generate:
    return ev.Generate(engine, Request(RequestId(group, member), (1, 2), Sampling(9), 0, (5,) * written))


def wrote(member: int, tokens: int, finish: FinishReason | None = None, engine: str = "a", group: int = 0) -> ev.SegmentArrived:
    ids = (5,) * tokens
    return ev.SegmentArrived(engine, Segment(RequestId(group, member), ids, (-1.0,) * tokens, V, V, finish))


def completion(member: int, tokens: int, group: int = 0) -> Completion:
    spans = (VersionSpan(V, V, tokens),)
    return Completion(group, member, (5,) * tokens, (-1.0,) * tokens, spans, FinishReason.STOP, "x")


def hear(survival: Survival, *entries: ev.Event | ev.Instruction, now: float = 0.0, life: int = 0) -> None:
    for entry in entries:
        survival.heard(entry, now, life)


def strike(survival: Survival, what: str, process: str, kind: str, engine: str = "", now: float = 10.0) -> Record:
    return survival.struck(Survived(1, what, process, 0, now), kind, engine, now)


def test_a_run_that_stands_still_goes_on_with_all_that_it_had() -> None:
    survival = Survival()
    hear(survival, generate(0), generate(1, engine="b"), wrote(0, 3), wrote(1, 4, engine="b"))
    record = strike(survival, "stall", "run", "run")
    assert record.survived.met == Tally(2, 7) and not record.survived.outcome
    hear(survival, wrote(0, 1), now=11.0)  # it had been heard before
    assert not record.survived.outcome
    record.lasts = False
    hear(survival, wrote(0, 1), now=15.0)
    found = record.survived
    assert (found.outcome, found.delay_s, found.recovered) == ("it went on", 5.0, Tally(2, 7))
    assert found.lost == found.repeated == Tally()


def test_an_engine_that_is_killed_and_started_again() -> None:
    """Of four members that it writes, one goes on, one has lost tokens, one is dropped; one is another engine's."""
    survival = Survival()
    hear(survival, generate(0), generate(1), generate(2), generate(3, engine="b"), wrote(0, 3), wrote(1, 4), wrote(2, 5))
    hear(survival, wrote(3, 6, engine="b"))
    record = strike(survival, "kill", "engine a", "engine", "a")
    assert record.survived.met == Tally(3, 12)
    hear(survival, ev.EngineResumed("a"), now=10.5)  # told before it died
    hear(survival, ev.EngineDown("a", "killed"), ev.Restart("a"), generate(0, 3, "b"), generate(1, 1, "b"), now=11.0)
    hear(survival, ev.Drop(0, 2, DropReason.FAILED), ev.EngineUp("a", 4, None), ev.EngineResumed("a"), now=14.0)
    assert record.survived == Survived(
        fault=1,
        what="kill",
        process="engine a",
        life=0,
        at_s=10.0,
        met=Tally(3, 12),
        lost=Tally(1, 5),
        repeated=Tally(1, 3),
        recovered=Tally(1, 3),
        delay_s=4.0,
        outcome="started again",
    )


def test_an_engine_that_is_not_started_again() -> None:
    survival = Survival()
    record = strike(survival, "kill", "a", "engine", "a")
    hear(survival, ev.EngineDown("a", "killed"), ev.Retire("a", lost=True), now=11.0)
    assert (record.survived.outcome, record.survived.delay_s) == ("the run went on without it", None)


def test_an_engine_that_stood_still() -> None:
    """What it wrote before and after is one completion."""
    survival = Survival()
    hear(survival, generate(0), wrote(0, 3))
    record = strike(survival, "stall", "a", "engine", "a")
    hear(survival, wrote(0, 1), now=10.1)  # on its way already
    record.lasts = False
    hear(survival, wrote(0, 2, FinishReason.STOP), now=15.0)
    assert (record.survived.recovered, record.survived.delay_s, record.survived.outcome) == (Tally(1, 5), 5.0, "it went on")


def test_a_judge_that_is_killed() -> None:
    survival = Survival()
    hear(survival, ev.Score(PROMPT, completion(0, 3)), ev.Score(PROMPT, completion(1, 4)))
    record = strike(survival, "kill", "reward worker 0", "reward")
    hear(survival, ev.Scored(0, 0, Reward(None)), now=11.0)
    assert record.survived.outcome == ""
    hear(survival, ev.Scored(0, 1, Reward(1.0)), now=12.0)
    assert (record.survived.lost, record.survived.recovered) == (Tally(1, 3), Tally(1, 4))
    assert (record.survived.delay_s, record.survived.outcome) == (2.0, "it went on")


def test_a_run_that_is_killed_and_resumed() -> None:
    """Two steps were trained since its checkpoint. Of five members one was judged, one written, and three lost tokens."""
    survival = Survival()
    hear(survival, generate(0), wrote(0, 3, FinishReason.STOP), ev.Score(PROMPT, completion(0, 3)), ev.Scored(0, 0, Reward(1.0)))
    hear(survival, generate(1), wrote(1, 4), generate(2), wrote(2, 5), generate(3), wrote(3, 2), generate(4), wrote(4, 1))
    hear(survival, ev.BatchTrained(WeightVersion(3)))
    record = strike(survival, "kill", "run", "run")
    assert record.survived.met == Tally(5, 15)

    later = Survival([record])
    later.begin(1)
    begun = Begun(0, (Rollout(completion(0, 3), Reward(1.0)),), (), (_partial(1, 4), _partial(2, 3)))
    hear(later, Reuse(begun), now=60.0, life=1)
    hear(later, generate(3), now=61.0, life=1)
    hear(later, ev.Drop(0, 4, DropReason.STOPPED), now=62.0, life=1)  # it is asked again
    survived = record.survived
    assert (survived.recovered, survived.repeated, survived.lost) == (Tally(2, 7), Tally(2, 4), Tally())
    assert (survived.delay_s, survived.outcome) == (51.0, "resumed after step 1, 2 trained again")


def test_a_trainer_that_is_killed_ends_a_life_and_the_next_one_goes_on() -> None:
    survival = Survival()
    record = strike(survival, "kill", "trainer-0", "trainer")
    hear(survival, ev.Finish("trainer-0 is lost", failed=True), now=11.0)
    assert record.survived.outcome == "the run ended: trainer-0 is lost" and record.survived.delay_s is None
    later = Survival([record])
    later.begin(0)
    group = Group(PROMPT, (Rollout(completion(0, 3), Reward(1.0)),))
    hear(later, ev.Keep(group, recovered=True), ev.Train(0, (group,)), now=20.0, life=1)
    assert (record.survived.outcome, record.survived.delay_s) == ("resumed after step 0, 0 trained again", 10.0)


def _partial(member: int, tokens: int) -> Partial:
    return Partial(member, (5,) * tokens, (-1.0,) * tokens, (VersionSpan(V, V, tokens),))


def test_a_half_that_is_killed_is_resumed_with_the_run_whatever_is_heard_of_its_engine_first() -> None:
    survival = Survival()
    record = strike(survival, "kill", "half-1", "trainer", "b")
    hear(survival, ev.EngineDown("b", "killed"), ev.Finish("one half is lost", failed=True))
    survival.begin(0)
    hear(survival, ev.EngineResumed("b"), generate(0, engine="b"), now=20.0, life=1)
    assert record.survived.outcome == "resumed after step 0, 0 trained again"
