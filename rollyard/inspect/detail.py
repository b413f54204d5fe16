"""One rollout, with all that is known of it."""

from __future__ import annotations

import json
from dataclasses import dataclass

from rollyard.errors import ConfigError
from rollyard.inspect.select import RolloutRow, Wanted, rollouts
from rollyard.inspect.source import Source
from rollyard.journal.codec import unpack_floats, unpack_ids, unpack_parts, unpack_spans, unpack_turns
from rollyard.journal.partials import joined, unpack_piece
from rollyard.types import Prompt, Turn, VersionSpan

PROMPT = "SELECT row, token_ids, text, columns FROM prompts WHERE incarnation = ? AND group_id = ?"
WRITTEN = """
    SELECT token_ids, logprobs, spans, turns, text, finished_at FROM completions
    WHERE incarnation = ? AND group_id = ? AND member = ?"""
BEGUN = """
    SELECT token_ids, logprobs, spans FROM partials WHERE incarnation = ? AND group_id = ? AND member = ? ORDER BY position"""
VERDICT = "SELECT parts, problem FROM verdicts WHERE incarnation = ? AND group_id = ? AND member = ?"


@dataclass(frozen=True, slots=True)
class Detail:
    """One rollout as it was recorded. Of one that was not finished there is what was kept, or nothing."""

    row: RolloutRow
    prompt: Prompt
    text: str
    token_ids: tuple[int, ...]  # [tokens]
    logprobs: tuple[float, ...]  # [tokens]
    spans: tuple[VersionSpan, ...]
    turns: tuple[Turn, ...]
    finished_at: float | None
    parts: dict[str, float]  # the reward's numbers by name
    problem: str


def detail(source: Source, group: int, member: int) -> Detail:
    """Of the newest life that has it. Raises ConfigError when none has, JournalError."""
    found = [row for row in rollouts(source, Wanted(group=group)).rows if row.member == member]
    if not found:
        problem = f"nothing is known of member {member} of group {group}"
        raise ConfigError(problem, where="rollout", remedy=_remedy(source, group))
    row = max(found, key=lambda row: row.life)
    key = (row.life, group, member)
    parts, problem = next(source.rows(VERDICT, *key), ("{}", ""))
    line, prompt_ids, prompt, columns = source.row(PROMPT, row.life, group)
    written = next(source.rows(WRITTEN, *key), None)
    with source.decoding():
        if written is None:
            begun = joined(unpack_piece(*piece) for piece in source.rows(BEGUN, *key))
            tokens, logprobs, spans = tuple(begun.token_ids), tuple(begun.logprobs), tuple(begun.spans)
            turns, text, at = "[]", "", None
        else:
            ids, floats, covered, turns, text, at = written
            tokens, logprobs, spans = unpack_ids(ids), unpack_floats(floats), unpack_spans(covered)
        return Detail(
            row=row,
            prompt=Prompt(group, line, unpack_ids(prompt_ids), prompt, json.loads(columns)),
            text=text,
            token_ids=tokens,
            logprobs=logprobs,
            spans=spans,
            turns=unpack_turns(turns, tokens),
            finished_at=at,
            parts=unpack_parts(parts),
            problem=problem,
        )


def _remedy(source: Source, group: int) -> str:
    there = sorted({row.member for row in rollouts(source, Wanted(group=group)).rows})
    if there:
        return f"it has {', '.join(map(str, there))}"
    sql = f"SELECT min(group_id), max(group_id) FROM prompts p WHERE {source.of_groups('p')}"
    first, last = source.row(sql)
    return "no prompt was admitted yet" if first is None else f"groups {first} to {last} were admitted"
