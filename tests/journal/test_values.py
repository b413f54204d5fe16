"""Values that come from elsewhere: read as they were written, or their step is left out whole."""

import itertools
import math
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from rollyard.errors import JournalError
from rollyard.events import Admit, EngineLoaded, Event, Instruction, Score, Scored
from rollyard.journal.check import Kind, check_journal
from rollyard.journal.codec import as_float
from rollyard.journal.reader import JournalReader
from rollyard.lives import Wrote
from rollyard.texts import clean
from rollyard.types import Prompt, RequestId, Reward, Segment, VersionSpan, WeightVersion
from tests.journal.test_recover import V0, V1, Life, complete, group_of, past, prompt, rollout, wrote
from tests.security.hostile import words

BROKEN: dict[str, tuple[Event | Instruction, ...]] = {
    "Admit of prompt 1: 'i' format": (Admit(Prompt(1, 1, (2**31,), "")),),
    "Score of prompt 1: float too large": (
        Admit(prompt(1)),
        Score(prompt(1), replace(rollout(1, 0).completion, logprobs=(-1e39, -1.0))),
        Scored(1, 0, Reward(1.0)),
    ),
    "Wrote of prompt 1: float too large": (
        Admit(prompt(1)),
        Wrote(Segment(RequestId(1, 0), (2,), (-1e39,), V1, V1)),
    ),
    "Score of prompt 1: int too large": (
        Admit(prompt(1)),
        Score(prompt(1), replace(rollout(1, 0).completion, spans=(VersionSpan(WeightVersion(2**63), V1, 2),))),
    ),
    "EngineLoaded: int too large": (*tuple(complete(group_of(1)))[:-1], EngineLoaded("engine-0", WeightVersion(2**63))),
}


@pytest.mark.parametrize("problem", BROKEN)
def test_a_step_that_no_column_can_hold_is_left_out_and_what_follows_is_written(tmp_path: Path, problem: str) -> None:
    life = Life(tmp_path / "journal.sqlite")
    life.step(*complete(group_of(0)))
    life.step(Admit(prompt(2)), wrote(2, 0, (5, 6)))
    life.step(*BROKEN[problem], wrote(2, 1, (7,)))
    life.step(*complete(group_of(3)))
    life.step(wrote(2, 0, (8,)), *tuple(complete(group_of(1)))[1:])  # its prompts stand as they did
    life.train(0, 0, 1)
    life.train(1, 3)
    with pytest.raises(JournalError, match=r"journal\.sqlite: a step cannot be written, .*") as caught:
        life.journal.commit_checkpoint(V1, "checkpoints/1", 0, {}).result(60)
    assert problem.partition(":")[0] in str(caught.value)
    life.journal.close()
    found = past(life.path)
    assert {group.id for group in found.recovered.groups} == {0, 3} and found.version == V0
    (begun,) = found.recovered.begun
    assert (begun.group, [(part.member, part.token_ids) for part in begun.partials]) == (2, [(0, (5, 6))])
    with JournalReader(life.path) as reader:
        assert list(reader.query("SELECT step FROM batches")) == [(1,)]


def test_whatever_floats_a_verdict_has_and_texts_it_is_read_as_it_was_written(tmp_path: Path) -> None:
    """Of the checksummed columns, those that others than this program fill."""
    numbers = st.floats() | st.integers(-(10**400), 10**400) | st.sampled_from((-0.0, 0.0, -0, 5e-324, 2.0**53, 1e308))
    name = itertools.count()

    @settings(max_examples=5, deadline=None)
    @example([(-0.0, {"a": -0.0}, ""), (10**400, {"a": -(10**400), "b": math.nan}, "\ud800"), (0, {"a": 0.0}, "")])
    @given(st.lists(st.tuples(numbers | st.none(), st.dictionaries(st.text(), numbers, max_size=2), words), max_size=20))
    def check(said: list[tuple[float | None, dict[str, float], str]]) -> None:
        life = Life(tmp_path / f"{next(name)}.sqlite")
        for id_, (value, parts, text) in enumerate(said):
            asked = Prompt(id_, id_, (1,), text, {"a": text, "number": value, "deep": parts})
            done = replace(rollout(id_, 0).completion, text=text, logprobs=(-0.0, -math.inf))
            life.step(Admit(asked), Score(asked, done), Scored(id_, 0, Reward(value, parts, text)))
        life.journal.close()
        found = {begun.group: begun for begun in past(life.path).recovered.begun}
        for id_, (value, parts, text) in enumerate(said):
            (read,) = found[id_].rollouts
            held = None if value is None else as_float(value)
            held = held if held is None or math.isfinite(held) else None
            assert (read.reward.value, read.completion.text) == (held, clean(text))
            assert read.reward.problem == clean(text) or held is None
            assert read.completion.logprobs == (-0.0, -math.inf)
            assert list(map(repr, read.reward.parts.values())) == [repr(as_float(each)) for each in parts.values()]
        assert not [each for each in check_journal(life.path, lambda folder: None).findings if each.kind is Kind.DAMAGED]

    check()
