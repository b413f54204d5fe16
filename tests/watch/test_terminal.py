import io
import itertools
import os
import re
import subprocess
import sys
import warnings
from dataclasses import replace
from pathlib import Path

import pytest

from rollyard.watch.eta import Left
from rollyard.watch.screen import Screen
from rollyard.watch.terminal import LiveView, PlainView, QuietView, open_view
from tests.watch.test_draw import HEADER, REPORT, SNAPSHOT


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def console(file: io.StringIO, **options: object) -> Screen:
    return Screen(file=file, width=200, **options)  # type: ignore[arg-type]


def test_auto_is_live_on_a_terminal_and_plain_elsewhere() -> None:
    assert isinstance(open_view("auto", HEADER, console(Terminal(), force_terminal=True)), LiveView)
    assert isinstance(open_view("auto", HEADER, console(io.StringIO())), PlainView)
    dumb = console(Terminal(), force_terminal=True, _environ={"TERM": "dumb"})
    assert isinstance(open_view("auto", HEADER, dumb), PlainView)
    assert isinstance(open_view("live", HEADER, console(io.StringIO())), LiveView)
    assert isinstance(open_view("plain", HEADER, console(Terminal(), force_terminal=True)), PlainView)
    assert isinstance(open_view("quiet", HEADER, console(Terminal())), QuietView)


def test_plain_prints_a_line_a_step_whatever_the_rate_of_updates() -> None:
    out = io.StringIO()
    view = PlainView(HEADER, console(out))
    view.update(replace(SNAPSHOT, step=0, rewards=[]))
    view.update(replace(SNAPSHOT, step=0, rewards=[]))
    for step, evaluations in ((1, 1), (1, 1), (2, 1), (3, 2)):
        view.update(replace(SNAPSHOT, step=step, evaluations=evaluations))
    view.close()
    head, first, second, third = out.getvalue().splitlines()
    assert head == "run sort  llama 0.43M  colocated  embedded  100 steps"
    assert first == (
        "step   1/100  reward 0.750  held-out 0.620  5,000 tokens/s  "
        "generate 50% train 25% setup 20% unaccounted 5%  dropped 2  0:20 eta 0:40"  # 98 steps of 0.4 s and 0.8 s at the end
    )
    assert second.startswith("step   2/100  reward 0.750  5,000 tokens/s  "), "held-out is not told again"
    assert third.startswith("step   3/100  reward 0.750  held-out 0.620  "), "another evaluation, though it came to the same"
    view.finish(REPORT)
    assert "3 steps done" in out.getvalue()


def test_plain_goes_quiet_when_it_cannot_write() -> None:
    class Full(io.StringIO):
        def write(self, text: str) -> int:
            raise OSError("No space left on device")

    view = PlainView(HEADER, console(Full()))
    with pytest.warns(RuntimeWarning, match="the run goes on unseen: No space left"):
        view.update(SNAPSHOT)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        view.update(replace(SNAPSHOT, step=41))
        view.finish(REPORT)


@pytest.mark.parametrize("kind", ["plain", "live"])
def test_a_reader_that_goes_away_does_not_end_the_run(kind: str) -> None:
    script = f"""
import dataclasses, sys, time
from rollyard.watch.terminal import open_view
from tests.watch.test_draw import HEADER, REPORT, SNAPSHOT
view = open_view("{kind}", HEADER)
view.update(SNAPSHOT)
sys.stdin.readline()
for step in range(41, 100):
    view.update(dataclasses.replace(SNAPSHOT, step=step))
view.finish(REPORT)
sys.stderr.write("trained to the end")
"""
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with subprocess.Popen([sys.executable, "-c", script], cwd=Path(__file__).parents[2], text=True, **pipes) as process:
        assert process.stdin and process.stdout and process.stderr
        if kind == "plain":
            assert "run sort" in process.stdout.readline()
        process.stdout.close()
        process.stdin.write("go on\n")
        process.stdin.close()
        error = process.stderr.read()
    assert process.returncode == 0
    assert error.endswith("trained to the end")
    assert error.count("the run goes on unseen") == 1


def test_live_draws_the_newest_snapshot_and_gives_the_terminal_back() -> None:
    out = Terminal()
    view = LiveView(HEADER, console(out, force_terminal=True), clock=lambda: 5.0)
    view.close()  # before it began: nothing to give back
    view.update(SNAPSHOT)
    for step in range(41, 1000):
        view.update(replace(SNAPSHOT, step=step))
    view.update(replace(SNAPSHOT, step=77))
    assert "\x1b[?25l" in out.getvalue()  # the cursor is hidden
    view.finish(REPORT)
    view.close()
    shown = out.getvalue()
    assert "40/100" in shown
    assert "77/100" in shown
    assert shown.count("/100") < 10  # most snapshots were never drawn
    assert shown.index("77/100") < shown.index("\x1b[?25h") < shown.index("3 steps done")


def test_a_frame_is_of_one_size_whatever_becomes_of_the_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    """Narrower each time somebody looks: way is made for the frame that is drawn."""
    monkeypatch.delenv("COLUMNS", raising=False)
    widths, out = itertools.count(160, -10), Terminal()
    monkeypatch.setattr("os.get_terminal_size", lambda _: os.terminal_size((next(widths), 50)))
    screen = Screen(file=out, force_terminal=True)
    assert screen.size.width > screen.size.width
    held = screen.hold().width
    assert {screen.size.width for _ in range(3)} == {held}
    view = LiveView(HEADER, screen, clock=lambda: 5.0)
    view.update(SNAPSHOT)
    frame = re.sub(r"\x1b\[[?0-9;]*[A-Za-z]", "", out.getvalue()).split("╭")[1].split("╰")[0].splitlines()
    assert {len(line) for line in frame[1:]} == {len(frame[0]) + 1}
    view.close()
    assert screen.size.width > screen.size.width


def test_quiet_shows_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    view = QuietView()
    view.update(SNAPSHOT)
    view.finish(REPORT)
    view.close()
    assert capsys.readouterr().out == ""


def test_plain_has_a_line_a_minute_within_a_long_step() -> None:
    out, now = io.StringIO(), [0.0]
    view = PlainView(HEADER, console(out), clock=lambda: now[0])
    for now[0] in range(0, 200, 5):
        view.update(replace(SNAPSHOT, step=0, rewards=[], left=Left(30.0, 10.0, rough=True)))
    head, *more = out.getvalue().splitlines()
    assert (
        head.startswith("run sort")
        and more
        == [
            "after 0/100: generate  180/256 completions judged  5,000 tokens/s  0:20 eta ~49:50"  # 20 s, and 99 steps of 30 s
        ]
        * 3
    )
