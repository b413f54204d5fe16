"""What `VllmEngine` needs of vLLM, whether it runs in this process (`local`) or behind HTTP (`server`)."""

from __future__ import annotations

from collections import Counter
from collections.abc import AsyncGenerator, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from rollyard.types import WeightVersion

ADAPTER, ADAPTER_NAME = 1, "rollyard"  # what vLLM calls the adapter, whatever version it is


@dataclass(frozen=True, slots=True)
class Output:
    """What vLLM wrote of one request since the last time."""

    token_ids: Sequence[int]
    logprobs: Sequence[float]  # one for each token
    finish: str = ""  # vLLM's word for how it ended, empty while it goes on
    reason: str = ""
    cached: int = 0  # tokens of the prompt that were in the cache, where vLLM says so
    labels: Counter[str] | None = None  # once it ended, where vLLM says so: tokens by the weights that wrote them


class Span(Protocol):
    """vLLM's word for which weights wrote the tokens `[start, end)` of a request."""

    version: str
    start: int
    end: int


def labels_of(spans: Iterable[Span] | None) -> Counter[str] | None:
    """Tokens by the weights that wrote them, in their order."""
    if spans is None:
        return None
    labels: Counter[str] = Counter()
    for span in spans:
        labels[span.version] += span.end - span.start
    return labels


@dataclass(frozen=True, slots=True)
class Asked:
    """One request. `params` are vLLM's sampling parameters."""

    name: str
    token_ids: Sequence[int]
    params: Mapping[str, object]
    salt: str  # only requests of one salt share keys and values
    priority: int


class Core(Protocol):
    """vLLM's side. Every call may raise EngineLost, once it is gone for good."""

    name: str  # such as vLLM 0.32.0
    ours: bool  # started for this run: it has the weights of the folder, all of them

    async def start(self, receiver: str, order: str) -> int:
        """Return when it serves and has a receiver; sequences it decodes at once. Raises ConfigError, EngineError."""

    def generate(self, asked: Asked) -> AsyncGenerator[Output]:
        """What it writes, until it ends; closing it cuts it. Raises EngineError for a request that vLLM refuses."""

    async def abort(self, names: Sequence[str]) -> None:
        """Have these end with the word "abort". One that has not arrived yet may be missed."""

    async def stand_still(self) -> None:
        """No step from now on; what was written before has come out of `generate`, as far as can be seen from here."""

    async def go_on(self) -> None:
        """Undo it."""

    async def ask(self, method: str, *args: object) -> Sequence[Mapping[str, object]]:
        """Call the extension in every worker. Raises EngineError when vLLM fails in it."""

    async def update(self, version: WeightVersion, label: str) -> None:
        """Fill the model with what its receiver took, while it stands still. Raises EngineError."""

    async def forget(self) -> None:
        """Empty the prefix cache. Nothing must run."""

    async def ended(self) -> str:
        """Wait until it is gone for good; why."""

    async def close(self) -> None:
        """Harmless when it never started."""
