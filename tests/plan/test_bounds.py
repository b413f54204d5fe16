"""What a choice takes at least: no way to order decode steps comes below it."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollyard.plan.bounds import Pace
from rollyard.plan.sample import Sample, sample_of
from rollyard.plan.step import Line, StepCost


@dataclass(frozen=True)
class Engine:
    """Costs by hand: a floor that grows with the sequences, memory and arithmetic."""

    floor_s: float = 3.0
    each_s: float = 0.1
    weights_s: float = 10.0
    cached_s: float = 0.01
    flops_s: float = 0.5
    kv_tokens: int = 1000

    def step(self, running: int) -> StepCost:
        return StepCost(
            self.floor_s + self.each_s * running,
            (Line(self.weights_s, self.cached_s), Line(self.flops_s * running, self.cached_s / 3)),
        )

    def prefill_s(self, tokens: int, pairs: int) -> float:
        return 0.001 * tokens


POSITIVE = st.floats(0, 20)
ENGINES = st.builds(Engine, POSITIVE, POSITIVE, POSITIVE, st.floats(0, 1), POSITIVE)
STEPS = st.lists(st.lists(st.integers(1, 500), min_size=1, max_size=12), min_size=1, max_size=20)


@given(ENGINES, STEPS)
def test_no_steps_write_so_many_tokens_in_less(engine: Engine, steps: list[list[int]]) -> None:
    """Steps of up to 12 sequences, each of which attends to some tokens."""
    taken = sum(engine.step(len(contexts)).at(sum(contexts)) for contexts in steps)
    tokens, context = sum(map(len, steps)), sum(map(sum, steps))
    assert Pace(engine).work_s(tokens, context, slots=12) <= taken * (1 + 1e-12)  # type: ignore[arg-type]


@given(ENGINES, st.integers(1, 50), st.integers(0, 100), st.integers(1, 12))
def test_no_company_makes_a_completion_quicker(engine: Engine, tokens: int, prompt: int, beside: int) -> None:
    taken = sum(engine.step(beside).at(beside * (prompt + step)) for step in range(1, tokens))
    assert Pace(engine).alone_s(prompt, tokens) <= taken * (1 + 1e-12)  # type: ignore[arg-type]


def test_work_by_hand() -> None:
    """At most 4 run: a token has a quarter of the weights and of the floor, its share of the rest, and its context."""
    pace = Pace(Engine())  # type: ignore[arg-type]
    assert pace.work_s(100, 2000, slots=4) == pytest.approx(100 * ((3.0 + 10.0) / 4 + 0.1) + 2000 * 0.01)
    assert pace.alone_s(5, 3) == pytest.approx(2 * (3.1 + 10.0) + (6 + 7) * 0.01)


def sample() -> Sample:
    lengths = {0: (1, 3), 1: (2, 2), 2: (4, 1), 3: (8, 8)}
    return sample_of(lambda group, member: lengths[group][member], lambda group: 10 + group, 4, 2, 2)


def test_a_sample_by_hand() -> None:
    found = sample()
    assert found.decoded.tolist() == [2, 2, 3, 14]
    assert found.context.tolist() == [11 + 12, 12 + 12, 13 + 14 + 15, 2 * (7 * 13 + 28)]
    assert found.trained.tolist() == [10 + 2, 11 + 2, 12 + 3, 13 + 14]
    assert found.pairs.tolist() == [55 + 23, 66 + 24, 78 + 42, 91 + 238]
    assert replace(found, times=2).trained.tolist() == [20 + 2, 22 + 2, 24 + 3, 26 + 14]
    assert found.longest.tolist() == [3, 2, 4, 8]
    assert found.batch_longest == (3 + 8) / 2
    assert found.mean == 29 / 8


def test_what_is_masked_is_not_trained_on() -> None:
    """Of prompts of 10 and 11 tokens: a completion of 3 of the first, none of the second."""
    found = replace(sample(), left=np.array([[0, 1], [0, 0], [1, 1], [1, 1]], float))
    assert found.decoded.tolist() == sample().decoded.tolist()
    assert found.trained.tolist() == [10 + 2, 0, 12 + 3, 13 + 14]
    assert found.pairs.tolist() == [55 + 11 + 12, 0, 78 + 42, 91 + 238]
    assert replace(found, times=2).trained.tolist() == [10 + 2, 0, 24 + 3, 26 + 14]


def test_how_many_still_write() -> None:
    """Of all that are being written at some moment, as many are left after x tokens as the area beyond x says."""
    rng = np.random.default_rng(0)
    lengths = np.minimum(np.ceil(rng.lognormal(3, 0.7, (64, 8))), 200.0)
    found = Sample(np.full(64, 5.0), lengths, 8)
    for place, share in zip(found.places, found.writing, strict=True):
        assert share == pytest.approx(np.mean(lengths > place))
    for place, share in zip(found.places, found.remaining, strict=True):
        exact = np.sum(np.maximum(lengths - place, 0)) / np.sum(lengths)
        assert share == pytest.approx(exact, abs=0.03)
