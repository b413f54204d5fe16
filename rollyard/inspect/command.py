"""`rollyard inspect RUN`: the command's options, and what each prints."""

from __future__ import annotations

import argparse
import io
import json
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict
from itertools import islice
from pathlib import Path
from typing import Any

from rich.console import RenderableType
from rich.text import Text

from rollyard.errors import ConfigError
from rollyard.inspect import show, simulated
from rollyard.inspect.check import check
from rollyard.inspect.detail import Detail, detail
from rollyard.inspect.export import export
from rollyard.inspect.exported import span_record, turn_record
from rollyard.inspect.overview import overview
from rollyard.inspect.select import ANY, GROUP_SORTS, ROLLOUT_SORTS, Rows, Wanted, groups, rollouts
from rollyard.inspect.source import Lives, Source, find
from rollyard.inspect.steps import steps
from rollyard.inspect.text import COLOURS, picture
from rollyard.inspect.timeline import draw
from rollyard.inspect.words import words_of
from rollyard.journal.folder import RunFolder
from rollyard.plan.show import table as summarized
from rollyard.types import DropReason, FinishReason
from rollyard.watch.screen import Screen

TEXT = "look at what a run left, or leaves while it goes on: steps, groups, rollouts; check it, query it, export it"
WIDE = 200  # columns of a table that goes to a file
LIMIT = 20  # rows of a list, unless said otherwise
VIEWS = {
    "steps": "one row a step: reward, tokens, which versions wrote it, staleness, drops; the newest steps",
    "groups": "one row a prompt, filtered and sorted",
    "rollouts": "one row a member, filtered and sorted",
    "rollout": "one member as text, its tokens coloured by what wrote them",
    "export": "all finished rollouts as Parquet or JSON Lines, with tokens and logprobs",
}


Web = Callable[[RunFolder, int, bool], int]  # serves a run on a port; as JSON


def add_inspect(commands: Any) -> None:
    """Hang the command into the command line's subparsers."""
    text = TEXT[0].upper() + TEXT[1:] + ". Nothing in its folder is changed."
    command = commands.add_parser("inspect", help=TEXT, description=text, allow_abbrev=False)
    command.add_argument("folder", type=Path, metavar="RUN", help="the run's folder, such as runs/NAME")
    command.add_argument("--check", action="store_true", help="read all of the journal and every checkpoint; say what is sound")
    command.add_argument("--sql", metavar="SELECT", help="rows of a SELECT over the journal: docs/journal.md")
    command.add_argument("--timeline", type=Path, metavar="FILE.svg", help="write a picture of what every device did")
    command.add_argument("--web", action="store_true", help="show it in a browser, on this machine alone: docs/dashboard.md")
    command.add_argument("--port", type=port, metavar="N", help="of that (default: one that is free)")
    command.set_defaults(view="", json=False, life=None, each=False, limit=LIMIT)
    _add_common(command, limit=True)
    views = command.add_subparsers(dest="view", required=False, metavar="VIEW", parser_class=type(command))
    parsers = {name: views.add_parser(name, help=text, description=text, allow_abbrev=False) for name, text in VIEWS.items()}
    for name, parser in parsers.items():
        _add_common(parser, limit=name in ("steps", "groups", "rollouts"))
    for name, sorts in (("groups", GROUP_SORTS), ("rollouts", ROLLOUT_SORTS)):
        _add_filters(parsers[name], list(sorts))
    parsers["rollouts"].add_argument("--finish", choices=[str(each) for each in FinishReason], help="that ended so")
    parsers["rollouts"].add_argument("--group", type=whole, metavar="N", help="of this prompt")
    parsers["rollout"].add_argument("group", type=whole, metavar="GROUP", help="id of the prompt")
    parsers["rollout"].add_argument("member", type=whole, metavar="MEMBER", help="which of its completions, from 0 on")
    parsers["rollout"].add_argument("--colour", choices=COLOURS, default=COLOURS[0], help="what colours say (default: version)")
    parsers["export"].add_argument("file", type=Path, metavar="FILE", help="a name that ends with .parquet or .jsonl")
    parsers["export"].add_argument("--overwrite", action="store_true", help="replace the file if it is there")


