"""Tokens of a simulation: as a tuple in all that is asked of them, and never looked at between an engine and a batch."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from rollyard import events as ev
from rollyard.plan.tokens import Told
from rollyard.rollout.core import RolloutCore
from rollyard.rollout.policy import RolloutPolicy
from rollyard.rollout.state import joined
from rollyard.types import FinishReason, Prompt, RequestId, Reward, Sampling, Segment, WeightVersion
from rollyard.watch.report import ReportBuilder
from tests.watch.test_report import STEP

V0 = WeightVersion(0)


def test_told_is_as_a_tuple_of_zeros():
    for tokens in range(4):
        told, zeros = Told(tokens), (0,) * tokens
        assert tuple(told) == zeros and len(told) == len(zeros) and bool(told) == bool(zeros)
        for cut in (slice(None), slice(1, None), slice(-1), slice(0, 99), slice(3, 1), slice(None, None, -1)):
            assert tuple(told[cut]) == zeros[cut] and isinstance(told[cut], Told)
        for index in range(-4, 4):
            if -tokens <= index < tokens:
                assert told[index] == 0
            else:
                with pytest.raises(IndexError):
                    told[index]
        assert told + Told(2) == Told(tokens + 2) != told and hash(told) == hash(Told(tokens))
        assert told != zeros
    assert repr(Told(2)) == "Told(2)"


def test_what_is_alone_is_not_copied():
    one, other = (1, 2), (3,)
    assert joined([one]) is one and joined([one, other]) == (1, 2, 3) and joined([]) == ()
    told = Told(5)
    assert joined([told]) is told and joined([told, Told(2), Told(1)]) == Told(8)


class Untouched(Told):
    """Breaks whoever looks at one token."""

    __slots__ = ()

    def __getitem__(self, index: Any) -> Any:
        assert isinstance(index, slice)
        return Untouched(len(super().__getitem__(index)))

    def __iter__(self) -> Any:
        raise AssertionError("somebody looks at each token")

    def __add__(self, other: Told) -> Told:
        return Untouched(len(self) + len(other))


def test_nobody_looks_at_tokens_between_an_engine_and_a_batch():
    """A member in three parts, cut and failed between; one in one, which arrives as it is; a report of all of it."""
    core = RolloutCore(RolloutPolicy(group_size=2, groups_per_batch=1, batches=1, sampling=Sampling(1000), window=2000))
    report = ReportBuilder(name="s", model="m", placement="async", engine="e", transport="t")

    def send(event: ev.Event | ev.Signal) -> list[Any]:
        out = core.step(event, 0.0)
        for each in (event, *out):
            if isinstance(each, (ev.Event, ev.Instruction)):
                report.record(each)
        return out

    def wrote(member: int, attempt: int, tokens: int, finish: FinishReason | None) -> list[Any]:
        segment = Segment(RequestId(0, member, attempt), Untouched(tokens), Untouched(tokens), V0, V0, finish, "broken")
        return send(ev.SegmentArrived("e", segment))

    send(ev.GenerationOpened())
    send(ev.EngineUp("e", 4, V0))
    send(ev.BatchWanted())
    send(ev.PromptsOffered((Prompt(0, 0, Untouched(100), ""),), exhausted=True))
    whole = wrote(0, 0, 700, FinishReason.STOP)
    (score,) = [each for each in whole if isinstance(each, ev.Score)]
    assert len(score.completion.token_ids) == len(score.completion.logprobs) == 700
    wrote(1, 0, 10, None)
    (again,) = [each.request for each in wrote(1, 0, 5, FinishReason.ABORT) if isinstance(each, ev.Generate)]
    assert len(again.written_ids) == 15 and again.sampling.max_tokens == 985
    (again,) = [each.request for each in wrote(1, 1, 5, FinishReason.ERROR) if isinstance(each, ev.Generate)]
    assert len(again.written_ids) == 20
    wrote(1, 2, 980, FinishReason.LENGTH)
    send(ev.Scored(0, 0, Reward(1.0)))
    (batch,) = [each for each in send(ev.Scored(0, 1, Reward(0.0))) if isinstance(each, ev.BatchTaken)]
    assert [len(each.completion.token_ids) for each in batch.groups[0].rollouts] == [700, 1000]
    report.add_step(replace(STEP, groups=batch.groups))
    assert report.generation_tokens == core.live_tokens == 1700
