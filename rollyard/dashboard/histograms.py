"""Lengths, staleness and rewards of all rollouts, as bars."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Final

import numpy as np

from rollyard.dashboard.told import Bars, Histograms, Lags
from rollyard.errors import JournalError
from rollyard.inspect.source import Source

BARS: Final = 40  # at most
LENGTHS: Final = "SELECT tokens, count(*) FROM completions c WHERE {groups} GROUP BY tokens"
REWARDS: Final = "SELECT value, count(*) FROM verdicts v WHERE value IS NOT NULL AND {groups} GROUP BY value"


def histograms(source: Source, stale: Mapping[int, int]) -> Histograms:
    """Raises JournalError. `stale`: trained tokens by lag."""
    lengths = list(source.rows(LENGTHS.format(groups=source.of_groups("c"))))
    rewards = [
        (value, count) for value, count in source.rows(REWARDS.format(groups=source.of_groups("v"))) if math.isfinite(value)
    ]
    return Histograms(whole_bars(lengths), lags(stale), bars(rewards))


def told_lengths(path: Path) -> Bars:
    """Of a simulated run, which leaves them; nothing where it is not there. Raises JournalError where it is damaged."""
    if not path.exists():
        return Bars()
    try:
        found = json.loads(path.read_bytes())
        return whole_bars(
            [(int(tokens), int(often)) for tokens, often in zip(found["tokens"], found["completions"], strict=True)]
        )
    except (ValueError, TypeError, KeyError, RecursionError) as error:
        raise JournalError(f"{path} is damaged: {error}") from None


def lags(stale: Mapping[int, int]) -> Lags:
    return Lags(tuple(stale), tuple(stale.values()))


def whole_bars(counted: Sequence[tuple[int, int]]) -> Bars:
    """Of whole numbers: all bars hold equally many of them."""
    if not counted:
        return Bars()
    least, most = min(value for value, _ in counted), max(value for value, _ in counted)
    width = -(-(most - least + 1) // BARS)
    return _filled([least + width * at for at in range((most - least) // width + 2)], counted)


def bars(counted: Sequence[tuple[float, int]]) -> Bars:
    """Of any numbers. Where they are few, each has a bar in the midst of which it lies."""
    if not counted:
        return Bars()
    values = sorted(value for value, _ in counted)
    least, most = values[0], values[-1]
    if least == most or not math.isfinite(most - least):
        return Bars((least, most), (sum(count for _, count in counted),))
    gap = min(after - before for before, after in pairwise(values))
    steps = round((most - least) / gap) if (most - least) / gap < BARS else 0
    if steps and all(abs((value - least) / gap - round((value - least) / gap)) < 1e-6 for value in values):
        return _filled([least + gap * (at - 0.5) for at in range(steps + 2)], counted)
    return _filled([least + (most - least) * at / BARS for at in range(BARS + 1)], counted)


def _filled(edges: Sequence[float], counted: Sequence[tuple[float, int]]) -> Bars:
    values, often = zip(*counted, strict=True)
    counts, _ = np.histogram(values, edges, weights=often)
    return Bars(tuple(edges), tuple(int(count) for count in counts))
