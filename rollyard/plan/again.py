"""A run that costs were fitted to, beside the same run simulated: how far the seconds of both can be compared."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from rollyard.errors import ConfigError
from rollyard.plan.calibrate import Calibration
from rollyard.plan.check import check_scenario
from rollyard.plan.hardware import CPU
from rollyard.plan.kinds import resolve_scenario
from rollyard.plan.outcome import means_of
from rollyard.plan.show import seconds
from rollyard.plan.simulate import simulate

APART: Final = 1.15  # times as long, from which on it is worth a word
AT_WORK: Final = 0.9  # share of its time in which a run had the processors that it wanted: others were hardly at work


def same_run(found: Calibration, run: Path, machine: Mapping[str, Any]) -> str:
    """What a step of the run took, and what it takes simulated, in a line.

    Args:
        run: its folder.
        machine: what is known otherwise than from the run, by dotted name.
    """
    measured_s = means_of(found.run.rows)["step_s"]
    lengths = {"workload.trace": str(found.run.journal)} if found.run.journal is not None else {}
    try:
        options = {**found.options(), **lengths, **machine}
        config = resolve_scenario(check_scenario, file=found.run.options, overrides=options).config
        simulated_s = means_of(simulate(config).metrics).get("step_s", 0.0)
    except ConfigError as error:
        return f"{run} took {seconds(measured_s)} a step; the same run cannot be simulated: {error.problem}"
    return told(run, measured_s, simulated_s, found.quiet, cpu=config.cluster.hardware == CPU)


def told(run: Path, measured_s: float, simulated_s: float, quiet: float, *, cpu: bool) -> str:
    """
    Args:
        measured_s, simulated_s: of a step, the first left out.
        quiet: see `Calibration`.
    """
    idle = " on a machine that does nothing else" if cpu else ""
    line = f"{run} took {seconds(measured_s)} a step; the same run, simulated{idle}: {seconds(simulated_s)}"
    if not simulated_s or not measured_s or 1 / APART <= measured_s / simulated_s <= APART:
        return line
    ratio = measured_s / simulated_s
    reason = f" (others were at work: its processes had a processor in {quiet:.0%} of the time in which they wanted one)"
    why = reason if cpu and quiet < AT_WORK else ""
    line += f", so the run took {ratio:.2g} times as long{why}. Compare what is simulated with this simulated step"
    return f"{line}, not with the measured one"
