"""`rollyard plan`."""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Collection, Mapping
from itertools import product
from pathlib import Path
from typing import Any, Final

from rich.text import Text

from rollyard.durable import write_file
from rollyard.errors import ConfigError
from rollyard.layers import presets
from rollyard.plan.advice import as_json, named, seconds, table
from rollyard.plan.advise import Choice, Plan, Planner
from rollyard.plan.cautions import cautions
from rollyard.plan.command import AddOptions, traced
from rollyard.plan.costs import costs_of, fewer_pages, formats_of, longest_of, shape_for, sizes_of
from rollyard.plan.devices import devices_of
from rollyard.plan.hardware import CPU, Hardware
from rollyard.plan.kinds import FOLDERS, resolve_scenario
from rollyard.plan.measured import device_of
from rollyard.plan.memory import training
from rollyard.plan.models import is_folder
from rollyard.plan.outcome import OVERLAPS
from rollyard.plan.ran import ran
from rollyard.plan.ready import config_of, toml_of, windowed
from rollyard.plan.scenario import Scenario
from rollyard.plan.shape import Shape
from rollyard.plan.space import CHOSEN, Space, with_options
from rollyard.plan.split import gpus_of
from rollyard.watch.screen import Screen

PLAN: Final = "say which placement, split, engines and staleness are best for so many devices, before anything is started"
DOES: Final = ("generates", "trains")
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
    text = f"{PLAN[0].upper()}{PLAN[1:]}. Options that a choice sets are searched, unless they are given here, "
    text += "in --costs or in the environment; those of a preset are not kept."
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
    """Raises ConfigError."""
    if given.top < 1 or given.max_staleness < 0:
        where, least = ("--top", 1) if given.top < 1 else ("--max-staleness", 0)
        raise ConfigError("too few", where=where, remedy=f"use at least {least}")
    if given.out:
        check_place(given.out)
    console = Screen(stderr=True)
    space = space_of(given)
    with console.status("") as status:
        planner = Planner(
            space,
            ran,
            given.top,
            lambda line: console.print(line, style="dim", soft_wrap=True, markup=False, highlight=False),
            lambda line: status.update(Text(line)),
        )
        found = planner.plan()
    if given.json:
        sys.stdout.write(json.dumps(as_json(found)) + "\n")
    else:
        shown = Screen()
        Screen(width=None if shown.is_terminal else WIDE).print(table(found, given.gpus))
    told = cautions_of(space.scenario(found.choices[0].point), space) + ([write(found, space, given.out)] if given.out else [])
    for line in told:
        console.print(line, soft_wrap=True, markup=False, highlight=False)
    return 0


def check_place(path: Path) -> None:
    """Raises ConfigError when no file can be written there: before anything is simulated."""
    folder, problem = path.parent, ""
    if not folder.is_dir():
        problem = f"there is no folder {folder}"
    elif path.is_dir():
        problem = f"{path} is a folder"
    elif not os.access(folder, os.W_OK):
        problem = f"nothing can be written in {folder}"
    if problem:
        raise ConfigError(problem, where="--out", remedy="name a file in a folder that is there")


def space_of(given: argparse.Namespace) -> Space:
    """What is searched. Raises ConfigError."""
    gpus, kind = gpus_of(given.gpus)
    overrides = traced({name: value for name, value in vars(given).items() if "." in name})
    if kind:
        overrides["cluster.hardware"] = kind
    resolved = resolve_scenario(lambda _: None, preset=given.preset, file=given.costs, overrides=overrides)
    said = {name for name, origin in resolved.origins.items() if origin != "default"}
    pinned = {name for name in said if name not in CHOSEN or not resolved.origins[name].startswith("preset ")}
    usual = {name: found for name, found in _fitting(resolved.config, said).items() if name not in said}
    shape = shape_for(resolved.config)
    base = with_options(resolved.config, {**usual, **windowed(resolved.config, shape.window, said)})
    hardware = device_of(base.cluster, formats_of(base))
    again, far = _least(base, shape, hardware, gpus)
    base = base if "train.recompute" in said else with_options(base, {"train.recompute": again})
    held = 1
    while held < gpus and shape.parameters * 2 / held > hardware.memory:
        held *= 2
    limit = base.rollout.max_staleness if "rollout.max_staleness" in pinned else given.max_staleness
    widest = max(hardware.node, 4 * held)
    return Space(base, gpus, hardware.node, limit, widest, frozenset(pinned), far)


