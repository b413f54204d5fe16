"""Reading `report.json` back."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Final

from pydantic import TypeAdapter

from rollyard.chaos.survival import Survived
from rollyard.errors import JournalError
from rollyard.stats import Pace
from rollyard.texts import counted, in_a_line
from rollyard.types import Canary, Handed, WeightVersion
from rollyard.watch.devices import DeviceTime, PoolTime
from rollyard.watch.forecast import Forecast
from rollyard.watch.lives import Lives
from rollyard.watch.report import (
    Counts,
    EvalRewards,
    Filtering,
    Finished,
    Lengths,
    Report,
    RewardCurve,
    TokenLedger,
    Usage,
    WeightTraffic,
)
from rollyard.watch.roofline import Operation
from rollyard.watch.timeline import BESIDE, PhaseSeconds

SURVIVAL: Final = TypeAdapter(tuple[Survived, ...])
FORECAST: Final = TypeAdapter(Forecast | None)


def read_report(path: Path) -> Report:
    """The report that `Report.write` wrote. Raises OSError, or JournalError when it is none."""
    try:
        record: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"), parse_int=counted)
        usage = record.pop("usage")
        return Report(
            phases=PhaseSeconds(wall_s=record["wall_s"], **{name: record.pop(name) for name in BESIDE}, **record.pop("phases")),
            reward=_read_curve(record.pop("reward")),
            rewards={name: _read_curve(curve) for name, curve in record.pop("rewards").items()},
            eval=_read_eval(record.pop("eval")),
            lengths=Lengths(**record.pop("lengths")),
            prompts=Counts(*(record.pop(name) for name in ("admitted", "trained", "dropped"))),
            members=Counts(**record.pop("members")),
            weights=_read_weights(record.pop("weights")),
            versions=tuple(WeightVersion(*version) for version in record.pop("versions")),
            lost=tuple(record.pop("lost")),
            finished=Finished(**record.pop("finished")),
            tokens=TokenLedger(**record.pop("tokens")),
            filtering=Filtering(**record.pop("filtering")),
            staleness={int(lag): tokens for lag, tokens in record.pop("staleness").items()},
            usage=Usage(
                tuple(DeviceTime(**device | {"roles": tuple(device["roles"])}) for device in usage["devices"]),
                tuple(PoolTime(**pool) for pool in usage["pools"]),
                tuple(Operation(**operation) for operation in usage["operations"]),
                usage["balance"],
                tuple(Pace(**pace) for pace in usage["paces"]),
            ),
            nodes={host: tuple(nodes) for host, nodes in record.pop("nodes").items()},
            lives=Lives(**(lives := record.pop("lives")) | {"begun": tuple(lives["begun"])}),
            survival=SURVIVAL.validate_python(record.pop("survival")),
            forecast=FORECAST.validate_python(record.pop("forecast")),
            **record,
        )
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise JournalError(f"{path}: not a report of this version of Rollyard: {in_a_line(error)}") from error


def _read_curve(record: dict[str, Any]) -> RewardCurve:
    return RewardCurve(record["first"], record["last"], tuple(record["curve"]))


def _read_eval(record: dict[str, Any]) -> EvalRewards:
    return EvalRewards(**{**record, "rewards": {name: tuple(means) for name, means in record["rewards"].items()}})


def _read_weights(record: dict[str, Any]) -> WeightTraffic:
    canary = record.pop("canary")
    if canary is not None:
        canary = Canary(**canary | {"unseen": tuple(canary["unseen"])})
    handed = tuple(Handed(**each) for each in record.pop("handed"))
    return WeightTraffic(canary=canary, handed=handed, **record)
