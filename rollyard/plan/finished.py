"""A run that is over, as far as a cost model can learn from it: its options, steps, engines, and what every process did when."""

from __future__ import annotations

import json
import tomllib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any, Final, NamedTuple

from rollyard.config import Config
from rollyard.errors import ConfigError, JournalError
from rollyard.journal.folder import CONFIG, SCENARIO, RunFolder
from rollyard.journal.reader import JournalReader
from rollyard.plan.scenario import Scenario
from rollyard.texts import in_a_line, visible
from rollyard.watch.read import read_report
from rollyard.watch.report import Report
from rollyard.watch.trace import DRIVER

LEAST: Final = 4  # steps: the first is left out, and three are the fewest that have a middle
WHERE: Final = "--calibrate"
REMEDY: Final = "give the folder of a run that came to its end, with this version of Rollyard"


Batch = tuple[tuple[int, tuple[int, ...]], ...]  # [groups]: tokens of the prompt, and of each completion


class Span(NamedTuple):
    """Seconds from the run's start."""

    device: str  # several names, with + between; or driver
    what: str  # a part, such as publish, or the activity itself
    start: float
    end: float


@dataclass(frozen=True, slots=True)
class FinishedRun:
    """What is left of it.

    Args:
        config: its options; of a simulated run those of its scenario.
        rows: of its metrics, a step each.
        options: the file that they are from.
        journal: None for a simulated run, which has none.
        batches: of each step but the first, of each group the tokens of its prompt and of its completions.
        verdict_s: seconds from the end of a completion to its verdict, in the middle; None where there is no journal.
    """

    options: Path
    config: Config
    journal: Path | None
    report: Report
    rows: tuple[Mapping[str, Any], ...]
    spans: tuple[Span, ...]
    batches: tuple[Batch, ...]
    verdict_s: float | None

    def column(self, name: str) -> list[float]:
        """A number of every step but the first, None left out."""
        return [float(row[name]) for row in self.rows[1:] if row.get(name) is not None]

    def windows(self) -> list[tuple[float, float]]:
        """From the end of the training before to the end of its own, of every step but the first."""
        ends = [span.end for span in self.spans if span.device == DRIVER and span.what == "train"]
        return list(pairwise(ends))

    def seconds(self, what: str, device: Callable[[str], bool] = lambda name: name != DRIVER) -> float:
        """Of one part in a step, in the middle of all steps but the first. Where it overlaps itself it counts once."""
        found = [(span.start, span.end) for span in self.spans if span.what == what and device(span.device)]
        return median(_within(found, start, end) for start, end in self.windows())

    def driver_s(self, what: str) -> float:
        """The same of what the driver says."""
        return self.seconds(what, lambda name: name == DRIVER)


def _within(spans: Sequence[tuple[float, float]], start: float, end: float) -> float:
    """Seconds between start and end in which any of these goes on."""
    total, until = 0.0, start
    for begin, over in sorted(spans):
        begin, over = max(begin, until), min(over, end)
        if over > begin:
            total, until = total + over - begin, over
    return total


def read_finished(path: Path) -> FinishedRun:
    """What a run left in its folder.

    Raises:
        ConfigError: it is no run's folder, or that of a run that did not come to its end, or of too few steps.
        JournalError: what is in it cannot be read, or is another version's.
    """
    folder = RunFolder(path)
    simulated = (path / SCENARIO).is_file()
    if not simulated and not folder.config.is_file():
        problem = f"{path} is no run's folder (no {CONFIG} in it)" if path.is_dir() else f"there is no folder {path}"
        raise ConfigError(problem, where=WHERE, remedy=REMEDY)
    for name in (folder.report, folder.metrics, folder.trace):
        if not name.is_file():
            raise ConfigError(f"{path} has no {name.name}: the run has not come to its end", where=WHERE, remedy=REMEDY)
    options, journal = (path / SCENARIO, None) if simulated else (folder.config, folder.journal)
    config = _options(options, Scenario if simulated else Config)
    report = read_report(folder.report)
    _check(path, report)
    rows, spans = tuple(_rows(folder.metrics)), tuple(_spans(folder.trace))
    verdict_s, batches = (None, tuple(map(_alike, rows[1:]))) if journal is None else _of_journal(journal)
    run = FinishedRun(options, config, journal, report, rows, spans, batches, verdict_s)
    found = {"metrics": len(rows), "the trace": len(run.windows()) + 1, "the journal": len(batches) + 1}
    for place, steps in found.items():
        if steps != report.steps:
            raise JournalError(f"{path}: the report has {report.steps} steps, and {place} {steps}")
    return run


