"""The command line. Exit codes: 0 done, 1 failed, 2 a user's mistake, 130 stopped."""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import signal
import sys
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from rich.table import Table

from rollyard.bench import report
from rollyard.bench.choice import BENCHES, LOAD, LOADS, MODEL, PLACEMENTS, SECTIONS, TAILS, load, measure
from rollyard.bench.setting import Setting
from rollyard.bench.theory import Work
from rollyard.bench.turns import Tell
from rollyard.config import Config
from rollyard.control import Order, ask
from rollyard.durable import is_full
from rollyard.environment import settle_environment
from rollyard.errors import ConfigError, RollyardError
from rollyard.inspect.command import add_inspect, inspect, port, whole
from rollyard.layers import Resolved, nearest, options, presets, resolve, value
from rollyard.plan.command import add_simulate, scenario_of, simulate
from rollyard.plan.plan_command import add_plan, plan
from rollyard.serve.command import add_serve, serve
from rollyard.texts import visible
from rollyard.watch.screen import Screen, warnings_as_lines

if TYPE_CHECKING:
    from rollyard.journal.folder import RunFolder
    from rollyard.loop import Run
    from rollyard.watch.snapshot import Header
    from rollyard.watch.terminal import Terminal, View

SHORT = {  # short names of common options
    "--model": "model.path",
    "--prompts": "prompts.path",
    "--reward": "reward.function",
    "--group-size": "rollout.group_size",
    "--max-tokens": "rollout.max_tokens",
    "--name": "run.name",
    "--out": "run.out",
    "--overwrite": "run.overwrite",
    "--steps": "run.steps",
    "--seed": "run.seed",
    "--inject": "run.inject",
    "--lr": "train.lr",
    "--view": "watch.view",
}
WIDE = 200  # columns of a table that goes to a file
KEEPS = "leave it out: a run goes on with the options in its config.toml, and with those given here, such as --run.steps 400"
ROOM = "make room there, then do it again; a run that had begun goes on with `rollyard resume RUN_FOLDER`"
STOPPED = 130  # exit code after Ctrl-C


