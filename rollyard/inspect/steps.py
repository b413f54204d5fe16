"""One row a step: what its batch was worth, and which weights wrote it."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from rollyard.inspect.source import Lives, Metrics, Source, read_metrics
from rollyard.journal.codec import unpack_spans

STEPS = """
    SELECT incarnation, step, taken_at, trained_at, count(*) OVER () FROM batches b
    WHERE {steps} ORDER BY step DESC, incarnation DESC LIMIT ?"""
# CROSS: the batch comes first. SQLite, which knows no numbers of rows, would look for the batch of every completion.
MEMBERS = """
    SELECT c.spans, c.tokens, v.value FROM batch_groups bg
    CROSS JOIN completions c ON c.incarnation = bg.incarnation AND c.group_id = bg.group_id
    LEFT JOIN verdicts v ON v.incarnation = c.incarnation AND v.group_id = c.group_id AND v.member = c.member
    LEFT JOIN drops d ON d.incarnation = c.incarnation AND d.group_id = c.group_id AND ifnull(d.member, -1) = c.member
    WHERE bg.incarnation = ? AND bg.step = ? AND d.reason IS NULL"""


@dataclass(frozen=True, slots=True)
class StepRow:
    """One batch, over the members that were in it. `step` counts from 1: it trains version `step` - 1 into `step`."""

    life: int
    step: int
    trained: bool  # False: it was taken, and is being trained, or never was
    groups: int
    members: int
    judged: int
    reward_mean: float | None
    tokens: int  # sampled for its members
    versions: tuple[int, int] | None  # the oldest and the newest that wrote a token of it
    lag_mean: float | None  # versions that a token lies behind the one that is trained
    lag_max: int | None
    dropped: int | None  # prompts dropped during the step, by the metrics
    loss: float | None
    seconds: float | None


@dataclass(frozen=True, slots=True)
class Steps:
    """The newest of `found` steps, oldest first. `broken` lines of the metrics could not be read."""

    rows: tuple[StepRow, ...]
    found: int
    broken: int


def steps(source: Source, limit: int) -> Steps:
    """The newest `limit` steps; -1 for all. Raises JournalError, OSError."""
    metrics = read_metrics(source.folder, source.lives)
    picked = list(source.rows(STEPS.format(steps=source.of_steps("b")), limit))
    found = picked[0][-1] if picked else 0
    lines = _by_step(metrics, source.lives)
    rows = [_step(source, row, lines) for row in reversed(picked)]
    return Steps(tuple(rows), found, metrics.broken)


def _by_step(metrics: Metrics, lives: Lives) -> dict[tuple[int, int | None], dict[str, Any]]:
    """Its metrics by step and life. Where what survived is meant, a step has one line, whichever life wrote it."""
    one = lives == Lives()
    return {(line["step"], None if one else line["incarnation"]): line for line in metrics.lines}


def _step(source: Source, row: tuple[Any, ...], lines: dict[tuple[int, int | None], dict[str, Any]]) -> StepRow:
    life, step, _, trained_at, _ = row
    line = lines.get((step + 1, life)) or lines.get((step + 1, None)) or {}
    tokens = members = judged = 0
    rewards = 0.0
    lags: dict[int, int] = {}
    for spans, count, value in source.rows(MEMBERS, life, step):
        members += 1
        tokens += count
        if value is not None:
            judged += 1
            rewards += value
        with source.decoding():
            for span in unpack_spans(spans):
                lag = step - span.version.step
                lags[lag] = lags.get(lag, 0) + span.tokens
    groups = source.row("SELECT count(*) FROM batch_groups WHERE incarnation = ? AND step = ?", life, step)[0]
    return StepRow(
        life=life,
        step=step + 1,
        trained=trained_at is not None,
        groups=groups,
        members=members,
        judged=judged,
        reward_mean=rewards / judged if judged else None,
        tokens=tokens,
        versions=(step - max(lags), step - min(lags)) if lags else None,
        lag_mean=_mean(lags.items()),
        lag_max=max(lags, default=None),
        dropped=_number(line, "dropped", int),
        loss=_number(line, "train/loss", float),
        seconds=_number(line, "seconds", float),
    )


def _mean(histogram: Iterable[tuple[int, int]]) -> float | None:
    pairs = list(histogram)
    whole = sum(count for _, count in pairs)
    return sum(value * count for value, count in pairs) / whole if whole else None


def _number(line: dict[str, Any], name: str, kind: type[Any]) -> Any:
    """None for one that is not there, or not finite: such are texts in the metrics."""
    value = line.get(name)
    return kind(value) if isinstance(value, int | float) else None
