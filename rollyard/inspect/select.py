"""Rollouts and groups by what is asked of them, in the order that is asked for.

What is asked for is found by narrow columns alone; texts are read for the rows that are shown.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from rollyard.inspect.source import Source
from rollyard.journal.codec import unpack_spans

SHOWN = 400  # characters of a text in a list

# Every member of which something is known: those that were finished, those of which tokens were kept, those dropped before.
MEMBERS = """
    SELECT incarnation, group_id, member, finish, tokens, oldest_version, rowid AS at FROM completions
    UNION ALL
    SELECT incarnation, group_id, member, NULL, sum(tokens), NULL, NULL FROM partials GROUP BY incarnation, group_id, member
    UNION ALL
    SELECT incarnation, group_id, member, NULL, NULL, NULL, NULL FROM drops d WHERE member IS NOT NULL AND NOT EXISTS (
        SELECT 1 FROM completions c WHERE c.incarnation = d.incarnation AND c.group_id = d.group_id AND c.member = d.member
    ) AND NOT EXISTS (
        SELECT 1 FROM partials w WHERE w.incarnation = d.incarnation AND w.group_id = d.group_id AND w.member = d.member)"""

# The batch that a group was taken into, unless a later life has another one for the step.
TAKEN = """
    LEFT JOIN batch_groups bg ON bg.incarnation = {table}.incarnation AND bg.group_id = {table}.group_id
    LEFT JOIN batches b ON b.incarnation = bg.incarnation AND b.step = bg.step AND {steps}"""

ROLLOUTS = """
    SELECT m.incarnation, m.group_id, m.member, m.finish, m.tokens, v.value, b.step, b.trained_at IS NOT NULL,
           b.step - m.oldest_version AS lag, coalesce(dm.reason, dg.reason) AS dropped, coalesce(dm.cause, dg.cause),
           count(*) OVER ()
    FROM ({members}) m
    LEFT JOIN verdicts v ON v.incarnation = m.incarnation AND v.group_id = m.group_id AND v.member = m.member {taken}
    LEFT JOIN drops dm ON dm.incarnation = m.incarnation AND dm.group_id = m.group_id AND ifnull(dm.member, -1) = m.member
    LEFT JOIN drops dg ON dg.incarnation = m.incarnation AND dg.group_id = m.group_id AND ifnull(dg.member, -1) = -1
    {texts} WHERE {where} ORDER BY {order}, m.group_id, m.member, m.incarnation LIMIT ? OFFSET ?"""

GROUPS = """
    SELECT p.incarnation, p.group_id, p.row, count(c.member), count(v.value), avg(v.value) AS mean, min(v.value), max(v.value),
           sum(c.tokens) AS tokens, b.step, b.trained_at IS NOT NULL, b.step - min(c.oldest_version) AS lag, d.reason, d.cause,
           count(*) OVER ()
    FROM prompts p
    LEFT JOIN completions c ON c.incarnation = p.incarnation AND c.group_id = p.group_id
    LEFT JOIN verdicts v ON v.incarnation = c.incarnation AND v.group_id = c.group_id AND v.member = c.member {taken}
    LEFT JOIN drops d ON d.incarnation = p.incarnation AND d.group_id = p.group_id AND ifnull(d.member, -1) = -1
    WHERE {where} GROUP BY p.incarnation, p.group_id HAVING {having} ORDER BY {order}, p.group_id, p.incarnation
    LIMIT ? OFFSET ?"""

# What rows can be ordered by. Rows that have no value of it come last, whichever way.
ROLLOUT_COLUMNS = {
    "id": "m.group_id",
    "reward": "v.value",
    "tokens": "m.tokens",
    "lag": "lag",
    "step": "b.step",
    "finished": "m.at",
}
GROUP_COLUMNS = {
    "id": "p.group_id",
    "reward": "mean",
    "tokens": "tokens",
    "lag": "lag",
    "step": "b.step",
    "admitted": "p.rowid",
}
# What people call it: a column, and whether the greatest comes first.
ROLLOUT_SORTS = {
    "id": ("id", False),
    "worst": ("reward", False),
    "best": ("reward", True),
    "longest": ("tokens", True),
    "shortest": ("tokens", False),
    "stale": ("lag", True),
    "newest": ("finished", True),
}
GROUP_SORTS = {
    "id": ("id", False),
    "worst": ("reward", False),
    "best": ("reward", True),
    "longest": ("tokens", True),
    "stale": ("lag", True),
    "newest": ("admitted", True),
}
ANY = "any"  # reason of a drop

Row = TypeVar("Row")


@dataclass(frozen=True, slots=True)
class Wanted:
    """Which rows, and in which order. What is empty or None asks for nothing.

    Example: Wanted(sort="reward", finish="length", limit=5).
    """

    sort: str = "id"  # of ROLLOUT_COLUMNS, or GROUP_COLUMNS
    down: bool = False  # the greatest first
    dropped: str = ""  # for this reason, or for `any`
    step: int | None = None  # taken into the batch of this step; 1 is the first
    finish: str = ""
    text: str = ""  # in the prompt or what was written, whatever the case of ASCII letters
    group: int | None = None
    least: float | None = None  # reward; of a group the mean
    most: float | None = None
    limit: int = -1  # rows at most; -1: all
    offset: int = 0  # rows that are passed over


@dataclass(frozen=True, slots=True)
class RolloutRow:
    """One member. `step` counts from 1, as in the metrics: it trains version `step` - 1 into `step`."""

    life: int
    group: int
    member: int
    reward: float | None  # None: no verdict
    tokens: int | None  # None: none were kept
    finish: str | None  # None: it was not finished
    versions: tuple[int, int] | None  # the oldest and the newest that wrote it; None: no token
    lag: int | None  # versions that its oldest token lies behind the one that it was taken to train
    step: int | None  # whose batch it was taken into
    trained: bool
    dropped: str | None  # the reason
    cause: str | None
    prompt: str
    completion: str


@dataclass(frozen=True, slots=True)
class GroupRow:
    """One prompt with what its finished members came to. `step` and `lag` as of a rollout."""

    life: int
    group: int
    row: int
    members: int
    judged: int
    mean: float | None
    worst: float | None
    best: float | None
    tokens: int
    lag: int | None
    step: int | None
    trained: bool
    dropped: str | None
    cause: str | None
    prompt: str


@dataclass(frozen=True, slots=True)
class Rows(Generic[Row]):
    """Some of `found` rows."""

    rows: tuple[Row, ...]
    found: int


def rollouts(source: Source, wanted: Wanted) -> Rows[RolloutRow]:
    """Members of which something is known. Raises JournalError."""
    where, values = _where("m", source, wanted)
    texts = ""
    if wanted.finish:
        where.append("m.finish = ?")
        values.append(wanted.finish)
    if wanted.dropped:
        where.append("dropped IS NOT NULL" if wanted.dropped == ANY else "dropped = ?")
        values.extend(() if wanted.dropped == ANY else (wanted.dropped,))
    if wanted.text:
        texts = f"JOIN prompts p USING (incarnation, group_id) LEFT JOIN completions c ON {_same('c', 'm', 'member')}"
        where.append("(instr(lower(p.text), lower(?)) OR instr(lower(c.text), lower(?)))")
        values.extend((wanted.text, wanted.text))
    taken = TAKEN.format(table="m", steps=source.of_steps("b"))
    for condition, bound in _bounds("v.value", wanted):
        where.append(condition)
        values.append(bound)
    order, whole = _order(ROLLOUT_COLUMNS, wanted), " AND ".join(where)
    sql = ROLLOUTS.format(members=MEMBERS, taken=taken, texts=texts, where=whole, order=order)
    picked, found = _page(source, sql, values, wanted)
    return Rows(tuple(_rollout(source, row) for row in picked), found)


def _rollout(source: Source, row: Sequence[Any]) -> RolloutRow:
    life, group, member, finish, tokens, reward, step, trained, lag, dropped, cause, _ = row
    sql = "SELECT spans, substr(text, 1, ?) FROM completions WHERE incarnation = ? AND group_id = ? AND member = ?"
    spans, text = next(source.rows(sql, SHOWN, life, group, member), ("[]", ""))
    with source.decoding():
        wrote = [span.version.step for span in unpack_spans(spans)]
    return RolloutRow(
        life=life,
        group=group,
        member=member,
        reward=reward,
        tokens=tokens,
        finish=finish,
        versions=(min(wrote), max(wrote)) if wrote else None,
        lag=lag,
        step=None if step is None else step + 1,
        trained=bool(trained) and dropped is None,
        dropped=dropped,
        cause=cause,
        prompt=_prompt(source, life, group),
        completion=text,
    )


def groups(source: Source, wanted: Wanted) -> Rows[GroupRow]:
    """Prompts that were admitted. Raises JournalError."""
    where, values = _where("p", source, wanted)
    if wanted.dropped:
        where.append("d.reason IS NOT NULL" if wanted.dropped == ANY else "d.reason = ?")
        values.extend(() if wanted.dropped == ANY else (wanted.dropped,))
    if wanted.text:
        where.append("instr(lower(p.text), lower(?))")
        values.append(wanted.text)
    taken = TAKEN.format(table="p", steps=source.of_steps("b"))
    bounds = list(_bounds("mean", wanted))
    having = " AND ".join(["TRUE", *(condition for condition, _ in bounds)])
    order = _order(GROUP_COLUMNS, wanted)
    sql = GROUPS.format(taken=taken, where=" AND ".join(where), having=having, order=order)
    picked, found = _page(source, sql, [*values, *(bound for _, bound in bounds)], wanted)
    return Rows(tuple(_group(source, row) for row in picked), found)


def _group(source: Source, row: Sequence[Any]) -> GroupRow:
    life, group, line, members, judged, mean, worst, best, tokens, step, trained, lag, dropped, cause, _ = row
    return GroupRow(
        life=life,
        group=group,
        row=line,
        members=members,
        judged=judged,
        mean=mean,
        worst=worst,
        best=best,
        tokens=tokens or 0,
        lag=lag,
        step=None if step is None else step + 1,
        trained=bool(trained) and dropped is None,
        dropped=dropped,
        cause=cause,
        prompt=_prompt(source, life, group),
    )


def _page(source: Source, sql: str, values: Sequence[object], wanted: Wanted) -> tuple[list[tuple[Any, ...]], int]:
    """The rows that are wanted, and how many there are in all. Past the last there is no row to say that."""
    picked = list(source.rows(sql, *values, wanted.limit, wanted.offset))
    first = picked or (list(source.rows(sql, *values, 1, 0)) if wanted.offset else [])
    return picked, first[0][-1] if first else 0


def _order(columns: Mapping[str, str], wanted: Wanted) -> str:
    return f"{columns[wanted.sort]}{' DESC' * wanted.down} NULLS LAST"


def _bounds(value: str, wanted: Wanted) -> Iterator[tuple[str, float]]:
    """Conditions on a reward, with their values. What has none is not within them."""
    if wanted.least is not None:
        yield f"{value} >= ?", wanted.least
    if wanted.most is not None:
        yield f"{value} <= ?", wanted.most


def _where(table: str, source: Source, wanted: Wanted) -> tuple[list[str], list[object]]:
    """Conditions that both lists have, with their values."""
    where, values = [source.of_groups(table)], list[object]()
    if wanted.step is not None:
        where.append("b.step = ?")
        values.append(wanted.step - 1)
    if wanted.group is not None:  # with its lives, for SQLite to find it by its key
        where.append(f"{table}.incarnation IN ({', '.join(map(str, source.known))}) AND {table}.group_id = ?")
        values.append(wanted.group)
    return where, values


def _same(one: str, other: str, *keys: str) -> str:
    return " AND ".join(f"{one}.{key} = {other}.{key}" for key in ("incarnation", "group_id", *keys))


def _prompt(source: Source, life: int, group: int) -> str:
    sql = "SELECT substr(text, 1, ?) FROM prompts WHERE incarnation = ? AND group_id = ?"
    return next((str(text) for (text,) in source.rows(sql, SHOWN, life, group)), "")
