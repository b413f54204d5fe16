"""`rollyard plan`."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from rollyard.errors import ConfigError
from rollyard.layers import presets
from rollyard.plan.advice import as_json, named, seconds, table
from rollyard.plan.advise import Choice, Plan, Planner
from rollyard.plan.command import AddOptions
from rollyard.plan.costs import costs_of, fewer_pages, shape_for
from rollyard.plan.hardware import CPU
from rollyard.plan.kinds import FOLDERS, resolve_scenario
from rollyard.plan.measured import device_of
from rollyard.plan.ran import ran
from rollyard.plan.ready import config_of, toml_of
from rollyard.plan.scenario import Scenario
from rollyard.plan.space import Space, with_options
from rollyard.plan.split import gpus_of
from rollyard.watch.screen import Screen

PLAN: Final = "say which placement, split, engines and staleness are best for so many devices, before anything is started"
WIDE: Final = 200  # columns of a table that goes to a file
SHORT: Final[Mapping[str, str]] = {  # short names of common options
    "--model": "model.path",
    "--group-size": "rollout.group_size",
    "--prompts-per-step": "rollout.groups_per_step",
    "--max-tokens": "rollout.max_tokens",
    "--mean-tokens": "workload.mean_tokens",
    "--prompt-tokens": "workload.prompt_tokens",
    "--trace": "workload.trace",
    "--price": "cluster.price",
    "--seed": "run.seed",
}


def add_plan(commands: Any, add_options: AddOptions) -> None:
    """Hang the command into the command line's subparsers.

    Args:
        add_options: gives a command all options of a tree, and short names of some.
    """
    text = f"{PLAN[0].upper()}{PLAN[1:]}. Options that a choice sets are searched, unless they are given here or in --costs."
    command = commands.add_parser("plan", help=PLAN, description=text, allow_abbrev=False)
    names = ", ".join(name for folder in FOLDERS for name in presets(folder))
    command.add_argument("--preset", default="", metavar="NAME", help=f"start from a preset: {names}")
    command.add_argument("--gpus", required=True, metavar="NxKIND", help="devices, such as 64xH100, or 2xcpu: this machine")
    command.add_argument(
        "--max-staleness", type=int, default=2, metavar="INT", help="versions that a rollout may lag at most (default: 2)"
    )
    command.add_argument("--top", type=int, default=3, metavar="N", help="choices to show (default: 3)")
    command.add_argument(
        "--costs", type=Path, metavar="FILE.toml", help="options of a scenario, such as costs that were fitted to a run"
    )
    command.add_argument("--out", type=Path, metavar="FILE.toml", help="where to write the config of the best that can be run")
    command.add_argument("--json", action="store_true", help="print one JSON object")
    add_options(command, SHORT, Scenario)


def plan(given: argparse.Namespace) -> int:
    """Raises ConfigError; OSError when --out cannot be written."""
    if given.top < 1 or given.max_staleness < 0:
        where, least = ("--top", 1) if given.top < 1 else ("--max-staleness", 0)
        raise ConfigError("too few", where=where, remedy=f"use at least {least}")
    console = Screen(stderr=True)
    space = space_of(given)
    planner = Planner(space, ran, given.top, lambda line: console.print(f"[dim]{line}[/]", soft_wrap=True))
    found = planner.plan()
    if given.json:
        sys.stdout.write(json.dumps(as_json(found)) + "\n")
    else:
        shown = Screen()
        Screen(width=None if shown.is_terminal else WIDE).print(table(found, given.gpus))
    if given.out:
        console.print(write(found, space, given.out), soft_wrap=True, markup=False)
    return 0


def space_of(given: argparse.Namespace) -> Space:
    """What is searched. Raises ConfigError."""
    gpus, kind = gpus_of(given.gpus)
    overrides = {name: value for name, value in vars(given).items() if "." in name}
    if kind:
        overrides["cluster.hardware"] = kind
    resolved = resolve_scenario(lambda _: None, preset=given.preset, file=given.costs, overrides=overrides)
    pinned = {name for name, origin in resolved.origins.items() if origin != "default"}
    base = with_options(resolved.config, _fitting(resolved.config, pinned))
    shape, hardware = shape_for(base), device_of(base.cluster, base.model.dtype)
    held = 1
    while held < gpus and shape.parameters * 2 / held > hardware.memory:
        held *= 2
    limit = base.rollout.max_staleness if "rollout.max_staleness" in pinned else given.max_staleness
    return Space(base, gpus, hardware.node, limit, max(hardware.node, 4 * held), frozenset(pinned))


def _fitting(base: Scenario, pinned: set[str]) -> Mapping[str, Any]:
    """What is usual on such devices."""
    cpu = base.cluster.hardware == CPU
    usual = {"model.dtype": "float32" if cpu else "bfloat16", "place.device": "cpu" if cpu else "cuda"}
    return {name: value for name, value in usual.items() if name not in pinned}


def write(found: Plan, space: Space, path: Path) -> str:
    """Write the config of the best choice that can be run; what is to be said of that. Raises OSError."""
    ready = [(number, choice) for number, choice in enumerate(found.choices, 1) if not choice.obstacle]
    if not ready:
        return f"{path} is not written: none of these can be run by this version of Rollyard"
    number, choice = ready[0]
    scenario = space.scenario(choice.point)
    if pages := fewer_pages(costs_of(scenario), scenario):
        scenario = with_options(scenario, {"engine.pages": pages})
    config = config_of(scenario).model_copy(update={"forecast": choice.ran.forecast})
    missing = "" if config.prompts.path or config.prompts.task else " --prompts FILE.jsonl --reward FILE.py:function"
    run = f"rollyard run {path}{missing}"
    path.write_text(toml_of(config, _comment(choice, space, run)), encoding="utf-8")
    return f"{path} is written, of {number}: {run}"


def _comment(choice: Choice, space: Space, run: str) -> list[str]:
    kind = space.base.cluster.hardware
    return [
        f"{named(choice.point)}, on {choice.point.devices} {kind}",
        f"expected: {seconds(choice.ran.step_s)} a step, bound by {choice.ran.bound}",
        run,
    ]
