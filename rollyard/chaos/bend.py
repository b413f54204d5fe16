"""Answers as an engine that is wrong would give them (PURE)."""

from __future__ import annotations

from dataclasses import replace

from rollyard.chaos.faults import How
from rollyard.types import Segment

OUTSIDE = 2**31 - 1  # no vocabulary is as large
AHEAD = 1000  # versions


def bent(segment: Segment, how: How) -> Segment:
    """A segment that cannot be right. One without tokens is as it was, but for its version."""
    if how == "short":
        return replace(segment, logprobs=segment.logprobs[:-1])
    if how == "vocabulary":
        return replace(segment, token_ids=tuple(OUTSIDE for _ in segment.token_ids))
    version = segment.version._replace(step=segment.version.step + AHEAD)
    return replace(segment, version=version, oldest_kv=version)
