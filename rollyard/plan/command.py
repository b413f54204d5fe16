"""`rollyard simulate`: the command's options, where its scenario comes from, and what it prints."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any, Final

from rollyard.config import Config
from rollyard.durable import write_file
from rollyard.errors import ConfigError
from rollyard.layers import Resolved, presets, value
from rollyard.plan.check import DRAWN, check_scenario, obstacle
from rollyard.plan.devices import nodes
from rollyard.plan.hardware import CPU, hardware_of
from rollyard.plan.kinds import FOLDERS, KIND, left_behind, resolve_scenario
from rollyard.plan.scenario import Scenario, WorkloadConfig
from rollyard.plan.split import HALF, SIZES, WHERE, gpus_of, share_of, split
from rollyard.plan.trace import read_trace
from rollyard.plan.unheeded import note_of, unheeded
from rollyard.plan.workload import Recorded
from rollyard.watch.screen import Screen
from rollyard.watch.step import Step

TEXT: Final = "a run on a virtual clock: how long its steps would take, and what each device would do meanwhile"
PROMPTS: Final = "workload.prompt_tokens"
ROOM: Final = "the window"  # origin of what it leaves
SHARED: Final = "--gpus, shared out"  # of sizes that follow from all devices
TRANSPORT: Final = "weights.transport"
NODES: Final = "several nodes"  # origin of what reaches all of them
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
    command.add_argument("--gpus", metavar="NxKIND", help="all devices, such as 64xH100: who gets which follows")
    command.add_argument(
        "--calibrate",
        type=Path,
        metavar="RUN",
        help="fit the costs to a run that is over, by its folder; "
        "without a file or preset the options and lengths are that run's too",
    )
    command.add_argument("--constants", type=Path, metavar="FILE.toml", help="write down what --calibrate found, and on what")
    command.add_argument("--explain", action="store_true", help="print every option and where its value is from, and do nothing")
    command.add_argument("--json", action="store_true", help="print one JSON object, the same for the same options and seed")
    command.set_defaults(again=None)
    add_options(command, SHORT, Scenario)


def scenario_of(given: argparse.Namespace) -> Resolved[Scenario]:
    """What the command line asks for. What was fitted to a run is written where `--constants` says.

    Where the scenario is that of the run, `given.again` is then what simulates the same run, and says how that compares.

    Raises:
        ConfigError: an option, or what they say together, does not fit; a run that nothing can be fitted to.
        JournalError: what that run left cannot be read.
    """
    overrides: dict[str, Any] = {name: value for name, value in vars(given).items() if "." in name}
    fitted = _fitted(given, overrides)
    overrides = traced(fitted | overrides)
    sized = {} if given.gpus is None else _devices(given, overrides)
    shared = [name for name in SIZES if name in sized and name not in overrides]
    overrides |= sized
    resolved = _resolved(given, overrides, check_scenario)
    if room := _short_prompts(resolved):
        resolved = _resolved(given, overrides | {PROMPTS: room}, check_scenario)
        resolved = replace(resolved, origins={**resolved.origins, PROMPTS: ROOM})
    of_run = {name: f"run {given.calibrate}" for name in fitted if overrides[name] is fitted[name]}
    of_devices = dict.fromkeys(shared, SHARED) | ({TRANSPORT: NODES} if TRANSPORT in sized else {})
    return replace(resolved, origins={**resolved.origins, **of_run, **of_devices})


def traced(overrides: dict[str, Any]) -> dict[str, Any]:
    """The same, where a trace is among them in the place of what a preset or file says of lengths."""
    usual = {f"workload.{name}": WorkloadConfig.model_fields[name].default for name in DRAWN}
    return usual | overrides if overrides.get("workload.trace") else overrides


def _fitted(given: argparse.Namespace, overrides: Mapping[str, Any]) -> dict[str, Any]:
    """Options that a run says, by dotted name; none without `--calibrate`."""
    if given.calibrate is None:
        if given.constants is not None:
            raise ConfigError("nothing is fitted", where="--constants", remedy="say --calibrate RUN too")
        return {}
    from rollyard.plan.again import same_run
    from rollyard.plan.calibrate import calibrate

    kind = "" if given.gpus is None else gpus_of(given.gpus)[1]
    found = calibrate(given.calibrate, overrides.get(KIND, kind))
    if given.constants is not None:
        try:
            write_file(given.constants, found.to_toml().encode())
        except OSError as error:
            raise ConfigError(f"cannot be written: {error}", where="--constants", remedy="give another file") from None
    options: dict[str, Any] = found.options()
    if given.file is None and not given.preset:
        given.file = found.run.options
        machine = {name: value for name, value in overrides.items() if name.startswith(("cluster.", "costs."))}
        given.again = partial(same_run, found, given.calibrate, machine)
        if found.run.journal is not None and not any(name.startswith("workload.") for name in overrides):
            options["workload.trace"] = str(found.run.journal)
    return options


def _short_prompts(resolved: Resolved[Scenario]) -> int:
    """Tokens of prompts of which nothing is said and that would be longer than the window allows; 0: they would not."""
    from rollyard.plan.costs import shape_for

    scenario = resolved.config
    if resolved.origins[PROMPTS] != "default" or scenario.workload.trace:
        return 0
    window, most = scenario.engine.window or shape_for(scenario).window, scenario.rollout.max_tokens
    room = window - most if most < window else window // 2
    return max(1, room) if window > 0 and room < scenario.workload.prompt_tokens else 0


def _devices(given: argparse.Namespace, overrides: Mapping[str, Any]) -> dict[str, Any]:
    """Options that `--gpus` stands for."""
    devices, kind = gpus_of(given.gpus)
    found: dict[str, Any] = {}
    if kind:
        found["cluster.hardware"] = kind
        if overrides.get("cluster.hardware", kind) != kind:
            problem = f"two kinds of device are named, {kind} and {overrides['cluster.hardware']}"
            raise ConfigError(problem, where=WHERE, remedy="leave out one of them")
    overrides = {**overrides, **found}
    unchecked = _resolved(given, overrides, lambda scenario: None)  # its sizes may not go together yet
    if _too_far(devices, unchecked.config):
        found[TRANSPORT] = "broadcast"
    said = [name for name in SIZES if name in overrides]
    others = {name: value for name, value in overrides.items() if name not in SIZES}
    by_itself = _resolved(given, others, lambda scenario: None)
    share = HALF if by_itself.origins["place.generate"] == "default" else share_of(by_itself.config)
    sizes = split(devices, unchecked.config, said, share=share)
    return found | {name: size for name, size in sizes.items() if size != value(unchecked.config, name)}


def _too_far(devices: int, scenario: Scenario) -> bool:
    """For the memory of a node, by which weights would go as nothing else is said."""
    from rollyard.plan.costs import travels_by

    cluster = scenario.cluster
    if cluster.hardware == CPU or scenario.weights.transport != "auto":
        return False
    return devices > (cluster.node or hardware_of(cluster.hardware).node) and travels_by(scenario) == "shared_memory"


def _resolved(given: argparse.Namespace, overrides: Mapping[str, Any], checked: Callable[[Scenario], None]) -> Resolved[Scenario]:
    return resolve_scenario(checked, preset=given.preset, file=given.file, overrides=overrides)


def simulate(resolved: Resolved[Scenario], *, as_json: bool, again: Callable[[], str] | None = None) -> int:
    """Simulate it, print what came of it, and leave the folder that the command line names; returns 1 when the run fails.

    Args:
        again: says what is to be known first of the run that the costs are fitted to.

    Raises:
        ConfigError: the model or the trace cannot be read, it does not fit on the devices, or the folder cannot be written.
    """
    from rollyard.plan.leave import check_free, held, write_folder
    from rollyard.plan.outcome import summarize
    from rollyard.plan.show import table
    from rollyard.plan.simulate import simulate

    scenario, folder = resolved.config, _folder(resolved)
    with held(folder) if folder is not None else nullcontext():
        if folder is not None:
            check_free(folder, scenario.run.overwrite)
        notes, first = notes_of(resolved), [again()] if again else []
        with _progress(scenario.run.steps) as stepped:
            outcome = simulate(scenario, stepped=stepped, followed=folder is not None)
        if folder is not None:
            write_folder(outcome, scenario, folder)
    if scenario.failures.node_hours:
        notes.append(f"{outcome.failures}; nodes that train do not fail: that ends a run, which is then resumed")
    summary = summarize(outcome.report, outcome.metrics, scenario)
    if as_json:
        sys.stdout.write(json.dumps(asdict(summary) | {"notes": [*first, *notes]}) + "\n")
        return int(summary.failed)
    screen = Screen()
    if first:
        screen.print(*first, soft_wrap=True, markup=False, highlight=False)
    screen.print(table(summary))
    for line in [*notes, *([f"simulated run: {folder}"] if folder is not None else [])]:
        screen.print(line, soft_wrap=True, markup=False, highlight=False)
    return int(summary.failed)


@contextmanager
def _progress(steps: int) -> Iterator[Callable[[Step], None] | None]:
    """A line on standard error for as long as the block takes, where that is a terminal; told each step."""
    screen = Screen(stderr=True)
    if not screen.is_terminal:
        yield None
        return
    with screen.status("simulating, Ctrl-C stops it") as line:
        yield lambda step: line.update(f"simulating: {step.version.step:,} of {steps:,} steps are trained, Ctrl-C stops it")


def _folder(resolved: Resolved[Scenario]) -> Path | None:
    """What the command line names; a file's `run.out` is where its real run goes."""
    named = resolved.origins["run.out"] == GIVEN and resolved.config.run.out
    return Path(named) if named else None


