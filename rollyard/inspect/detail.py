"""One rollout, with all that is known of it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from rollyard.errors import ConfigError
from rollyard.inspect.select import RolloutRow, Wanted, rollouts
from rollyard.inspect.source import Source
from rollyard.journal.decode import COMPLETION, PARTIAL, PROMPT, VERDICT, completion_of, piece_of, prompt_of, reward_of
from rollyard.journal.partials import joined
from rollyard.types import Prompt, Reward, Turn, VersionSpan

MEMBER = "incarnation = ? AND group_id = ? AND member = ?"


@dataclass(frozen=True, slots=True)
class Detail:
    """One rollout as it was recorded. Of one that was not finished there is what was kept, or nothing."""

    row: RolloutRow
    prompt: Prompt
    verdict: Reward
    text: str
    token_ids: Sequence[int]  # [tokens]
    logprobs: Sequence[float]  # [tokens]
    spans: tuple[VersionSpan, ...]
    turns: tuple[Turn, ...]
    finished_at: float | None


def detail(source: Source, group: int, member: int) -> Detail:
    """Of the newest life that has it. Raises ConfigError when none has, JournalError when a row is damaged."""
    found = [row for row in rollouts(source, Wanted(group=group)).rows if row.member == member]
    if not found:
        problem = f"nothing is known of member {member} of group {group}"
        raise ConfigError(problem, where="rollout", remedy=_remedy(source, group))
    row = max(found, key=lambda row: row.life)
    key = (row.life, group, member)
    with source.decoding():
        prompt = prompt_of(*source.row(f"SELECT {PROMPT} FROM prompts p WHERE incarnation = ? AND group_id = ?", row.life, group))
        judged = source.rows(f"SELECT {VERDICT} FROM verdicts v WHERE {MEMBER}", *key)
        verdict = next((reward_of(*each) for each in judged), Reward(None))
        for *written, at in source.rows(f"SELECT {COMPLETION}, finished_at FROM completions c WHERE {MEMBER}", *key):
            done = completion_of(*written)
            return Detail(row, prompt, verdict, done.text, done.token_ids, done.logprobs, done.spans, done.turns, at)
        kept = source.rows(f"SELECT {PARTIAL} FROM partials WHERE {MEMBER} ORDER BY position", *key)
        begun = joined(piece_of(*piece) for piece in kept)
        return Detail(row, prompt, verdict, "", tuple(begun.token_ids), tuple(begun.logprobs), tuple(begun.spans), (), None)


def _remedy(source: Source, group: int) -> str:
    there = sorted({row.member for row in rollouts(source, Wanted(group=group)).rows})
    if there:
        return f"it has {', '.join(map(str, there))}"
    sql = f"SELECT min(group_id), max(group_id) FROM prompts p WHERE {source.of_groups('p')}"
    first, last = source.row(sql)
    return "no prompt was admitted yet" if first is None else f"groups {first} to {last} were admitted"
