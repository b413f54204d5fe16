"""Which of the texts that wait a model judges next (PURE)."""

from __future__ import annotations

from collections.abc import Sequence


def next_batch(lengths: Sequence[int], budget: int) -> tuple[int, ...]:
    """Some that wait, by their places: with the one that waits longest, those of lengths nearest to its own.

    Rows are padded to the longest, and longest x rows is at most `budget`. All that wait are divided into such batches from
    the longest to the shortest, so little is padded; whichever has the first goes next, so nobody waits for ever.

    Args:
        lengths: `[waiting]`, tokens, in the order in which they came; none longer than `budget`.

    Example: next_batch([3, 9, 8, 2], 18) == (0, 3), for 9 and 8 fill a batch of their own.
    """
    batch: list[int] = []
    for place in sorted(range(len(lengths)), key=lambda place: (-lengths[place], place)):
        if batch and lengths[batch[0]] * (len(batch) + 1) > budget:
            if 0 in batch:
                break
            batch = []
        batch.append(place)
    return tuple(sorted(batch))
