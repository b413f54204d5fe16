"""How long prompts and completions are: drawn, or as a run had them, which `trace` reads (PURE).

Lengths are lognormal, as those of reasoning models are about, and engines cut them at `rollout.max_tokens`. Most of their spread
lies between prompts: completions of one prompt share a part of their draw,

    z = sqrt(between) * of the prompt + sqrt(1 - between) * of the completion,    length = exp(mu + sigma * z)

with `mu` such that the mean of what is written, after the cut, is `workload.mean_tokens`. Everything follows from the run's seed
and the ids, whatever the order in which it is asked for; draws are made for `BLOCK` prompts at a time.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import Final, Protocol

import numpy as np

from rollyard.plan.scenario import Scenario

BLOCK: Final = 256  # prompts that are drawn at once
KEPT: Final = 128  # blocks in memory
LONGEST: Final = 2**31  # tokens of a completion that would never end
CEILING: Final = math.log(LONGEST)
ROUNDS: Final = 80  # halvings of the interval that mu is in: more than a float has bits

Draws = tuple[list[float], list[list[float]]]  # of a block: [prompts] of prompts, and [prompts][members] of completions


class Lengths(Protocol):
    """Tokens of everything that is asked and written in a run."""

    def prompt(self, prompt_id: int) -> int:
        """Tokens of a prompt, at least 1."""
        ...

    def completion(self, prompt_id: int, member: int, step: int) -> int:
        """Tokens of a whole completion if nothing cuts it, at least 1; `rollout.max_tokens` may be less.

        Args:
            step: of the version that the policy had when the prompt was admitted.
        """
        ...


def drawn_of(scenario: Scenario) -> Drawn:
    """Those that the scenario describes."""
    workload = scenario.workload
    if scenario.rollout.ignore_eos:
        return Drawn(scenario, mu=CEILING, sigma=0.0, growth=0.0)
    mu = mu_of(mean_of(scenario), workload.sigma, scenario.rollout.max_tokens)
    return Drawn(scenario, mu=mu, sigma=workload.sigma, growth=math.log1p(workload.growth))


def mean_of(scenario: Scenario) -> float:
    """Tokens of a completion that the first version writes, on average and after the cut; drawn lengths only."""
    return scenario.workload.mean_tokens or max(1.0, scenario.rollout.max_tokens / 4)


@dataclass(frozen=True, slots=True)
class Recorded:
    """Lengths of a run: group by group, in the order of their ids."""

    groups: tuple[tuple[int, ...], ...]  # [groups][members], tokens of completions, one more than written where they were cut
    prompts: tuple[int, ...]  # [groups], tokens, at least 1
    cut: int  # completions that a limit cut: they would have been longer, and nobody knows by how much
    cut_at: int  # tokens of the longest of them, 0: there is none
    left_out: int  # rows without a length: failed, or without a token

    @property
    def completions(self) -> int:
        """Of all groups."""
        return sum(map(len, self.groups))


class Drawn:
    """Lognormal lengths.

    Args:
        mu: mean of the logarithm of a completion's tokens, before the cut and at the first version.
        sigma: its standard deviation.
        growth: what is added to it at each version.
    """

    def __init__(self, scenario: Scenario, *, mu: float, sigma: float, growth: float) -> None:
        rollout, workload = scenario.rollout, scenario.workload
        self._seed, self._members, self._samples = scenario.run.seed, rollout.group_size, scenario.eval.samples
        self._mu, self._growth = mu, growth
        self._shared, self._own = sigma * math.sqrt(workload.between), sigma * math.sqrt(1 - workload.between)
        spread = workload.prompt_sigma
        self._prompt_mu, self._prompt_sigma = mu_of(workload.prompt_tokens, spread), spread
        self._block: Callable[[int], Draws] = lru_cache(KEPT)(self._draw)

    def prompt(self, prompt_id: int) -> int:
        """See `Lengths`."""
        block, place = divmod(prompt_id, BLOCK)
        return _tokens(self._block(block)[0][place])

    def completion(self, prompt_id: int, member: int, step: int) -> int:
        """See `Lengths`."""
        block, place = divmod(prompt_id, BLOCK)
        return _tokens(self._block(block)[1][place][member] + self._growth * step)

    def _draw(self, block: int) -> Draws:
        """Logarithms of lengths; evaluation has prompts with ids below 0."""
        members = self._members if block >= 0 else max(self._members, self._samples)
        draws = _stream(self._seed, block).standard_normal((BLOCK, members + 2))
        prompts = self._prompt_mu + self._prompt_sigma * draws[:, 0]
        completions = self._mu + self._shared * draws[:, 1:2] + self._own * draws[:, 2:]
        return prompts.tolist(), completions.tolist()


class Traced:
    """Lengths that a run had, prompt by prompt and in its order; when all were there, again in another order.

    A group that has fewer members than are asked for begins again with its first. A completion that was cut would have had one
    token more, if not many.

    Args:
        growth: share by which a completion is longer at each version than it was in the trace.
        endless: completions end where they are cut.
    """

    def __init__(self, trace: Recorded, seed: int, growth: float, *, endless: bool) -> None:
        self._trace, self._seed, self._growth, self._endless = trace, seed, math.log1p(growth), endless
        self._order: Callable[[int], list[int]] = lru_cache(8)(self._shuffled)

    def prompt(self, prompt_id: int) -> int:
        """See `Lengths`."""
        return self._trace.prompts[self._at(prompt_id)]

    def completion(self, prompt_id: int, member: int, step: int) -> int:
        """See `Lengths`."""
        if self._endless:
            return LONGEST
        found = self._trace.groups[self._at(prompt_id)]
        tokens = found[member % len(found)]
        return _tokens(math.log(tokens) + self._growth * step) if self._growth and step else tokens

    def _at(self, prompt_id: int) -> int:
        again, place = divmod(prompt_id, len(self._trace.groups))
        return self._order(again)[place] if again else place

    def _shuffled(self, again: int) -> list[int]:
        order: list[int] = _stream(self._seed, again).permutation(len(self._trace.groups)).tolist()
        return order


def _tokens(log: float) -> int:
    return max(1, round(math.exp(log))) if log < CEILING else LONGEST


def _stream(seed: int, number: int) -> np.random.Generator:
    """Of random numbers, one for each pair."""
    return np.random.Generator(np.random.Philox(key=np.array([seed, number % 2**64], np.uint64)))


@lru_cache(256)
def mu_of(mean: float, sigma: float, cap: float = math.inf) -> float:
    """Mean of the logarithm of lognormal lengths whose mean is `mean` once they are brought between 1 and `cap`.

    The mean is between 1 and the cap, and below it unless sigma is 0.
    """
    if not sigma:
        return math.log(mean)
    if math.isinf(cap):
        return math.log(mean) - sigma * sigma / 2
    low, high = math.log(mean) - sigma * sigma / 2, math.log(cap) + 40 * sigma
    low -= 40 * sigma  # what is brought up to 1 token may make the mean
    for _ in range(ROUNDS):
        middle = (low + high) / 2
        if cut_mean(middle, sigma, cap) < mean:
            low = middle
        else:
            high = middle
    return (low + high) / 2


def cut_mean(mu: float, sigma: float, cap: float) -> float:
    """Mean of exp(mu + sigma * z) brought between 1 and `cap`; z is standard normal.

    Of a lognormal X, E[X; a < X < b] = exp(mu + sigma^2 / 2) * (Phi(beta - sigma) - Phi(alpha - sigma)) where alpha and beta are
    the z of a and b.
    """
    if not sigma:
        return min(max(1.0, math.exp(mu)), cap)
    alpha, beta = -mu / sigma, (math.log(cap) - mu) / sigma
    between = _normal(beta - sigma) - _normal(alpha - sigma)
    return _normal(alpha) + (math.exp(mu + sigma * sigma / 2) * between if between > 0 else 0.0) + cap * _normal(-beta)


def _normal(z: float) -> float:
    """Share of a standard normal below z."""
    return math.erfc(-z / math.sqrt(2)) / 2
