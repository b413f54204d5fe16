"""The real part of `bench placements`: the tiny model under each placement, one run each, in processes of this machine."""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from rollyard import worker
from rollyard.bench.result import Load
from rollyard.bench.turns import Tell
from rollyard.config import Config
from rollyard.errors import RollyardError
from rollyard.layers import resolve
from rollyard.loop import Run
from rollyard.watch.devices import DeviceTime
from rollyard.watch.report import Report

STEPS = 24  # a third of what the task takes to be learnt: enough to see rewards rise
HELD_OUT = 128


@dataclass(frozen=True, slots=True)
class Real:
    """One run. Rates are of the time between the first and the last step, evaluations and start left out.

    `generating` and `training` are shares of the time after setup, of the devices that do it; two processes share a core
    where there are more of them than cores.
    """

    placement: str
    rollover: str
    steps: int
    staleness_limit: int
    steps_per_s: float
    tokens_per_s: float
    generating: float
    training: float
    staleness: Mapping[int, int]  # trained tokens by the versions they lag behind
    handed_s: float  # of all handoffs of training states
    reward_first: float | None
    reward_last: float | None
    eval_first: float | None  # of held-out prompts
    eval_last: float | None
    wall_s: float
    load: Load


async def measure_real(staleness: int, tell: Tell, steps: int = STEPS) -> tuple[Real, ...]:
    """Raises RunFailed, ConfigError.

    Args:
        staleness: S of async.
        steps: of each run.
    """
    runs = []
    for placement, limit, rollover in (("colocated", 0, ""), ("separate", 0, ""), ("async", staleness, "keep"), ("swap", 1, "")):
        tell(f"tiny model, {placement}: {steps} steps")
        with tempfile.TemporaryDirectory(prefix="rollyard-bench-") as scratch:
            one = await _run(config_of(placement, limit, rollover, steps, Path(scratch)))
        tell(f"tiny model, {placement}: {one.steps_per_s:.3g} steps/s, reward {one.reward_last or 0.0:.3f}")
        runs.append(one)
    return tuple(runs)


def config_of(placement: str, staleness: int, rollover: str, steps: int, scratch: Path) -> Config:
    """The preset `sort`, shorter; one thread a process."""
    options: dict[str, object] = {
        "run.steps": steps,
        "run.out": str(scratch / "run"),
        "prompts.held_out": HELD_OUT,
        "place.placement": placement,
        "place.device": "cpu",
        "place.threads": 1,
        "rollout.max_staleness": staleness,
        "watch.view": "quiet",
    }
    if rollover:
        options["weights.rollover"] = rollover
    return resolve(preset="sort", overrides=options).config


async def _run(config: Config) -> Real:
    run, ends, tokens, before = Run(config), list[float](), list[int](), os.getloadavg()[0]
    async for step in run:
        ends.append(time.perf_counter())
        tokens.append(step.tokens)
    report = run.report
    if report is None or len(ends) < 2:
        raise RollyardError(f"a run of {len(ends)} steps has no pace: at least 2 are needed")
    seconds = ends[-1] - ends[0]
    load = Load(before, os.getloadavg()[0])
    return _found(config, report, (len(ends) - 1) / seconds, sum(tokens[1:]) / seconds, load)


def _found(config: Config, report: Report, steps_per_s: float, tokens_per_s: float, load: Load) -> Real:
    devices = report.usage.devices
    return Real(
        placement=report.placement,
        rollover=str(worker.rollover_of(config)) if report.placement == "async" else "",
        steps=report.steps,
        staleness_limit=config.rollout.max_staleness,
        steps_per_s=steps_per_s,
        tokens_per_s=tokens_per_s,
        generating=share(devices, "engine", "generate"),
        training=share(devices, "trainer", "train"),
        staleness=dict(sorted(report.staleness.items())),
        handed_s=sum(handed.seconds for handed in report.weights.handed),
        reward_first=report.reward.first,
        reward_last=report.reward.last,
        eval_first=report.eval.first,
        eval_last=report.eval.last,
        wall_s=report.wall_s,
        load=load,
    )


def share(devices: Sequence[DeviceTime], role: str, activity: str) -> float:
    """How much of the time after setup the devices of a role spend with an activity."""
    own = [device for device in devices if role in device.roles]
    whole = sum(device.wall_ns - device.busy_ns.get("setup", 0) for device in own)
    return sum(device.busy_ns.get(activity, 0) for device in own) / whole if whole else 0.0
