"""Sides take turns: one warm-up each, then rounds in alternating order, with the load of the machine around each."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from rollyard.bench.memory import reset_peak
from rollyard.bench.result import Load, Measured, Side

Tell = Callable[[str], None]  # shows how things go


class Contender(Protocol):
    """One side."""

    @property
    def name(self) -> str: ...

    async def warm_up(self) -> None: ...

    async def run(self, number: int) -> Measured:
        """Round `number`, from 1. Raises PeerError, EngineError when what came out is not what was asked for."""
        ...


@dataclass(frozen=True, slots=True)
class Rounds:
    """What each contender measured, and the load around each round."""

    names: tuple[str, ...]  # [contenders]
    measured: tuple[tuple[Measured, ...], ...]  # [contenders][rounds]
    loads: tuple[Load, ...]  # [rounds]

    def sides(self) -> tuple[Side, ...]:
        """Each contender with nothing but its rounds."""
        return tuple(Side.of(name, measured) for name, measured in zip(self.names, self.measured, strict=True))


async def alternate(contenders: Sequence[Contender], rounds: int, tell: Tell, *, watched: Sequence[int] = ()) -> Rounds:
    """Let the contenders take turns.

    Args:
        rounds: how often each runs; the order turns round with every one.
        tell: given a line after each turn.
        watched: processes whose peak of memory is counted from the first round on.
    """
    for contender in contenders:
        tell(f"{contender.name}: warming up")
        await contender.warm_up()
    for pid in watched:
        reset_peak(pid)
    measured: dict[int, list[Measured]] = {place: [] for place in range(len(contenders))}
    loads = []
    for number in range(1, rounds + 1):
        order = list(enumerate(contenders))
        before = os.getloadavg()[0]
        for place, contender in order if number % 2 else reversed(order):
            one = await contender.run(number)
            measured[place].append(one)
            tell(f"round {number}/{rounds}, {contender.name}: {one.value:.4g}")
        loads.append(Load(before, os.getloadavg()[0]))
    return Rounds(tuple(one.name for one in contenders), tuple(map(tuple, measured.values())), tuple(loads))
