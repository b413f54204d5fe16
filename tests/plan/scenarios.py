"""Scenarios of tests."""

from __future__ import annotations

from importlib import resources
from pathlib import Path
from typing import Any

from rollyard.layers import resolve_tree
from rollyard.plan.scenario import Scenario


def scenario(file: Path | None = None, **values: Any) -> Scenario:
    """Unchecked; `place__train=4` is place.train."""
    overrides = {name.replace("__", "."): value for name, value in values.items()}
    return resolve_tree(Scenario, lambda scenario: None, file=file, environment={}, overrides=overrides).config


def preset(name: str, **values: Any) -> Scenario:
    """One that ships."""
    found = resources.files("rollyard").joinpath("presets", "scenarios", f"{name}.toml")
    with resources.as_file(found) as file:
        return scenario(file, **values)
