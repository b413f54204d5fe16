"""Draws the README's picture of the terminal: the demo is run, its live view is drawn amid a step, then its report.

    python docs/make_terminal_picture.py docs/terminal.svg

What is drawn is what `rollyard run --preset sort` gives its view; the report is of the same run. Take it while the machine does
nothing else. The run's folder is not kept.
"""

from __future__ import annotations

import argparse
import io
import re
import tempfile
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from rich.console import Console

from rollyard import Run, resolve
from rollyard.watch.draw import LivePanel, table
from rollyard.watch.report import Report
from rollyard.watch.snapshot import Header, Snapshot
from rollyard.watch.timeline import Phase


class Kept:
    """A view that keeps what it is given amid a step: the first once so many are done, else the last before. And the report."""

    snapshot: Snapshot | None = None
    report: Report | None = None

    def __init__(self, header: Header, steps: int) -> None:
        self.header, self._steps = header, steps

    def update(self, snapshot: Snapshot) -> None:
        early = self.snapshot is None or self.snapshot.step < self._steps
        if early and snapshot.activity == Phase.GENERATE and snapshot.judged > 0:
            self.snapshot = replace(snapshot, rewards=tuple(snapshot.rewards))  # the run's own list grows on

    def finish(self, report: Report) -> None:
        self.report = report

    def close(self) -> None:
        """Nothing is held."""


def played(preset: str, options: Mapping[str, str], folder: Path) -> Kept:
    """A run of the preset; three quarters of its steps are done when its snapshot is taken."""
    config = resolve(preset=preset, environment={}, overrides={**options, "run.out": str(folder)}).config
    kept: list[Kept] = []

    def view(header: Header) -> Kept:
        kept.append(Kept(header, header.steps * 3 // 4))
        return kept[-1]

    for _ in Run(config, view=view):
        pass
    return kept[0]


def drawn(kept: Kept, width: int) -> str:
    """An SVG document. Raises SystemExit where the run was too short to be seen."""
    if kept.snapshot is None or kept.report is None:
        raise SystemExit("the view was not refreshed within a step: take a run with longer ones")
    console = Console(record=True, width=width, file=io.StringIO(), force_terminal=True, color_system="truecolor")
    console.print(LivePanel(kept.header, kept.snapshot))
    console.print(table(kept.report))
    # The reader's own monospace font: a picture in a README may not fetch one. An id of its own would be drawn by lot.
    svg = console.export_svg(title="rollyard run", unique_id="terminal")
    return re.sub(r"@font-face \{.*?\}\s*", "", svg, flags=re.DOTALL)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("picture", type=Path, help="SVG file to write")
    parser.add_argument("--preset", default="sort", help="what is run (default: %(default)s, the demo)")
    parser.add_argument("--set", action="append", default=[], metavar="OPTION=VALUE", help="another option of the run")
    parser.add_argument("--width", type=int, default=92, help="columns of the terminal (default: %(default)s)")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        options = dict(each.partition("=")[::2] for each in arguments.set)
        kept = played(arguments.preset, options, Path(folder) / arguments.preset)
    arguments.picture.write_text(drawn(kept, arguments.width), encoding="utf-8")


if __name__ == "__main__":
    main()