def _least(base: Scenario, shape: Shape, hardware: Hardware, gpus: int) -> tuple[bool, str]:
    """What training cannot do without, though as many devices as there are shared all the rest.

    Returns:
        Whether activations are computed again, and how weights go from node to node: by the common disk where a copy to
        broadcast would have no room.
    """
    for again, transport in product((base.train.recompute, True), ("broadcast", "checkpoint")):
        options = {"place.placement": "separate", "place.generate": 1, "place.train": max(gpus - 1, 1), "train.shard": True}
        options |= {"weights.transport": transport, "engine.tensor_parallel_size": 1, "train.recompute": again}
        scenario = with_options(base, options)
        devices, sizes = devices_of(scenario, hardware), sizes_of(scenario, shape)
        try:
            training(scenario, shape, devices, sizes, longest_of(scenario, shape))
        except ConfigError:
            continue
        return again, transport
    return base.train.recompute, "broadcast"  # nothing fits, and that is told


def _fitting(base: Scenario, said: Collection[str]) -> Mapping[str, Any]:
    """What is usual on such devices, and what our own trainer does, which is to run it: it makes a copy to send.

    Parameters of 16 bits would lose what small learning rates change: matrices are multiplied in 16 bits, parameters kept in 32.
    Those under an adapter do not change.
    """
    if base.cluster.hardware == CPU:
        return {"model.dtype": "float32", "place.device": "cpu", "costs.recompute": False}
    frozen = base.weights.what == "lora"
    dtype = base.model.dtype if "model.dtype" in said else "bfloat16" if frozen else "float32"
    usual: dict[str, Any] = {"model.dtype": dtype, "place.device": "cuda", "costs.recompute": False, "costs.sent_copy": True}
    return usual if dtype == "bfloat16" else usual | {"train.precision": "bfloat16", "engine.dtype": "bfloat16"}


def write(found: Plan, space: Space, path: Path) -> str:
    """Write the config of the best choice that can be run; what is to be said of that. Raises ConfigError where it cannot be."""
    ready = [(number, choice) for number, choice in enumerate(found.choices, 1) if not choice.obstacle]
    if not ready:
        return f"{path} is not written: none of these can be run by this version of Rollyard"
    number, choice = ready[0]
    scenario = space.scenario(choice.point)
    costs = costs_of(scenario)
    if pages := fewer_pages(costs, scenario):
        scenario = with_options(scenario, {"engine.pages": pages})
    config = config_of(scenario).model_copy(update={"forecast": choice.ran.forecast})
    run = f"rollyard run {path}"
    folder = not config.model.path or is_folder(config.model.path)
    if not folder:
        run += " --model FOLDER"
    if not (config.prompts.path or config.prompts.dataset or config.prompts.task):
        run += " --prompts FILE.jsonl --reward FILE.py:function"
    lines = _comment(choice, space)
    lines += [f"a device that {does} holds {each}" for does, each in zip(DOES, costs.memory, strict=True)]
    lines += cautions_of(scenario, space)
    if config.engine.window:
        lines.append(f"engine.window: {config.engine.window:,} tokens of a prompt with its answer at most")
    if not folder:
        lines.append(f"It cannot be run yet: model.path has to be the folder of {config.model.path}")
    try:
        write_file(path, toml_of(config, [*lines, run]).encode())
    except OSError as error:
        raise ConfigError(f"cannot be written: {error}", where="--out", remedy="give another file") from None
    told = "" if folder else f"; it cannot be run before model.path is the folder of {config.model.path}"
    return f"{path} is written, with choice {number}{told}; to start it: {run}"


def cautions_of(scenario: Scenario, space: Space) -> list[str]:
    """What whoever runs it should know of its training, a line each."""
    costs = costs_of(scenario)
    found = cautions(scenario, costs.shape, costs.devices)
    if scenario.weights.transport == space.far == "checkpoint" and "weights.transport" not in space.pinned:
        found.append("weights go by a disk that all nodes share, since a copy to broadcast has no room beside training")
    if scenario.train.recompute and "train.recompute" not in space.pinned:
        found.append("activations are computed again (train.recompute), since training does not fit otherwise")
    return [f"caution: {line}" for line in found]


def _comment(choice: Choice, space: Space) -> list[str]:
    kind = space.base.cluster.hardware
    return [
        f"{named(choice.point)}, on {choice.point.devices} {kind}",
        f"expected: {seconds(choice.ran.step_s)} a step, bound by {choice.ran.bound}",
        *(["forecast.generate_s is what training does not hide of generation"] * (choice.point.placement in OVERLAPS)),
    ]
