"""Event files for TensorBoard, in the folder `tensorboard` of the run's. TensorBoard's own writer: torch is not needed."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from typing import Final

from tensorboard.compat.proto.event_pb2 import Event, SessionLog
from tensorboard.compat.proto.summary_pb2 import Summary
from tensorboard.plugins.hparams.summary_v2 import hparams_pb
from tensorboard.plugins.text.summary_v2 import text_pb
from tensorboard.summary.writer.event_file_writer import EventFileWriter

from rollyard.protocols.devices import Tracked
from rollyard.watch.aside import Tell
from rollyard.watch.tracked import flat, numbers

FOLDER: Final = "tensorboard"


class TensorBoardSink:
    """Scalars by step; the options, and at the end what the run came to, as texts. What was written is in the file at once."""

    takes_back = True

    def __init__(self, tell: Tell) -> None:
        """Everything happens in `open`."""

    def open(self, run: Tracked) -> str:
        self._files, self._step = EventFileWriter(str(run.folder / FOLDER)), run.begins
        if run.again:  # readers forget what earlier files have of the steps from here on
            again = SessionLog(status=SessionLog.START)
            self._files.add_event(Event(wall_time=time.time(), step=run.begins + 1, session_log=again))
        self._add(text_pb("config", _shown(run.config)))
        self._add(hparams_pb({name: _plain(value) for name, value in flat(run.config).items()}))
        return ""

    def write(self, record: Mapping[str, object]) -> None:
        self._scalars(record)

    def evaluated(self, record: Mapping[str, object]) -> None:
        self._scalars(record)

    def close(self, summary: Mapping[str, object], failed: bool) -> None:
        self._add(text_pb("summary", _shown(summary)))
        self._files.close()

    def _scalars(self, record: Mapping[str, object]) -> None:
        told = numbers(record)
        self._step = int(told.pop("step"))
        self._add(Summary(value=[Summary.Value(tag=name, simple_value=value) for name, value in told.items()]))

    def _add(self, summary: Summary) -> None:
        self._files.add_event(Event(wall_time=time.time(), step=self._step, summary=summary))
        self._files.flush()


def _plain(value: object) -> bool | int | float | str:
    return value if isinstance(value, bool | int | float | str) else json.dumps(value)


def _shown(values: Mapping[str, object]) -> str:
    """As Markdown that is shown as it is."""
    lines = json.dumps(values, indent=2).splitlines()
    return "\n".join(f"    {line}" for line in lines)
