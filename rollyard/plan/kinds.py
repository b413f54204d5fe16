"""Options of a scenario by layer, where a layer that names a kind of device leaves the numbers of another kind behind."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

from rollyard.layers import RUNS, Resolved, resolve_tree
from rollyard.plan.scenario import ClusterConfig, Scenario

SCENARIOS: Final = f"{RUNS}/scenarios"  # presets of scenarios, in the package
FOLDERS: Final = (SCENARIOS, RUNS)  # a run's preset is a scenario too
KIND: Final = "cluster.hardware"
NUMBERS: Final = tuple(f"cluster.{name}" for name in ClusterConfig.model_fields if name != "hardware")
LAYERS: Final = ("default", "preset", "file", "environment", "command line")  # how an origin begins


def resolve_scenario(
    checked: Callable[[Scenario], None], *, preset: str = "", file: Path | None = None, overrides: Mapping[str, Any]
) -> Resolved[Scenario]:
    """As `layers.resolve_tree`. Numbers that an earlier layer gave of another kind have their defaults, and the kind as origin.

    Raises:
        ConfigError: see there.
    """

    def resolved(checked: Callable[[Scenario], None], overrides: Mapping[str, Any]) -> Resolved[Scenario]:
        return resolve_tree(Scenario, checked, preset=preset, file=file, overrides=overrides, folders=FOLDERS)

    found = resolved(lambda _: None, overrides)
    left = {name: getattr(ClusterConfig(), name.partition(".")[2]) for name in _of_another(found, preset, file, overrides)}
    whole = resolved(checked, {**overrides, **left})
    return replace(whole, origins={**whole.origins, **dict.fromkeys(left, f"{KIND}, {found.config.cluster.hardware}")})


def left_behind(resolved: Resolved[Scenario]) -> list[str]:
    """Names of such numbers."""
    return [name for name in NUMBERS if resolved.origins[name].startswith(KIND)]


def _of_another(found: Resolved[Scenario], preset: str, file: Path | None, overrides: Mapping[str, Any]) -> Iterator[str]:
    """Numbers that were given before the kind was, by a layer that had another one."""
    layer = _layer(found.origins[KIND])
    earlier = [name for name in NUMBERS if 0 < _layer(found.origins[name]) < layer]
    if not earlier:
        return
    before = resolve_tree(
        Scenario,
        lambda _: None,
        preset=preset,
        file=file if layer > LAYERS.index("file") else None,
        environment=None if layer > LAYERS.index("environment") else {},
        overrides={name: value for name, value in overrides.items() if not name.startswith("cluster.")},
        folders=FOLDERS,
    )
    if before.origins[KIND] != "default" and before.config.cluster.hardware != found.config.cluster.hardware:
        yield from earlier


def _layer(origin: str) -> int:
    return next(index for index, name in enumerate(LAYERS) if origin.startswith(name))
