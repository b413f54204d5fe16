"""Rollouts as Parquet. Only this module knows PyArrow."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import IO, Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from rollyard.inspect.exported import PART, ROWS, Exported, span_record, turn_record
from rollyard.journal.codec import unpack_parts

SPAN = pa.struct([(name, pa.int32()) for name in ("step", "life", "oldest_kv_step", "oldest_kv_life", "tokens")])
TURN = pa.struct([("prompt_ids", pa.list_(pa.int32())), ("tokens", pa.int32()), ("finish", pa.string())])
SCHEMA = pa.schema([
    ("life", pa.int32()),
    ("group", pa.int64()),
    ("member", pa.int32()),
    ("row", pa.int64()),
    ("prompt", pa.string()),
    ("prompt_ids", pa.list_(pa.int32())),
    ("columns", pa.string()),  # JSON: data sets differ in what they have
    ("completion", pa.string()),
    ("token_ids", pa.list_(pa.int32())),
    ("logprobs", pa.list_(pa.float32())),
    ("spans", pa.list_(SPAN)),
    ("turns", pa.list_(TURN)),
    ("finish", pa.string()),
    ("reward", pa.float64()),
    ("rewards", pa.map_(pa.string(), pa.float64())),
    ("problem", pa.string()),
    ("step", pa.int64()),
    ("trained", pa.bool_()),
    ("dropped", pa.string()),
    ("drop_cause", pa.string()),
    ("finished_at", pa.timestamp("us", tz="UTC")),
])  # fmt: skip
BLOBS = {"prompt_ids": "<i4", "token_ids": "<i4", "logprobs": "<f4"}


def write_parquet(file: IO[bytes], rows: Iterable[Exported]) -> None:
    """One row group for every `ROWS` rollouts, or fewer where they are long."""
    with pq.ParquetWriter(file, SCHEMA, compression="zstd") as writer:
        for part in _parts(rows):
            writer.write_table(pa.Table.from_arrays([_column(field, part) for field in SCHEMA], schema=SCHEMA))


def _parts(rows: Iterable[Exported]) -> Iterator[list[Exported]]:
    part: list[Exported] = []
    size = 0
    for row in rows:
        part.append(row)
        size += row.size
        if size >= PART or len(part) == ROWS:
            yield part
            part, size = [], 0
    if part:
        yield part


def _column(field: Any, rows: Sequence[Exported]) -> Any:
    name = field.name
    values = [getattr(row, name) for row in rows]
    if name in BLOBS:  # as they are: nothing is unpacked
        ends = np.cumsum([0, *(len(blob) // 4 for blob in values)], dtype=np.int32)
        return pa.ListArray.from_arrays(pa.array(ends), pa.array(np.frombuffer(b"".join(values), BLOBS[name])))
    if name == "spans":
        values = [[span_record(span) for span in spans] for spans in values]
    elif name == "turns":
        values = [[turn_record(turn) for turn in turns] for turns in values]
    elif name == "rewards":
        values = [list(unpack_parts(parts).items()) for parts in values]
    elif name == "finished_at":
        values = [round(at * 1e6) for at in values]
    return pa.array(values, type=field.type)
