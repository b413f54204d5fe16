"""A rollout as it is exported, whatever the format."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from rollyard.types import Turn, VersionSpan

PART = 2**24  # bytes of tokens and texts, about, that are in memory at once
ROWS = 4096  # and rollouts


@dataclass(frozen=True, slots=True)
class Exported:
    """One finished rollout. Tokens and logprobs are still the journal's bytes, columns and parts its JSON."""

    life: int
    group: int
    member: int
    row: int
    prompt: str
    prompt_ids: bytes  # [tokens], int32
    columns: str
    completion: str
    token_ids: bytes  # [tokens], int32
    logprobs: bytes  # [tokens], float32
    spans: tuple[VersionSpan, ...]
    turns: tuple[Turn, ...]
    finish: str
    reward: float | None
    rewards: str
    problem: str
    step: int | None
    trained: bool
    dropped: str | None
    drop_cause: str | None
    finished_at: float

    @property
    def size(self) -> int:
        """Bytes, about."""
        turns = sum(len(turn.prompt_ids) for turn in self.turns)
        return 2 * len(self.token_ids) + len(self.prompt) + len(self.completion) + len(self.columns) + 32 * turns + 500


def span_record(span: VersionSpan) -> dict[str, int]:
    """Which version wrote so many tokens, and the oldest whose keys and values they attended to."""
    (step, life), (kv_step, kv_life), tokens = span
    return {"step": step, "life": life, "oldest_kv_step": kv_step, "oldest_kv_life": kv_life, "tokens": tokens}


def turn_record(turn: Turn) -> dict[str, Any]:
    """What an answer of an episode came after, how many tokens it has, and how it ended."""
    return {"prompt_ids": turn.prompt_ids, "tokens": turn.tokens, "finish": turn.finish.value}
