"""The live view in a terminal whose size changes: a real one for the run, and what a person would see of it here."""

from __future__ import annotations

import fcntl
import os
import pty
import re
import struct
import subprocess
import sys
import termios
import time
from pathlib import Path

import pytest

CONTROL = re.compile(r"\x1b\[(\??)([0-9;]*)([A-Za-z])")
SCRIPT = """
import dataclasses, sys
from rollyard.watch.terminal import open_view
from tests.watch.test_draw import HEADER, REPORT, SNAPSHOT
print("what was there before")
view = open_view("auto", HEADER)
step = 40
while step < 90:
    step += 1
    view.update(dataclasses.replace(SNAPSHOT, step=step))
    sys.stdin.readline()
view.finish(REPORT)
"""


class Screen:
    """A terminal that breaks long lines anew as it becomes narrower, as most do: lines, and where the cursor is."""

    def __init__(self, width: int) -> None:
        self.width, self.row, self.column = width, 0, 0
        self.rows: list[str] = [""]

    def resize(self, width: int) -> None:
        rows, at = list[str](), self.row
        for number, row in enumerate(self.rows):
            text = row.rstrip()
            if number == self.row:
                at = len(rows) + max(len(text) - 1, 0) // width
            rows += [text[start : start + width] for start in range(0, max(len(text), 1), width)]
        self.rows, self.row, self.width, self.column = rows, at, width, min(self.column, width - 1)

    def feed(self, text: str) -> None:
        at = 0
        while at < len(text):
            if (found := CONTROL.match(text, at)) is not None:
                self._control(*found.groups())
                at = found.end()
                continue
            self._put(text[at])
            at += 1

    def _control(self, private: str, number: str, kind: str) -> None:
        match private, kind, number:
            case ("", "A", _):
                self.row = max(self.row - int(number or 1), 0)
            case ("", "J", "" | "0"):
                self.rows[self.row] = self.rows[self.row][: self.column]
                del self.rows[self.row + 1 :]
            case ("", "K", "2"):
                self.rows[self.row] = ""
            case ("", "m", _) | ("?", "l" | "h", _):
                pass
            case _:
                raise AssertionError(f"nobody knows {private}{number}{kind}")

    def _put(self, sign: str) -> None:
        if sign == "\r":
            self.column = 0
        elif sign == "\n":
            self.row, self.column = self.row + 1, 0
        else:
            if self.column == self.width:
                self.row, self.column = self.row + 1, 0
            self.rows += [""] * (self.row + 1 - len(self.rows))
            row = self.rows[self.row].ljust(self.column)
            self.rows[self.row] = row[: self.column] + sign + row[self.column + 1 :]
            self.column += 1
        self.rows += [""] * (self.row + 1 - len(self.rows))


def resize(terminal: int, width: int) -> None:
    fcntl.ioctl(terminal, termios.TIOCSWINSZ, struct.pack("HHHH", 50, width, 0, 0))


def seen(terminal: int, screen: Screen, seconds: float) -> None:
    """What comes in so long."""
    until, told = time.monotonic() + seconds, b""
    os.set_blocking(terminal, False)
    while time.monotonic() < until:
        try:
            told += os.read(terminal, 65536)
        except BlockingIOError:
            time.sleep(0.02)
        except OSError:  # it has ended
            break
    screen.feed(told.decode(errors="replace"))


def drawn(terminal: int, screen: Screen) -> None:
    """Until a frame has come, and nothing after it: the next one is a quarter of a second away."""
    deadline, last, told = time.monotonic() + 10, 0.0, b""
    while time.monotonic() < deadline and not 0 < last < time.monotonic() - 0.05:
        try:
            told += os.read(terminal, 65536)
            last = time.monotonic()
        except BlockingIOError:
            time.sleep(0.005)
    screen.feed(told.decode(errors="replace"))


@pytest.mark.slow  # it looks at a terminal for some seconds
def test_there_is_one_panel_whatever_becomes_of_the_terminal() -> None:
    terminal, theirs = pty.openpty()
    resize(terminal, 92)
    environment = {name: value for name, value in os.environ.items() if name not in ("COLUMNS", "LINES", "NO_COLOR")}
    process = subprocess.Popen(
        [sys.executable, "-c", SCRIPT],
        cwd=Path(__file__).parents[2],
        stdin=subprocess.PIPE,
        stdout=theirs,
        env=environment | {"TERM": "xterm"},
        text=True,
    )
    os.close(theirs)
    screen = Screen(92)
    try:
        assert process.stdin is not None
        deadline = time.monotonic() + 30
        while "41/100" not in "".join(screen.rows) and time.monotonic() < deadline:
            seen(terminal, screen, 0.3)
        for width in (50, 45, 120, 92, 40):
            drawn(terminal, screen)
            resize(terminal, width)
            screen.resize(width)
            process.stdin.write("\n")
            process.stdin.flush()
            seen(terminal, screen, 1.0)
            text = "\n".join(screen.rows)
            assert [text.count(part) for part in ("╭─ rollyard · sort", "╰", "what was there before")] == [1, 1, 1], text
            panel = [row.rstrip() for row in screen.rows if row.strip() and "before" not in row]
            assert {len(row) for row in panel} == {width}, text
        process.stdin.write("\n" * 60)
        process.stdin.close()
        seen(terminal, screen, 1.0)
        assert process.wait(10) == 0 and "3 steps done" in "\n".join(screen.rows)
    finally:
        process.kill()
        process.wait()
        os.close(terminal)
