"""How records become columns of the journal, and back."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from functools import lru_cache
from itertools import takewhile
from struct import Struct
from typing import Final
from zlib import crc32

from rollyard.texts import clean
from rollyard.types import FinishReason, Turn, VersionSpan, WeightVersion

_encode: Final = json.JSONEncoder(ensure_ascii=False, allow_nan=False).encode


@lru_cache(maxsize=1 << 14)
def _array(count: int, kind: str) -> Struct:
    """Little-endian; the quickest there is, also for a few numbers."""
    return Struct(f"<{count}{kind}")


pack_number: Final = Struct("<q").pack  # raises struct.error for a number that SQLite has no room for


def pack_ids(ids: Sequence[int]) -> bytes:
    """`[tokens]` as little-endian int32. Raises struct.error."""
    return _array(len(ids), "i").pack(*ids)


def unpack_ids(blob: bytes) -> tuple[int, ...]:
    return _array(len(blob) // 4, "i").unpack(blob)


def pack_floats(values: Sequence[float]) -> bytes:
    """`[tokens]` as little-endian float32: a logprob keeps 7 digits, more than any engine computes. Raises OverflowError."""
    return _array(len(values), "f").pack(*values)


def unpack_floats(blob: bytes) -> tuple[float, ...]:
    return _array(len(blob) // 4, "f").unpack(blob)


def as_float(value: float) -> float:
    """As a column has it: SQLite knows no -0.0, and a number that no float can hold is infinite."""
    try:
        return float(value) + 0.0
    except OverflowError:
        return math.inf if value > 0 else -math.inf


def checksum(ids: bytes, logprobs: bytes, others: str) -> int:
    """Of a row's blobs and its other columns, which tells it from one that the disk has changed."""
    return crc32(others.encode(), crc32(logprobs, crc32(ids)))


def pack_spans(spans: Sequence[VersionSpan]) -> str:
    rows = [f"[{v}, {life}, {kv}, {kv_life}, {tokens}]" for (v, life), (kv, kv_life), tokens in spans]
    return f"[{rows[0]}]" if len(rows) == 1 else f"[{', '.join(rows)}]"


@lru_cache(maxsize=4096)
def unpack_spans(text: str) -> tuple[VersionSpan, ...]:
    rows: list[list[int]] = json.loads(text)
    return tuple(VersionSpan(WeightVersion(*row[0:2]), WeightVersion(*row[2:4]), row[4]) for row in rows)


def pack_turns(turns: Sequence[Turn], ids: Sequence[int]) -> str:
    """Of each turn: how many tokens of what was there before its prompt begins with, the others, tokens written, finish.

    Args:
        ids: `[tokens]` that were sampled, of all turns.
    """
    if not turns:
        return "[]"
    rows: list[list[object]] = []
    before: tuple[int, ...] = ()
    written = 0
    for turn in turns:
        kept = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(before, turn.prompt_ids, strict=False)))
        rows.append([kept, turn.prompt_ids[kept:], turn.tokens, turn.finish.value])
        before = (*turn.prompt_ids, *ids[written : written + turn.tokens])
        written += turn.tokens
    return json.dumps(rows)


def unpack_turns(text: str, ids: Sequence[int]) -> tuple[Turn, ...]:
    if text == "[]":
        return ()
    turns: list[Turn] = []
    before: tuple[int, ...] = ()
    written = 0
    for kept, new, tokens, finish in json.loads(text):
        turns.append(Turn((*before[:kept], *new), tokens, FinishReason(finish)))
        before = (*turns[-1].prompt_ids, *ids[written : written + tokens])
        written += tokens
    return tuple(turns)


def pack_json(record: Mapping[str, object]) -> str:
    """A JSON object. A value that JSON has no words for (a NaN, a date) is written as its `repr`, if it has one."""
    if not record:
        return "{}"
    try:
        encoded = _encode(record)
    except (TypeError, ValueError, RecursionError):
        encoded = _encode({str(key): _plain(value) for key, value in record.items()})
    return clean(encoded)


def pack_list(messages: Sequence[Mapping[str, str]]) -> str:
    """A JSON list of objects, each as `pack_json` writes it."""
    return f"[{', '.join(map(pack_json, messages))}]" if messages else "[]"


def pack_parts(parts: Mapping[str, float]) -> str:
    """Rewards by name as a JSON object, as `pack_json` writes it. The same few come over and over."""
    return _parts(tuple([(name, as_float(value)) for name, value in parts.items()])) if parts else "{}"


@lru_cache(maxsize=1024)
def _parts(items: tuple[tuple[str, float], ...]) -> str:
    return pack_json(dict(items))


def unpack_parts(text: str) -> dict[str, float]:
    """Rewards by name. One that is not finite is written as its `repr`."""
    return {} if text == "{}" else {name: float(value) for name, value in json.loads(text).items()}


def _plain(value: object) -> object:
    try:
        _encode(value)
    except (TypeError, ValueError, RecursionError):
        try:
            return repr(value)
        except (ValueError, RecursionError):  # numbers of thousands of digits, lists in lists without end
            return f"<{type(value).__name__}>"
    return value
