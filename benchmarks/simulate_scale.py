"""How long a very large run takes to simulate: 1,024 engines, 512 devices that train, 8,192 completions a step.

    python benchmarks/simulate_scale.py [--steps 12 24 49 100] [--profile]

Each number of steps is a process of its own. CPU seconds are of one core; memory is the most that the process had.
"""

from __future__ import annotations

import argparse
import cProfile
import json
import pstats
import resource
import subprocess
import sys
import time

from rollyard.layers import resolve_tree
from rollyard.plan.check import check_scenario
from rollyard.plan.kinds import FOLDERS
from rollyard.plan.scenario import Scenario
from rollyard.plan.simulate import simulate

SERIES = (12, 24, 49, 100)  # steps: about 100k, 200k, 400k and 819,200 completions


def once(steps: int, profile: bool) -> dict[str, float]:
    """One run, in this process."""
    overrides = {"run.steps": steps}
    scenario = resolve_tree(Scenario, check_scenario, preset="thousand", overrides=overrides, folders=FOLDERS).config
    watched = cProfile.Profile()
    began, cpu = time.perf_counter(), time.process_time()
    if profile:
        watched.enable()
    done = simulate(scenario)
    if profile:
        watched.disable()
        pstats.Stats(watched).sort_stats("tottime").print_stats(45)
    cpu, wall = time.process_time() - cpu, time.perf_counter() - began
    completions = done.report.members.trained
    return {
        "steps": steps,
        "completions": completions,
        "events": done.events,
        "wall_s": round(wall, 2),
        "cpu_s": round(cpu, 2),
        "cpu_us": round(cpu / completions * 1e6, 1),
        "rss_gb": round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20, 2),
        "virtual_s": round(done.steps_s[-1], 1),
        "slots_busy": round(done.report.slots_busy, 3),
    }


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, nargs="+", default=SERIES)
    parser.add_argument("--profile", action="store_true")
    parser.add_argument("--here", action="store_true", help="in this process")
    given = parser.parse_args()
    for steps in given.steps:
        if given.here or given.profile:
            print(json.dumps(once(steps, given.profile)))
        else:
            subprocess.run([sys.executable, __file__, "--here", "--steps", str(steps)], check=True)


if __name__ == "__main__":
    main()
