"""A run of MLflow: at the server that MLFLOW_TRACKING_URI names, else in `mlflow.db` beside the run's folder."""

from __future__ import annotations

import logging
import posixpath
import re
import time
from collections.abc import Mapping
from typing import Final

import mlflow
from mlflow.entities import Metric, Param
from mlflow.exceptions import MlflowException

from rollyard.protocols.devices import Tracked
from rollyard.watch.aside import Tell
from rollyard.watch.tracked import flat, numbers

STORE: Final = "mlflow.db"
MANY: Final = 100  # parameters that MLflow takes at once
LONG: Final = 500  # characters of a parameter that each of its stores takes
NAME: Final = 250  # of a metric's name
STRANGE: Final = re.compile(r"[^\w. :/-]")  # in a metric's name


class MlflowSink:
    """Metrics by step, options as parameters. MLflow takes nothing back: what was told first of a step stays."""

    takes_back = False

    def __init__(self, tell: Tell) -> None:
        for name in ("mlflow", "alembic"):  # the terminal is the run's own
            logging.getLogger(name).setLevel(logging.WARNING)

    def open(self, run: Tracked) -> str:
        uri = mlflow.get_tracking_uri() if mlflow.is_tracking_uri_set() else f"sqlite:///{run.folder.resolve().parent / STORE}"
        self._client = mlflow.MlflowClient(tracking_uri=uri)
        if run.id:
            self._client.update_run(run.id, status="RUNNING")
            self._id, self._last = run.id, int(self._client.get_run(run.id).data.metrics.get("step", 0))
            return run.id
        tags = {"mlflow.source.name": "rollyard", "mlflow.note.content": f"Folder: {run.folder.resolve()}"}
        self._id = self._client.create_run(self._experiment(run.project), run_name=run.name, tags=tags).info.run_id
        self._last = 0
        params = [Param(name, str(value)[:LONG]) for name, value in flat(run.config).items()]
        for at in range(0, len(params), MANY):
            self._client.log_batch(self._id, params=params[at : at + MANY])
        return str(self._id)

    def write(self, record: Mapping[str, object]) -> None:
        """The store itself knows what it has, whatever was noted when the run was killed."""
        step = int(str(record["step"]))
        if step > self._last:
            self._log(record, step)
            self._last = step

    def evaluated(self, record: Mapping[str, object]) -> None:
        self._log({name: value for name, value in record.items() if name != "step"}, int(str(record["step"])))

    def close(self, summary: Mapping[str, object], failed: bool) -> None:
        self._log(summary, self._last)
        self._client.set_tag(self._id, "cause", summary["run/cause"])
        self._client.set_terminated(self._id, "FAILED" if failed else "FINISHED")

    def _log(self, record: Mapping[str, object], step: int) -> None:
        now = int(time.time() * 1e3)
        told = [Metric(_name(name), value, now, step) for name, value in numbers(record).items()]
        self._client.log_batch(self._id, metrics=told)

    def _experiment(self, name: str) -> str:
        """Made where it is not there yet."""
        found = self._client.get_experiment_by_name(name)
        if found is None:
            try:
                return str(self._client.create_experiment(name))
            except MlflowException:  # another run was faster
                found = self._client.get_experiment_by_name(name)
                if found is None:
                    raise
        return str(found.experiment_id)


def _name(name: str) -> str:
    """As MLflow takes it: names of rewards may have anything in them."""
    return posixpath.normpath(STRANGE.sub("_", name)).strip("/.")[:NAME]
