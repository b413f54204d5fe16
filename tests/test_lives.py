"""Whole runs that are killed and resumed, over plain lists of events: under every placement each prompt leaves once."""

from __future__ import annotations

from copy import deepcopy
from dataclasses import asdict

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rollyard import events as ev
from rollyard.rollout.recovery import counts_before
from rollyard.rollout.state import Counts
from tests.conducting import Answers, conductor
from tests.records import Records

PLACEMENTS = st.sampled_from(("colocated", "separate", "async", "swap"))
ENDLESS = 50_000


class Life(Answers):
    """One life of a run, with the records that all its lives have in common.

    Args:
        rules: of `conducting.conductor`.
    """

    def __init__(self, rules: dict, prompts: int, records: Records, seed: int, **named) -> None:
        past, self.records, self.limit = records.past(), records, rules.get("limit", 0)
        self.past, self.before = past, counts_before(past.counters or asdict(Counts()), past.dropped, past.members_dropped)
        run = conductor(**rules, version=past.version, counts=deepcopy(self.before))
        named |= dict(done=frozenset(past.done), version=past.version, life=records.life)
        super().__init__(run, rules["engines"], prompts, seed, **named)
        self.slow = True
        self.todo.insert(0, past.recovered)
        self.take(0)

    def happens(self, event: ev.Event) -> None:
        if isinstance(event, ev.Checkpointed):
            self.records.checkpoint(event.version, deepcopy(asdict(self.conductor.counts)))

    def noted(self, event: ev.Event, said: list[ev.Instruction]) -> None:
        self.records.step(event, said)
        counts, tokens = self.conductor.counts, self.conductor.counts.tokens
        assert tokens.generated == tokens.trained + sum(tokens.dropped.values()) + self.conductor.live_tokens
        for train in (each for each in said if isinstance(each, ev.Train)):
            spans = [span for group in train.groups for each in group.rollouts for span in each.completion.spans]
            stored = train.step < self.past.version.step + len(self.past.recovered.batches)
            oldest = train.step - (2 if stored else self.limit)  # a life with another limit may have taken it
            assert all(oldest <= span.version.step <= train.step for span in spans)
        assert counts.admitted >= counts.trained + sum(counts.dropped.values()) + self.conductor.live


@settings(max_examples=150, deadline=None)
@given(
    placements=st.one_of(st.tuples(PLACEMENTS), st.tuples(PLACEMENTS), st.tuples(PLACEMENTS, PLACEMENTS)),
    steps=st.integers(1, 8),
    engines=st.integers(1, 3),
    batch=st.integers(1, 3),
    prompts=st.integers(0, 30),
    evaluate=st.booleans(),
    save=st.sampled_from((0, 0, 2, 3)),
    limit=st.integers(0, 2),
    rollover=st.sampled_from(list(ev.Rollover)),
    prove=st.booleans(),
    broken=st.frozensets(st.integers(0, 19), max_size=3),
    spare=st.sampled_from((0, 0, 1, 3)),
    moves=st.integers(0, 1),
    flat=st.frozensets(st.integers(0, 19), max_size=3),
    refills=st.sampled_from((0, 0, 1, 99)),
    turns=st.sampled_from((0, 0, 0, 2)),
    deaths=st.sampled_from((0, 0, 2)),
    kills=st.lists(st.integers(0, 150), min_size=1, max_size=3),
    seed=st.integers(0, 2**32),
)
def test_a_run_that_is_killed_and_resumed_trains_each_prompt_once(
    placements, steps, engines, batch, prompts, evaluate, save, limit, rollover, prove, broken, spare, moves, flat, refills,
    turns, deaths, kills, seed,
):  # fmt: skip
    rules = dict(steps=steps, batch=batch, evaluate=evaluate, save=save, rollover=rollover, prove=prove, moves=moves)
    rules |= dict(refills=refills, turns=turns, restarts=9)
    records = Records(2)
    for number, events in enumerate((*kills, ENDLESS)):
        placement = placements[number % len(placements)]
        own = dict(placement=placement, spare=spare if limit and placement in ("async", "colocated") else 0)
        own["limit"] = {"async": limit, "swap": 1, "colocated": limit if own["spare"] else 0}.get(placement, 0)
        own["engines"] = {"swap": 2}.get(placement, engines)
        lost = deaths if placement in ("separate", "async") else 0
        life = Life(rules | own, prompts, records, seed + number, broken=broken, flat=flat, deaths=lost)
        life.run(events)
        records.kill(life.random)
    end = life.said[-1]
    assert isinstance(end, ev.Finish) and (not end.failed or (deaths and "no engine is left" in end.cause))
    if not end.failed:
        check_the_end(life, steps, prompts)