class _Parser(argparse.ArgumentParser):
    """Mistakes on the command line are ConfigErrors like any other. `remedies`: for options that only other commands have."""

    remedies: Mapping[str, str] = {}

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        """Each command refuses what it does not know: what would be right depends on what it knows."""
        given, unknown = super().parse_known_args(args, namespace)
        if not unknown:
            return given, unknown
        flag, help_ = unknown[0].partition("=")[0], f"see `{self.prog} --help`"
        if not unknown[0].startswith("-"):
            raise ConfigError(f"{unknown[0]!r} is too much", where="command line", remedy=help_)
        remedy = self.remedies.get(flag) or nearest(flag, self._option_string_actions, help_)
        raise ConfigError(f"there is no option {flag!r}", where=self.prog, remedy=remedy)

    def error(self, message: str) -> NoReturn:
        raise ConfigError(message, where="command line", remedy=f"see `{self.prog} --help`")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; return the exit code."""
    with warnings_as_lines():
        return _main(arguments)


def _main(arguments: Sequence[str] | None) -> int:
    settle_environment()
    console = Screen(stderr=True)
    try:
        return _done(_parser().parse_args(arguments), console)
    except ConfigError as error:
        console.print(f"[bold red]error:[/] [bold]{_plain(error.where)}[/]: {_plain(error.problem)}", soft_wrap=True)
        console.print(f"       {_plain(error.remedy)}", soft_wrap=True)
        return 2
    except KeyboardInterrupt:
        return STOPPED
    except (RollyardError, OSError) as error:
        console.print(f"[bold red]failed:[/] {_plain(str(error))}", soft_wrap=True)
        if is_full(str(error)):
            console.print(f"        {ROOM}", soft_wrap=True)
        return 1


def _done(given: argparse.Namespace, console: Screen) -> int:
    """What the command line asks for."""
    match given.command:
        case "bench":
            return _bench(given, console)
        case "engines":
            return _engines(given)
        case "resume":
            return _resume(given, _port(given))
        case "inspect":
            return inspect(given, _web)
        case "simulate":
            scenario = scenario_of(given)
            return _explain(scenario) if given.explain else simulate(scenario, as_json=given.json, again=given.again)
        case "plan":
            return plan(given)
        case "explain":
            return _explain(_resolved(given))
        case "train":
            return _train(_resolved(given))
        case "serve":
            return serve(given, _overrides(given), _explain)
    port = _port(given)
    return _run(_resolved(given), port)


def _plain(text: str) -> str:
    return text.replace("[", r"\[")


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(prog="rollyard", description="Rollout orchestration for reinforcement learning on language models.")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND", parser_class=_Parser)
    for name, text in (
        ("run", "train a policy: generate, judge, learn, and again"),
        ("train", "the training job of two jobs that share --exchange.folder; `run` with the same options is the other"),
        ("explain", "print every option of a run, its value, and where the value comes from"),
    ):
        command = commands.add_parser(name, help=text, description=text[0].upper() + text[1:] + ".", allow_abbrev=False)
        command.add_argument(
            "file", nargs="?", type=Path, metavar="FILE.toml", help="options as TOML, sections as in `rollyard explain`"
        )
        command.add_argument("--preset", default="", metavar="NAME", help=f"start from a preset: {', '.join(presets())}")
        if name == "run":
            _add_dashboard(command)
        _add_options(command, SHORT)
    text = "go on with a run that was killed or stopped, from its newest whole checkpoint"
    command = commands.add_parser("resume", help=text, description=text[0].upper() + text[1:] + ".", allow_abbrev=False)
    command.add_argument("folder", type=Path, metavar="RUN_FOLDER", help="of the run, such as runs/NAME")
    command.remedies = {"--preset": KEEPS}
    _add_dashboard(command)
    _add_options(command, SHORT)
    _add_bench(commands)
    _add_engines(commands)
    add_inspect(commands)
    add_simulate(commands, lambda command, short, tree: _add_options(command, short, tree=tree))
    add_plan(commands, lambda command, short, tree: _add_options(command, short, tree=tree))
    add_serve(commands, lambda command, tree: _add_options(command, SHORT, tree=tree))
    return parser


def _add_dashboard(command: Any) -> None:
    text = "show the run in a browser, on this machine alone; prints the address: docs/dashboard.md"
    command.add_argument("--dashboard", action="store_true", help=text)
    command.add_argument("--port", type=port, metavar="N", help="of the dashboard (default: one that is free)")


def _port(given: argparse.Namespace) -> int | None:
    """Of the dashboard, 0 for any; None where none is wanted."""
    if given.port is not None and not given.dashboard:
        raise ConfigError("a port is of the dashboard alone", where="--port", remedy="give --dashboard too")
    return (given.port or 0) if given.dashboard else None


def _add_engines(commands: Any) -> None:
    text = "show the engines of a run that is going on, add one, or remove one"
    command = commands.add_parser("engines", help=text, description=text[0].upper() + text[1:] + ".", allow_abbrev=False)
    command.add_argument("folder", type=Path, metavar="RUN_FOLDER", help="of the run, such as runs/NAME")
    command.add_argument("do", nargs="?", choices=("list", "add", "remove"), default="list", help="what to do (default: list)")
    command.add_argument("engine", nargs="?", default="", metavar="ID", help="the engine to remove")
    command.add_argument("--cut", action="store_true", help="what it holds goes on elsewhere; else it finishes that first")
    command.add_argument("--url", default="", help="of a running server, where the engines are running servers")


def _add_bench(commands: Any) -> None:
    text = "measure this machine beside a peer, taking turns: generation, training, or whole steps"
    bench = commands.add_parser("bench", help=text, description=text[0].upper() + text[1:] + ".", allow_abbrev=False)
    kinds = bench.add_subparsers(dest="bench", required=True, metavar="WHAT", parser_class=_Parser)
    for name, kind in BENCHES.items():
        command = kinds.add_parser(
            name, help=kind.text, description=kind.text[0].upper() + kind.text[1:] + ".", allow_abbrev=False
        )
        command.add_argument("--model", type=Path, default=MODEL, metavar="DIR", help=f"Hugging Face folder (default: {MODEL})")
        command.add_argument("--workload", choices=kind.workloads, default=kind.workloads[0], help="what is measured")
        if kind.peers:
            command.add_argument("--peer", choices=kind.peers, default=kind.peers[0], help="who takes turns with it")
        command.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32", help="number format of both sides")
        command.add_argument("--rounds", type=_count, default=5, metavar="N", help="times each side runs (default: 5)")
        command.add_argument("--threads", type=_count, default=os.cpu_count(), metavar="N", help="CPU threads of each side")
        command.add_argument("--json", action="store_true", help="print one JSON object")
        _add_options(command, {}, SECTIONS)
    _add_placements(kinds)
    _add_load(kinds)
    command = kinds.add_parser("tails", help=TAILS, description=TAILS[0].upper() + TAILS[1:] + ".", allow_abbrev=False)
    command.add_argument("--engines", type=_count, metavar="N", help="only the cases with so many (default: 8 and 64)")
    command.add_argument("--json", action="store_true", help="print one JSON object")


def _add_load(kinds: Any) -> None:
    command = kinds.add_parser("load", help=LOAD, description=LOAD[0].upper() + LOAD[1:] + ".", allow_abbrev=False)
    command.add_argument("--workload", choices=LOADS, default=LOADS[0], help="what is measured")
    command.add_argument("--rounds", type=_count, default=5, metavar="N", help="times everything runs, but for soak (default: 5)")
    command.add_argument("--json", action="store_true", help="print one JSON object")


def _add_placements(kinds: Any) -> None:
    text = PLACEMENTS[0].upper() + PLACEMENTS[1:] + "."
    command = kinds.add_parser("placements", help=PLACEMENTS, description=text, allow_abbrev=False)
    command.add_argument(
        "--only", choices=("doubles", "real"), help="only stations that take time and compute nothing, or only the tiny model"
    )
    for name, default, meaning in (
        ("steps", Work.steps, "steps with doubles"),
        ("staleness", Work.staleness, "versions a rollout may lag behind with async"),
        ("longest", Work.cap, "tokens of a completion at most, with doubles"),
    ):
        command.add_argument(f"--{name}", type=_count, default=default, metavar="N", help=f"{meaning} (default: {default})")
    command.add_argument("--json", action="store_true", help="print one JSON object")


def _count(text: str) -> int:
    return whole(text, 1)


def _add_options(
    command: argparse.ArgumentParser, short_names: Mapping[str, str], sections: Collection[str] = (), tree: type[Config] = Config
) -> None:
    """Options of the tree: of these sections, or all of them. They are hundreds: the usage has what the command has besides."""
    own = " ".join(command.format_usage().removeprefix("usage: ").split())
    command.usage = f"{own} [OPTION VALUE ...]".replace("%", "%%")
    if short_names:
        command.description = f"{command.description or ''} Options with short names: {', '.join(short_names)}."
    short = {name: flag for flag, name in short_names.items()}
    groups: dict[str, Any] = {}
    for option in options(tree):
        section = option.name.partition(".")[0]
        if sections and section not in sections:
            continue
        group = groups.setdefault(section, command.add_argument_group(section) if section not in groups else None)
        flags = [f"--{option.name}", *([short[option.name]] if option.name in short else [])]
        default = f"default: {option.default}" if option.default != "" else "default: empty"
        group.add_argument(
            *flags,
            dest=option.name,
            default=argparse.SUPPRESS,
            metavar=option.values,
            help=f"{option.description} ({default})".replace("%", "%%"),
            **({"nargs": "?", "const": "true"} if option.values == "BOOL" else {}),
        )


def _resolved(given: argparse.Namespace) -> Resolved[Config]:
    return resolve(preset=given.preset, file=given.file, overrides=_overrides(given))


def _overrides(given: argparse.Namespace) -> dict[str, str]:
    return {name: value for name, value in vars(given).items() if "." in name}


def _explain(resolved: Resolved[Any]) -> int:
    """Every option of its tree."""
    table = Table(box=None, pad_edge=False)
    for column in ("option", "value", "from", "meaning"):
        table.add_column(column, overflow="fold")
    for option in options(type(resolved.config)):
        found = value(resolved.config, option.name)
        shown = ",".join(map(str, found)) if isinstance(found, tuple) else str(found)
        origin = resolved.origins[option.name]
        style = "dim" if origin == "default" else "bold"
        table.add_row(f"[{style}]{option.name}[/]", _plain(shown), origin, f"[dim]{_plain(option.description)}[/]")
    Screen().print(table)
    return 0


def _run(resolved: Resolved[Config], port: int | None) -> int:
    from rollyard.loop import Run
    from rollyard.watch.terminal import Terminal, open_view

    console = Terminal()
    kind = resolved.config.watch.view
    return _go(Run(resolved.config, view=lambda header: open_view(kind, header, console)), console, port)


def _resume(given: argparse.Namespace, port: int | None) -> int:
    from rollyard.loop import Run
    from rollyard.watch.terminal import Terminal, open_view

    console = Terminal()

    def view(header: Header) -> View:
        return open_view(run.config.watch.view, header, console)

    run: Run = Run.resume(given.folder, _overrides(given), view=view)
    return _go(run, console, port)


def _go(run: Run, console: Terminal, port: int | None) -> int:
    """To its end. `port`: of its dashboard."""
    stopped = asyncio.run(_drive(run) if port is None else _shown(run, console, port))
    if run.config.watch.view != "quiet":
        line = run.finished or f"run folder: {run.folder.path}"
        console.print(line, soft_wrap=True, markup=False, highlight=False)
    return STOPPED if stopped else 0


async def _shown(run: Run, console: Terminal, port: int) -> bool:
    """To its end, beside its dashboard, which stays until Ctrl-C where somebody sits at a terminal."""
    from rollyard.dashboard.beside import beside, until_stopped

    def tell(line: str) -> None:
        console.print(line, soft_wrap=True, markup=False, highlight=False)

    async with beside(run.folder, port) as address:
        tell(f"dashboard: {address}")
        try:
            stopped = await _drive(run)
        except ConfigError:
            raise
        except RollyardError as error:
            if console.is_terminal:
                tell(f"run failed: {error}\nthe dashboard stays at {address} until Ctrl-C")
                await until_stopped()
            raise
        if console.is_terminal and not stopped and not run.finished:
            tell(f"run finished; the dashboard stays at {address} until Ctrl-C")
            await until_stopped()
        return stopped


def _train(resolved: Resolved[Config]) -> int:
    from rollyard.training import Training
    from rollyard.watch.terminal import Terminal

    console, quiet = Terminal(), resolved.config.watch.view == "quiet"

    def tell(line: str) -> None:
        if not quiet:
            console.print(line, soft_wrap=True, markup=False, highlight=False)

    stopped = asyncio.run(_drive(Training(resolved.config, tell)))
    return STOPPED if stopped else 0


def _web(folder: RunFolder, port: int, as_json: bool) -> int:
    from rollyard.dashboard.command import web

    return web(folder, port, as_json)


def _engines(given: argparse.Namespace) -> int:
    if bool(given.engine) != (given.do == "remove"):
        remedy = "give such as: rollyard engines RUN_FOLDER remove engine-1"
        raise ConfigError("an engine is named to remove it", where="command line", remedy=remedy)
    told = ask(given.folder, Order(given.do, given.engine, given.url, given.cut))
    for line in [told.text] if told.text else [f"{name:<12} {state}" for name, state in told.engines]:
        sys.stdout.write(f"{visible(line)}\n")
    return 0


def _bench(given: argparse.Namespace, console: Screen) -> int:
    def tell(line: str) -> None:
        console.print(f"[dim]{_plain(line)}[/]", soft_wrap=True)

    if given.bench == "placements":
        return _placements(given, tell)
    if given.bench == "tails":
        return _tails(given, tell)
    if given.bench == "load":
        result, table = asyncio.run(load(given.workload, given.rounds, tell))
        if given.json:
            sys.stdout.write(json.dumps(asdict(result)) + "\n")
        else:
            Screen().print(table)
        return 0
    if not given.model.is_dir():
        raise ConfigError(f"there is no folder {given.model}", where="--model", remedy="make model, or give a model's folder")
    peer = getattr(given, "peer", "")
    setting = Setting(given.model, given.workload, peer, given.dtype, given.rounds, given.threads, _overrides(given))
    result = asyncio.run(measure(given.bench, setting, tell))
    if given.json:
        sys.stdout.write(json.dumps(asdict(result)) + "\n")
    else:
        Screen().print(report.table(result))
    return 0


def _placements(given: argparse.Namespace, tell: Tell) -> int:
    from rollyard.bench import placements, shown

    parts = {"doubles": given.only != "real", "real": given.only != "doubles"}
    choice = placements.Choice(given.steps, given.staleness, given.longest, **parts)
    result = asyncio.run(placements.bench(choice, tell))
    if given.json:
        sys.stdout.write(json.dumps(asdict(result)) + "\n")
    else:
        console = Screen()
        Screen(width=None if console.is_terminal else WIDE).print(shown.table(result))
    return 0


def _tails(given: argparse.Namespace, tell: Tell) -> int:
    from rollyard.bench import tails

    cases = [case for case in tails.CASES if given.engines in (None, case.engines)]
    if not cases:
        problem = f"no case has {given.engines} engines"
        raise ConfigError(problem, where="--engines", remedy=f"one of: {', '.join(str(case.engines) for case in tails.CASES)}")
    result = tails.bench(tell, cases)
    if given.json:
        sys.stdout.write(json.dumps(asdict(result)) + "\n")
    else:
        console = Screen()
        Screen(width=None if console.is_terminal else WIDE).print(tails.table(result))
    return 0


async def _drive(run: Any) -> bool:
    """Run to the end. The first Ctrl-C stops cleanly and is reported; a second one ends the process at once."""
    stopped = False

    def stop(cause: str) -> None:
        nonlocal stopped
        if stopped:
            os._exit(STOPPED)
        stopped = True
        run.stop(f"stopped by {cause}")

    loop = asyncio.get_running_loop()
    for number, cause in ((signal.SIGINT, "Ctrl-C"), (signal.SIGTERM, "SIGTERM")):
        loop.add_signal_handler(number, stop, cause)
    async for _ in run:
        pass
    return stopped


if __name__ == "__main__":
    sys.exit(main())