def _add_common(parser: argparse.ArgumentParser, *, limit: bool) -> None:
    absent = argparse.SUPPRESS  # what was said before the view stands
    parser.add_argument("--json", action="store_true", default=absent, help="one JSON object, or one a line for lists")
    parser.add_argument("--life", type=whole, default=absent, metavar="N", help="what was recorded in this life, from 0 on")
    parser.add_argument("--all", action="store_true", dest="each", default=absent, help="each life; default: what survived")
    if limit:
        parser.add_argument("--limit", type=whole, default=absent, metavar="N", help=f"rows at most, 0: all (default: {LIMIT})")


def _add_filters(parser: argparse.ArgumentParser, sorts: list[str]) -> None:
    reasons = [ANY, *(str(each) for each in DropReason)]
    parser.add_argument("--sort", choices=sorts, default="id", help=f"what comes first: {', '.join(sorts)} (default: id)")
    parser.add_argument("--dropped", nargs="?", const=ANY, default="", choices=reasons, help="left untrained, for this reason")
    parser.add_argument("--step", type=whole, metavar="N", help="taken into the batch of this step; 1 is the first")
    parser.add_argument("--text", default="", help="with this text in the prompt or in what was written")


def whole(text: str, least: int = 0) -> int:
    """Of an option. Raises what argparse tells as it is."""
    wanted = f"{text!r} does not fit: give a whole number of at least {least}"
    try:
        number = int(text)
    except ValueError:
        raise argparse.ArgumentTypeError(wanted) from None
    if not least <= number < 2**63:
        raise argparse.ArgumentTypeError(wanted)
    return number


def port(text: str) -> int:
    """Of an option. Raises what argparse tells as it is."""
    number = whole(text)
    if number >= 2**16:
        raise argparse.ArgumentTypeError(f"{text!r} does not fit: ports end at 65535")
    return number


def inspect(given: argparse.Namespace, web: Web) -> int:
    """Do what the command line says; returns the exit code. Raises ConfigError, JournalError, OSError."""
    _check(given)
    if given.web:
        return web(find(given.folder), given.port or 0, given.json)
    try:
        return _do(given, Printer(given.json))
    except BrokenPipeError:  # whoever reads has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0


def _check(given: argparse.Namespace) -> None:
    asked = _asked(given)
    if len(asked) > 1:
        raise ConfigError(f"{' and '.join(asked)} do not go together", where="command line", remedy="give one of them")
    if given.each and given.life is not None:
        raise ConfigError("--life and --all do not go together", where="command line", remedy="give one of them")
    if given.web and (given.each or given.life is not None):
        problem = "the page shows what survived of all lives"
        raise ConfigError(problem, where="--web", remedy="leave --life and --all out, or give `steps`, `groups`, `rollouts`")
    if given.port is not None and not given.web:
        raise ConfigError("a port is of the page alone", where="--port", remedy="give --web too")


def _asked(given: argparse.Namespace) -> list[str]:
    """What it is to do; nothing: the overview."""
    flags = {"--check": given.check, "--sql": given.sql is not None, "--timeline": given.timeline is not None, "--web": given.web}
    return [name for name, on in (*flags.items(), (given.view, given.view)) if on]


def _simulated(folder: RunFolder, given: argparse.Namespace, printer: Printer) -> int:
    """What there is of a run that was simulated."""
    asked = [*_asked(given), *(["--life"] if given.life is not None else []), *(["--all"] if given.each else [])]
    if asked == ["steps"]:
        rows, found = simulated.steps(folder, given.limit)
        printer.list(Rows(rows, found), simulated.table(rows))
    elif asked:
        simulated.refuse(asked[0], folder)
    else:
        printer.one(seen := simulated.overview(folder), summarized(seen))
    return 0


