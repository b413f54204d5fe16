"""What engine and trainer compute differently, apart from what the policy has become since a token was written."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import pytest

from rollyard.types import Group, VersionSpan, WeightVersion
from tests.right_values.chain import chain_folder
from tests.right_values.learning import completion, judged, trained

NOW, BEFORE, OTHER_LIFE = WeightVersion(2), WeightVersion(1), WeightVersion(2, 1)
LOGPROB = -math.log(2)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return chain_folder(tmp_path_factory.mktemp("chain"), {token: {4: 0.0, 5: 0.0} for token in (3, 4, 5)})


def group(*members: tuple[tuple[VersionSpan, float], ...]) -> Group:
    """Each member's tokens in spans, and by how much the engine's logprobs of a span differ from the policy's."""
    done = []
    for member, spans in enumerate(members):
        gaps = [gap for span, gap in spans for _ in range(span.tokens)]
        one = completion([4, 5] * len(gaps), member=member, logprobs=[LOGPROB + gap for gap in gaps for _ in range(2)])
        doubled = tuple(span._replace(tokens=2 * span.tokens) for span, _ in spans)
        done.append((replace(one, spans=doubled), float(member)))
    return judged(*done, prompt=(3,))


FRESH, OLD, OLD_CACHE, OLD_LIFE = (
    VersionSpan(*versions, 1) for versions in ((NOW, NOW), (BEFORE, BEFORE), (NOW, BEFORE), (OTHER_LIFE, OTHER_LIFE))
)


async def test_each_token_by_the_version_that_wrote_it(folder: Path) -> None:
    """One completion by two versions, one under the weights of now over an older cache, one of another life of the run."""
    batch = group(((OLD, 0.5), (FRESH, -0.01)), ((OLD_CACHE, 0.3),), ((OLD_LIFE, 0.1),), ((FRESH, 0.03),))
    step = await trained(folder, [batch], version=2)
    assert step.tokens == 10
    assert (step.fresh_gap_mean, step.fresh_gap_max) == pytest.approx((0.02, 0.03), abs=1e-5)
    assert (step.stale_gap_mean, step.stale_gap_max) == pytest.approx(((0.5 + 0.3 + 0.1) / 3, 0.5), abs=1e-5)
    assert (step.logprob_gap_mean, step.logprob_gap_max) == pytest.approx((0.94 / 5, 0.5), abs=1e-5)


async def test_without_one_of_both_there_is_no_number_for_it(folder: Path) -> None:
    step = await trained(folder, [group(((FRESH, 0.03),), ((FRESH, 0.0),))], version=2)
    assert step.fresh_gap_max == step.logprob_gap_max and (step.stale_gap_mean, step.stale_gap_max) == (None, None)
    step = await trained(folder, [group(((OLD, 0.03),), ((OLD, 0.0),))], version=2)
    assert step.stale_gap_max == step.logprob_gap_max and (step.fresh_gap_mean, step.fresh_gap_max) == (None, None)


@pytest.mark.parametrize("correction", ["none", "truncate"])
async def test_what_the_batch_itself_taught_is_no_gap_of_the_engine(folder: Path, correction: str) -> None:
    """Two optimizer steps at a rate that changes the policy visibly. Without a correction nobody knows what the second one's
    tokens had before: they are in neither."""
    written = [completion(tokens, member=k, logprobs=[LOGPROB] * 2) for k, tokens in enumerate(((4, 4), (5, 5)))]
    spans = (FRESH._replace(tokens=2),)
    members = [(replace(each, spans=spans), float(each.member)) for each in written]
    batch = [judged(*members, prompt=(3,), id_=id_) for id_ in range(2)]
    step = await trained(folder, batch, version=2, train={"minibatches": 2, "lr": 0.1, "correction": correction})
    assert step.tokens == 8 and step.fresh_gap_max is not None and step.fresh_gap_max < 1e-5
    assert step.stale_gap_mean is None
    assert (step.logprob_gap_max > 0.01) == (correction == "none")
