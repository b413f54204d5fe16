"""A plan as tensors: built once a step, with numpy, and used by every layer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from rollyard.engine.embedded.pages import PageTable
from rollyard.engine.embedded.scheduler import Plan

Ints = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Rows:
    """Sequences that attend together, padded to the most pages (and, for chunks, to the longest chunk).

    `length` is pages x page_tokens, `tokens` the padded chunk length. Of the two index tensors `pad` finds the flat
    token for each padded place, `unpad` the padded place of each flat token; both None when each row is one token.
    """

    rows: int
    tokens: int
    pages: Tensor  # [rows * pages a row] int64
    mask: Tensor  # decode [1, rows, 1, length], chunks [rows, 1, tokens, length]: 0 where attended, -inf elsewhere
    pad: Tensor | None = None  # [rows * tokens] int64
    unpad: Tensor | None = None  # [flat tokens of these rows] int64


@dataclass(frozen=True, slots=True)
class StepBatch:
    """The flat batch of one step: tokens of decoding sequences first, then chunks."""

    ids: Tensor  # [tokens] int64
    positions: Tensor  # [tokens] int64
    places: Tensor  # [tokens] int64, where in the cache: page x page_tokens + offset
    decodes: int  # tokens
    decode: Rows | None
    chunks: Rows | None


def flatten(plan: Plan, page_tokens: int, dtype: torch.dtype, device: torch.device) -> StepBatch:
    """The tensors of a plan that has at least one token."""
    ids, positions, places = [], [], []
    decode = chunks = None
    if plan.decodes:
        ids.append(np.array([sequence.tokens[-1] for sequence in plan.decodes]))
        at = np.array([sequence.table.tokens for sequence in plan.decodes]) - 1
        pages = _pages([sequence.table for sequence in plan.decodes], at // page_tokens + 1)
        positions.append(at)
        places.append(pages[np.arange(len(at)), at // page_tokens] * page_tokens + at % page_tokens)
        beyond = np.arange(pages.shape[1] * page_tokens) > at[:, None]
        decode = Rows(len(at), 1, _to(pages.ravel(), device), _mask(beyond[None, :, None, :], dtype, device))
    if plan.chunks:
        sizes = np.array([len(chunk.ids) for chunk in plan.chunks])
        starts = np.array([chunk.start for chunk in plan.chunks])
        row = np.repeat(np.arange(len(sizes)), sizes)
        offset = np.arange(len(row)) - (np.cumsum(sizes) - sizes)[row]
        at = starts[row] + offset
        pages = _pages([chunk.table for chunk in plan.chunks], (starts + sizes - 1) // page_tokens + 1)
        ids.append(np.fromiter(chain.from_iterable(chunk.ids for chunk in plan.chunks), np.int64, len(row)))
        positions.append(at)
        places.append(pages[row, at // page_tokens] * page_tokens + at % page_tokens)
        chunks = _chunk_rows(sizes, starts, row * int(sizes.max()) + offset, pages, page_tokens, dtype, device)
    flat_ids, flat_positions, flat_places = (_to(np.concatenate(parts), device) for parts in (ids, positions, places))
    return StepBatch(flat_ids, flat_positions, flat_places, len(plan.decodes), decode, chunks)


def _chunk_rows(
    sizes: Ints, starts: Ints, places: Ints, pages: Ints, page_tokens: int, dtype: torch.dtype, device: torch.device
) -> Rows:
    """`places` `[flat tokens]`: row x longest + offset."""
    rows, longest = len(sizes), int(sizes.max())
    pad = np.zeros(rows * longest, np.int64)  # padding repeats the first token, and nobody reads what comes of it
    pad[places] = np.arange(len(places))
    at = starts[:, None] + np.arange(longest)
    beyond = np.arange(pages.shape[1] * page_tokens) > at[:, :, None]
    mask = _mask(beyond[:, None], dtype, device)
    return Rows(rows, longest, _to(pages.ravel(), device), mask, _to(pad, device), _to(places, device))


def _pages(tables: Sequence[PageTable], used: Ints) -> Ints:
    """`[rows, most pages]`; the rest of a row is page 0, which the mask hides."""
    pages = np.zeros((len(tables), int(used.max())), np.int64)
    lists = (table.pages[:count] for table, count in zip(tables, used.tolist(), strict=True))
    pages[np.arange(pages.shape[1]) < used[:, None]] = np.fromiter(chain.from_iterable(lists), np.int64, int(used.sum()))
    return pages


def _mask(hidden: NDArray[np.bool_], dtype: torch.dtype, device: torch.device) -> Tensor:
    return torch.from_numpy(np.where(hidden, np.float32(-np.inf), np.float32(0.0))).to(device, dtype)


def _to(array: Ints, device: torch.device) -> Tensor:
    return torch.from_numpy(array).to(device)
