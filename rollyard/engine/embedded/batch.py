"""A plan as flat arrays: built once a step, with numpy, and used by every layer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain

import numpy as np
from numpy.typing import NDArray

from rollyard.engine.embedded.pages import PageTable
from rollyard.engine.embedded.scheduler import Plan

Ints = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class FlatBatch:
    """The tokens of one step: those of decoding sequences first, then chunks."""

    ids: Ints  # [tokens]
    positions: Ints  # [tokens]
    places: Ints  # [tokens], where in the cache: page x page_tokens + offset
    rows: Ints  # [tokens], whose token it is: decoding sequences first, then chunks
    tables: Ints  # [rows, most pages]; the rest of a row is page 0
    sizes: Ints  # [rows], tokens of this step
    starts: Ints  # [rows], position of the first
    used: Ints  # [rows], pages
    decodes: int  # rows that are decoding sequences


def flatten(plan: Plan, page_tokens: int) -> FlatBatch:
    """The arrays of a plan that has at least one token."""
    decodes, chunks = plan.decodes, plan.chunks
    tables = [*(sequence.table for sequence in decodes), *(chunk.table for chunk in chunks)]
    sizes = np.array([1] * len(decodes) + [len(chunk.ids) for chunk in chunks])
    starts = np.array([sequence.table.tokens - 1 for sequence in decodes] + [chunk.start for chunk in chunks])
    rows = np.repeat(np.arange(len(sizes)), sizes)
    positions = starts[rows] + np.arange(len(rows)) - (np.cumsum(sizes) - sizes)[rows]
    used = (starts + sizes - 1) // page_tokens + 1
    pages = _pages(tables, used)
    ids = np.fromiter(chain((s.tokens[-1] for s in decodes), *(chunk.ids for chunk in chunks)), np.int64, len(rows))
    places = pages[rows, positions // page_tokens] * page_tokens + positions % page_tokens
    return FlatBatch(ids, positions, places, rows, pages, sizes, starts, used, len(decodes))


def _pages(tables: Sequence[PageTable], used: Ints) -> Ints:
    pages = np.zeros((len(tables), int(used.max())), np.int64)
    lists = (table.pages[:count] for table, count in zip(tables, used.tolist(), strict=True))
    pages[np.arange(pages.shape[1]) < used[:, None]] = np.fromiter(chain.from_iterable(lists), np.int64, int(used.sum()))
    return pages
