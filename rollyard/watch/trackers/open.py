"""Trackers by their names in `watch.sinks`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from importlib import import_module
from importlib.util import find_spec
from typing import Final, cast

from rollyard.errors import ConfigError
from rollyard.protocols.devices import Sink
from rollyard.watch.aside import Aside, Tell
from rollyard.watch.timeline import Timeline
from rollyard.watch.trackers.phased import Phased

NEEDS: Final = {
    "tensorboard": ("tensorboard",),
    "wandb": ("wandb",),
    "mlflow": ("mlflow", "sqlalchemy", "alembic"),
    "opentelemetry": ("opentelemetry",),
}
CLASSES: Final = {
    "tensorboard": "TensorBoardSink",
    "wandb": "WandbSink",
    "mlflow": "MlflowSink",
    "opentelemetry": "OpenTelemetrySink",
}
PHASED: Final = ("opentelemetry",)  # is told phases too


def check_trackers(names: Sequence[str]) -> None:
    """Raises ConfigError for one whose package is not installed. Nothing is imported."""
    for name in names:
        missing = [package for package in NEEDS[name] if find_spec(package) is None]
        if missing:
            problem = f"{name} needs {' and '.join(missing)}, which {'is' if len(missing) == 1 else 'are'} not installed"
            raise ConfigError(problem, where="watch.sinks", remedy=f"pip install 'rollyard[{name}]', or leave it out")


def open_trackers(names: Sequence[str], timeline: Timeline) -> list[Sink]:
    """Each on a thread of its own, where its package is imported too."""
    return [_open(name, partial(_made, name), timeline) for name in names]


def _open(name: str, make: Callable[[Tell], Sink], timeline: Timeline) -> Aside:
    return Phased(name, make, timeline) if name in PHASED else Aside(name, make)


def _made(name: str, tell: Tell) -> Sink:
    of = cast(Callable[[Tell], Sink], getattr(import_module(f"rollyard.watch.trackers.{name}"), CLASSES[name]))
    return of(tell)
