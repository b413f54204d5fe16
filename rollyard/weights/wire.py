"""What crosses the line to a trainer in another process, as JSON."""

from __future__ import annotations

from collections.abc import Mapping

from pydantic import ConfigDict, TypeAdapter

from rollyard.types import Answer, Baseline, Finding, Handed, Judged, Manifest, Probed, Sent, WeightVersion

# A distance may be infinite, an engine's logprob no number. A record alone would not listen to this: it goes as a tuple of one.
_NUMBERS = ConfigDict(ser_json_inf_nan="constants")

MANIFEST = TypeAdapter(Manifest)
OFFER = TypeAdapter(tuple[WeightVersion, tuple[str, ...]])  # and the engines it is for
SENT: TypeAdapter[Sent | None] = TypeAdapter(Sent | None)
ENGINES = TypeAdapter(tuple[str, ...])
TAKEN = TypeAdapter(tuple[str, WeightVersion])  # by which engine

PROMPTS = TypeAdapter(tuple[tuple[int, ...], ...])
ANSWERED = TypeAdapter(tuple[str, tuple[Answer, ...]], config=_NUMBERS)  # by which engine
ANSWERS = TypeAdapter(Mapping[str, tuple[Answer, ...]], config=_NUMBERS)
PROBED = TypeAdapter(tuple[Probed], config=_NUMBERS)
BASELINE = TypeAdapter(tuple[Baseline], config=_NUMBERS)
MOVE = TypeAdapter(tuple[int, tuple[str, ...]])  # attempt, tensors
JUDGED = TypeAdapter(tuple[Judged], config=_NUMBERS)
FINDINGS = TypeAdapter(Mapping[str, Finding], config=_NUMBERS)

RECORD = TypeAdapter(tuple[WeightVersion, str])  # and the folder it goes to
GIVE = TypeAdapter(tuple[WeightVersion, str])  # and the side it is for
HANDED = TypeAdapter(Handed)