def notes_of(resolved: Resolved[Scenario]) -> list[str]:
    """What a reader of the figures should know besides, a line each.

    Raises:
        ConfigError: the trace cannot be read, or the model does not fit on the devices.
    """
    from rollyard.plan.cautions import cautions
    from rollyard.plan.costs import costs_of, fewer_pages

    scenario, notes = resolved.config, list[str]()
    costs = costs_of(scenario)
    if why := obstacle(scenario):
        notes.append(f"this version of Rollyard could not run it as it is: {why}")
    notes += _notes_of_devices(resolved)
    if resolved.origins[PROMPTS] == ROOM:
        told = f"prompts of {scenario.workload.prompt_tokens:,} tokens, which is what the window leaves"
        notes.append(f"{told}: give --workload.prompt_tokens for others")
    if slow := _slow(resolved):
        notes.append(f"arithmetic is in float32, as nothing else is said: give {' and '.join(slow)} for 16 bits")
    said = [name for name, origin in resolved.origins.items() if origin != "default"]
    notes += cautions(scenario, costs.shape, costs.devices, said)
    if resolved.origins[TRANSPORT] == NODES:
        notes.append("on several nodes what travels goes by broadcast: give --weights.transport for another")
    if pages := fewer_pages(costs, scenario):
        told = f"an engine has {pages:,} pages, as many as memory has room for, which is not every slot at its longest"
        notes.append(f"{told}: a run needs --engine.pages {pages}")
    if scenario.workload.trace:
        notes += _notes_of_trace(read_trace(scenario.workload.trace), scenario)
    if scenario.cluster.hardware == CPU and not (scenario.cluster.bandwidth and scenario.cluster.flops):
        notes.append("this machine was measured: figures differ a little each time, whatever the seed")
    if line := note_of(unheeded(scenario, resolved.origins)):
        notes.append(line)
    return notes


