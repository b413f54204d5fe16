"""Samples over data-parallel ranks, so that none computes much more than the others (PURE)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from rollyard.batch.pack import families
from rollyard.types import Sample


@dataclass(slots=True)
class Unit:
    """Samples with the same prompt that fit into one micro-batch together: the prompt is computed once for them."""

    family: int
    prompt: int  # tokens
    own: dict[int, int]  # place of each sample -> tokens after the prompt

    @property
    def tokens(self) -> int:
        return self.prompt + sum(self.own.values())


@dataclass(slots=True)
class Rank:
    """What one rank computes."""

    budget: int
    load: int = 0  # tokens
    units: dict[int, list[Unit]] = field(default_factory=dict)  # by family

    def host(self, family: int, own: int) -> Unit | None:
        """A unit with the same prompt that has room for `own` more tokens."""
        return next((unit for unit in self.units.get(family, ()) if unit.tokens + own <= self.budget), None)

    def add(self, unit: Unit) -> None:
        """Take it in, into a unit that is here already where there is room."""
        own = sum(unit.own.values())
        host = self.host(unit.family, own)
        if host is None:
            self.units.setdefault(unit.family, []).append(unit)
            self.load += unit.tokens
        else:
            host.own |= unit.own
            self.load += own

    def remove(self, part: Unit) -> None:
        """Give away some samples of a unit, or all of them, and then the prompt too."""
        unit = next(unit for unit in self.units[part.family] if part.own.keys() <= unit.own.keys())
        before = unit.tokens
        unit.own = {place: own for place, own in unit.own.items() if place not in part.own}
        if unit.own:
            self.load += unit.tokens - before
        else:
            self.units[part.family].remove(unit)
            self.load -= before

    def parts(self) -> Iterator[tuple[Unit, int]]:
        """What may leave it: every unit, then every sample; and the tokens it would be rid of."""
        every = [unit for units in self.units.values() for unit in units]
        yield from ((unit, unit.tokens) for unit in every)
        for unit in every:
            if len(unit.own) > 1:
                yield from ((Unit(unit.family, unit.prompt, {place: own}), own) for place, own in unit.own.items())


def split(samples: Sequence[Sample], ranks: int, budget: int) -> tuple[tuple[Sample, ...], ...]:
    """One part for each of `ranks`, each sample in exactly one of them, in order; some are empty when samples are few.

    The largest part is made small: a step lasts as long as its slowest rank. What counts is what a trainer computes, a
    prompt once for the samples of a micro-batch. First the samples of each prompt go, as one, to the rank that has least,
    the largest first (source: Graham 1969, Bounds on multiprocessing timing anomalies). Then whatever lowers the largest
    part moves to the smallest, single samples too. Last, samples that went away from others of their prompt come back
    where that makes the largest part no larger.

    Args:
        samples: with their prompts; those of one prompt share it.
        ranks: at least 1.
        budget: tokens of a micro-batch at most.

    Raises:
        ConfigError: one sample alone is longer than the budget.
    """
    if ranks == 1:
        return (tuple(samples),)
    units = [
        Unit(family, prompt, {place: len(samples[place].token_ids) - prompt for place in members})
        for family, (prompt, parts) in enumerate(families(samples, budget))
        for members in parts
    ]
    found = [Rank(budget) for _ in range(ranks)]
    for unit in sorted(units, key=lambda unit: -unit.tokens):
        min(found, key=lambda rank: rank.load).add(unit)
    while _even_out(max(found, key=lambda rank: rank.load), min(found, key=lambda rank: rank.load)):
        pass
    while sum(_reunite(found, unit.family) for unit in units):
        pass
    places = [sorted(place for units in rank.units.values() for unit in units for place in unit.own) for rank in found]
    return tuple(tuple(samples[place] for place in part) for part in places)


def _even_out(largest: Rank, smallest: Rank) -> bool:
    """Move what leaves the larger of both smallest. Whether that is smaller than before: so this comes to an end."""
    best, lowest = None, largest.load
    for part, rid in largest.parts():
        own = sum(part.own.values())
        more = own if smallest.host(part.family, own) is not None else part.prompt + own
        if (high := max(largest.load - rid, smallest.load + more)) < lowest:
            best, lowest = part, high
    if best is None:
        return False
    _move(best, largest, smallest)
    return True


def _reunite(ranks: Sequence[Rank], family: int) -> bool:
    """Bring samples of one prompt together again as long as the largest load stays what it is. Whether that saved tokens."""
    limit = max(rank.load for rank in ranks)
    holders = sorted((rank for rank in ranks if family in rank.units), key=lambda rank: rank.load)
    before = sum(rank.load for rank in ranks)
    for source in holders:
        for unit in tuple(source.units[family]):
            own = sum(unit.own.values())
            for target in holders:
                if target is not source and target.load + own <= limit and target.host(family, own) is not None:
                    _move(unit, source, target)
                    break
    return sum(rank.load for rank in ranks) < before


def _move(part: Unit, source: Rank, target: Rank) -> None:
    moved = Unit(part.family, part.prompt, dict(part.own))
    source.remove(moved)
    target.add(moved)
