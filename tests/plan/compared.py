"""What the real loop and the simulator came to, held against each other."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import asdict
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tests.plan.sides import Side


def compare(one: Side, other: Side) -> None:
    """Each step of the conductor, and the report. Raises AssertionError."""
    for at, (left, right) in enumerate(zip(one.steps, other.steps, strict=False)):
        assert left[1:] == right[1:], f"step {at}: at {left[0]:.9g} s\n{left[1:]}\n  but at {right[0]:.9g} s\n{right[1:]}"
        assert abs(left[0] - right[0]) < 1e-6, f"step {at}: {left[0]} and {right[0]}"
    assert len(one.steps) == len(other.steps)
    assert one.report is not None and other.report is not None
    if one.report.finished.failed:
        return  # a run then saves what it can, which nobody simulates
    left, right = asdict(one.report), asdict(other.report)
    if one.report.lost:  # a fake engine that dies notes what it was at all the same
        del left["usage"], right["usage"]
    if one.report.weights.canary is not None:  # it pauses and resumes at the same moment, which nobody's clock does
        for device in (device for side in (left, right) for device in side.get("usage", {}).get("devices", ())):
            del device["stall_ns"]
    found = list(differ("report", left, right))
    assert not found, "\n".join(found)


UNLIKE = (
    "report.objective",
    "report.phases.driver_s",
    "report.phases.driver_generating_s",
    "report.weights.bytes_copied",
    "report.weights.canary",
    "report.weights.handed",
    "report.weights.size",
    "report.simulated",
    "report.forecast",
)  # what only a real run has


def differ(where: str, left: object, right: object) -> Iterator[str]:
    """What is not the same, but for roundings of times."""
    if where in UNLIKE or where.startswith("report.phases.driver"):  # processor time
        return
    if isinstance(left, Mapping) and isinstance(right, Mapping):
        nothing = 0 if where.endswith(("_ns", "_share")) else None
        for key in dict.fromkeys((*left, *right)):
            yield from differ(f"{where}.{key}", left.get(key, nothing), right.get(key, nothing))
    elif isinstance(left, list | tuple) and isinstance(right, list | tuple) and len(left) == len(right):
        for at, pair in enumerate(zip(left, right, strict=True)):
            yield from differ(f"{where}[{at}]", *pair)
    elif isinstance(left, int | float) and isinstance(right, int | float):
        if abs(left - right) > (1e4 if "_ns" in where else 1e-6 * max(abs(left), 1)):
            yield f"{where}: {left} and {right}"
    elif left != right:
        yield f"{where}: {left} and {right}"
