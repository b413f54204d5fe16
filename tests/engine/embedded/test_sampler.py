"""Drawing tokens: exact distributions, noise that belongs to (seed, index), never a token of probability 0."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rollyard.engine.embedded.sampler import BLOCK, draw, inverse_cdf, uniform
from rollyard.types import Sampling


def test_splitmix64_is_the_published_generator() -> None:
    """The first numbers of SplitMix64 from seed 1234567, as in the reference tests of several languages."""
    from rollyard.engine.embedded.sampler import GAMMA, _mix

    state = np.array([(1234567 + GAMMA * step) % 2**64 for step in range(1, 4)], np.uint64)
    assert _mix(state).tolist() == [6457827717110365317, 3203168211198807973, 9817491932198370423]


def test_noise_is_uniform_and_unrelated_along_seeds_and_indices() -> None:
    noise = uniform(np.repeat(np.arange(300), 300).tolist(), np.tile(np.arange(300), 300).tolist()).reshape(300, 300)
    assert noise.min() >= 0 and noise.max() < 1
    counts = np.histogram(noise, bins=50, range=(0, 1))[0]
    assert ((counts - 1800) ** 2 / 1800).sum() < 49 + 5 * np.sqrt(98)
    for a, b in ((noise[1:], noise[:-1]), (noise[:, 1:], noise[:, :-1])):
        assert abs(np.corrcoef(a.ravel(), b.ravel())[0, 1]) < 0.017  # five standard deviations of 1 / sqrt(90,000)


def test_large_seeds_are_taken_whole() -> None:
    assert len(set(uniform([2**64 - 1, 2**63, 2**63 - 1, 0], [0] * 4).tolist())) == 4


@pytest.mark.parametrize(
    ("vocab", "sampling"), [(7, Sampling(1)), (1000, Sampling(1, temperature=0.7)), (600, Sampling(1, top_p=0.6, top_k=40))]
)
def test_draws_follow_the_distribution(vocab: int, sampling: Sampling) -> None:
    torch.manual_seed(1)
    logits = torch.randn(vocab) * 2
    rows = 8_000
    drawn = draw(logits.expand(rows, -1), [sampling] * rows, list(range(rows)), [3] * rows)
    probabilities = kept(torch.softmax(logits.double() / sampling.temperature, 0), sampling)
    counts = torch.bincount(torch.tensor(drawn.token_ids), minlength=vocab)
    assert counts[probabilities == 0].sum() == 0
    often = probabilities * rows >= 5
    expected = probabilities[often] * rows
    degrees = int(often.sum()) - 1
    assert float(((counts[often] - expected) ** 2 / expected).sum()) < degrees + 5 * (2 * degrees) ** 0.5
    torch.testing.assert_close(
        torch.tensor(drawn.logprobs[:100]).double(), probabilities[drawn.token_ids[:100]].log(), atol=1e-5, rtol=0
    )


def kept(probabilities: torch.Tensor, sampling: Sampling) -> torch.Tensor:
    """By definition: the top_k likeliest, of those the fewest that hold top_p."""
    order = probabilities.argsort(descending=True)[: sampling.top_k or None]
    share = probabilities[order] / probabilities[order].sum()
    size = int((share.cumsum(0) < sampling.top_p - 1e-12).sum()) + 1
    result = torch.zeros_like(probabilities)
    result[order[:size]] = probabilities[order[:size]] / probabilities[order[:size]].sum()
    return result


def test_a_row_draws_the_same_in_any_batch() -> None:
    torch.manual_seed(2)
    logits = torch.randn(40, 700) * 3
    kinds = [Sampling(1), Sampling(1, temperature=0.0), Sampling(1, temperature=0.5, top_p=0.8), Sampling(1, top_k=3)]
    sampling = [kinds[row % 4] for row in range(40)]
    seeds, indices = [row * 977 for row in range(40)], [row % 7 for row in range(40)]
    whole = draw(logits, sampling, seeds, indices)
    for row in range(40):
        one = draw(logits[row : row + 1], [sampling[row]], [seeds[row]], [indices[row]])
        assert one.token_ids[0] == whole.token_ids[row]
        assert one.logprobs[0] == pytest.approx(whole.logprobs[row], abs=1e-6)


def test_temperature_zero_is_the_likeliest_with_its_plain_logprob() -> None:
    logits = torch.tensor([[0.0, 2.0, 1.0], [3.0, 2.0, 3.0]])
    drawn = draw(logits, [Sampling(1, temperature=0.0, top_k=1)] * 2, [0, 0], [0, 0])
    assert drawn.token_ids[0] == 1
    assert drawn.logprobs == pytest.approx([-0.40760596, -0.86199480], abs=1e-5)  # -ln(1 + 1/e + 1/e^2), -ln(2 + 1/e)
    assert drawn.near_ties == 1  # the second row


@given(st.sampled_from([1, 2, 5, BLOCK, BLOCK + 1, 3 * BLOCK - 1]), st.integers(0, 2**32 - 1), st.floats(0, 1))
def test_inverse_cdf_is_exact(vocab: int, seed: int, share: float) -> None:
    """Against a plain running sum, and never a token of probability 0, also at the ends."""
    random = np.random.default_rng(seed)
    weights = random.integers(0, 9, vocab) * (random.random(vocab) < random.random())
    weights[random.integers(vocab)] += 1
    total = int(weights.sum())
    # Weights are whole numbers and noise a multiple of a quarter of their sum's inverse, so that every sum is exact.
    noise = min(int(share * total * 4) / 4 / total, 1 - 2.0**-53)
    tokens, _, summed = inverse_cdf(
        torch.from_numpy(weights.astype(np.float64))[None], torch.tensor([noise], dtype=torch.float64)
    )
    token = int(tokens[0])
    assert int(summed[0]) == total
    assert weights[token] > 0
    ends = np.cumsum(weights)
    exact = int(np.searchsorted(ends, noise * total, side="right"))
    assert token == min(exact, int(np.flatnonzero(weights)[-1]))


def test_draws_near_an_edge_are_counted() -> None:
    probabilities = torch.full((4, 4), 0.25)
    noise = torch.tensor([0.25 + 1e-8, 0.25 - 1e-8, 0.3, 0.75 - 1e-8], dtype=torch.float64)
    tokens, near, _ = inverse_cdf(probabilities, noise)
    assert tokens.tolist() == [1, 0, 1, 2] and near.tolist() == [True, True, False, True]
