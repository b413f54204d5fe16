"""Is the planner's choice the best? Every point of a grid is simulated, and the planner simulates few of them.

    python benchmarks/plan_grid.py [--only WORKLOAD] [--gpus 24] [--prompts 8] [--out FILE.json]

Each of the workloads has a grid of more than 2,000 points. The planner's choice, and every other point, is simulated for as many
steps as the planner's last simulations have, with the same lengths; its step time over the least of all is what counts. One
process; about four minutes for each workload on one core.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Mapping
from typing import Any

from rollyard.errors import ConfigError
from rollyard.plan.advice import named
from rollyard.plan.advise import Planner
from rollyard.plan.costs import shape_for
from rollyard.plan.ran import ran
from rollyard.plan.ready import windowed
from rollyard.plan.scenario import Scenario
from rollyard.plan.space import Point, Space, with_options

MODEL = "llama-8b"
WORKLOADS: Mapping[str, Mapping[str, Any]] = {
    "short answers": {"cluster.hardware": "H100", "rollout.max_tokens": 1024, "workload.mean_tokens": 250.0},
    "long tail": {
        "cluster.hardware": "H100",
        "rollout.max_tokens": 16384,
        "workload.mean_tokens": 1500.0,
        "workload.sigma": 1.3,
    },
    "training-bound": {  # much bandwidth, little arithmetic; two logprob passes
        "cluster.hardware": "H20",
        "rollout.max_tokens": 2048,
        "workload.mean_tokens": 800.0,
        "workload.prompt_tokens": 1024,
        "costs.logprob_passes": 2,
    },
}
WINDOWS = (4, 8, 8)


def space_of(workload: str, gpus: int, prompts: int) -> Space:
    """2,000 points and more, from 24 devices on."""
    options = {
        "model.path": MODEL,
        "model.dtype": "bfloat16",
        "place.device": "cuda",
        "rollout.groups_per_step": prompts,
        "rollout.group_size": 8,
    }
    base = with_options(Scenario(), options | dict(WORKLOADS[workload]))
    base = with_options(base, windowed(base, shape_for(base).window, ()))
    return Space(base, gpus, node=8, staleness=2, widest=8)


def planned(space: Space) -> tuple[Point, dict[str, Any]]:
    """The planner's choice, and what it took."""
    began = time.perf_counter()
    plan = Planner(space, ran, top=3, windows=WINDOWS, shifts=False).plan()
    best = plan.choices[0]
    return best.point, {
        "points": plan.points,
        "refused": sum(each.count for each in plan.refused),
        "simulated": plan.simulated,
        "share": plan.simulated / plan.points,
        "excluded": plan.excluded,
        "left": plan.left,
        "choice": named(best.point),
        "choice_s": best.ran.step_s,
        "seconds": time.perf_counter() - began,
    }


def exhaustive(space: Space) -> dict[Point, float]:
    """Seconds of a step, of every point that fits."""
    planner, found = Planner(space, ran), dict[Point, float]()
    began = time.perf_counter()
    fitting = planner.fitting()
    for number, point in enumerate(fitting, 1):
        scenario = with_options(space.scenario(point), {"run.steps": planner.first + WINDOWS[-1]})
        found[point] = ran(scenario, planner.first).step_s
        if number % 200 == 0:
            print(f"{number} of {len(fitting)}, {time.perf_counter() - began:.0f} s", file=sys.stderr, flush=True)
    return found


def compared(workload: str, gpus: int, prompts: int) -> dict[str, Any]:
    """One row."""
    space = space_of(workload, gpus, prompts)
    choice, row = planned(space)
    began = time.perf_counter()
    steps_s = exhaustive(space)
    best = min(steps_s, key=lambda point: steps_s[point])
    return {
        "workload": workload,
        **row,
        "best": named(best),
        "best_s": steps_s[best],
        "of_best": steps_s[choice] / steps_s[best],
        "better": sum(seconds < steps_s[choice] for seconds in steps_s.values()),
        "median_of_best": sorted(steps_s.values())[len(steps_s) // 2] / steps_s[best],
        "exhaustive_seconds": time.perf_counter() - began,
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", choices=tuple(WORKLOADS))
    parser.add_argument("--gpus", type=int, default=24)
    parser.add_argument("--prompts", type=int, default=8, help="of a step, 8 completions each")
    parser.add_argument("--out", help="where the rows go, as JSON")
    given = parser.parse_args()
    rows = []
    for workload in [given.only] if given.only else WORKLOADS:
        try:
            rows.append(compared(workload, given.gpus, given.prompts))
        except ConfigError as error:
            print(f"{error.where}: {error.problem}", file=sys.stderr)
            return 2
        print(json.dumps(rows[-1]), flush=True)
    if given.out:
        with open(given.out, "w", encoding="utf-8") as file:
            json.dump(rows, file, indent=1)
    return 0


if __name__ == "__main__":
    sys.exit(main())
