"""Lengths that a run had, from a file: as `rollyard inspect RUN export` writes it, or plain JSON Lines with a few fields."""

from __future__ import annotations

import codecs
import json
import stat
from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path
from typing import Any, Final, NamedTuple

from rollyard.errors import ConfigError, JournalError
from rollyard.journal.folder import JOURNAL
from rollyard.journal.reader import JournalReader
from rollyard.plan.scenario import Scenario
from rollyard.plan.workload import Lengths, Recorded, Traced, drawn_of
from rollyard.texts import once

WHERE: Final = "workload.trace"
EXAMPLE: Final = 'a line is such as {"group": 0, "prompt_tokens": 120, "tokens": 900}'
SHOWN: Final = 120  # characters of a broken line that an error shows
ENDED: Final = ("stop", "length", "context")  # how a completion ended whose length says something


class _Row(NamedTuple):
    """What a row of the file says. `where` is the file and line."""

    where: str
    life: int
    group: int
    member: int  # -1: not said, one more of its group
    prompt: int
    tokens: int
    finish: str
    turns: int


def read_trace(path: str | Path) -> Recorded:
    """Read all of it; a file that did not change since is not read again.

    A line of JSON has `group`, and either `token_ids` and `prompt_ids` (lists) or `tokens` and `prompt_tokens` (numbers);
    `member`, `life` and `finish` where they are known. Parquet has the same as columns.

    Raises:
        ConfigError: naming the file, the line and the field.
    """
    path = Path(path)
    if path.is_dir():
        path /= JOURNAL
    if path.suffix not in READ and path.exists():
        remedy = "give a file that ends with .jsonl or .parquet, or the folder of a run"
        raise ConfigError(f"{path.name!r} says no format", where=WHERE, remedy=remedy)
    try:
        there = path.stat()
    except (OSError, ValueError) as error:  # ValueError: a name with a null character in it
        why = error.strerror if isinstance(error, OSError) else error
        raise ConfigError(f"{path} cannot be read: {why}", where=WHERE, remedy="give a file") from None
    if not (stat.S_ISREG(there.st_mode) or stat.S_ISDIR(there.st_mode)):
        remedy = "write what comes through it to a file, and give that"
        raise ConfigError(f"{path} is a pipe or a device, and it is read more than once", where=WHERE, remedy=remedy)
    return _read(path, there.st_mtime_ns, there.st_size)


def prompts_of(scenario: Scenario) -> tuple[float, int]:
    """Mean tokens of a prompt, and those of the longest that is sure to come: drawn ones have no end, so it is the mean.

    Raises:
        ConfigError: the trace cannot be read.
    """
    workload = scenario.workload
    if not workload.trace:
        return float(workload.prompt_tokens), workload.prompt_tokens
    prompts = read_trace(workload.trace).prompts
    return sum(prompts) / len(prompts), max(prompts)


def lengths_of(scenario: Scenario) -> Lengths:
    """What the scenario says, of its trace or drawn.

    Raises:
        ConfigError: its trace cannot be read.
    """
    workload = scenario.workload
    if not workload.trace:
        return drawn_of(scenario)
    return Traced(read_trace(workload.trace), scenario.run.seed, workload.growth, endless=scenario.rollout.ignore_eos)


