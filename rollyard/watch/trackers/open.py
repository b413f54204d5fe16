"""Trackers by their names in `watch.sinks`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from importlib import import_module
from importlib.util import find_spec
from typing import Any, Final, cast

from rollyard.errors import ConfigError
from rollyard.protocols.devices import Sink
from rollyard.watch.aside import Aside, Tell
from rollyard.watch.timeline import Timeline

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
QUICK: Final = ("opentelemetry",)  # has what to do done elsewhere, by itself


def check_trackers(names: Sequence[str]) -> None:
    """Raises ConfigError for one whose package is not installed. Nothing is imported."""
    for name in names:
        missing = [package for package in NEEDS[name] if find_spec(package) is None]
        if missing:
            problem = f"{name} needs {' and '.join(missing)}, which {'is' if len(missing) == 1 else 'are'} not installed"
            raise ConfigError(problem, where="watch.sinks", remedy=f"pip install 'rollyard[{name}]', or leave it out")


def open_trackers(names: Sequence[str], timeline: Timeline) -> list[Sink]:
    """Those that may take long each on a thread of its own, where its package is imported too."""
    return [_class(name)(timeline) if name in QUICK else Aside(name, partial(_made, name)) for name in names]


def _made(name: str, tell: Tell) -> Sink:
    return _class(name)(tell)


def _class(name: str) -> Callable[[Any], Sink]:
    return cast(Callable[[Any], Sink], getattr(import_module(f"rollyard.watch.trackers.{name}"), CLASSES[name]))