def _check(path: Path, report: Report) -> None:
    if report.generation_tokens and not report.usage.paces:  # before what another run of the kind would mend
        problem = f"{path}: engine {report.engine} does not tell what its steps take, however long the run is"
        raise ConfigError(problem, where=WHERE, remedy="give a run with --engine.kind embedded")
    if report.finished.failed:
        raise ConfigError(f"{path}: the run failed: {visible(report.finished.cause)}", where=WHERE, remedy=REMEDY)
    if report.lives.count > 1:
        problem = f"{path}: the run had {report.lives.count} lives, and only the last one left a trace"
        raise ConfigError(problem, where=WHERE, remedy="give a run that was not resumed")
    if report.steps < LEAST:
        problem = f"{path}: a run of {report.steps} steps says too little"
        raise ConfigError(problem, where=WHERE, remedy=f"give one of at least {LEAST}")


def _options(path: Path, tree: type[Config]) -> Config:
    try:
        return tree.model_validate(tomllib.loads(path.read_text(encoding="utf-8")))
    except (OSError, ValueError, RecursionError) as error:
        raise JournalError(f"{path}: not the options of a run of this version of Rollyard: {in_a_line(error)}") from error


def _rows(path: Path) -> Iterator[Mapping[str, Any]]:
    try:
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
            row = json.loads(line)
            if not isinstance(row, dict) or not {"seconds", "driver_s", "tokens", "prompt_tokens_mean"} <= row.keys():
                raise JournalError(f"{path}, line {number}: not metrics of this version of Rollyard")
            yield row
    except (OSError, ValueError, RecursionError) as error:
        raise JournalError(f"{path} cannot be read: {in_a_line(error)}") from error


def _spans(path: Path) -> Iterator[Span]:
    names: dict[int, str] = {}
    try:
        for event in json.loads(path.read_text(encoding="utf-8"))["traceEvents"]:
            if event["ph"] == "M" and event["name"] == "process_name":
                names[event["pid"]] = event["args"]["name"]
            elif event["ph"] == "X":
                start = event["ts"] / 1e6
                yield Span(names[event["pid"]], event["name"], start, start + event["dur"] / 1e6)
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise JournalError(f"{path} is no trace of this version of Rollyard: {in_a_line(error)}") from error


def _alike(row: Mapping[str, Any]) -> Batch:
    """A step of which only means are known."""
    groups, each = int(row["groups"]), float(row["tokens_per_prompt"])
    members = round(each / float(row["completion_tokens_mean"]))
    tokens, longer = divmod(round(groups * each), groups * members)  # so many have one more
    prompt = round(float(row["prompt_tokens_mean"]))
    lengths = [tokens + (number < longer) for number in range(groups * members)]
    return tuple((prompt, tuple(lengths[begin : begin + members])) for begin in range(0, groups * members, members))


def _of_journal(path: Path) -> tuple[float | None, tuple[Batch, ...]]:
    """Seconds until a verdict, in the middle, and the batches but the first."""
    verdicts = """
        SELECT v.judged_at - c.finished_at FROM completions c JOIN verdicts v USING (incarnation, group_id, member)
        WHERE incarnation = ?"""
    written = """
        SELECT b.step, group_id, length(p.token_ids) / 4, c.tokens FROM batch_groups b
        JOIN prompts p USING (incarnation, group_id) JOIN completions c USING (incarnation, group_id)
        JOIN verdicts v USING (incarnation, group_id, member)
        WHERE incarnation = ? ORDER BY b.step, b.position"""
    steps: dict[int, dict[int, tuple[int, list[int]]]] = {}
    with JournalReader(path) as journal:
        life = journal.incarnation.incarnation
        seconds = [found for (found,) in journal.query(verdicts, life)]
        for step, group, prompt, tokens in journal.query(written, life):
            steps.setdefault(step, {}).setdefault(group, (prompt, []))[1].append(tokens)
    batches = [tuple((prompt, tuple(tokens)) for prompt, tokens in steps[step].values()) for step in sorted(steps)]
    return max(median(seconds), 0.0) if seconds else None, tuple(batches[1:])
