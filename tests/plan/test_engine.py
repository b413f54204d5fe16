"""The modelled engine against one that looks at every token: the same segments, in the same order, at the same times."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cache
from math import inf, isclose
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rollyard.errors import ConfigError, RequestRejected
from rollyard.plan.engine import EngineModel
from rollyard.plan.step import Line, StepCost
from rollyard.plan.tokens import Told
from rollyard.types import Activity, Request, RequestId, Sampling, Segment, WeightVersion
from tests.plan import slow_engine
from tests.plan.slow_engine import SlowEngine


@dataclass(frozen=True)
class Costs:
    """Lines that cross, so that both are the longer one at times."""

    floor_s: float = 0.003
    memory: float = 2e-5
    arithmetic: float = 1e-5
    prefill: float = 1e-4

    def step(self, running: int) -> StepCost:
        memory = Line(0.002, self.memory)
        return StepCost(self.floor_s, (memory, Line(0.0007 * running + 0.001, self.arithmetic), Line(0.0, 4e-5)))

    def prefill_s(self, tokens: int, pairs: int, beside: int = 1) -> float:
        return self.prefill * tokens + 1e-7 * pairs + 1e-3 / beside


@dataclass
class World:
    """Both engines, told the same."""

    model: EngineModel
    slow: SlowEngine
    seed: int
    prompts: int = 4
    group: int = 4
    told: list[slow_engine.Told] = field(default_factory=list)
    now: float = 0.0
    asked: int = 0
    live: list[RequestId] = field(default_factory=list)
    paused: bool = False

    def note(self, segments: list[Segment], at: float) -> None:
        for each in segments:
            self.told.append(slow_engine.Told(at, each.request, len(each.token_ids), each.version, each.oldest_kv, each.finish))
            if each.finish is not None:
                self.live.remove(each.request)

    def go_to(self, now: float) -> None:
        if now == self.now:
            return
        self.slow.begin(self.now)  # everything of the last moment was handed over
        while (at := self.model.next_s) <= now:
            self.note(self.model.advance(at), at)
        assert self.model.advance(now) == []
        self.slow.go_to(now)
        self.now = now


LIMITS = {"prompt": 40, "completion": 70, "window": 100}


def request(random: Random, number: int, groups: int) -> Request:
    group = random.randrange(groups)
    prompt = Random(group).randint(1, LIMITS["prompt"])
    written = random.choice([0, 0, 0, random.randint(1, 25)])
    most = random.randint(1, LIMITS["completion"])
    priority = random.choice([0, 0, 0, -1, 1])
    most = min(most, LIMITS["window"] - prompt - written)
    return Request(RequestId(group, number), (group,) * prompt, Sampling(most), number, (1,) * written, priority)


@cache
def length(seed: int, member: int) -> int:
    random = Random(seed * 1000 + member)
    return random.choice([1, random.randint(1, 12), random.randint(1, LIMITS["completion"])])


def world(random: Random, seed: int) -> World:
    page_tokens = random.choice([1, 3, 4, 8, 16])
    least = -(-(LIMITS["window"]) // page_tokens)
    slots = random.randint(1, 8)
    step_tokens = random.choice([slots, slots + 3, 32, 200])
    shared = {
        "pages": random.choice([least, least + random.randint(0, 10), least * 2, least * 20]),
        "page_tokens": page_tokens,
        "step_tokens": max(step_tokens, slots),
        "prefill_tokens": random.choice([1, 5, 16, 1000]),
        "window": random.choice([LIMITS["window"], LIMITS["window"] + 5]),
        "share": random.random() < 0.8,
        "tell_every": random.choice([0, 0, 1, 5]),
    }
    costs = Costs(*(random.choice([0.5, 1.0, 3.0]) * value for value in (0.003, 2e-5, 1e-5, 1e-4)))

    def whole(request: Request) -> int:
        return len(request.written_ids) + length(seed, request.id.member)

    model = EngineModel("engine-0", slots, costs, whole, **shared)
    model.load(WeightVersion(0))
    return World(model, SlowEngine(slots, costs, whole, **shared), seed)


def play(seed: int) -> World:
    """Random requests, aborts and pauses, until all has ended."""
    random = Random(seed)
    it = world(random, seed)
    groups = random.randint(1, 8)
    pace = random.choice([0.001, 0.02, 0.2])
    for _ in range(random.randint(1, 30)):
        it.go_to(it.now + random.choice([0.0, random.expovariate(1 / pace)]))
        kind = random.random()
        if it.paused and kind < 0.5:
            version = WeightVersion(it.asked)
            if random.random() < 0.7:
                it.model.load(version)
                it.slow.load(version)
            it.model.resume(it.now)
            it.slow.resume(it.now)
            it.paused = False
        elif it.paused or kind < 0.6:
            if not it.paused:
                wanted = [request(random, it.asked + i, groups) for i in range(random.choice([1, 1, 4]))]
                it.asked += len(wanted)
                it.live += [each.id for each in wanted]
                it.model.generate(wanted, it.now)
                it.slow.generate(wanted, it.now)
        elif kind < 0.8:
            cut = random.sample(it.live, min(len(it.live), random.randint(0, 3)))
            it.note(it.model.abort(cut, it.now), it.now)
            it.slow.abort(cut, it.now)
        else:
            every = random.random() < 0.3
            it.note(it.model.pause(it.now, every), it.now)
            it.slow.pause(it.now, every)
            it.paused = True
    if it.paused:
        it.model.resume(it.now)
        it.slow.resume(it.now)
    it.go_to(1e6)
    return it


def check(it: World) -> None:
    assert [(one.request, one.finish) for one in it.told] == [(one.request, one.finish) for one in it.slow.told]
    for fast, slow in zip(it.told, it.slow.told, strict=True):
        assert (fast.tokens, fast.version, fast.oldest_kv) == (slow.tokens, slow.version, slow.oldest_kv), (fast, slow)
        assert isclose(fast.at, slow.at, rel_tol=1e-9), (fast, slow)
    stats, counters = it.model.stats(), it.slow.scheduler.counters
    assert (stats.steps, stats.generated_tokens) == (it.slow.steps, it.slow.generated)
    assert (stats.prefilled_tokens, stats.shared_tokens, stats.recomputed_tokens, stats.preemptions) == (
        counters.prefilled,
        counters.shared,
        counters.recomputed,
        counters.preemptions,
    )
    assert not len(it.model) and it.model.next_s == inf


@settings(max_examples=300, deadline=None)
@given(st.integers(0, 2**32))
def test_an_engine_from_completion_to_completion_is_one_from_token_to_token(seed: int) -> None:
    check(play(seed))


LINES = st.tuples(st.floats(0, 0.1), st.floats(0, 1e-3)).map(lambda pair: Line(*pair))


@given(
    st.floats(1e-4, 0.1), st.lists(LINES, min_size=1, max_size=4), st.integers(0, 5000), st.integers(0, 40), st.integers(1, 300)
)
def test_many_steps_take_what_each_of_them_takes(floor_s: float, lines: list[Line], context: int, grow: int, steps: int) -> None:
    cost = StepCost(floor_s, tuple(lines))
    each = [cost.at(context + grow * step) for step in range(steps)]
    assert isclose(cost.total(context, grow, steps), sum(each), rel_tol=1e-12)
    for ended in {1, steps // 2, steps}:
        assert cost.fit(context, grow, sum(each[:ended]) * (1 + 1e-12), steps) == ended
        assert cost.fit(context, grow, sum(each[:ended]) * (1 - 1e-9), steps) == max(ended - 1, 0)


def test_a_step_goes_from_one_line_to_the_next() -> None:
    """Up to 100 tokens arithmetic takes longer, then memory: 1.0 + 1.0 + 1.2 + 1.4."""
    cost = StepCost(0.5, (Line(0.5, 0.0), Line(-1.5, 0.02)))
    assert cost.total(90, 10, 4) == pytest.approx(4.6)
    assert [cost.fit(90, 10, seconds, 9) for seconds in (0.9, 1.0, 2.1, 3.2, 4.7)] == [0, 1, 2, 3, 4]


@dataclass(frozen=True)
class Even:
    """A step takes a second, and a token of a prompt a tenth of one."""

    def step(self, running: int) -> StepCost:
        return StepCost(1.0, (Line(0.0, 0.0),))

    def prefill_s(self, tokens: int, pairs: int, beside: int = 1) -> float:
        return tokens / 10


def engine(told: list[tuple[Activity, float, float]] | None = None, **options: int) -> EngineModel:
    """Completions of 4 tokens."""
    options = {"pages": 100, "page_tokens": 4} | options

    def busy(activity: Activity, began: float, ended: float) -> None:
        if told is not None:
            told.append((activity, began, ended))

    found = EngineModel("engine-0", 2, Even(), lambda request: 4, busy=busy, **options)
    found.load(WeightVersion(0))
    return found


def asked(group: int, member: int, prompt: int = 10, most: int = 8, written: int = 0) -> Request:
    return Request(RequestId(group, member), Told(prompt), Sampling(most), 0, Told(written))


def ends(model: EngineModel) -> list[tuple[float, RequestId, int]]:
    """When each ends, and with how many tokens from here."""
    found = []
    while (at := model.next_s) < inf:
        found += [(at, each.request, len(each.token_ids)) for each in model.advance(at) if each.finish is not None]
    return found


def test_a_prompt_is_computed_once_for_its_group() -> None:
    """The first step computes the prompt, 2 s with both first tokens; the third member comes when they end, after 3 more."""
    model = engine()
    model.generate([asked(0, member) for member in range(3)], 0.0)
    assert ends(model) == [
        (pytest.approx(5.0), RequestId(0, 0), 4),
        (pytest.approx(5.0), RequestId(0, 1), 4),
        (pytest.approx(9.0), RequestId(0, 2), 4),
    ]
    stats = model.stats()
    assert (stats.prefilled_tokens, stats.shared_tokens, stats.recomputed_tokens, stats.prefill_s) == (10, 20, 0, 1.0)
    assert (stats.step_s, stats.busy_slot_s, stats.steps) == (9.0, 14.0, 8)


def test_what_was_written_elsewhere_is_read_again() -> None:
    """2 s for the prompt, 1.3 s for the three tokens that are there, which give the fourth."""
    model = engine()
    model.generate([asked(0, 0, written=3)], 0.0)
    assert ends(model) == [(pytest.approx(3.3), RequestId(0, 0), 1)]
    assert model.stats().recomputed_tokens == 12


def test_what_it_did_is_told() -> None:
    """Two requests with a rest between them; evaluation is another activity; standing still is none."""
    told: list[tuple[Activity, float, float]] = []
    model = engine(told)
    model.generate([asked(0, 0)], 1.0)
    ends(model)
    model.generate([asked(-1, 0)], 10.0)
    model.settle(12.5)
    assert told == [(Activity.GENERATE, 1.0, 6.0), (Activity.EVAL, 10.0, 12.0)]
    model.pause(13.5, False)
    model.resume(20.0)
    ends(model)
    assert told[2:] == [(Activity.EVAL, 12.0, 13.0), (Activity.EVAL, 13.0, 14.0), (Activity.EVAL, 20.0, 21.0)]


def test_a_request_that_can_never_run_is_refused() -> None:
    with pytest.raises(RequestRejected, match="no room for a token"):
        engine(window=10).generate([asked(0, 0)], 0.0)
    with pytest.raises(RequestRejected, match="it may need 5 pages of 4"):
        engine(pages=4).generate([asked(0, 0)], 0.0)
    with pytest.raises(ConfigError, match="2 sequences do not fit into a step of 1 tokens"):
        engine(step_tokens=1)