def _do(given: argparse.Namespace, printer: Printer) -> int:
    folder, lives = find(given.folder), Lives(given.life, given.each)
    if given.timeline is not None:
        count = draw(folder, given.timeline)
        printer.told({"file": str(given.timeline), "devices": count}, f"{count:,} device{'s' * (count != 1)} in {given.timeline}")
        return 0
    if folder.scenario.exists():
        return _simulated(folder, given, printer)
    if given.check:
        return printer.check(check(folder))
    if not given.view and given.sql is None:
        printer.one(seen := overview(folder, lives), show.overview(seen))
        return 0
    with Source(folder, lives) as source:
        if given.sql is not None:
            printer.answer(*source.only_read(given.sql), given.limit)
        elif given.view == "steps":
            found = steps(source, given.limit or -1)
            printer.list(Rows(found.rows, found.found), show.steps(found.rows, _several(source)))
        elif given.view == "groups":
            groups_found = groups(source, _wanted(given))
            printer.list(groups_found, show.groups(groups_found.rows, _several(source)))
        elif given.view == "rollouts":
            rollouts_found = rollouts(source, _wanted(given))
            printer.list(rollouts_found, show.rollouts(rollouts_found.rows, _several(source)))
        elif given.view == "rollout":
            printer.rollout(detail(source, given.group, given.member), source, given.colour)
        else:
            count = export(source, given.file, overwrite=given.overwrite)
            printer.told({"file": str(given.file), "rollouts": count}, f"{count:,} rollouts in {given.file}")
        source.check_unchanged()
    return 0


def _several(source: Source) -> bool:
    """Is it worth a column, which life a row is of?"""
    return len(source.known) > 1


def _wanted(given: argparse.Namespace) -> Wanted:
    rollouts = given.view == "rollouts"
    more = {"finish": given.finish or "", "group": given.group} if rollouts else {}
    limit = given.limit or -1
    sort, down = (ROLLOUT_SORTS if rollouts else GROUP_SORTS)[given.sort]
    return Wanted(sort=sort, down=down, dropped=given.dropped, step=given.step, text=given.text, limit=limit, **more)


class Printer:
    """Writes to the standard output: for people, or as JSON in ASCII, in which nothing can drive a terminal."""

    def __init__(self, as_json: bool) -> None:
        self._json = as_json

    def _print(self, *shown: RenderableType) -> None:
        screen = Screen()
        for each in shown:
            if isinstance(each, Text) or screen.is_terminal:
                screen.print(each, soft_wrap=isinstance(each, Text), highlight=False)
            else:
                sys.stdout.write(_bare(each))

    def _write(self, record: Mapping[str, object]) -> None:
        sys.stdout.write(json.dumps(record, default=_hex) + "\n")

    def one(self, record: Any, shown: RenderableType) -> None:
        """A record."""
        if self._json:
            self._write(asdict(record))
        else:
            self._print(shown)

    def told(self, record: Mapping[str, object], text: str) -> None:
        """What was done."""
        if self._json:
            self._write(record)
        else:
            self._print(Text(text))

    def list(self, found: Rows[Any], shown: RenderableType) -> None:
        """Rows, and how many there are besides."""
        if self._json:
            for row in found.rows:
                self._write(asdict(row))
            return
        self._print(shown)
        if len(found.rows) < found.found:
            self._print(Text(f"{len(found.rows):,} of {found.found:,}; --limit N shows more", "dim"))

    def answer(self, names: Sequence[str], rows: Iterator[Sequence[Any]], limit: int) -> None:
        """What a SELECT came to."""
        first = islice(rows, limit or None)
        if self._json:
            for row in first:
                self._write(dict(zip(names, row, strict=True)))
            return
        self._print(show.answer(names, first))
        if next(rows, None) is not None:
            self._print(Text(f"the first {limit:,}; --limit N shows more", "dim"))

    def check(self, found: Iterable[Any]) -> int:
        """What is sound; returns 1 where something is not."""
        known = []
        for each in found:
            known.append(each)
            if self._json:
                self._write(asdict(each))
        if not self._json:
            self._print(show.findings(known))
        return 0 if all(each.sound for each in known) else 1

    def rollout(self, shown: Detail, source: Source, colour: str) -> None:
        """One member."""
        if self._json:
            spans, turns = [span_record(span) for span in shown.spans], [turn_record(turn) for turn in shown.turns]
            self._write(asdict(shown) | {"spans": spans, "turns": turns})
        else:
            words, why = words_of(source.folder)
            self._print(*picture(shown, words, why, colour))


def _bare(table: RenderableType) -> str:
    """Its lines as a file has them: without colours, and without the blanks that fill them up."""
    kept = io.StringIO()
    Screen(file=kept, width=WIDE).print(table, highlight=False)
    return "\n".join(line.rstrip() for line in kept.getvalue().split("\n"))


def _hex(value: object) -> str:
    """Bytes of a SELECT have no other words in JSON."""
    return value.hex() if isinstance(value, bytes) else repr(value)
