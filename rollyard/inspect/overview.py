"""The whole run at a glance. What cannot be read is said, and the rest is shown."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from rollyard.durable import check_whole
from rollyard.errors import ConfigError, DurableError, JournalError
from rollyard.inspect.source import Lives, Metrics, Source, goes_on, read_config, read_metrics, saved
from rollyard.journal.folder import RunFolder

T = TypeVar("T")
PHASE = "phase/"

LIVES = """
    SELECT incarnation, rollyard, seed, begun_step, started_at, ended_at, cause, failed FROM incarnations i
    WHERE {lives} ORDER BY 1"""
TAKEN = """
    SELECT count(*), sum(trained_at IS NOT NULL), max(CASE WHEN trained_at IS NOT NULL THEN step + 1 END)
    FROM batches b WHERE {steps}"""
TRAINED = """
    SELECT count(*) FROM batch_groups bg JOIN batches b ON b.incarnation = bg.incarnation AND b.step = bg.step
    WHERE b.trained_at IS NOT NULL AND {steps} AND {groups}"""
FINISHED = "SELECT count(*), ifnull(sum(tokens), 0), ifnull(max(tokens), 0) FROM completions c WHERE {groups}"
JUDGED = "SELECT count(*), count(value), avg(value), min(value), max(value) FROM verdicts v WHERE {groups}"
DROPPED = "SELECT reason, count(*) FROM drops d WHERE member IS {what} NULL AND {groups} GROUP BY reason ORDER BY 2 DESC, 1"
CHECKPOINTED = "SELECT version_step, folder, committed_at FROM checkpoints k WHERE {lives} ORDER BY rowid"
ENGINES = "SELECT event, count(*) FROM engine_events e WHERE {lives} GROUP BY event ORDER BY min(rowid)"
PROBLEMS = """
    SELECT happened_at, engine, event, text FROM engine_events e
    WHERE event NOT IN ('up', 'loaded', 'left') AND {lives} ORDER BY rowid DESC LIMIT 3"""
EVALUATED = "SELECT version_step, mean_reward, samples, unscored FROM evaluations e WHERE {lives} ORDER BY rowid"


@dataclass(frozen=True, slots=True)
class Life:
    """One life of the run. Times are unix seconds; without an end it goes on, or was killed.

    `begun` is the version that it began with, None where it ended in its start.
    """

    life: int
    rollyard: str
    seed: int
    begun: int | None
    started_at: float
    ended_at: float | None
    cause: str | None
    failed: bool | None


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """One that was committed. `state`: whole, removed, or what is wrong with it."""

    step: int
    folder: str
    committed_at: float
    state: str


@dataclass(frozen=True, slots=True)
class Overview:
    """Counts are of the lives that are meant. What is None could not be read: `unreadable` says why."""

    folder: str
    name: str
    goes_on: bool
    steps_wanted: int | None  # by the config
    lives: tuple[Life, ...] | None = None
    batches: tuple[int, int, int | None] | None = None  # taken, trained, the newest step that was trained
    rewards: tuple[float | None, ...] = ()  # mean of each step, by the metrics
    phases: dict[str, float] = field(default_factory=dict)  # seconds by name, of the steps that are meant, setup not among them
    evaluations: tuple[tuple[int, float | None, int, int], ...] | None = None  # version, mean, samples, unscored
    admitted: int | None = None
    trained: int | None = None
    dropped: dict[str, int] | None = None  # prompts, by reason
    finished: tuple[int, int, int] | None = None  # members, their tokens, tokens of the longest
    judged: tuple[int, int, float | None, float | None, float | None] | None = None  # asked, answered, mean, least, most
    members_dropped: dict[str, int] | None = None
    published: int | None = None
    checkpoints: tuple[Checkpoint, ...] | None = None
    engines: dict[str, int] | None = None  # events, by kind
    problems: tuple[tuple[float, str, str, str], ...] | None = None  # the newest of engines: when, which, what, why
    unreadable: dict[str, str] = field(default_factory=dict)


def overview(folder: RunFolder, lives: Lives, only: Collection[str] = ()) -> Overview:
    """Raises ConfigError for a life that there was not.

    Args:
        only: what is read of the journal, such as `lives`; empty: all.
    """
    config = read_config(folder) or {}
    run = config.get("run", {}) if isinstance(config.get("run"), dict) else {}
    seen = _Seen()
    if not config:
        seen.unreadable["config.toml"] = "missing or damaged"
    metrics = seen.get("metrics.jsonl", lambda: read_metrics(folder, lives)) or Metrics()
    if metrics.broken:
        seen.unreadable["metrics.jsonl"] = f"{metrics.broken} lines are not whole, and left out"
    found: dict[str, Any] = {}
    source = seen.get("journal.sqlite", lambda: Source(folder, lives))
    if source is not None:
        with source:
            found = {name: seen.get(name, look) for name, look in _looks(source).items() if not only or name in only}
    return Overview(
        folder=str(folder.path),
        name=str(run.get("name") or folder.path.resolve().name),
        goes_on=goes_on(folder),
        steps_wanted=run.get("steps") if isinstance(run.get("steps"), int) else None,
        rewards=tuple(_finite(line.get("reward_mean")) for line in metrics.lines),
        phases=_phases(metrics.lines),
        unreadable=seen.unreadable,
        **found,
    )


class _Seen:
    """Looks at one thing after the other, and notes what cannot be read."""

    def __init__(self) -> None:
        self.unreadable: dict[str, str] = {}

    def get(self, name: str, look: Callable[[], T]) -> T | None:
        try:
            return look()
        except ConfigError:
            raise
        except (JournalError, OSError) as error:
            self.unreadable[name] = str(error)
            return None


def _looks(source: Source) -> dict[str, Callable[[], Any]]:
    """What is read of the journal, each by itself: a damaged table spoils no other."""
    lives = {name: source.of_lives(name) for name in "ike"}
    groups = {name: source.of_groups(name) for name in ("p", "bg", "c", "v", "d")}
    steps = source.of_steps("b")
    return {
        "lives": lambda: tuple(Life(*_life(row)) for row in source.rows(LIVES.format(lives=lives["i"]))),
        "batches": lambda: (lambda row: (row[0], row[1] or 0, row[2]))(source.row(TAKEN.format(steps=steps))),
        "evaluations": lambda: tuple(source.rows(EVALUATED.format(lives=lives["e"]))),
        "admitted": lambda: source.row(f"SELECT count(*) FROM prompts p WHERE {groups['p']}")[0],
        "trained": lambda: source.row(TRAINED.format(steps=steps, groups=groups["bg"]))[0],
        "dropped": lambda: dict(source.rows(DROPPED.format(what="", groups=groups["d"]))),
        "finished": lambda: source.row(FINISHED.format(groups=groups["c"])),
        "judged": lambda: source.row(JUDGED.format(groups=groups["v"])),
        "members_dropped": lambda: dict(source.rows(DROPPED.format(what="NOT", groups=groups["d"]))),
        "published": lambda: source.row(f"SELECT count(*) FROM versions e WHERE {lives['e']}")[0],
        "checkpoints": lambda: _checkpoints(source, lives["k"]),
        "engines": lambda: dict(source.rows(ENGINES.format(lives=lives["e"]))),
        "problems": lambda: tuple(source.rows(PROBLEMS.format(lives=lives["e"]))),
    }


def _life(row: tuple[Any, ...]) -> tuple[Any, ...]:
    return (*row[:-1], None if row[-1] is None else bool(row[-1]))


def _checkpoints(source: Source, lives: str) -> tuple[Checkpoint, ...]:
    there = saved(source.folder)
    rows = list(source.rows(CHECKPOINTED.format(lives=lives)))
    return tuple(Checkpoint(step, name, at, _state(there.get(name))) for step, name, at in rows)


def _state(folder: Path | None) -> str:
    if folder is None:
        return "removed"
    try:
        check_whole(folder)
    except DurableError as error:
        return str(error)
    return "whole"


def _phases(lines: Collection[Mapping[str, Any]]) -> dict[str, float]:
    names = dict.fromkeys(name for line in lines for name in line if name.startswith(PHASE))
    return {name[len(PHASE) : -len("_s")]: sum(_finite(line.get(name)) or 0.0 for line in lines) for name in names}


def _finite(value: object) -> float | None:
    return float(value) if isinstance(value, int | float) else None