@lru_cache(4)
def _read(path: Path, changed_ns: int, size: int) -> Recorded:
    """Of the file as it was then."""
    groups: dict[
        int, dict[tuple[bool, int], tuple[int, int]]
    ] = {}  # group -> member, those without a number last -> life, tokens
    prompts: dict[int, int] = {}
    left_out = cut = cut_at = 0
    for row in READ[path.suffix](path):
        _check(row)
        if row.finish not in ENDED or not row.tokens:
            left_out += 1
            continue
        if was_cut := row.finish != "stop":
            cut, cut_at = cut + 1, max(cut_at, row.tokens)
        if prompts.setdefault(row.group, row.prompt) != row.prompt:
            problem = f"group {row.group} has a prompt of {prompts[row.group]} tokens, and of {row.prompt}"
            raise ConfigError(problem, where=row.where, remedy="number each prompt as a group of its own")
        members = groups.setdefault(row.group, {})
        member = (True, len(members)) if row.member < 0 else (False, row.member)
        if member in members and members[member][0] == row.life:
            problem = f"member {row.member} of group {row.group} comes twice"
            raise ConfigError(problem, where=row.where, remedy="number members of a group, or leave `member` out")
        if members.get(member, (-1, 0))[0] <= row.life:  # what an earlier life wrote again is not another completion
            members[member] = (row.life, row.tokens + was_cut)
    if not groups:
        raise ConfigError(f"{path} has no completion in it", where=WHERE, remedy=EXAMPLE)
    ids = sorted(groups)
    lengths = tuple(tuple(groups[group][member][1] for member in sorted(groups[group])) for group in ids)
    return Recorded(lengths, tuple(prompts[group] for group in ids), cut, cut_at, left_out)


def _check(row: _Row) -> None:
    if row.turns > 0:
        problem = "an episode of several turns, and a simulated prompt is answered once"
        raise ConfigError(problem, where=row.where, remedy="give the trace of a run without an environment")
    for name, found, least in (("prompt", row.prompt, 1), ("tokens", row.tokens, 0), ("life", row.life, 0)):
        if found < least:
            raise ConfigError(f"{name} of {found} is less than {least}", where=row.where, remedy=EXAMPLE)


def _of_jsonl(path: Path) -> Iterator[_Row]:
    number = 0
    try:
        with path.open("rb") as file:
            for number, line in enumerate(file, 1):
                if number == 1:
                    line = line.removeprefix(codecs.BOM_UTF8)
                if line.strip():
                    yield _parsed(line, f"{path}:{number}")
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror}", where=WHERE, remedy="give a file") from None


def _parsed(line: bytes, where: str) -> _Row:
    shown = line.decode("utf-8", "backslashreplace").strip()
    shown = shown if len(shown) <= SHOWN else shown[:SHOWN] + "..."
    try:
        record = json.loads(line.decode("utf-8"), object_pairs_hook=once)
    except (ValueError, RecursionError) as error:  # not UTF-8 is one too
        raise ConfigError(f"not JSON ({error}): {shown}", where=where, remedy=EXAMPLE) from None
    if not isinstance(record, dict):
        raise ConfigError(f"not an object: {shown}", where=where, remedy=EXAMPLE)
    return _Row(
        where=where,
        life=_number(record, "life", where, 0),
        group=_number(record, "group", where),
        member=_number(record, "member", where, -1),
        prompt=_size(record, "prompt_ids", "prompt_tokens", where),
        tokens=_size(record, "token_ids", "tokens", where),
        finish=_finish(record.get("finish", "stop"), where),
        turns=len(_list(record, "turns", where)) if record.get("turns") else 0,
    )


def _number(record: dict[str, Any], field: str, where: str, otherwise: int | None = None) -> int:
    if field not in record and otherwise is not None:
        return otherwise
    if field not in record:
        raise ConfigError(f"no field {field!r} ({', '.join(record) or 'the line has none'})", where=where, remedy=EXAMPLE)
    found = record[field]
    if not isinstance(found, int) or isinstance(found, bool):
        raise ConfigError(f"field {field!r} is {str(found)[:SHOWN]!r}, not a whole number", where=where, remedy=EXAMPLE)
    return found


def _size(record: dict[str, Any], ids: str, tokens: str, where: str) -> int:
    return len(_list(record, ids, where)) if ids in record else _number(record, tokens, where)


def _list(record: dict[str, Any], field: str, where: str) -> list[Any]:
    found = record[field]
    if not isinstance(found, list):
        raise ConfigError(f"field {field!r} is {str(found)[:SHOWN]!r}, not a list", where=where, remedy=EXAMPLE)
    return found


def _finish(found: object, where: str) -> str:
    if not isinstance(found, str):
        raise ConfigError(f"field 'finish' is {str(found)[:SHOWN]!r}, not a text", where=where, remedy="give stop or length")
    return found


