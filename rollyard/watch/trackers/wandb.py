"""A run of Weights & Biases. Key, address and mode are W&B's own (`wandb login`, WANDB_...); without a key it is offline."""

from __future__ import annotations

import secrets
from collections.abc import Mapping
from typing import Final, Literal, cast

import wandb
from wandb.sdk.wandb_run import Run

from rollyard.protocols.devices import Tracked
from rollyard.watch.aside import LIMIT_S, Tell
from rollyard.watch.tracked import numbers

PLACE: Final = "wandb"  # the folder that W&B makes in that of the run
FLUSH_S: Final = 1.0  # between writes to the disk; what comes meanwhile is lost when the run is killed
Mode = Literal["online", "offline", "disabled", "shared"]
EVALUATED: Final = "eval/step"


class WandbSink:
    """Metrics by step. W&B takes nothing back: what was told first of a step stays.

    Args:
        tell: that it is offline, though nobody asked for that.
    """

    takes_back = False

    def __init__(self, tell: Tell) -> None:
        self._tell = tell
        self._step = 0

    def open(self, run: Tracked) -> str:
        settings = wandb.Settings(
            silent=True,  # the terminal is the run's own
            console="off",
            init_timeout=LIMIT_S,  # so that the program ends, whatever W&B waits for
            finish_timeout=LIMIT_S,
            x_transaction_log_flush_interval=FLUSH_S,
        )
        known = wandb.setup(settings)
        name = run.id or secrets.token_hex(4)
        self._run: Run = wandb.init(
            project=run.project,
            name=run.name,
            id=name,
            dir=str(run.folder),
            config=dict(run.config),
            resume="allow",
            mode=self._mode(str(known.settings.mode), run),
            settings=settings,
        )
        self._run.define_metric(EVALUATED)
        self._run.define_metric("eval/*", step_metric=EVALUATED)
        return name

    def write(self, record: Mapping[str, object]) -> None:
        told = numbers(record)
        self._step = int(told.pop("step"))
        self._run.log(told, step=self._step)

    def evaluated(self, record: Mapping[str, object]) -> None:
        """Of a version that may be behind by now, and W&B's steps only grow."""
        told = numbers(record)
        self._run.log({EVALUATED: told.pop("step"), **told}, step=self._step)

    def close(self, summary: Mapping[str, object], failed: bool) -> None:
        self._run.summary.update(dict(summary))
        self._run.finish(exit_code=int(failed))

    def _mode(self, wanted: str, run: Tracked) -> Mode:
        """What W&B is set to, but for what would ask a question on the terminal."""
        if wanted == "online" and not wandb.login(prompt=False, verify=False):
            later = f"`wandb sync {run.folder / PLACE}/offline-run-*` sends it once there is one"
            self._tell(f"there is no key, so it is offline; {later}")
            return "offline"
        return cast(Mode, wanted)
