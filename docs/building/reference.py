"""The reference of the site, made from the code: options, command line, Python names, events, examples."""

from __future__ import annotations

import argparse
import re
from collections.abc import Iterable, Iterator
from pathlib import Path

import rollyard
from rollyard import cli
from rollyard.config import Config
from rollyard.layers import Option, options, presets, resolve, value
from rollyard.plan.scenario import Scenario
from rollyard.serve.settings import ServeConfig

EXAMPLES = "examples.md"
TEXT = {".py": "python", ".toml": "toml", ".jsonl": "json", ".json": "json", ".txt": "text"}
SOURCE = ("      show_source: true", "      merge_init_into_class: false", "")
NOT_SHOWN = (argparse._HelpAction, argparse._SubParsersAction)  # the latter have headings of their own
SHOWN = 8  # lines of a file of data


def pages(root: Path) -> dict[str, str]:
    """Pages by their path below docs/."""
    return {
        "reference/options.md": _options(),
        "reference/scenario.md": _more("Options of a simulation", Scenario, SIMULATION),
        "reference/service.md": _more("Options of a service", ServeConfig, SERVICE),
        "reference/command-line.md": _command_line(),
        "reference/python.md": _python(),
        "reference/types.md": _module("Records", "rollyard.types", "What flows between the stations, in the order it does."),
        "reference/protocols.md": _protocols(root),
        "reference/events.md": _module("Events", "rollyard.events", EVENTS),
        EXAMPLES: _examples(root),
    }


def anchor(path: str) -> str:
    """Of an example on its page."""
    return re.sub(r"[^a-z0-9]+", "-", path.lower()).strip("-")


# ------------------------------------------------------------------------------------------------------ options


def _options() -> str:
    lines = [
        "---\nsearch:\n  boost: 4\n---",  # who looks for an option finds it here first
        "# Options",
        "",
        "Every option of a run. `rollyard explain` prints the same for one run, each with its value and where that came from:",
        "default < preset < file < environment < command line. `train.lr` is `--train.lr 1e-5` on the command line,",
        "`ROLLYARD_TRAIN__LR=1e-5` in the environment, and `lr = 1e-5` under `[train]` in a file.",
        "",
        "A list is given with commas. A mistake is one line that says what was wrong, where, and what would be right, before",
        "anything starts.",
        "",
        *_sections(list(options(Config)), Config),
        "## Presets",
        "",
        "What each of them sets; `--preset NAME` starts from one.",
        "",
        *_presets(),
    ]
    return "\n".join(lines)


def _more(title: str, tree: type[Config], text: str) -> str:
    """What a tree has beyond the options of a run."""
    ours = {option.name for option in options(Config)}
    more = [option for option in options(tree) if option.name not in ours]
    return "\n".join([f"# {title}", "", text, "", *_sections(more, tree)])


def _sections(found: list[Option], tree: type[Config]) -> Iterator[str]:
    """A table for each section, under its own docstring."""
    for name in dict.fromkeys(option.name.rpartition(".")[0] for option in found):
        yield f"## {name}"
        yield ""
        if text := _docstring(tree, name):
            yield f"{text}\n"
        yield "| option | takes | default | meaning |"
        yield "| --- | --- | --- | --- |"
        for option in found:
            if option.name.rpartition(".")[0] == name:
                yield f"| `{option.name}` | {_takes(option.values)} | {_default(option.default)} | {_cell(option.description)} |"
        yield ""


def _docstring(tree: type[Config], section: str) -> str:
    kind: type = tree
    for part in section.split("."):
        kind = kind.model_fields[part].annotation  # type: ignore[attr-defined]
    return (kind.__dict__.get("__doc__") or "").strip()


def _takes(values: str) -> str:
    return " ".join(f"`{one}`" for one in values.split("|")) if "|" in values else values


def _default(given: object) -> str:
    if given == "" or given == ():
        return "empty"
    shown = ",".join(map(str, given)) if isinstance(given, tuple) else str(given)
    return f"`{shown}`"


def _cell(text: str) -> str:
    return text.replace("|", r"\|").replace("<", "&lt;")


def _presets() -> Iterator[str]:
    for name in presets():
        resolved = resolve(preset=name, environment={})
        settings = [option for option in resolved.origins if resolved.origins[option] != "default"]
        shown = ", ".join(f"`{option}` {_default(value(resolved.config, option))}" for option in sorted(settings))
        yield f"- **{name}**: {shown}"


# ------------------------------------------------------------------------------------------------- command line


def _command_line() -> str:
    parser = cli._parser()
    lines = [
        "# Command line",
        "",
        "`rollyard COMMAND --help` says the same, and has the options of a run too, which stand [on their own page](options.md).",
        "Exit codes: 0 done, 1 failed, 2 a mistake in what was asked, 130 stopped.",
        "",
    ]
    for name, command in _commands(parser):
        lines += _command(name, command)
    return "\n".join(lines)