def _slow(resolved: Resolved[Scenario]) -> list[str]:
    """Options that would have devices other than a CPU multiply in 16 bits, where nothing is said of any format."""
    scenario = resolved.config
    if scenario.cluster.hardware == CPU or resolved.origins["model.dtype"] != "default":
        return []
    ways = ("train.precision", "engine.dtype")
    return [f"--{name} bfloat16" for name in ways if value(scenario, name) == "model"]


def _notes_of_devices(resolved: Resolved[Scenario]) -> Iterator[str]:
    scenario = resolved.config
    if left := left_behind(resolved):
        kind = scenario.cluster.hardware
        yield f"devices are {kind}: {', '.join(left)} of what was said before are another kind's, and left out"
    if scenario.place.apart and SHARED in (resolved.origins[name] for name in SIZES):
        yield _note_of_sizes(scenario)
    if scenario.place.placement == "swap" and scenario.engine.tensor_parallel_size > 1:
        yield _note_of_halves(scenario)


def _note_of_sizes(scenario: Scenario) -> str:
    """Who got which of all devices."""
    place, size = scenario.place, scenario.engine.tensor_parallel_size
    engines = f"{place.generate:,} engine{'s' * (place.generate > 1)}" + f" of {size} devices" * (size > 1)
    told = f"{engines}, and {place.train:,} device{'s' * (place.train > 1)} to train"
    return f"devices are shared out: {told}; --place.generate or --place.train says otherwise"


def _note_of_halves(scenario: Scenario) -> str:
    """Halves are no smaller engines: more devices make one that has more to add up."""
    cluster, size = scenario.cluster, scenario.engine.tensor_parallel_size
    node = cluster.node or (0 if cluster.hardware == CPU else hardware_of(cluster.hardware).node)
    told = f"each half is one engine of {size} devices"
    return f"{told}, on {nodes(size, node)} nodes" if 0 < node < size else told


def _notes_of_trace(trace: Recorded, scenario: Scenario) -> list[str]:
    notes = []
    asked = scenario.run.steps * scenario.rollout.groups_per_step
    if asked > len(trace.groups):
        notes.append(f"the trace has {len(trace.groups):,} prompts for at least {asked:,}: they come again, in another order")
    if trace.cut and trace.cut_at < scenario.rollout.max_tokens:
        told = f"{trace.cut:,} of the trace's {trace.completions:,} completions were cut, at {trace.cut_at:,} tokens at most"
        notes.append(f"{told}: with a limit of {scenario.rollout.max_tokens:,} they would have gone on")
    if trace.left_out:
        notes.append(f"{trace.left_out:,} rollouts of the trace are left out: they failed, or have no token")
    return notes
