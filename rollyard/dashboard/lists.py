"""Groups and rollouts, page by page, and one of them with all that is known of it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from itertools import takewhile
from typing import Final

from rollyard.dashboard.told import GroupRows, GroupShown, RolloutRows, RolloutShown, Token, TurnShown
from rollyard.errors import ConfigError
from rollyard.inspect.detail import Detail, detail
from rollyard.inspect.select import Wanted, groups, rollouts
from rollyard.inspect.source import Source
from rollyard.inspect.words import Words
from rollyard.journal.decode import PROMPT, prompt_of

KEY: Final = "incarnation = ? AND group_id = ?"


def group_rows(source: Source, wanted: Wanted) -> GroupRows:
    """A page of them. Raises JournalError."""
    found = groups(source, wanted)
    return GroupRows(found.found, found.rows)


def rollout_rows(source: Source, wanted: Wanted) -> RolloutRows:
    """A page of them. Raises JournalError."""
    found = rollouts(source, wanted)
    return RolloutRows(found.found, tuple(replace(row, reward=finite(row.reward)) for row in found.rows))


def group(source: Source, id_: int, words: Words | None) -> GroupShown:
    """Of the newest life that has it. Raises ConfigError when none has, JournalError when a row is damaged."""
    found = groups(source, Wanted(group=id_)).rows
    if not found:
        first, last = source.row(f"SELECT min(group_id), max(group_id) FROM prompts p WHERE {source.of_groups('p')}")
        remedy = "no prompt was admitted yet" if first is None else f"groups {first} to {last} were admitted"
        raise ConfigError(f"there is no group {id_}", where="group", remedy=remedy)
    row = max(found, key=lambda row: row.life)
    with source.decoding():
        prompt = prompt_of(*source.row(f"SELECT {PROMPT} FROM prompts p WHERE {KEY}", row.life, id_))
    members = tuple(each for each in rollout_rows(source, Wanted(group=id_)).rows if each.life == row.life)
    tokens = plain(prompt.token_ids, words)
    return GroupShown(row, prompt.text, tokens, prompt.columns, tuple(prompt.messages), members)


def rollout(source: Source, group_: int, member: int, words: Words | None, why: str) -> RolloutShown:
    """See `inspect.detail`. `why`: there are no words."""
    found = detail(source, group_, member)
    verdict = found.verdict
    return RolloutShown(
        row=replace(found.row, reward=finite(found.row.reward)),
        prompt=found.prompt.text,
        columns=found.prompt.columns,
        text=found.text,
        tokens=_tokens(found, words),
        turns=_turns(found, words),
        reward=finite(verdict.value),
        rewards={name: finite(value) for name, value in verdict.parts.items()},
        problem=verdict.problem,
        spans=tuple((*span.version, *span.oldest_kv, span.tokens) for span in found.spans),
        finish=found.row.finish,
        finished_at=found.finished_at,
        no_texts="" if words is not None else why,
    )


def finite(value: float | None) -> float | None:
    """None for a number that JSON has no word for."""
    return value if value is not None and math.isfinite(value) else None


def plain(ids: Sequence[int], words: Words | None) -> tuple[Token, ...]:
    """Tokens that were read."""
    texts: Sequence[str | None] = [None] * len(ids) if words is None else words.split(ids)
    return tuple(Token(id_, text) for id_, text in zip(ids, texts, strict=True))


def _tokens(found: Detail, words: Words | None) -> tuple[Token, ...]:
    """Tokens that were written."""
    wrote = [(span.version.step, span.oldest_kv.step) for span in found.spans for _ in range(span.tokens)]
    written = plain(found.token_ids, words)
    return tuple(
        Token(token.id, token.text, finite(logprob), *versions)
        for token, logprob, versions in zip(written, found.logprobs, wrote, strict=True)
    )


def _turns(found: Detail, words: Words | None) -> tuple[TurnShown, ...]:
    shown, before, written = list[TurnShown](), tuple[int, ...](), 0
    for turn in found.turns:
        kept = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(before, turn.prompt_ids, strict=False)))
        new = plain(turn.prompt_ids[kept:], words)
        shown.append(TurnShown(len(before) - kept, new, turn.tokens, str(turn.finish)))
        before = (*turn.prompt_ids, *found.token_ids[written : written + turn.tokens])
        written += turn.tokens
    return tuple(shown)