def _commands(parser: argparse.ArgumentParser, above: str = "rollyard") -> Iterator[tuple[str, argparse.ArgumentParser]]:
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for name, command in action.choices.items():
                below = [sub for sub in command._actions if isinstance(sub, argparse._SubParsersAction)]
                if not any(sub.required for sub in below):
                    yield f"{above} {name}", command
                yield from _commands(command, f"{above} {name}")


def _command(name: str, command: argparse.ArgumentParser) -> Iterator[str]:
    tree = [action for action in command._actions if "." in action.dest]
    own = [action for action in command._actions if action not in tree and not isinstance(action, NOT_SHOWN)]
    positional = " ".join(_positional(action) for action in own if not action.option_strings)
    yield f"## {name}\n"
    yield f"{(command.description or '').strip()}\n"
    yield f"```text\n{name} {positional} [options]\n```\n".replace("  ", " ")
    if own:
        yield "| | meaning |"
        yield "| --- | --- |"
        for action in own:
            yield f"| {_argument(action)} | {_cell(action.help or '')} |"
        yield ""
    if tree:
        sections = sorted({action.dest.partition(".")[0] for action in tree})
        yield f"Options of {', '.join(f'`{section}`' for section in sections)} besides, as `--SECTION.NAME VALUE`.\n"
        short = [(string, action.dest) for action in tree for string in action.option_strings if "." not in string]
        if short:
            yield "Short for: " + ", ".join(f"`{string}` = `{dest}`" for string, dest in short) + ".\n"


def _positional(action: argparse.Action) -> str:
    name = str(action.metavar or action.dest)
    return f"[{name}]" if action.nargs in ("?", "*") else name


def _argument(action: argparse.Action) -> str:
    takes = "" if action.nargs == 0 else str(action.metavar or "|".join(map(str, action.choices or ())) or action.dest.upper())
    if not action.option_strings:
        return f"`{takes}`"
    shown = " ".join([", ".join(action.option_strings), takes]).strip().replace("|", r"\|")
    return f"`{shown}`"


# ------------------------------------------------------------------------------------------------------- Python


def _python() -> str:
    """Each name once: records and errors have their places."""
    homes = {name: rollyard._FROM.get(name, "errors") for name in rollyard.__all__}
    records = ", ".join(f"[`{name}`][rollyard.types.{name}]" for name, home in homes.items() if home == "types")
    lines = [
        "# Python",
        "",
        "What `import rollyard` gives; all of it is loaded as it is asked for, and most without torch.",
        f"Besides what follows: {records}, and the errors at the end.",
    ]
    for name, home in homes.items():
        if home not in ("types", "errors"):
            lines += ["", *_entry(f"rollyard.{home}.{name}")]
    lines += ["", "## Errors", "", *_entry("rollyard.errors", heading=False)]
    return "\n".join(lines)


def _module(title: str, module: str, text: str) -> str:
    """With the source, whose comments say what each field is."""
    return "\n".join([f"# {title}", "", text, "", *_entry(module, heading=False), *SOURCE])


def _protocols(root: Path) -> str:
    """A station of one's own has one of these shapes."""
    lines = ["# Seams", "", "Whatever has one of these shapes can be a station of the ring; no base class is needed.", ""]
    for path in sorted((root / "rollyard/protocols").glob("[a-z]*.py")):
        lines += ["", f"## {path.stem}", "", *_entry(f"rollyard.protocols.{path.stem}", heading=False)]
        lines += ["      show_if_no_docstring: true"]
    return "\n".join(lines)


def _entry(name: str, *, heading: bool = True) -> Iterable[str]:
    shown = str(heading).lower()
    return [f"::: {name}", "    options:", f"      show_root_heading: {shown}", f"      show_root_toc_entry: {shown}"]


SIMULATION = (
    "What `rollyard simulate` and `rollyard plan` take besides [the options of a run](options.md); "
    "[the simulator](../simulator.md) says what is made of them."
)
SERVICE = "What `rollyard serve` takes besides [the options of a run](options.md)."
EVENTS = (
    "What happened, what is to be done, and what one machine tells another: the language between the pure core and the world. "
    "[Architecture](../architecture.md#three-machines-one-language) says who says what to whom."
)


# ----------------------------------------------------------------------------------------------------- examples


def _examples(root: Path) -> str:
    lines = ["# Examples", "", "The folder `examples/` of the repository, file by file. Each is run by a test.", ""]
    files = [path for path in (root / "examples").rglob("*") if path.suffix in TEXT and "__pycache__" not in path.parts]
    for path in sorted(files, key=lambda path: (list(TEXT).index(path.suffix), path)):  # programs first, data last
        if path.is_file():
            shown = path.relative_to(root).as_posix()
            text = path.read_text(encoding="utf-8").splitlines()
            cut = text[:SHOWN] if path.suffix == ".jsonl" else text
            lines += [f"## {shown} {{ #{anchor(shown)} }}", "", f"```{TEXT[path.suffix]}", *cut, "```", ""]
    return "\n".join(lines)
