"""The options of a run, as its folder has them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Final

from rollyard.config import Config
from rollyard.dashboard.told import OptionShown
from rollyard.inspect.source import read_config
from rollyard.journal.folder import RunFolder
from rollyard.layers import options
from rollyard.plan.scenario import Scenario

DEFAULT: Final = "default"
UNKNOWN: Final = "this version of Rollyard has no such option"


def shown(folder: RunFolder) -> tuple[OptionShown, ...]:
    """Every option in the order of the tree, then those that this version does not know."""
    simulated = folder.scenario.exists()
    file = folder.scenario.name if simulated else folder.config.name
    values = dict(_flat(read_config(folder) or {}))
    known = {option.name: option for option in options(Scenario if simulated else Config)}
    found = []
    for name, option in known.items():
        default = _plain(option.default)
        value = values.pop(name, default)
        found.append(OptionShown(name, value, DEFAULT if value == default else file, default, option.description))
    found += [OptionShown(name, value, file, None, UNKNOWN) for name, value in values.items()]
    return tuple(found)


def _flat(tree: Mapping[str, Any], above: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in tree.items():
        if isinstance(value, dict):
            yield from _flat(value, f"{above}{name}.")
        else:
            yield above + name, value


def _plain(value: Any) -> Any:
    """As TOML has it."""
    return list(value) if isinstance(value, tuple) else value
