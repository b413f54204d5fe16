"""How long the first prompts and completions of a run are, the same whatever is chosen, and what follows from them (PURE)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

Numbers = NDArray[np.float64]
PLACES = 49  # tokens at which is looked how many still write


@dataclass(frozen=True)
class Sample:
    """The first groups of a run, in the order of admission.

    Attributes:
        prompts: tokens `[groups]`.
        lengths: tokens of the completions `[groups, K]`, cut as the run cuts them.
        size: B, groups of a batch.
        times: that a prompt is trained on in a batch: once, or with each of its completions.
        left: which completions are surely trained on `[groups, K]`, 1 or 0; None: all.
    """

    prompts: Numbers
    lengths: Numbers
    size: int
    times: int = 1
    left: Numbers | None = None

    @cached_property
    def decoded(self) -> Numbers:
        """Tokens of each group that are written in a decode step; the first of a completion comes with its prompt `[groups]`."""
        return np.asarray(np.sum(np.maximum(self.lengths - 1, 0), axis=1))

    @cached_property
    def context(self) -> Numbers:
        """Tokens that decoding each group attends to at least, over all its steps: the prompt and those before `[groups]`."""
        steps = np.maximum(self.lengths - 1, 0)
        return np.asarray(np.sum(self.prompts[:, None] * steps + steps * (steps + 1) / 2, axis=1))

    @cached_property
    def trained(self) -> Numbers:
        """Tokens of each group that are trained on: prompts, and completions but for their last tokens `[groups]`."""
        return np.asarray(self._prompt_times * self.prompts + np.sum(self._learnt, axis=1))

    @cached_property
    def pairs(self) -> Numbers:
        """Pairs of a token with itself or an earlier one that it attends to, of the same `[groups]`."""
        steps = self._learnt
        own = np.sum(self.prompts[:, None] * steps + steps * (steps + 1) / 2, axis=1)
        return np.asarray(self._prompt_times * self.prompts * (self.prompts + 1) / 2 + own)

    @property
    def _prompt_times(self) -> Numbers:
        """That each prompt is trained on `[groups]`."""
        rows = np.full(len(self.prompts), self.lengths.shape[1], float) if self.left is None else np.sum(self.left, axis=1)
        return np.asarray(np.minimum(rows, self.times))

    @property
    def _learnt(self) -> Numbers:
        """Tokens of completions that are input to training `[groups, K]`."""
        steps = np.maximum(self.lengths - 1, 0)
        return np.asarray(steps if self.left is None else steps * self.left)

    @cached_property
    def longest(self) -> Numbers:
        """Tokens of each group's longest completion `[groups]`."""
        return np.asarray(np.max(self.lengths, axis=1))

    # ---- means, for estimates

    @cached_property
    def mean(self) -> float:
        """Tokens of a completion."""
        return float(np.mean(self.lengths))

    @cached_property
    def prompt(self) -> float:
        """Tokens of a prompt."""
        return float(np.mean(self.prompts))

    @cached_property
    def running(self) -> float:
        """Tokens that one which is being written has so far, on average over time."""
        return float(np.mean(self.lengths**2) / (2 * self.mean))

    @cached_property
    def batch_longest(self) -> float:
        """Mean of the batches' longest completions."""
        whole = self.longest[: len(self.longest) // self.size * self.size]
        return float(np.mean(np.max(whole.reshape(-1, self.size), axis=1)))

    def left_out(self, spare: int) -> float:
        """Tokens within which all but `spare` of B + `spare` groups are written."""
        return float(np.quantile(self.longest, self.size / (self.size + spare)))

    @cached_property
    def places(self) -> Numbers:
        """Numbers of tokens from 0 to the longest of a batch `[PLACES]`, dense where many end."""
        ordered = np.quantile(self.lengths, np.linspace(0, 1, PLACES - 16))
        rest = np.linspace(0, self.batch_longest, 16)
        return np.asarray(np.sort(np.minimum(np.concatenate((ordered, rest)), self.batch_longest)))

    @cached_property
    def writing(self) -> Numbers:
        """Share of completions that are longer than each of `places`."""
        flat = np.sort(self.lengths, axis=None)
        return np.asarray(1 - np.searchsorted(flat, self.places, side="right") / len(flat))

    @cached_property
    def remaining(self) -> Numbers:
        """Share of those being written at some moment that write more than each of `places` after it."""
        width = np.diff(self.places)
        area = (self.writing[1:] + self.writing[:-1]) / 2 * width
        after = np.concatenate((np.cumsum(area[::-1])[::-1], [0.0]))
        return np.asarray(after / max(after[0], 1.0))


def sample_of(
    completion: Callable[[int, int], int],
    prompt: Callable[[int], int],
    groups: int,
    group_size: int,
    size: int,
    times: int = 1,
    left: Callable[[int, int], bool] | None = None,
) -> Sample:
    """The first groups.

    Args:
        completion: tokens that a member (prompt, number) writes.
        prompt: tokens of a prompt.
        size, times: see `Sample`.
        left: whether a member is trained on; None: all are.
    """
    members = range(group_size)
    lengths: Sequence[Sequence[int]] = [[completion(group, member) for member in members] for group in range(groups)]
    kept = None if left is None else np.array([[left(group, member) for member in members] for group in range(groups)], float)
    return Sample(np.array([prompt(group) for group in range(groups)], float), np.array(lengths, float), size, times, kept)
