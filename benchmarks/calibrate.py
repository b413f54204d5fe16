"""How well a run of one placement predicts the others, on this machine: constants fitted to each, and a table of errors.

    python benchmarks/calibrate.py [--runs 3] [--steps 24] [--folder FOLDER]

Every placement of `rollyard bench placements` is run so many times in turns, by `rollyard run`. To each of these runs the costs
are fitted (`rollyard simulate --calibrate`), and with them, and its lengths, each placement is simulated. Of the run that is
predicted nothing is known to the prediction but its options. A step's time is the mean over all steps but the first. The table
has the median over the runs; beside it stands how far identical real runs are apart.

What is predicted is an idle machine: the work is fitted, in processor time, and what else the machine does is not. So measure on
one; the load is printed.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from statistics import median

from rollyard.plan.calibrate import calibrate, with_values
from rollyard.plan.finished import read_finished
from rollyard.plan.outcome import means_of
from rollyard.plan.scenario import Scenario
from rollyard.plan.simulate import simulate

PLACEMENTS = {
    "colocated": ("--rollout.max_staleness=0",),
    "separate": ("--rollout.max_staleness=0",),
    "async": ("--rollout.max_staleness=2", "--weights.rollover=keep"),
    "swap": ("--rollout.max_staleness=1",),
}
PARTS = ("step_s", "generate_s", "train_s", "sync_s")
Means = Mapping[str, float]


def main() -> None:
    given = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    given.add_argument("--runs", type=int, default=3, help="of each placement")
    given.add_argument("--steps", type=int, default=24, help="of each run")
    given.add_argument("--folder", type=Path, help="where runs are kept; those that are there already are used again")
    asked = given.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        folder = asked.folder or Path(scratch)
        before = os.getloadavg()[0]
        for number in range(asked.runs):
            for placement in PLACEMENTS:
                _run(folder / f"{placement}-{number}", placement, asked.steps)
        print(_page(folder, asked.runs, asked.steps, f"load {before:.1f} before, {os.getloadavg()[0]:.1f} after"))


def _run(out: Path, placement: str, steps: int) -> None:
    """One real run, as a user would start it; one thread a process."""
    if (out / "report.json").exists():
        return
    options = {"run.steps": steps, "run.out": out, "place.placement": placement, "place.device": "cpu", "place.threads": 1}
    command = [sys.executable, "-m", "rollyard", "run", "--preset=sort", "--prompts.held_out=128", "--watch.view=quiet"]
    command += [f"--{name}={value}" for name, value in options.items()]
    print(f"{out.name}: {steps} steps", file=sys.stderr)
    subprocess.run([*command, *PLACEMENTS[placement]], check=True, stdout=subprocess.DEVNULL)


def _page(folder: Path, runs: int, steps: int, load: str) -> str:
    found = {(name, number): folder / f"{name}-{number}" for name in PLACEMENTS for number in range(runs)}
    real = {key: means_of(read_finished(path).rows) for key, path in found.items()}
    simulated: dict[tuple[str, str, int], Means] = {}
    for (source, number), path in found.items():
        fitted = calibrate(path)
        for target in PLACEMENTS:
            config = read_finished(found[target, number]).config.model_dump()
            scenario = with_values(Scenario.model_validate(config), {"workload.trace": str(path)})
            simulated[source, target, number] = means_of(simulate(fitted.scenario(scenario)).metrics)
    lines = [f"{runs} runs of {steps} steps each, in turns; {load}; {os.cpu_count()} processors.", ""]
    for part in PARTS:
        lines += [*_table(part, runs, real, simulated), ""]
    return "\n".join(lines)


def _table(
    part: str, runs: int, real: Mapping[tuple[str, int], Means], simulated: Mapping[tuple[str, str, int], Means]
) -> list[str]:
    """Predicted over measured, less 1; of phases the difference as a share of the step."""
    name = part.removesuffix("_s")
    lines = [f"| {name}: calibrated on | {' | '.join(PLACEMENTS)} |", "| --- |" + " ---: |" * len(PLACEMENTS)]
    measured = {each: median(real[each, number][part] for number in range(runs)) for each in PLACEMENTS}
    whole = {each: median(real[each, number]["step_s"] for number in range(runs)) for each in PLACEMENTS}
    for source in PLACEMENTS:
        cells = []
        for target in PLACEMENTS:
            expected = median(simulated[source, target, number][part] for number in range(runs))
            cells.append(f"{(expected - measured[target]) / whole[target]:+.1%}")
        lines.append(f"| {source} | {' | '.join(cells)} |")
    lines.append(f"| measured, ms | {' | '.join(f'{1e3 * seconds:.1f}' for seconds in measured.values())} |")
    apart = [[real[each, number][part] for number in range(runs)] for each in PLACEMENTS]
    shares = [(max(found) - min(found)) / whole[each] for each, found in zip(PLACEMENTS, apart, strict=True)]
    lines.append(f"| identical runs are apart by | {' | '.join(f'{share:.1%}' for share in shares)} |")
    return lines


if __name__ == "__main__":
    main()