def _of_parquet(path: Path) -> Iterator[_Row]:
    try:
        import pyarrow as pa
        import pyarrow.parquet as pq
    except ModuleNotFoundError:
        remedy = "pip install 'rollyard[parquet]', or give a file that ends with .jsonl"
        raise ConfigError("PyArrow is not installed", where=WHERE, remedy=remedy) from None
    try:
        with pq.ParquetFile(path) as file:
            names = _columns(file.schema_arrow, path)
            number = 0
            for batch in file.iter_batches(columns=list(names.values())):
                columns = {name: _numbers(batch.column(column), column, path) for name, column in names.items()}
                for values in zip(*columns.values(), strict=True):
                    number += 1
                    yield _row(dict(zip(columns, values, strict=True)), f"{path}, row {number}")
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror or error}", where=WHERE, remedy="give a file") from None
    except (pa.ArrowException, ValueError) as error:  # ValueError: names that are not UTF-8
        problem = f"{path} is not Parquet: {' '.join(str(error).split())[:SHOWN]}"
        raise ConfigError(problem, where=WHERE, remedy="give what `rollyard inspect RUN export FILE.parquet` writes") from None


def _columns(schema: Any, path: Path) -> dict[str, str]:
    """Those that are read, by what they say."""
    there = set(schema.names)
    if twice := next((name for name in schema.names if schema.names.count(name) > 1), ""):
        raise ConfigError(f"{path} has two columns {twice!r}", where=WHERE, remedy="rename one of them")
    found = {name: name for name in ("life", "group", "member", "finish", "turns") if name in there}
    for name, ids, tokens in (("prompt", "prompt_ids", "prompt_tokens"), ("tokens", "token_ids", "tokens")):
        if column := next((column for column in (ids, tokens) if column in there), ""):
            found[name] = column
    if missing := {"group", "prompt", "tokens"} - set(found):
        example = {"group": "group", "prompt": "prompt_ids or prompt_tokens", "tokens": "token_ids or tokens"}
        lacks = "; ".join(example[name] for name in sorted(missing))
        raise ConfigError(f"{path} has no column {lacks}", where=WHERE, remedy="see docs/simulator.md for what a trace has")
    return found


def _numbers(column: Any, name: str, path: Path) -> list[Any]:
    """Numbers and texts as they are, lists as their lengths."""
    import pyarrow as pa
    import pyarrow.compute as pc

    kind = column.type
    text, several = (pa.types.is_string, pa.types.is_large_string), (pa.types.is_list, pa.types.is_large_list)
    wanted = any(fits(kind) for fits in (text if name == "finish" else (pa.types.is_integer,)))
    if any(fits(kind) for fits in several) and name in ("token_ids", "prompt_ids", "turns"):
        column, wanted = pc.list_value_length(column), True
    if not wanted or column.null_count:
        found = f"{kind}, {column.null_count} of its values empty"
        raise ConfigError(f"{path}: column {name!r} is {found}", where=WHERE, remedy="see docs/simulator.md for what a trace has")
    values: list[Any] = column.to_pylist()
    return values


def _row(record: dict[str, Any], where: str) -> _Row:
    usual: dict[str, Any] = {"life": 0, "member": -1, "finish": "stop", "turns": 0}
    return _Row(where, **(usual | record))


def _of_journal(path: Path) -> Iterator[_Row]:
    """What a run has written so far, all its lives."""
    sql = """
        SELECT c.incarnation, group_id, member, length(p.token_ids) / 4, c.tokens, c.finish, json_array_length(c.turns)
        FROM completions c JOIN prompts p USING (incarnation, group_id) ORDER BY c.rowid"""
    try:
        with JournalReader(path) as journal:
            for life, group, member, prompt, tokens, finish, turns in journal.query(sql):
                yield _Row(f"{path}, group {group}", life, group, member, prompt, tokens, finish, turns)
    except JournalError as error:
        raise ConfigError(str(error), where=WHERE, remedy="give the journal of a run") from None


READ: Final = {".jsonl": _of_jsonl, ".parquet": _of_parquet, ".sqlite": _of_journal}
