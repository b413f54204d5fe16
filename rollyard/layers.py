"""Where values of options come from; with `environment` the only reader of the environment.

Values come in layers, later ones win: default < preset < file < environment < command line. `resolve` joins the
layers, remembers where each value came from, and checks the whole.
"""

from __future__ import annotations

import difflib
import os
import tomllib
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Any, Generic, Literal, TypeVar, get_args, get_origin

from pydantic import BaseModel, ValidationError
from pydantic.fields import FieldInfo

from rollyard.combinations import check
from rollyard.config import Config
from rollyard.errors import ConfigError
from rollyard.events import Rollover

Tree = TypeVar("Tree", bound=Config)
RUNS = "presets"  # folder in the package of presets of runs


@dataclass(frozen=True, slots=True)
class Option:
    """One leaf of the tree, for help texts. `values` says what it takes."""

    name: str  # dotted, such as rollout.group_size
    values: str
    default: Any
    description: str


@dataclass(frozen=True, slots=True)
class Resolved(Generic[Tree]):
    """A config and where each value came from: `origins["train.lr"]` is such as "default" or "preset sort"."""

    config: Tree
    origins: Mapping[str, str]


def options(tree: type[Config] = Config) -> Iterator[Option]:
    """Every option, in the order of the tree."""
    for name, leaf in _leaves(tree):
        yield Option(name, _values(leaf.annotation), leaf.default, leaf.description or "")


def value(config: Config, name: str) -> Any:
    """Of the option of this dotted name."""
    found: Any = config
    for part in name.split("."):
        found = getattr(found, part)
    return found


def presets(folder: str = RUNS) -> tuple[str, ...]:
    """Names of the presets that ship with the package in this folder of it."""
    found = resources.files("rollyard").joinpath(folder).iterdir()
    return tuple(sorted(entry.name.removesuffix(".toml") for entry in found if entry.name.endswith(".toml")))


def resolve(
    *,
    preset: str = "",
    file: Path | None = None,
    environment: Mapping[str, str] | None = None,
    overrides: Mapping[str, Any] | None = None,
) -> Resolved[Config]:
    """Join the layers and check the whole.

    Args:
        preset: name of a preset in the package.
        file: a TOML file of the same tree.
        environment: variables such as ROLLYARD_TRAIN__LR; the process's own when None.
        overrides: dotted names and values; values that are text are converted.

    Raises:
        ConfigError: naming the option, where it was set, and what would be right.
    """
    return resolve_tree(Config, check, preset=preset, file=file, environment=environment, overrides=overrides)


def resolve_tree(
    tree: type[Tree],
    checked: Callable[[Tree], None],
    *,
    preset: str = "",
    file: Path | None = None,
    environment: Mapping[str, str] | None = None,
    overrides: Mapping[str, Any] | None = None,
    folders: Sequence[str] = (RUNS,),
) -> Resolved[Tree]:
    """The same for a tree that has more options than a run's.

    Args:
        checked: raises ConfigError for what does not go together.
        folders: in the package, where a preset of this name is looked for; no two of them have one of the same name.
    """
    layers: list[tuple[str, Mapping[str, Any]]] = []
    if preset:
        layers.append((f"preset {preset}", _flatten(_read_preset(preset, folders), f"preset {preset}", tree)))
    if file is not None:
        layers.append((f"file {file}", _flatten(_read_toml(file), str(file), tree)))
    layers.append(("environment", _from_environment(os.environ if environment is None else environment)))
    layers.append(("command line", overrides or {}))
    known = {option.name for option in options(tree)}
    values: dict[str, Any] = {}
    origins = dict.fromkeys(known, "default")
    for origin, layer in layers:
        for name, value in layer.items():
            if name not in known:
                raise ConfigError(f"there is no option {name!r}", where=origin, remedy=nearest(name, known))
            values[name] = value
            origins[name] = origin
    config = _build(tree, values, origins)
    checked(config)
    return Resolved(config, origins)


