"""Writes what results.json says into docs/published.md: a block for each table, and one that counts."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Final

from results import Compared, Constants, Results, compare
from rows import TABLES, WITHIN, Table

PAGE: Final = Path(__file__).parents[2] / "docs" / "published.md"
BEGIN, END = "<!-- {}: written by benchmarks/published/tables.py -->", "<!-- end of {} -->"
COUNTS: Final = "counts"
PARTS: Final = {
    "generation_s": "nothing trains, s",
    "training_s": "training, s",
    "logprob_s": "logprob pass, s",
    "tokens_per_s": "tokens/s",
}


def render(page: str, results: Mapping[str, Results]) -> str:
    """The page with all blocks made anew."""
    for table in TABLES:
        page = _replaced(page, table.name, block(table, results[table.name]))
    return _replaced(page, COUNTS, counts({table.name: compare(table, results[table.name]) for table in TABLES}))


def _replaced(page: str, name: str, lines: Iterable[str]) -> str:
    begin, end = BEGIN.format(name), END.format(name)
    before, rest = page.split(begin)
    _, after = rest.split(end)
    return "\n".join((before + begin, "", *lines, "", end + after))


def block(table: Table, results: Results) -> Iterator[str]:
    """What was fitted, steps with their ratios, and parts of steps."""
    compared = compare(table, results)
    yield from constants_table(results.constants)
    yield ""
    yield from steps_table(compared)
    if rows := list(parts_table(compared)):
        yield from ("", *rows)
    if judged := [each for each in compared if each.row.against]:
        held = sum(each.holds for each in judged)
        yield from ("", f"{held} of {len(judged)} ratios within {WITHIN:.0%}, of means over {table.seeds} seeds.")


def steps_table(compared: Sequence[Compared]) -> Iterator[str]:
    """With standard errors."""
    yield "| row | steps | step s | published | error | step against | published | error |"
    yield "| --- | --- | --- | --- | --- | --- | --- | --- |"
    labels = {each.row.file: each.row.label for each in compared}
    for each in compared:
        row, step_s = each.row, each.found.step_s
        cells = [
            row.label + (" (fitted)" if row.calibrates else ""),
            f"{each.found.steps:.0f}",
            f"{step_s:,.1f} ± {each.doubt_s:.1f}",
            f"{row.step_s:,.1f}",
            _error(step_s, row.step_s),
        ]
        if row.against:
            cells += [f"{each.ratio:.2f} of {labels[row.against]}", f"{each.published:.2f}"]
            cells.append(f"{each.error:+.1%} ± {each.doubt:.1%}")
        else:
            cells += ["", "", ""]
        yield f"| {' | '.join(cells)} |"


def parts_table(compared: Sequence[Compared]) -> Iterator[str]:
    """What else is published; nothing where there is nothing else."""
    shown = {name: title for name, title in PARTS.items() if any(getattr(each.row, name) for each in compared)}
    if not shown:
        return
    yield f"| row | {' | '.join(f'{title} | published | error' for title in shown.values())} |"
    yield f"| {' | '.join(['---'] * (1 + 3 * len(shown)))} |"
    for each in compared:
        cells = [each.row.label]
        for name in shown:
            published, found = getattr(each.row, name), getattr(each.found, name)
            if name == "training_s" and each.row.logprob_s:  # which is published apart
                found -= each.found.logprob_s
            digits = ",.0f" if name == "tokens_per_s" else ",.1f"
            known = (format(published, digits), _error(found, published)) if published else ("", "")
            cells += [format(found, digits), *known]
        yield f"| {' | '.join(cells)} |"


def constants_table(constants: Mapping[str, Constants]) -> Iterator[str]:
    """By the beginning of the names of scenarios."""
    yield "| scenarios | decoding takes | a micro-batch takes besides |"
    yield "| --- | --- | --- |"
    for name, each in constants.items():
        yield f"| `{name}` | x {each.decoding:.3f} | {each.microbatch_s:.3f} s |"


def counts(compared: Mapping[str, Sequence[Compared]]) -> Iterator[str]:
    """How many ratios hold, and which could as well be on the other side."""
    yield f"| table | ratios within {WITHIN:.0%} | on either side within two standard errors |"
    yield "| --- | --- | --- |"
    judged = {name: [each for each in rows if each.row.against] for name, rows in compared.items()}
    titles = {table.name: table.title for table in TABLES if judged[table.name]}
    for name, title in titles.items():
        doubtful = "; ".join(f"{each.row.label} ({each.error:+.1%} ± {each.doubt:.1%})" for each in judged[name] if each.doubtful)
        yield f"| {title} | {_held(judged[name])} | {doubtful or 'none'} |"
    for title, names in (("T1 and T2", ("T1", "T2")), ("T1 and T2, lengths of each row in T1", ("T1-lengths", "T2"))):
        yield f"| {title} | {_held([each for name in names for each in judged[name]])} | |"


def _held(judged: Sequence[Compared]) -> str:
    held = sum(each.holds for each in judged)
    return f"{held} of {len(judged)}, {held / len(judged):.0%}"


def _error(found: float, published: float) -> str:
    return f"{found / published - 1:+.0%}"
