"""Staleness arithmetic (PURE).

A live group's rank is its place among the live groups in order of admission. Batch n trains version n into n + 1,
so a group of rank r is due at version d = (next batch to be taken) + r div B. With staleness limit S and current
version v: admit while d <= v + S; an engine at version e may work for the group while e >= d - S.
"""

from __future__ import annotations


def due(next_batch: int, rank: int, groups_per_batch: int) -> int:
    """The version that the group of this rank is expected to train."""
    return next_batch + rank // groups_per_batch


def most_live(version: int, next_batch: int, last_batch: int, limit: int, groups_per_batch: int) -> int:
    """How many groups may be live at once: as many as are due by `version + limit` and before `last_batch`.

    Rank r may join while next_batch + r div B <= version + limit, so r < (version + limit + 1 - next_batch) x B.
    """
    batches = min(version + limit + 1, last_batch) - next_batch
    return max(0, batches) * groups_per_batch
