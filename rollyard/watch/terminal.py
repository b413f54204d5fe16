"""What the terminal shows while a run goes on. A view knows snapshots and the report, and nothing of the loop."""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable
from typing import Final, Literal, Protocol

from rich.console import Console, RenderableType
from rich.live import Live

from rollyard.watch.draw import LivePanel, duration, eta, number, shares, table
from rollyard.watch.report import Report
from rollyard.watch.screen import Screen
from rollyard.watch.snapshot import Header, Snapshot

REFRESHES_PER_S: Final = 4.0
SILENT_S: Final = 60.0  # after which a log has a line, also within a step


class Terminal(Screen):
    """Standard output. When its reader goes away (`| head`), the run goes on unseen instead of ending."""

    def on_broken_pipe(self) -> None:
        try:
            super().on_broken_pipe()  # sends what is still to come to /dev/null, then asks to exit
        except SystemExit:
            warnings.warn("nobody reads the output any more: the run goes on unseen", RuntimeWarning, stacklevel=2)


class View(Protocol):
    """Somewhere people look."""

    def update(self, snapshot: Snapshot) -> None:
        """Show this from now on. Cheap: may be called at any rate."""
        ...

    def finish(self, report: Report) -> None:
        """The run is over: show what it did."""
        ...

    def close(self) -> None:
        """Give the terminal back. May be called again, and without `finish`."""
        ...


class LiveView:
    """A panel that stays in place, redrawn a few times a second by a thread of its own from the newest snapshot."""

    def __init__(self, header: Header, console: Screen, clock: Callable[[], float] = time.monotonic) -> None:
        self._header = header
        self._console = console
        self._clock = clock
        self._live: Live | None = None
        self._panel: LivePanel | None = None  # on the screen

    def update(self, snapshot: Snapshot) -> None:
        self._newest = (snapshot, self._clock())
        if self._live is None:
            self._live = Live(console=self._console, get_renderable=self._draw, refresh_per_second=REFRESHES_PER_S)
            self._live.start(refresh=True)

    def _draw(self) -> RenderableType:
        snapshot, taken = self._newest
        self._console.hold()  # way is made for a frame of this size, and no other
        if self._panel is not None:
            self._make_way(*self._panel.drawn)
        self._panel = LivePanel(self._header, snapshot, self._clock() - taken)
        return self._panel

    def _make_way(self, columns: int, lines: int) -> None:
        """A terminal that became narrower has broken each line of the panel in several: rich would leave the upper ones."""
        size = self._console.size
        if not 0 < size.width < columns:
            return
        before = min(lines, size.height)
        broken = min(before * -(-columns // size.width), size.height)
        self._console.file.write(f"\r\x1b[{max(broken - 1, 1)}A\x1b[J" + "\n" * (before - 1))
        self._console.file.flush()

    def finish(self, report: Report) -> None:
        self.close()
        self._console.print(table(report))

    def close(self) -> None:
        if self._live is not None:
            self._live.stop()
            self._console.let_go()


class PlainView:
    """One line a step, for pipes and logs, and in a long step one a minute. The held-out reward stands where it is a new one.

    When they cannot be written it goes quiet; the run goes on.
    """

    def __init__(self, header: Header, console: Console, clock: Callable[[], float] = time.monotonic) -> None:
        self._header = header
        self._console = console
        self._clock, self._last = clock, clock()
        self._shown: Snapshot | None = None
        self._waiting = ""
        self._evaluations = 0  # that were told
        self._broken = False

    def update(self, snapshot: Snapshot) -> None:
        if self._shown is None:
            header = self._header
            self._print(f"run {header.run}  {header.model}  {header.placement}  {header.engine}  {header.steps} steps")
        if self._shown is None or snapshot.step > self._shown.step:
            if snapshot.step > snapshot.before:
                self._print(self._line(snapshot))
            self._shown = snapshot
        elif self._clock() - self._last >= SILENT_S and not snapshot.waiting:
            self._print(self._meanwhile(snapshot))
        if snapshot.waiting not in ("", self._waiting):
            self._print(snapshot.waiting)
        self._waiting = snapshot.waiting

    def _line(self, snapshot: Snapshot) -> str:
        steps = self._header.steps
        evaluated, self._evaluations = snapshot.evaluations > self._evaluations, snapshot.evaluations
        parts = [
            f"step {snapshot.step:>{len(str(steps))}}/{steps}",
            f"reward {number(snapshot.rewards[-1] if snapshot.rewards else None)}",
            *([f"held-out {number(snapshot.eval_last)}"] if evaluated else []),
            f"{snapshot.tokens_per_s:,.0f} tokens/s",
            " ".join(f"{name} {share:.0%}" for name, share in shares(snapshot.phases).items()),
            f"dropped {snapshot.dropped}",
            f"{duration(snapshot.phases.wall_s)} {eta(snapshot, steps)}".rstrip(),
        ]
        return "  ".join(parts)

    def _meanwhile(self, snapshot: Snapshot) -> str:
        """Within a step."""
        parts = [
            f"after {snapshot.step}/{self._header.steps}: {snapshot.activity}",
            f"{snapshot.judged}/{snapshot.wanted} completions judged" if snapshot.wanted else "",
            f"{snapshot.tokens_per_s:,.0f} tokens/s" if snapshot.tokens else "",
            f"{duration(snapshot.phases.wall_s)} {eta(snapshot, self._header.steps)}".rstrip(),
        ]
        return "  ".join(filter(None, parts))

    def finish(self, report: Report) -> None:
        self._print(table(report))

    def close(self) -> None:
        """Nothing is held."""

    def _print(self, what: RenderableType) -> None:
        if self._broken:
            return
        self._last = self._clock()
        try:
            self._console.print(what, soft_wrap=isinstance(what, str), markup=False, highlight=False)
        except OSError as error:
            self._broken = True
            warnings.warn(f"the output cannot be written, the run goes on unseen: {error}", RuntimeWarning, stacklevel=3)


class QuietView:
    """Shows nothing."""

    def update(self, snapshot: Snapshot) -> None:
        """Nothing is shown."""

    def finish(self, report: Report) -> None:
        """Nothing is shown."""

    def close(self) -> None:
        """Nothing is held."""


def open_view(kind: Literal["auto", "live", "plain", "quiet"], header: Header, console: Screen | None = None) -> View:
    """The view that `watch.view` asks for, on standard output unless another console is given.

    `auto` is live on a terminal that can move its cursor, plain elsewhere.
    """
    console = console or Terminal()
    if kind == "auto":
        kind = "live" if console.file.isatty() and not console.is_dumb_terminal else "plain"
    if kind == "live":
        return LiveView(header, console)
    return PlainView(header, console) if kind == "plain" else QuietView()
