"""Rollouts as a file for other programs: Parquet or JSON Lines, whole or not at all, in memory that does not grow with them."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator
from itertools import islice
from pathlib import Path
from typing import IO, Any

from rollyard.durable import writing
from rollyard.errors import ConfigError
from rollyard.inspect.exported import Exported, span_record, turn_record
from rollyard.inspect.select import TAKEN
from rollyard.inspect.source import Source
from rollyard.journal.codec import unpack_floats, unpack_ids, unpack_spans, unpack_turns
from rollyard.journal.decode import COMPLETION, PROMPT, VERDICT, check_completion, check_prompt, check_verdict

ROLLOUTS = """
    SELECT {prompt}, {completion}, {verdict}, b.step + 1, b.trained_at IS NOT NULL AND dm.reason IS NULL,
           coalesce(dm.reason, dg.reason), coalesce(dm.cause, dg.cause), c.finished_at
    FROM completions c
    JOIN prompts p ON p.incarnation = c.incarnation AND p.group_id = c.group_id
    LEFT JOIN verdicts v ON v.incarnation = c.incarnation AND v.group_id = c.group_id AND v.member = c.member {taken}
    LEFT JOIN drops dm ON dm.incarnation = c.incarnation AND dm.group_id = c.group_id AND ifnull(dm.member, -1) = c.member
    LEFT JOIN drops dg ON dg.incarnation = c.incarnation AND dg.group_id = c.group_id AND ifnull(dg.member, -1) = -1
    WHERE {groups} ORDER BY c.rowid"""
COLUMNS = tuple(columns.count(",") + 1 for columns in (PROMPT, COMPLETION, VERDICT))


def export(source: Source, path: Path, *, overwrite: bool) -> int:
    """Write all finished rollouts of the lives that are meant, in the order they finished; returns how many.

    Raises:
        ConfigError: the file's name says no format, it is there already or among the run's, or PyArrow is not installed.
        JournalError: the journal cannot be read to its end; OSError: the file cannot be written. There is no file then.
    """
    write = _writer(path)
    if path.is_dir() or (path.exists() and not overwrite):
        raise ConfigError(f"{path} exists already", where="export", remedy="give another name, or --overwrite")
    if source.folder.path.resolve() in path.resolve().parents:
        raise ConfigError(f"{path} would be in the run's own folder", where="export", remedy="give a name elsewhere")
    if not path.parent.is_dir():
        raise ConfigError(f"there is no folder {path.parent}", where="export", remedy="make it, or give another name")
    count = 0

    def counted() -> Iterator[Exported]:
        nonlocal count
        for row in _rows(source):
            count += 1
            yield row

    with writing(path) as file:
        write(file, counted())
        source.check_unchanged()
    return count


def _writer(path: Path) -> Callable[[IO[bytes], Iterable[Exported]], None]:
    if path.suffix == ".jsonl":
        return _write_jsonl
    if path.suffix != ".parquet":
        raise ConfigError(f"{path.name!r} says no format", where="export", remedy="give a name that ends with .parquet or .jsonl")
    try:
        from rollyard.inspect.parquet import write_parquet
    except ModuleNotFoundError:
        remedy = "pip install 'rollyard[parquet]', or give a name that ends with .jsonl"
        raise ConfigError("PyArrow is not installed", where="export", remedy=remedy) from None
    return write_parquet


def _rows(source: Source) -> Iterator[Exported]:
    taken, groups = TAKEN.format(table="c", steps=source.of_steps("b")), source.of_groups("c")
    for row in source.rows(ROLLOUTS.format(prompt=PROMPT, completion=COMPLETION, verdict=VERDICT, taken=taken, groups=groups)):
        with source.decoding():
            yield _exported(iter(row))


def _exported(row: Iterator[Any]) -> Exported:
    """Raises Damaged when a part of it is not what was written."""
    prompt, completion, verdict = (tuple(islice(row, count)) for count in COLUMNS)
    check_prompt(*prompt)
    check_completion(*completion)
    value, parts, problem = None, "{}", ""
    if verdict[0] is not None:
        check_verdict(*verdict)
        value, parts, problem = verdict[3:6]
    life, group, line, prompt_ids, asked, columns, *_ = prompt
    _, _, member, ids, logprobs, spans, turns, finish, text, _ = completion
    step, trained, dropped, cause, at = row
    return Exported(
        life=life,
        group=group,
        member=member,
        row=line,
        prompt=asked,
        prompt_ids=prompt_ids,
        columns=columns,
        completion=text,
        token_ids=ids,
        logprobs=logprobs,
        spans=unpack_spans(spans),
        turns=unpack_turns(turns, unpack_ids(ids)) if turns != "[]" else (),
        finish=finish,
        reward=value,
        rewards=parts,
        problem=problem,
        step=step,
        trained=bool(trained),
        dropped=dropped,
        drop_cause=cause,
        finished_at=at,
    )


def _write_jsonl(file: IO[bytes], rows: Iterable[Exported]) -> None:
    encode = json.JSONEncoder(ensure_ascii=False, separators=(",", ":")).encode
    for row in rows:
        file.write(encode(_record(row)).encode() + b"\n")


def _record(row: Exported) -> dict[str, Any]:
    return {
        "life": row.life,
        "group": row.group,
        "member": row.member,
        "row": row.row,
        "prompt": row.prompt,
        "prompt_ids": unpack_ids(row.prompt_ids),
        "columns": json.loads(row.columns),
        "completion": row.completion,
        "token_ids": unpack_ids(row.token_ids),
        "logprobs": unpack_floats(row.logprobs),
        "spans": [span_record(span) for span in row.spans],
        "turns": [turn_record(turn) for turn in row.turns],
        "finish": row.finish,
        "reward": row.reward,
        "rewards": json.loads(row.rewards),
        "problem": row.problem,
        "step": row.step,
        "trained": row.trained,
        "dropped": row.dropped,
        "drop_cause": row.drop_cause,
        "finished_at": row.finished_at,
    }
