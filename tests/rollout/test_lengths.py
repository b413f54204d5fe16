"""Expected lengths, against numbers by hand and an integral; who goes first, and who moves, by them."""

from __future__ import annotations

import math
import random

import pytest

from rollyard import events as ev
from rollyard.rollout.core import RolloutCore
from rollyard.rollout.lengths import Lengths
from rollyard.rollout.policy import RolloutPolicy
from rollyard.rollout.state import GroupState, Member, Phase
from rollyard.types import Asking, FinishReason, Prompt, RequestId, Sampling, Segment, WeightVersion

V0 = WeightVersion(0)


def group(row: int, *written: int, size: int = 4) -> GroupState:
    """A group some of whose members run and have written so much."""
    members = [Member(row, index) for index in range(size)]
    for member, tokens in zip(members, written, strict=False):
        member.phase, member.tokens = Phase.RUNNING, tokens
    return GroupState(Prompt(row, row, (1, 2), ""), members, max_tokens=10_000, clamped=False)


def learnt(between: float = 0.65, sigma: float = 1.0, rows: int = 400) -> tuple[Lengths, dict[int, float]]:
    """What was seen of many rows, and the mean log of each."""
    found, drawn, means = Lengths(), random.Random(0), {}
    for row in range(rows):
        means[row] = math.log(64) + sigma * math.sqrt(between) * drawn.gauss(0, 1)
        for _ in range(4):
            found.finished(row, round(math.exp(means[row] + sigma * math.sqrt(1 - between) * drawn.gauss(0, 1))) or 1)
    return found, means


def test_a_prompt_that_is_not_known_is_as_long_as_the_mean_of_all():
    found, _ = learnt()
    assert found.expected(group(10**6)) == pytest.approx(64 * math.exp(0.5), rel=0.1)


def test_a_prompt_that_is_known_is_shrunk_towards_it():
    """Four of variance 0.35 say 4 * 0.65 / (4 * 0.65 + 0.35) = 88 % of it."""
    found, _ = learnt()
    for _ in range(4):
        found.finished(10**6, 640)
    shrunk = math.log(64) + 0.88 * math.log(10)
    rest = 0.35 + 0.65 * 0.12
    assert found.expected(group(10**6)) == pytest.approx(math.exp(shrunk + rest / 2), rel=0.1)


def test_an_episode_may_be_as_long_as_all_its_turns():
    found, _ = learnt()
    for turns, most in ((1, 20), (2, 40)):
        short = group(10**6)
        short.max_tokens, short.turns = 20, turns
        assert found.expected(short) == most
    member = group(10**6, 30).members[0]
    member.earlier, member.asking = 25, Asking((1, 2), 12)
    assert found.remaining(group(10**6), member) == 12 - 5, "what its turn may still have"


def test_estimates_follow_the_true_means():
    found, means = learnt()
    order = sorted(means, key=lambda row: found.expected(group(row)))
    place = {row: at for at, row in enumerate(sorted(means, key=lambda row: means[row]))}
    gaps = [abs(place[row] - at) for at, row in enumerate(order)]
    assert sum(gaps) / len(gaps) < len(order) / 10  # by chance it would be a third


def test_a_member_that_runs_for_long_makes_its_group_long():
    found, _ = learnt()
    assert found.expected(group(10**6, 500)) > 2 * found.expected(group(10**6)) > 2 * found.expected(group(10**6, 1)) * 0.9


def test_what_remains_of_a_member_is_the_mean_beyond_what_it_wrote():
    found, _ = learnt()
    one = group(10**6)
    one.members[0].phase, one.members[0].tokens = Phase.SCORING, 100  # it says nothing of the prompt here
    mean, variance = found._of(one)
    spread = math.sqrt(variance)
    logs = [math.log(100) + 0.001 * (n + 0.5) for n in range(12_000)]
    density = [math.exp(-(((log - mean) / spread) ** 2) / 2) for log in logs]
    integral = sum(math.exp(log) * each for log, each in zip(logs, density, strict=True)) / sum(density)
    assert found.remaining(one, one.members[0]) == pytest.approx(integral - 100, rel=0.01)


