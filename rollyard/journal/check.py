"""What of a run's journal is sound: SQLite's own checks, every row's checksum, and what must hold between the rows."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any, Final

from rollyard.errors import JournalError
from rollyard.journal.decode import COMPLETION, PARTIAL, PROMPT, VERDICT, Damaged, completion_of, piece_of, prompt_of, reward_of
from rollyard.journal.reader import JournalReader

SHOWN: Final = 3  # examples of what a finding is about


class Kind(StrEnum):
    """What is not as it must be."""

    UNREADABLE = "unreadable"  # no journal, or one that SQLite cannot read (further)
    BROKEN = "broken"  # SQLite's integrity check says so
    REFERENCE = "reference"  # a row refers to one that is not there
    DAMAGED = "damaged"  # a row is not what was written
    PROMPT = "prompt"  # a prompt did not end once
    MEMBER = "member"  # a member did not end once, or is none of its group
    TOKENS = "tokens"  # spans, blobs and counts of a row contradict each other
    BATCH = "batch"  # a batch has an incomplete group, or none, or does not follow the one before
    CHECKPOINT = "checkpoint"  # one that was committed is not whole
    LEDGER = "ledger"  # a checkpoint was trained on more than there is


@dataclass(frozen=True, slots=True)
class Finding:
    """Example: Finding(Kind.PROMPT, "2 prompts were trained and dropped: prompt 3 of life 0, prompt 7 of life 0")."""

    kind: Kind
    text: str


@dataclass(frozen=True, slots=True)
class Sound:
    """Rows of one table that are as they were written. `rows` is None where the table cannot be read to its end."""

    table: str
    good: int
    rows: int | None


@dataclass(frozen=True, slots=True)
class Checked:
    """What was found. No findings: all is sound."""

    tables: tuple[Sound, ...]
    findings: tuple[Finding, ...]
    checkpoint: str  # the folder that a resume would begin from; "" for the beginning


def check_journal(path: Path, whole: Callable[[str], bool | None]) -> Checked:
    """Look at everything. It changes nothing, and raises nothing for what it finds.

    Args:
        path: of the journal, in the run's folder.
        whole: is this folder of a checkpoint, named as in the journal, as it was written? None: it is not there.
    """
    try:
        with JournalReader(path) as reader, reader.still():
            return _Check(reader, whole).run()
    except JournalError as error:
        return Checked((), (Finding(Kind.UNREADABLE, str(error)),), "")


class _Check:
    """One look at one journal."""

    def __init__(self, reader: JournalReader, whole: Callable[[str], bool | None]) -> None:
        self._query, self._whole = reader.query, whole
        self._findings: list[Finding] = []

    def run(self) -> Checked:
        self._look(Kind.BROKEN, "SQLite's integrity check found {} problems", INTEGRITY)
        tables = tuple(self._rows(table) for table in TABLES)
        self._look(Kind.REFERENCE, "{} rows refer to what is not there", REFERENCES)
        for kind, text, sql in RULES:
            self._look(kind, text, sql)
        checkpoint = self._checkpoints()
        return Checked(tables, tuple(self._findings), checkpoint)

    def _look(self, kind: Kind, text: str, sql: str) -> None:
        """Every row that the statement returns is one too many; it tells where."""
        try:
            self._tell(kind, text, [" ".join(map(str, row)) for row in self._query(sql)])
        except JournalError as error:
            self._unreadable(error)

    def _tell(self, kind: Kind, text: str, where: list[str]) -> None:
        if where:
            more = ", ..." if len(where) > SHOWN else ""
            self._findings.append(Finding(kind, f"{text.format(len(where))}: {', '.join(where[:SHOWN])}{more}"))

    def _unreadable(self, error: JournalError) -> None:
        finding = Finding(Kind.UNREADABLE, str(error))
        if finding not in self._findings:
            self._findings.append(finding)

    def _rows(self, table: str) -> Sound:
        """Read all rows, and their checksums where they have some."""
        good, damaged, complete = 0, list[str](), True
        columns, source, decode = DECODED.get(table, ("*", table, lambda *row: row))
        try:
            for row in self._query(f"SELECT {columns} FROM {source} NOT INDEXED"):
                try:
                    decode(*row)
                    good += 1
                except Damaged as error:
                    damaged.append(str(error))
        except JournalError as error:
            self._unreadable(error)
            complete = False
        self._tell(Kind.DAMAGED, f"{{}} rows of {table} are not what was written", damaged)
        return Sound(table, good, good + len(damaged) if complete else None)

    def _checkpoints(self) -> str:
        """The newest that is whole. Older ones may have been deleted, and none may be there half."""
        broken: list[str] = []
        newest = ""
        try:
            folders = [folder for (folder,) in self._query(CHECKPOINTS)]
        except JournalError as error:
            self._unreadable(error)
            return ""
        for number, folder in enumerate(dict.fromkeys(folders)):
            whole = self._whole(folder)
            if whole:
                newest = newest or folder
            elif whole is not None or number == 0:
                broken.append(folder if whole is not None else f"{folder} (it is the newest, and is not there)")
        self._tell(Kind.CHECKPOINT, "{} checkpoints are not whole", broken)
        return newest


TABLES: Final = (
    "incarnations",
    "prompts",
    "partials",
    "completions",
    "verdicts",
    "drops",
    "batches",
    "batch_groups",
    "versions",
    "evaluations",
    "checkpoints",
    "engine_events",
)
DECODED: Final[dict[str, tuple[str, str, Callable[..., Any]]]] = {
    "prompts": (PROMPT, "prompts p", prompt_of),
    "completions": (COMPLETION, "completions c", completion_of),
    "verdicts": (VERDICT, "verdicts v", reward_of),
    "partials": (PARTIAL, "partials", piece_of),
}

INTEGRITY: Final = "SELECT integrity_check FROM pragma_integrity_check(20) WHERE integrity_check != 'ok'"
REFERENCES: Final = """SELECT 'row', "rowid", 'of', "table", 'to', parent FROM pragma_foreign_key_check LIMIT 1000"""

OBJECT: Final = "CASE WHEN json_valid(counters) THEN json_type(counters) END IS 'object'"
CHECKPOINTS: Final = f"SELECT folder FROM checkpoints WHERE {OBJECT} ORDER BY rowid DESC"

# A statement returns what contradicts the rule, as words that tell where it is.
OF_PROMPT: Final = "'prompt', group_id, 'of life', incarnation"
OF_MEMBER: Final = "'member', member, 'of prompt', group_id, 'of life', incarnation"
SPANS: Final = "(SELECT ifnull(sum(json_extract(value, '$[4]')), 0) FROM json_each(CASE WHEN json_valid(spans) THEN spans END))"
SIZES: Final = f"length(token_ids) != 4 * tokens OR length(logprobs) != 4 * tokens OR tokens != {SPANS}"
RULES: Final = (
    (
        Kind.PROMPT,
        "{} prompts were taken for training, and dropped",
        f"""SELECT {OF_PROMPT} FROM batch_groups JOIN batches USING (incarnation, step) JOIN drops USING (incarnation, group_id)
            WHERE member IS NULL AND (trained_at IS NOT NULL OR reason != 'stopped')""",
    ),
    (
        Kind.PROMPT,
        "{} prompts are in two batches of what survives",
        """SELECT 'prompt', group_id FROM lineage_batches JOIN batch_groups USING (incarnation, step)
           GROUP BY group_id HAVING count(*) > 1""",
    ),
    (
        Kind.PROMPT,
        "{} prompts were neither trained nor dropped when their life ended",
        f"""SELECT {OF_PROMPT} FROM prompts p JOIN incarnations USING (incarnation) WHERE ended_at IS NOT NULL
            AND NOT EXISTS (SELECT 1 FROM batch_groups bg JOIN batches b USING (incarnation, step)
                WHERE bg.incarnation = p.incarnation AND bg.group_id = p.group_id AND trained_at IS NOT NULL)
            AND NOT EXISTS (SELECT 1 FROM drops d
                WHERE d.incarnation = p.incarnation AND d.group_id = p.group_id AND ifnull(d.member, -1) = -1)""",
    ),
    (
        Kind.MEMBER,
        "{} members are none of their group",
        f"""SELECT {OF_MEMBER} FROM (
                SELECT incarnation, group_id, member FROM completions UNION SELECT incarnation, group_id, member FROM partials
                UNION SELECT incarnation, group_id, member FROM drops WHERE member IS NOT NULL
            ) JOIN incarnations USING (incarnation) WHERE member < 0 OR member >= group_size""",
    ),
    (
        Kind.MEMBER,
        "{} prompts were dropped, and not all of their members",
        f"""SELECT {OF_PROMPT} FROM drops d JOIN incarnations USING (incarnation) WHERE member IS NULL
            AND group_size != (SELECT count(*) FROM drops o
                WHERE o.incarnation = d.incarnation AND o.group_id = d.group_id AND o.member IS NOT NULL)""",
    ),
    (
        Kind.MEMBER,
        "{} members have no verdict, and were not dropped",
        f"""SELECT {OF_MEMBER} FROM verdicts v WHERE value IS NULL AND NOT EXISTS (SELECT 1 FROM drops d
                WHERE d.incarnation = v.incarnation AND d.group_id = v.group_id AND ifnull(d.member, -1) = v.member)""",
    ),
    (
        Kind.MEMBER,
        "{} members have finished, and are being written",
        f"SELECT {OF_MEMBER} FROM partials JOIN completions USING (incarnation, group_id, member) GROUP BY 4, 6, 2",
    ),
    (Kind.TOKENS, "{} completions contradict themselves", f"SELECT {OF_MEMBER} FROM completions WHERE {SIZES}"),
    (
        Kind.TOKENS,
        "{} rows of unfinished members contradict themselves, or do not follow the one before",
        f"""SELECT {OF_MEMBER} FROM partials p WHERE {SIZES} OR position != (
                SELECT ifnull(sum(tokens), 0) FROM partials o
                WHERE o.incarnation = p.incarnation AND o.group_id = p.group_id AND o.member = p.member
                AND o.position < p.position)""",
    ),
    (
        Kind.BATCH,
        "{} groups of batches are not complete",
        f"""SELECT {OF_PROMPT} FROM batch_groups bg JOIN incarnations USING (incarnation)
            WHERE group_size != (SELECT count(*) FROM (
                    SELECT member FROM verdicts v WHERE v.incarnation = bg.incarnation AND v.group_id = bg.group_id
                    UNION SELECT member FROM drops d
                    WHERE d.incarnation = bg.incarnation AND d.group_id = bg.group_id AND d.member IS NOT NULL))
            OR NOT EXISTS (SELECT 1 FROM verdicts v
                WHERE v.incarnation = bg.incarnation AND v.group_id = bg.group_id AND v.value IS NOT NULL)""",
    ),
    (
        Kind.BATCH,
        "{} batches have no groups",
        """SELECT 'step', step, 'of life', incarnation FROM batches b
           WHERE NOT EXISTS (SELECT 1 FROM batch_groups o WHERE o.incarnation = b.incarnation AND o.step = b.step)""",
    ),
    (
        Kind.BATCH,
        "{} batches do not follow the one before",
        """SELECT 'step', step, 'of life', incarnation FROM batches b JOIN incarnations USING (incarnation)
           WHERE step IS NOT begun_step AND NOT EXISTS (SELECT 1 FROM batches o
               WHERE o.incarnation = b.incarnation AND o.step = b.step - 1
               AND (b.trained_at IS NULL OR o.trained_at IS NOT NULL))""",
    ),
    (
        Kind.DAMAGED,
        "{} checkpoints have counters that are damaged",
        f"SELECT folder FROM checkpoints WHERE NOT {OBJECT}",
    ),
    (
        Kind.LEDGER,
        "{} checkpoints have weights that more batches were trained on than there are",
        """SELECT folder FROM checkpoints c JOIN incarnations USING (incarnation)
           WHERE ifnull(json_extract(config, '$.exchange.folder'), '') = ''
           AND version_step != (SELECT count(DISTINCT step) FROM batches WHERE step < c.version_step)""",
    ),
)
