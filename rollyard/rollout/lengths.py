"""How long a completion will be (PURE), from what its prompt's other members and earlier epochs came to.

Lengths are taken as lognormal: the log of one is the mean of all, a part that belongs to the prompt, and a part of its own,
both normal. Their variances are estimated on the way; the prompt's part is shrunk towards 0 by how little is known of it.
A member that still runs counts as what a length is on average that exceeds what it has written.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from rollyard.rollout.state import GroupState, Member, Phase

FEW = 16  # observations beyond the first of their row; with fewer, half of the variance is taken as the prompts'
LEAST_VARIANCE = 1e-4
UNDER_WAY = (Phase.RUNNING, Phase.WAITING, Phase.PLAYING)


@dataclass(slots=True)
class Moments:
    """Running mean and sum of squared differences from it (Welford)."""

    count: int = 0
    mean: float = 0.0
    squares: float = 0.0

    def add(self, value: float) -> float:
        """Returns by how much the sum of squares grew."""
        self.count += 1
        before = value - self.mean
        self.mean += before / self.count
        grown = before * (value - self.mean)
        self.squares += grown
        return grown


class Lengths:
    """Learns from finished members; rows of the data set are told apart, so that a later epoch begins with what is known.

    Args:
        wanted: somebody will ask; else nothing is kept.
    """

    def __init__(self, wanted: bool = True) -> None:
        self._wanted = wanted
        self._all = Moments()
        self._rows: dict[int, Moments] = {}
        self._within = 0.0  # squared differences from the mean of the row
        self._repeated = 0  # observations that are not the first of their row

    def finished(self, row: int, tokens: int) -> None:
        """A member of this row's prompt has written its last token."""
        if not self._wanted:
            return
        value = math.log(max(tokens, 1))
        self._all.add(value)
        seen = self._rows.setdefault(row, Moments())
        self._repeated += seen.count > 0
        self._within += seen.add(value)

    def expected(self, group: GroupState) -> float:
        """Tokens of a member of this group that has written none, on average."""
        mean, variance = self._of(group)
        return min(math.exp(min(mean + variance / 2, 50.0)), group.max_tokens * group.turns)

    def remaining(self, group: GroupState, member: Member) -> float:
        """Tokens that this member will still write, on average.

        E[L | L > w] = exp(m + s^2 / 2) Q((ln w - m) / s - s) / Q((ln w - m) / s), with Q the normal distribution's upper tail.
        """
        written = member.tokens
        mean, variance = self._of(group)
        spread = math.sqrt(variance)
        beyond = (math.log(max(written, 1)) - mean) / spread
        tail = _upper(beyond)
        whole = 2.0 * written  # far beyond anything expected: as much again
        if tail > 1e-12:
            whole = math.exp(min(mean + variance / 2, 50.0)) * _upper(beyond - spread) / tail
        return min(whole - written, group.left(member))

    def _of(self, group: GroupState) -> tuple[float, float]:
        """Mean and variance of the log of a member's length."""
        between, within = self._variances()
        seen = self._rows.get(group.prompt.row, Moments())
        mean, variance = self._shrunk(seen.count, seen.mean, between, within)
        spread = math.sqrt(variance)
        floors = [m.tokens for m in group.members if m.phase in UNDER_WAY and m.tokens]
        if not floors:
            return mean, variance
        under_way = sum(mean + spread * _excess((math.log(floor) - mean) / spread) for floor in floors)
        count = seen.count + len(floors)
        return self._shrunk(count, (seen.count * seen.mean + under_way) / count, between, within)

    def _shrunk(self, count: int, mean: float, between: float, within: float) -> tuple[float, float]:
        share = count * between / (count * between + within)
        return self._all.mean + share * (mean - self._all.mean), within + between * (1 - share)

    def _variances(self) -> tuple[float, float]:
        """Of the prompts' part and of the members' own."""
        whole = self._all.squares / (self._all.count - 1) if self._all.count > 1 else 1.0
        within = self._within / self._repeated if self._repeated >= FEW else whole / 2
        return max(whole - within, LEAST_VARIANCE), max(within, LEAST_VARIANCE)


def _upper(z: float) -> float:
    """The share of a normal distribution above z."""
    return math.erfc(z / math.sqrt(2)) / 2


def _excess(z: float) -> float:
    """The mean of what of a normal distribution lies above z (the inverse Mills ratio)."""
    if z > 8:
        return z + 1 / z
    return math.exp(-z * z / 2) / math.sqrt(2 * math.pi) / _upper(z)
