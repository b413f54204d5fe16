"""What trackers are told, in their terms: numbers by name, options by dotted name, and what a run came to."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict

from rollyard.watch.report import Report


def numbers(record: Mapping[str, object]) -> dict[str, float]:
    """Of a record of metrics, those that are numbers: what nothing stands for is left out."""
    return {name: value for name, each in record.items() if (value := _number(each)) is not None}


def _number(value: object) -> float | None:
    """One that is not finite is a text in a record that was read from a file."""
    if isinstance(value, int | float):
        return float(value)
    return float(value) if isinstance(value, str) and value in ("nan", "inf", "-inf") else None


def flat(values: Mapping[str, object], above: str = "") -> dict[str, object]:
    """Of values in sections, each by its dotted name."""
    found: dict[str, object] = {}
    for name, value in values.items():
        found |= flat(value, f"{above}{name}.") if isinstance(value, Mapping) else {f"{above}{name}": value}
    return found


def summary(report: Report) -> dict[str, object]:
    """What a run came to, flat; what nobody knows is left out."""
    told = {
        "steps": report.steps,
        "wall_s": report.wall_s,
        **{f"phase/{name}_s": seconds for name, seconds in report.phases.parts().items()},
        "generation_tokens": report.generation_tokens,
        "generation_tokens_per_s": report.generation_tokens_per_s,
        "slots_busy": report.slots_busy,
        "reward/first": report.reward.first,
        "reward/last": report.reward.last,
        "eval/first": report.eval.first,
        "eval/last": report.eval.last,
        "prompts/admitted": report.prompts.admitted,
        "prompts/trained": report.prompts.trained,
        **{f"prompts/dropped/{reason}": count for reason, count in report.prompts.dropped.items()},
        **{f"lengths/{name}": value for name, value in asdict(report.lengths).items()},
        "lives": report.lives.count,
        "cause": report.finished.cause,
        "failed": report.finished.failed,
    }
    return {f"run/{name}": value for name, value in told.items() if value is not None}
