"""One rollout, with all that is known of it."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

from rollyard.errors import ConfigError
from rollyard.inspect.select import RolloutRow, Wanted, rollouts
from rollyard.inspect.source import Source
from rollyard.journal.codec import unpack_floats, unpack_ids, unpack_spans, unpack_turns
from rollyard.types import Prompt, Turn, VersionSpan

PROMPT = "SELECT row, token_ids, text, columns FROM prompts WHERE incarnation = ? AND group_id = ?"
WRITTEN = """
    SELECT token_ids, logprobs, spans, turns, text, finished_at FROM completions
    WHERE incarnation = ? AND group_id = ? AND member = ?"""
VERDICT = "SELECT parts, problem FROM verdicts WHERE incarnation = ? AND group_id = ? AND member = ?"


@dataclass(frozen=True, slots=True)
class Detail:
    """One rollout as it was recorded. Nothing was written where it was dropped before it was finished."""

    row: RolloutRow
    prompt: Prompt
    text: str
    token_ids: tuple[int, ...]  # [tokens]
    logprobs: tuple[float, ...]  # [tokens]
    spans: tuple[VersionSpan, ...]
    turns: tuple[Turn, ...]
    finished_at: float | None
    parts: dict[str, Any]  # the reward's numbers by name
    problem: str


def detail(source: Source, group: int, member: int) -> Detail:
    """Of the newest life that has it. Raises ConfigError when none has, JournalError."""
    found = [row for row in rollouts(source, Wanted(group=group)).rows if row.member == member]
    if not found:
        problem = f"group {group} has no member {member} that ended"
        raise ConfigError(problem, where="rollout", remedy=_remedy(source, group))
    row = max(found, key=lambda row: row.life)
    key = (row.life, group, member)
    ids, logprobs, spans, turns, text, at = next(source.rows(WRITTEN, *key), (b"", b"", "[]", "[]", "", None))
    parts, problem = next(source.rows(VERDICT, *key), ("{}", ""))
    line, prompt_ids, prompt, columns = source.row(PROMPT, row.life, group)
    with source.decoding():
        tokens = unpack_ids(ids)
        return Detail(
            row=row,
            prompt=Prompt(group, line, unpack_ids(prompt_ids), prompt, json.loads(columns)),
            text=text,
            token_ids=tokens,
            logprobs=unpack_floats(logprobs),
            spans=unpack_spans(spans),
            turns=unpack_turns(turns, tokens),
            finished_at=at,
            parts=json.loads(parts),
            problem=problem,
        )


def _remedy(source: Source, group: int) -> str:
    there = sorted({row.member for row in rollouts(source, Wanted(group=group)).rows})
    if there:
        return f"it has {', '.join(map(str, there))}"
    sql = f"SELECT min(group_id), max(group_id) FROM prompts p WHERE {source.of_groups('p')}"
    first, last = source.row(sql)
    return "no prompt was admitted yet" if first is None else f"groups {first} to {last} were admitted"
