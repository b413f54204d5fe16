"""What crosses the line to an engine in another process: the records of `types`, as JSON."""

from __future__ import annotations

from pydantic import ConfigDict, TypeAdapter

from rollyard.types import EngineStats, Manifest, Request, RequestId, Segment, WeightVersion

REQUESTS = TypeAdapter(tuple[Request, ...])
# A logprob that is no number is for the core to judge, and no reason to lose the engine.
SEGMENTS = TypeAdapter(tuple[Segment, ...], config=ConfigDict(ser_json_inf_nan="constants"))
IDS = TypeAdapter(tuple[RequestId, ...])
MANIFEST = TypeAdapter(Manifest)
VERSION = TypeAdapter(WeightVersion)
STATS = TypeAdapter(EngineStats)
