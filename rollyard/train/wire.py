"""What crosses the line to a trainer in another process: the records of `types`, as JSON."""

from __future__ import annotations

from dataclasses import dataclass

from pydantic import ConfigDict, TypeAdapter

from rollyard.types import TrainBatch, TrainStats, WeightVersion

# Numbers arrive to the last bit, and one that is no number arrives too.
SHARDS = TypeAdapter(tuple[TrainBatch, ...], config=ConfigDict(ser_json_inf_nan="constants"))
TRAINED = TypeAdapter(tuple[TrainStats, WeightVersion], config=ConfigDict(ser_json_inf_nan="constants"))
VALUES = TypeAdapter(tuple[tuple[tuple[float, ...], ...], ...], config=ConfigDict(ser_json_inf_nan="constants"))
VERSION = TypeAdapter(WeightVersion)


@dataclass(frozen=True, slots=True)
class Opening:
    """Rank 0 is to say where the ranks can meet: at an address of its machine, as the others reach it."""

    address: str
    limit_s: float


@dataclass(frozen=True, slots=True)
class Joining:
    """A trainer is to be one of the ranks that meet at `place`."""

    place: str
    rank: int
    size: int
    limit_s: float


OPENING = TypeAdapter(Opening)
JOINING = TypeAdapter(Joining)
