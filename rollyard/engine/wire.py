"""What crosses the line to an engine in another process: the records of `types`, as JSON."""

from __future__ import annotations

from pydantic import TypeAdapter

from rollyard.types import EngineStats, Manifest, Request, RequestId, Segment, WeightVersion

REQUESTS = TypeAdapter(tuple[Request, ...])
SEGMENTS = TypeAdapter(tuple[Segment, ...])
IDS = TypeAdapter(tuple[RequestId, ...])
MANIFEST = TypeAdapter(Manifest)
VERSION = TypeAdapter(WeightVersion)
STATS = TypeAdapter(EngineStats)
