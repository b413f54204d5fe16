"""Rows of the journal as records again. A row that is not what was written is an error, whatever its bytes say now."""

from __future__ import annotations

import json
from typing import Final

from rollyard.errors import JournalError
from rollyard.journal.codec import checksum, unpack_floats, unpack_ids, unpack_parts, unpack_spans, unpack_turns
from rollyard.journal.partials import Piece, unpack_piece
from rollyard.types import Completion, FinishReason, Prompt, Reward

# Columns of the tables p(rompts), c(ompletions), v(erdicts) and partials, as the functions below take them.
PROMPT: Final = "p.incarnation, p.group_id, p.row, p.token_ids, p.text, p.columns, p.messages, p.checksum"
COMPLETION: Final = """
    c.incarnation, c.group_id, c.member, c.token_ids, c.logprobs, c.spans, c.turns, c.finish, c.text, c.checksum"""
VERDICT: Final = "v.incarnation, v.group_id, v.member, v.value, v.parts, v.problem, v.checksum"
PARTIAL: Final = "incarnation, group_id, member, position, token_ids, logprobs, spans, checksum"


class Damaged(JournalError):
    """A row is not what was written there: the disk has changed it."""


def check_prompt(life: int, group: int, row: int, ids: bytes, text: str, columns: str, messages: str, check: int) -> None:
    """Raises Damaged."""
    if check != checksum(ids, b"", f"{life} {group} {row} {columns} {messages} {text}"):
        raise Damaged(f"prompt {group} of life {life} is damaged")


def prompt_of(life: int, group: int, row: int, ids: bytes, text: str, columns: str, messages: str, check: int) -> Prompt:
    """Raises Damaged."""
    check_prompt(life, group, row, ids, text, columns, messages, check)
    try:
        return Prompt(group, row, unpack_ids(ids), text, json.loads(columns), tuple(json.loads(messages)))
    except RecursionError:  # it was written where the stack was not as deep
        raise Damaged(f"prompt {group} of life {life} has lists in lists without end") from None


def check_completion(
    life: int,
    group: int,
    member: int,
    ids: bytes,
    logprobs: bytes,
    spans: str,
    turns: str,
    finish: str,
    text: str,
    check: int,
) -> None:
    """Raises Damaged."""
    if check != checksum(ids, logprobs, f"{life} {group} {member} {spans} {turns} {finish} {text}"):
        raise Damaged(f"the completion of prompt {group}, member {member} of life {life} is damaged")


def completion_of(
    life: int,
    group: int,
    member: int,
    ids: bytes,
    logprobs: bytes,
    spans: str,
    turns: str,
    finish: str,
    text: str,
    check: int,
) -> Completion:
    """Raises Damaged."""
    check_completion(life, group, member, ids, logprobs, spans, turns, finish, text, check)
    tokens = unpack_ids(ids)
    taken = unpack_turns(turns, tokens)
    return Completion(group, member, tokens, unpack_floats(logprobs), unpack_spans(spans), FinishReason(finish), text, taken)


def check_verdict(life: int, group: int, member: int, value: float | None, parts: str, problem: str, check: int) -> None:
    """Raises Damaged."""
    if check != checksum(b"", b"", f"{life} {group} {member} {value} {parts} {problem}"):
        raise Damaged(f"the verdict on prompt {group}, member {member} of life {life} is damaged")


def reward_of(life: int, group: int, member: int, value: float | None, parts: str, problem: str, check: int) -> Reward:
    """Raises Damaged."""
    check_verdict(life, group, member, value, parts, problem, check)
    return Reward(value, unpack_parts(parts), problem)


def piece_of(life: int, group: int, member: int, position: int, ids: bytes, logprobs: bytes, spans: str, check: int) -> Piece:
    """Raises Damaged."""
    if check != checksum(ids, logprobs, f"{life} {group} {member} {position} {spans}"):
        raise Damaged(f"tokens of prompt {group}, member {member} of life {life} are damaged")
    return unpack_piece(ids, logprobs, spans)