def check_the_end(life: Life, steps: int, prompts: int) -> None:
    counts, batches = life.conductor.counts, [*map(list, life.past.trained), *life.batches]
    trained = [id_ for each in batches for id_ in each]
    dropped = {id_ for id_, why in life.past.done.items() if why}
    dropped |= {i.group for i in life.said if isinstance(i, ev.Drop) and i.member is None}
    assert len(trained) == len(set(trained)) == counts.trained and not dropped & set(trained)
    assert len(dropped) == sum(counts.dropped.values()) and counts.admitted == len(trained) + len(dropped)
    assert counts.members_admitted == 2 * counts.admitted
    assert counts.members_admitted == counts.members_trained + sum(counts.members_dropped.values())
    assert life.version == len(batches) and life.conductor.live == 0
    assert life.version == steps or set(trained) | dropped == set(range(prompts))


def stored(batches: int, placement: str, **rules) -> tuple[Life, list[ev.Instruction]]:
    """A run that has taken so many batches of two groups, and saved none, in its next life; what that says in the end."""
    rules = dict(steps=batches + 2, engines={"swap": 2}.get(placement, 1), batch=2, evaluate=False, placement=placement, **rules)
    records = Records(2)
    first = Life(rules | {"save": 0}, 100, records, seed=1)
    while len(records.batches()) < batches:
        first.run(1)
    records.life += 1
    return (life := Life(rules, 100, records, seed=2)), life.said


@pytest.mark.parametrize("placement", ["colocated", "separate"])
def test_nothing_is_generated_for_batches_of_an_earlier_life(placement):
    """Where generation and training take turns, it would be cut at once."""
    rules = dict(spare=4, limit=2) if placement == "colocated" else {}
    life, said = stored(3, placement, **rules)
    life.run()
    told = [type(i).__name__ for i in said if isinstance(i, (ev.Generate, ev.Train))]
    assert told[:4] == ["Train", "Train", "Train", "Generate"] and told.count("Train") == 5


def test_async_generates_beside_batches_of_an_earlier_life():
    life, said = stored(3, "async", limit=4)
    life.run()
    told = [type(i).__name__ for i in said if isinstance(i, (ev.Generate, ev.Train))]
    assert told.index("Generate") < [at for at, name in enumerate(told) if name == "Train"][2]


def test_halves_trade_roles_for_batches_of_an_earlier_life():
    """A half trains again no sooner than it has come to the version that it trained before."""
    for seed in range(30):
        life, said = stored(3, "swap", limit=1)
        life.random.seed(seed)
        life.run()
        assert [i.half for i in said if isinstance(i, ev.Train)] == ["e1", "e0", "e1", "e0", "e1"]
        groups = [group for i in said if isinstance(i, ev.Train) for group in i.groups]
        assert all(len(each.completion.spans) == 1 for group in groups for each in group.rollouts)


def test_a_stop_while_batches_of_an_earlier_life_wait_loses_none_of_them():
    life, said = stored(4, "async", limit=1, save=1)
    waiting = [[group.id for group in batch] for batch in life.past.recovered.batches]
    while not [i for i in said if isinstance(i, ev.Train)]:
        life.run(1)
    life.todo.insert(0, ev.StopRequested("Ctrl-C"))
    life.take(0)
    life.run()
    assert said[-1] == ev.Finish("Ctrl-C", stopped=True) and life.version == 1
    life.records.life += 1
    after = life.records.past()
    assert after.version.step == 1 and [[group.id for group in batch] for batch in after.recovered.batches] == waiting[1:]