def _build(kind: type[Tree], values: Mapping[str, Any], origins: Mapping[str, str]) -> Tree:
    tree: dict[str, Any] = {}
    types = {name: leaf.annotation for name, leaf in _leaves(kind)}
    for name, value in values.items():
        *sections, leaf = name.split(".")
        branch = tree
        for section in sections:
            branch = branch.setdefault(section, {})
        branch[leaf] = _converted(name, types[name], value, origins[name])
    try:
        return kind.model_validate(tree)
    except ValidationError as error:
        first = error.errors()[0]
        parts = [str(part) for part in first["loc"]]  # below an option, what part of its value
        name = next(found for end in range(len(parts), 0, -1) if (found := ".".join(parts[:end])) in types)
        where = f"{name} ({origins.get(name, 'default')})"
        raise ConfigError(f"{first['input']!r} does not fit", where=where, remedy=_remedy(first["msg"])) from None


def _converted(name: str, annotation: Any, value: Any, origin: str) -> Any:
    """Lists may be given as text with commas; a truth value is never taken for a number."""
    if get_origin(annotation) is tuple and isinstance(value, str):
        return tuple(part for part in value.split(",") if part)
    if isinstance(value, bool) and annotation is not bool:
        raise ConfigError(f"{value!r} does not fit", where=f"{name} ({origin})", remedy=f"give {_values(annotation)}")
    return value


def _remedy(message: str) -> str:
    message = message.removeprefix("Value error, ")  # of a validator of ours
    return message[0].lower() + message[1:]


def _read_preset(name: str, folders: Sequence[str]) -> dict[str, Any]:
    for folder in folders:
        if name in presets(folder):
            return tomllib.loads(resources.files("rollyard").joinpath(folder, f"{name}.toml").read_text(encoding="utf-8"))
    known = [each for folder in folders for each in presets(folder)]
    raise ConfigError(f"there is no preset {name!r}", where="--preset", remedy=f"one of: {', '.join(known)}")


def _read_toml(path: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ConfigError("no such file", where=str(path), remedy="give the path of a TOML file, or --preset NAME") from None
    except OSError as error:
        raise ConfigError(f"cannot be read: {error.strerror}", where=str(path), remedy="give the path of a TOML file") from None
    except UnicodeDecodeError as error:
        raise ConfigError(f"cannot be read: {error}", where=str(path), remedy="give the path of a TOML file") from None
    except (tomllib.TOMLDecodeError, RecursionError) as error:
        raise ConfigError(f"not valid TOML: {error}", where=str(path), remedy="see toml.io for the format") from None


def _flatten(given: Mapping[str, Any], origin: str, tree: type[Config]) -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for section, values in given.items():
        if not isinstance(values, dict):
            remedy = f"{section} is a section: [{section}]" if section in tree.model_fields else "sections are such as [train]"
            raise ConfigError(f"{section!r} stands outside any section", where=origin, remedy=remedy)
        flat.update(_below(section, values))
    return flat


def _below(section: str, values: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    for name, value in values.items():
        if isinstance(value, dict):
            yield from _below(f"{section}.{name}", value)
        else:
            yield f"{section}.{name}", value


def _from_environment(environment: Mapping[str, str]) -> dict[str, str]:
    """ROLLYARD_TRAIN__LR=1e-5 sets train.lr."""
    return {
        variable.removeprefix("ROLLYARD_").lower().replace("__", "."): value
        for variable, value in environment.items()
        if variable.startswith("ROLLYARD_") and "__" in variable
    }


def nearest(name: str, known: Collection[str], other: str = "`rollyard explain` lists all options") -> str:
    """What an unknown option was probably meant to be, as the remedy of an error; `other` when nothing is like it."""
    leaf = name.rpartition(".")[2]
    close = difflib.get_close_matches(name, known, n=1) or difflib.get_close_matches(leaf, known, n=1, cutoff=0.5)
    return f"did you mean {close[0]}?" if close else other


def _leaves(section: type[BaseModel], above: str = "") -> Iterator[tuple[str, FieldInfo]]:
    """Dotted names of all options below, in the order of the tree."""
    for name, field in section.model_fields.items():
        kind = field.annotation
        if isinstance(kind, type) and issubclass(kind, BaseModel):
            yield from _leaves(kind, f"{above}{name}.")
        else:
            yield above + name, field


def _values(annotation: Any) -> str:
    if get_origin(annotation) is Literal:
        return "|".join(str(value) or '""' for value in get_args(annotation))
    if isinstance(annotation, type) and issubclass(annotation, Rollover):
        return "|".join(annotation)
    if get_origin(annotation) is tuple:
        return "LIST"
    return {bool: "BOOL", int: "INT", float: "FLOAT", str: "TEXT"}.get(annotation, "VALUE")
