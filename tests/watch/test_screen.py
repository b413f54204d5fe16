"""Nothing that is shown drives a terminal."""

from __future__ import annotations

import io
import warnings
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Group
from rich.live import Live
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from rollyard.texts import visible
from rollyard.watch.draw import table
from rollyard.watch.report import Finished
from rollyard.watch.screen import Screen, warnings_as_lines
from rollyard.watch.terminal import Terminal
from tests.watch.test_draw import REPORT

BAD = "all dropped; ValueError: bad \x1b]0;owned\x1b[2J\x9b31m\x00\x7f"
CONTROL = [chr(code) for code in [*range(0x20), *range(0x7F, 0xA0)] if chr(code) not in "\n\t"]


def _grid() -> Table:
    grid = Table.grid()
    grid.add_row("ended", Text(BAD, "bold red"))
    grid.add_row(Text(BAD), BAD)
    return grid


@pytest.mark.parametrize("made", [Screen, Terminal])
@pytest.mark.parametrize("shown", [BAD, Text(BAD, "bold"), Panel(Group(_grid(), BAD), title=Text(BAD), subtitle=BAD)])
@pytest.mark.parametrize("how", [{"markup": False}, {"soft_wrap": True, "highlight": True}])
def test_wherever_a_text_is(made, shown, how):
    screen = made(file=io.StringIO(), width=300)
    screen.print(shown, **how)
    told = screen.file.getvalue()
    assert not any(sign in told for sign in CONTROL) and "ValueError: bad ␛]0;owned␛[2J\ufffd31m␀␡" in told


def test_the_cause_that_a_report_shows():
    screen = Screen(file=io.StringIO(), width=200)
    screen.print(table(replace(REPORT, finished=Finished("bad \x1b]0;owned\x1b[2J", failed=True))))
    told = screen.file.getvalue()
    assert "bad ␛]0;owned" in told and "\x1b" not in told
    assert len({len(line) for line in told.splitlines()}) == 1, "the frame stays whole"


def test_colours_are_still_sent():
    screen = Screen(file=io.StringIO(), force_terminal=True, color_system="truecolor", width=40)
    screen.print(Text("it \x1bis", "bold red"))
    assert screen.file.getvalue() == "\x1b[1;31mit ␛is\x1b[0m\n"


@given(st.text(st.characters()))
def test_each_sign_is_one_sign(text):
    shown = visible(text)
    assert len(shown) == len(text) and visible(shown) == shown
    assert not any(sign in shown for sign in CONTROL) and shown.encode().decode() == shown
    assert all(new == old or old in CONTROL or "\ud800" <= old <= "\udfff" for old, new in zip(text, shown, strict=True))


def test_a_warning_goes_above_a_live_panel():
    screen = Screen(file=io.StringIO(), force_terminal=True, width=60)
    with warnings.catch_warnings(), warnings_as_lines(), Live("panel", console=screen, auto_refresh=False):
        warnings.simplefilter("always")
        warnings.warn("the disk is full", RuntimeWarning, stacklevel=1)
    told = screen.file.getvalue()
    assert "warning: the disk is full" in told and "panel" in told.split("full")[1]
