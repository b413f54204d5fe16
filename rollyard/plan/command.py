"""`rollyard simulate`: the command's options, where its scenario comes from, and what it prints."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final

from rollyard.config import Config
from rollyard.errors import ConfigError
from rollyard.layers import RUNS, Resolved, presets, resolve_tree
from rollyard.plan.check import check_scenario
from rollyard.plan.scenario import Scenario
from rollyard.plan.split import SIZES, WHERE, gpus_of, split

TEXT: Final = "a run on a virtual clock: how long its steps would take, and what each device would do meanwhile"
SCENARIOS: Final = f"{RUNS}/scenarios"  # presets of scenarios, in the package
FOLDERS: Final = (SCENARIOS, RUNS)  # a run's preset is a scenario too
GIVEN: Final = "command line"  # origin of options there
SHORT: Final[Mapping[str, str]] = {  # short names of common options
    "--model": "model.path",
    "--placement": "place.placement",
    "--group-size": "rollout.group_size",
    "--prompts-per-step": "rollout.groups_per_step",
    "--max-tokens": "rollout.max_tokens",
    "--mean-tokens": "workload.mean_tokens",
    "--max-staleness": "rollout.max_staleness",
    "--trace": "workload.trace",
    "--price": "cluster.price",
    "--name": "run.name",
    "--out": "run.out",
    "--overwrite": "run.overwrite",
    "--steps": "run.steps",
    "--seed": "run.seed",
}
AddOptions = Callable[[argparse.ArgumentParser, Mapping[str, str], type[Config]], None]


def add_simulate(commands: Any, add_options: AddOptions) -> None:
    """Hang the command into the command line's subparsers.

    Args:
        add_options: gives a command all options of a tree, and short names of some.
    """
    text = TEXT[0].upper() + TEXT[1:] + ". Nothing is written unless --out names a folder."
    command = commands.add_parser("simulate", help=TEXT, description=text, allow_abbrev=False)
    command.add_argument("file", nargs="?", type=Path, metavar="FILE.toml", help="a run's options, and those of the scenario")
    names = ", ".join(name for folder in FOLDERS for name in presets(folder))
    command.add_argument("--preset", default="", metavar="NAME", help=f"start from a preset: {names}")
    command.add_argument("--gpus", default="", metavar="NxKIND", help="all devices, such as 64xH100: who gets which follows")
    command.add_argument("--explain", action="store_true", help="print every option and where its value is from, and do nothing")
    command.add_argument("--json", action="store_true", help="print one JSON object, the same for the same options and seed")
    add_options(command, SHORT, Scenario)


def scenario_of(given: argparse.Namespace) -> Resolved[Scenario]:
    """What the command line asks for.

    Raises:
        ConfigError: an option, or what they say together, does not fit.
    """
    overrides: dict[str, Any] = {name: value for name, value in vars(given).items() if "." in name}
    if given.gpus:
        overrides |= _devices(given, overrides)
    return _resolved(given, overrides, check_scenario)


def _devices(given: argparse.Namespace, overrides: Mapping[str, Any]) -> dict[str, Any]:
    """Options that `--gpus` stands for."""
    devices, kind = gpus_of(given.gpus)
    found: dict[str, Any] = {}
    if kind:
        found["cluster.hardware"] = kind
        if overrides.get("cluster.hardware", kind) != kind:
            problem = f"two kinds of device are named, {kind} and {overrides['cluster.hardware']}"
            raise ConfigError(problem, where=WHERE, remedy="leave out one of them")
    unchecked = _resolved(given, overrides, lambda scenario: None)  # its sizes may not go together yet
    keep = unchecked.origins["place.generate"] != "default"
    return found | split(devices, unchecked.config, [name for name in SIZES if name in overrides], keep=keep)


def _resolved(given: argparse.Namespace, overrides: Mapping[str, Any], checked: Callable[[Scenario], None]) -> Resolved[Scenario]:
    return resolve_tree(Scenario, checked, preset=given.preset, file=given.file, overrides=overrides, folders=FOLDERS)
