"""Draws the README's picture of the terminal from a finished run: the live view at one of its steps, then its report.

    python docs/make_terminal_picture.py runs/sort docs/terminal.svg

Everything comes from the run's `metrics.jsonl` and `report.json`. The one liberty: the share of busy slots, which the
metrics do not have by step, is that of the whole run.
"""

import argparse
import io
import json
import re
from pathlib import Path
from typing import Any

from rich.console import Console

from rollyard.watch.draw import LivePanel, table
from rollyard.watch.eta import Eta
from rollyard.watch.read import read_report
from rollyard.watch.report import Report
from rollyard.watch.snapshot import Header, Snapshot
from rollyard.watch.timeline import PhaseSeconds


def snapshot_at(step: int, metrics: list[dict[str, Any]], report: Report) -> Snapshot:
    """The run as it stood after `step`: sums over the steps so far, and the setup before them."""
    done = [record for record in metrics if record["step"] <= step]
    seconds = {f"{name}_s": sum(record[f"phase/{name}_s"] for record in done) for name in report.phases.parts()}
    seconds["setup_s"] = report.phases.setup_s
    eta = Eta()
    eta.evaluated(report.phases.eval_s / 2)  # the first of two
    for record in done:
        eta.add(PhaseSeconds(wall_s=sum(record[f"phase/{name}_s"] for name in report.phases.parts())))
    return Snapshot(
        step=step,
        phases=PhaseSeconds(wall_s=sum(seconds.values()), **seconds),
        rewards=[record["reward_mean"] for record in done],
        activity="generate",
        eval_first=report.eval.first,
        eval_last=report.eval.first,
        tokens=sum(record["tokens"] for record in done),
        slots_busy=report.slots_busy,
        dropped=sum(record["dropped"] for record in done),
        left=eta.at(PhaseSeconds(), 0.0),
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path, help="folder of the run")
    parser.add_argument("picture", type=Path, help="SVG file to write")
    parser.add_argument("--step", type=int, help="step of the live view (default: three quarters of the run)")
    parser.add_argument("--width", type=int, default=92, help="columns of the terminal")
    arguments = parser.parse_args()
    report = read_report(arguments.run / "report.json")
    records = map(json.loads, (arguments.run / "metrics.jsonl").read_text(encoding="utf-8").splitlines())
    metrics = [record for record in records if "phase/generate_s" in record]
    step = arguments.step or max(report.steps * 3 // 4, 1)
    header = Header(report.name, report.model, report.placement, report.engine, report.steps)
    console = Console(record=True, width=arguments.width, file=io.StringIO(), force_terminal=True, color_system="truecolor")
    console.print(LivePanel(header, snapshot_at(step, metrics, report)))
    console.print(table(report))
    # The reader's own monospace font: a picture in a README may not fetch one.
    svg = re.sub(r"@font-face \{.*?\}\s*", "", console.export_svg(title="rollyard run"), flags=re.DOTALL)
    arguments.picture.write_text(svg, encoding="utf-8")


if __name__ == "__main__":
    main()
