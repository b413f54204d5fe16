"""Drawn lengths have the mean, the spread and the likeness within groups that were asked for, whoever asks first."""

from __future__ import annotations

import math
from statistics import NormalDist

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollyard.layers import resolve_tree
from rollyard.plan.scenario import Scenario
from rollyard.plan.trace import lengths_of
from rollyard.plan.workload import BLOCK, KEPT, Lengths, cut_mean, mu_of

Z90 = NormalDist().inv_cdf(0.9)


def scenario(**options: object) -> Scenario:
    given = {"rollout.max_tokens": CAP, "workload.mean_tokens": 1500, "rollout.group_size": 8}
    given |= {name.replace("__", "."): value for name, value in options.items()}
    return resolve_tree(Scenario, lambda tree: None, environment={}, overrides=given).config


CAP = 8192


def drawn(lengths: Lengths, prompts: int, members: int = 8, step: int = 0, cap: int = CAP) -> np.ndarray:
    """[prompts, members], as an engine writes them."""
    whole = [[lengths.completion(prompt, member, step) for member in range(members)] for prompt in range(prompts)]
    return np.minimum(whole, cap)


def test_mean_quantiles_cut_share_and_likeness_are_those_of_the_formula() -> None:
    asked = scenario()
    found = drawn(lengths_of(asked), 20_000)
    mu = mu_of(1500.0, 1.0, 8192.0)
    assert found.mean() == pytest.approx(1500, rel=0.02)
    assert np.quantile(found, 0.5) == pytest.approx(math.exp(mu), rel=0.03)
    assert np.quantile(found, 0.9) == pytest.approx(math.exp(mu + Z90), rel=0.03)
    assert (found == CAP).mean() == pytest.approx(1 - NormalDist().cdf(math.log(CAP) - mu), abs=0.003)
    logs = np.log(drawn(lengths_of(scenario(rollout__max_tokens=10**9, workload__mean_tokens=1e5)), 20_000, cap=10**9))
    between = logs.mean(axis=1).var() - logs.var(axis=1, ddof=1).mean() / 8
    assert between == pytest.approx(0.65, abs=0.03) and logs.var() == pytest.approx(1.0, abs=0.03)


def test_held_out_prompts_may_be_answered_more_often_than_others() -> None:
    """Evaluation has ids below 0, and `eval.samples` completions of each; those of the run are what they were."""
    few, many = (lengths_of(scenario(rollout__group_size=2, eval__samples=samples)) for samples in (1, 9))
    assert len({many.completion(-1, member, 0) for member in range(9)}) > 5
    assert drawn(few, 300, members=2).tolist() == drawn(many, 300, members=2).tolist()


@given(st.floats(0, 4), st.floats(math.log(2), math.log(100_000)), st.floats(0.02, 0.98))
def test_mu_gives_the_mean_after_the_cut(sigma: float, log_cap: float, share: float) -> None:
    cap = math.exp(log_cap)
    mean = 1 + share * (cap - 1)
    mu = mu_of(mean, sigma, cap)
    assert cut_mean(mu, sigma, cap) == pytest.approx(mean, rel=1e-6)
    grid = np.linspace(-9, 9, 20_001)
    weights = np.exp(-grid * grid / 2) / math.sqrt(2 * math.pi) * (grid[1] - grid[0])
    exact = float((np.exp(np.clip(mu + sigma * grid, 0, log_cap)) * weights).sum())  # by the sum, not the closed form
    assert exact == pytest.approx(mean, rel=1e-3)


def test_it_does_not_matter_who_asks_first() -> None:
    asked = scenario(run__seed=3, workload__prompt_sigma=0.5)
    ids = [(prompt, member) for prompt in [*range(-4, 40), *range(0, 3 * KEPT * BLOCK, BLOCK)] for member in (7, 0, 3)]
    one, other = lengths_of(asked), lengths_of(asked)
    forth = [(one.completion(*each, 2), one.prompt(each[0])) for each in ids]
    back = [(other.completion(*each, 2), other.prompt(each[0])) for each in reversed(ids)]
    assert forth == back[::-1]
    another = lengths_of(scenario(run__seed=4, workload__prompt_sigma=0.5))
    assert forth != [(another.completion(*each, 2), another.prompt(each[0])) for each in ids]


def test_likeness_and_spread_have_ends() -> None:
    alike = drawn(lengths_of(scenario(workload__between=1.0)), 50)
    assert (alike == alike[:, :1]).all() and len(set(alike[:, 0])) > 40
    assert (drawn(lengths_of(scenario(workload__sigma=0.0)), 5) == 1500).all()
    assert (drawn(lengths_of(scenario(rollout__ignore_eos=True)), 5) == 8192).all()
    plain = lengths_of(scenario(workload__prompt_tokens=77))
    assert {plain.prompt(prompt) for prompt in range(9)} == {77}
    spread = lengths_of(scenario(workload__prompt_tokens=400, workload__prompt_sigma=0.8))
    assert np.mean([spread.prompt(prompt) for prompt in range(20_000)]) == pytest.approx(400, rel=0.03)


def test_completions_grow_by_a_share_at_each_step() -> None:
    asked = lengths_of(scenario(workload__growth=0.02))
    first, later = drawn(asked, 2_000), drawn(asked, 2_000, step=20)
    whole = later < 8192
    assert later[whole].sum() / first[whole].sum() == pytest.approx(1.02**20, rel=1e-3)
    assert (drawn(asked, 50, step=10**6) == 8192).all()
    assert (drawn(lengths_of(scenario(workload__growth=-0.5)), 50, step=10**6) == 1).all()