def test_without_anything_seen_there_are_numbers_all_the_same():
    found = Lengths()
    for one in (group(0), group(0, 5), group(0, 9_999)):
        assert 0 < found.expected(one) <= 10_000 and found.remaining(one, one.members[0]) >= 0


def core(slots: dict[str, int], **changes: object) -> RolloutCore:
    values = dict(group_size=4, groups_per_batch=2, batches=5, sampling=Sampling(1000), window=2000, min_scored=1)
    made = RolloutCore(RolloutPolicy(**(values | changes)))  # type: ignore[arg-type]
    made.step(ev.GenerationOpened(), 0.0)
    for engine, count in slots.items():
        made.step(ev.EngineUp(engine, count, V0), 0.0)
    return made


def prompts(count: int) -> ev.PromptsOffered:
    return ev.PromptsOffered(tuple(Prompt(n, n, (1, 2), "") for n in range(count)), exhausted=False)


def wrote(engine: str, request: RequestId, tokens: int, finish: FinishReason | None = None) -> ev.SegmentArrived:
    return ev.SegmentArrived(engine, Segment(request, (5,) * tokens, (-1.0,) * tokens, V0, V0, finish))


def asked(outputs) -> list[RequestId]:
    return [output.request.id for output in outputs if isinstance(output, ev.Generate)]


def test_one_of_each_prompt_begins_and_then_the_longest():
    """Four slots: both prompts begin; the first one's member ends at once, so the other prompt is the longer one."""
    made = core({"e": 2}, order="longest")
    first = asked(made.step(prompts(2), 0.0))
    assert [request[:2] for request in first] == [(0, 0), (1, 0)]
    made.step(wrote("e", first[1], 300), 0.0)
    assert [request[:2] for request in asked(made.step(wrote("e", first[0], 3, FinishReason.STOP), 0.0))] == [(1, 1)]


def test_the_longest_goes_first_only_among_those_due_together():
    made = core({"e": 1}, order="longest", max_staleness=1, groups_per_batch=1)
    first = asked(made.step(prompts(2), 0.0))
    assert [request[:2] for request in first] == [(0, 0)]
    following = asked(made.step(wrote("e", first[0], 1, FinishReason.STOP), 0.0))
    assert [request[:2] for request in following] == [(0, 1)]  # prompt 1 may be longer, and is due later


def test_the_one_with_the_most_left_moves_to_an_idle_engine_with_its_tokens():
    made = core({"e0": 4}, moves=1, groups_per_batch=1)
    running = asked(made.step(prompts(1), 0.0))
    for request, tokens in zip(running, (40, 80, 20, 10), strict=True):
        made.step(wrote("e0", request, tokens), 0.0)
    moves = [output for output in made.step(ev.EngineUp("e1", 4, V0), 0.0) if isinstance(output, ev.Move)]
    assert [(move.engine, move.to) for move in moves] == [("e0", "e1")]  # three and one: another would not make it more even
    again = [o for o in made.step(wrote("e0", moves[0].request, 1, FinishReason.ABORT), 0.0) if isinstance(o, ev.Generate)]
    written = {0: 40, 1: 80, 2: 20, 3: 10}[moves[0].request.member]
    assert [(o.engine, len(o.request.written_ids)) for o in again] == [("e1", written + 1)]
    ended = [made.step(wrote("e1", again[0].request.id, 1, FinishReason.STOP), 0.0)]
    others = [request for request in running if request.member != moves[0].request.member]
    moved = [o.request.member for out in ended for o in out if isinstance(o, ev.Move)]
    assert moved and moved[0] in [request.member for request in others]  # e1 is idle again: another one moves, once
