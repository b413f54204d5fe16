"""An engine of the hostile world (`world.World`), as its referee knows it."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from rollyard.types import Request, RequestId


@dataclass
class WorldEngine:
    slots: int
    version: int | None = None
    held: bool = False
    up: bool = True
    stuck: bool = False  # it is awaited, and never comes
    running: dict[RequestId, Request] = field(default_factory=dict)
    tokens: Counter[RequestId] = field(default_factory=Counter)  # of those: read and written

    @property
    def load(self) -> int:
        return sum(self.tokens[request] for request in self.running)

    @property
    def free(self) -> bool:
        return self.up and not self.held and self.version is not None and len(self.running) < self.slots
