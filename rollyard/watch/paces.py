"""What an engine's steps took, by how many sequences ran: what a cost model is fitted to (PURE)."""

from __future__ import annotations

from collections.abc import Iterable

from rollyard.stats import Pace


class Paces:
    """Totals of the steps so far: a few dozen numbers, however many steps there were."""

    __slots__ = ("_found",)

    def __init__(self) -> None:
        self._found: dict[tuple[int, bool], list[float]] = {}

    def add(
        self,
        sequences: int,
        prefilled: int,
        context: int,
        seconds: float,
        thread_s: float = 0.0,
        process_s: float = 0.0,
        *,
        steps: int = 1,
    ) -> None:
        """So many more steps, of all of which the other numbers are but the first.

        Args:
            sequences: that decoded in each of them.
            prefilled: tokens of prompts, or of what was cut, that were computed beside.
            context: tokens that running sequences attended to.
            thread_s: processor time of the thread that computes.
            process_s: of the whole process, where that is the engine's own.
        """
        key = 1 << (sequences - 1).bit_length() if sequences else 0, prefilled > 0
        totals = self._found.get(key)
        if totals is None:
            totals = self._found[key] = [0, 0, 0, 0, 0.0, 0.0, 0.0]
        totals[0] += steps
        totals[1] += sequences * steps
        totals[2] += prefilled
        totals[3] += context
        totals[4] += seconds
        if thread_s or process_s:
            totals[5] += thread_s
            totals[6] += process_s

    def totals(self) -> tuple[Pace, ...]:
        """By sequences, steps with prefill after those without."""
        return tuple(
            Pace(*key, int(steps), int(sequences), int(prefilled), int(context), *spent)
            for key, (steps, sequences, prefilled, context, *spent) in sorted(self._found.items())
        )


def together(engines: Iterable[Iterable[Pace]]) -> tuple[Pace, ...]:
    """Those of several engines as one."""
    found: dict[tuple[int, bool], Pace] = {}
    for pace in (pace for paces in engines for pace in paces):
        key = pace.running, pace.prefill
        had = found.get(key)
        found[key] = pace if had is None else _sum(had, pace)
    return tuple(found[key] for key in sorted(found))


def _sum(one: Pace, other: Pace) -> Pace:
    return Pace(
        one.running,
        one.prefill,
        one.steps + other.steps,
        one.sequences + other.sequences,
        one.prefilled + other.prefilled,
        one.context + other.context,
        one.seconds + other.seconds,
        one.thread_s + other.thread_s,
        one.process_s + other.process_s,
    )
