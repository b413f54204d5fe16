"""Does the planner choose the placement that is fastest? Real runs of the tiny model, five workloads under four placements each.

    python benchmarks/plan_placements.py [--steps 16] [--only WORKLOAD] [--from colocated] [--keep FOLDER] [--out FILE.json]

Every run is a `rollyard run` of its own, one after the other, on an otherwise idle machine. The planner is given what a user has:
the options, and one finished run, to which `rollyard simulate --calibrate` fits the costs and whose lengths are the workload. It
has not seen the other placements. Its top choice is to be the fastest, or within 10 % of it, on 4 of 5.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from statistics import fmean
from typing import Any

WITHIN = 1.1
PLACEMENTS = ("colocated", "separate", "async", "swap")
COMMON = {"place.device": "cpu", "place.threads": "1", "weights.canary": "false", "watch.view": "quiet"}
WORKLOADS: Mapping[str, Mapping[str, str]] = {
    "sort, as the preset has it": {},
    "long answers": {"rollout.max_tokens": "48", "rollout.ignore_eos": "true", "rollout.groups_per_step": "16"},
    "few and short": {"rollout.groups_per_step": "8", "rollout.group_size": "4", "rollout.max_tokens": "12"},
    "much training": {"train.minibatches": "4", "warmup.layers": "4", "rollout.groups_per_step": "24"},
    "wide model, few slots, staleness 1": {
        "warmup.width": "256",
        "warmup.feed_forward": "768",
        "engine.slots": "32",
        "rollout.groups_per_step": "12",
        "rollout.max_tokens": "48",
        "rollout.ignore_eos": "true",
    },
}
STALENESS = {"wide model, few slots, staleness 1": 1}


def rollyard(*arguments: str) -> str:
    """What the command prints. Raises CalledProcessError."""
    command = [sys.executable, "-m", "rollyard", *arguments]
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True, env=os.environ | {"OMP_NUM_THREADS": "1"})
    return done.stdout


def options_of(workload: str) -> list[str]:
    """On the command line."""
    named = COMMON | dict(WORKLOADS[workload])
    return ["--preset", "sort", *(part for name, value in named.items() for part in (f"--{name}", value))]


def measured(workload: str, placement: str, steps: int, folder: Path) -> float:
    """Seconds of a step of a real run, the first left out."""
    lag = {"async": STALENESS.get(workload, 2), "swap": 1}.get(placement, 0)
    more = ["--place.placement", placement, "--rollout.max_staleness", str(lag), "--prompts.held_out", "0"]
    rollyard("run", *options_of(workload), *more, "--steps", str(steps), "--out", str(folder), "--overwrite")
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    return fmean(float(row["seconds"]) for row in rows[1:])


def planned(workload: str, run: Path, scratch: Path) -> dict[str, float]:
    """Seconds of a step of each placement as the planner sees it, its choice first."""
    constants = scratch / "constants.toml"
    constants.unlink(missing_ok=True)
    rollyard("simulate", "--calibrate", str(run), "--constants", str(constants), "--json")
    fixed: dict[str, object] = {"place.generate": 1, "place.train": 1, "engine.tensor_parallel_size": 1}
    fixed |= {"rollout.oversample": 0, "weights.rollover": "keep"}
    sizes = [part for name, value in fixed.items() for part in (f"--{name}", str(value))]
    given = [*options_of(workload), *sizes, "--costs", str(constants), "--trace", str(run)]
    limit = str(STALENESS.get(workload, 2))
    shown = rollyard("plan", "--gpus", "2xcpu", *given, "--max-staleness", limit, "--top", "99", "--json")
    found: dict[str, float] = {}
    for choice in json.loads(shown)["choices"]:
        point = choice["point"]
        if point["placement"] != "async" or point["staleness"] == STALENESS.get(workload, 2):
            found.setdefault(point["placement"], choice["ran"]["step_s"])
    return found


def compared(workload: str, steps: int, calibrated: str, scratch: Path) -> dict[str, Any]:
    """One row."""
    real = {placement: measured(workload, placement, steps, scratch / placement) for placement in PLACEMENTS}
    foretold = planned(workload, scratch / calibrated, scratch)
    choice = min(foretold, key=lambda placement: foretold[placement])
    return {
        "workload": workload,
        "calibrated_on": calibrated,
        "measured_s": real,
        "planned_s": foretold,
        "choice": choice,
        "fastest": min(real, key=lambda placement: real[placement]),
        "of_fastest": real[choice] / min(real.values()),
        "errors": {placement: foretold[placement] / real[placement] - 1 for placement in foretold},
        "load": os.getloadavg()[0],
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=16)
    parser.add_argument("--only", choices=tuple(WORKLOADS))
    parser.add_argument("--from", dest="calibrated", choices=PLACEMENTS, default="colocated", help="placement of the known run")
    parser.add_argument("--keep", type=Path, help="folder for the runs (default: thrown away)")
    parser.add_argument("--out", type=Path, help="where the rows go, as JSON")
    given = parser.parse_args()
    rows = []
    with tempfile.TemporaryDirectory(prefix="rollyard-plan-") as scratch:
        for number, workload in enumerate([given.only] if given.only else WORKLOADS):
            folder = (given.keep or Path(scratch)) / str(number)
            folder.mkdir(parents=True, exist_ok=True)
            rows.append(compared(workload, given.steps, given.calibrated, folder))
            print(json.dumps(rows[-1]), flush=True)
    right = sum(row["of_fastest"] <= WITHIN for row in rows)
    print(f"top choice the fastest or within 10 % of it: {right} of {len(rows)}")
    if given.out:
        given.out.write_text(json.dumps(rows, indent=1), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
