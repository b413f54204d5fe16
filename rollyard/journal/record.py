"""What a run's books ask of a durable record, and one that keeps nothing: of a run that nobody will resume."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from concurrent.futures import Future
from typing import Any, Protocol

from rollyard.events import Event, Instruction
from rollyard.types import WeightVersion


class Record(Protocol):
    """See `journal.journal.Journal`, which is the one that lasts."""

    def record_step(self, entries: Iterable[Event | Instruction]) -> None: ...

    def record_beginning(self, version: WeightVersion) -> None: ...

    def record_evaluation(self, version: WeightVersion, mean_reward: float | None, samples: int, unscored: int = 0) -> None: ...

    def commit_checkpoint(
        self, version: WeightVersion, folder: str, prompt_cursor: int, counters: Mapping[str, object]
    ) -> Future[None]: ...

    def tick(self) -> None: ...

    def close(self) -> None: ...


class Unkept:
    """Keeps nothing (Record)."""

    def __init__(self, *about: Any, **more: Any) -> None:
        """Whatever a journal is told at its start."""

    def record_step(self, entries: Iterable[Event | Instruction]) -> None:
        """Nothing is kept."""

    def record_beginning(self, version: WeightVersion) -> None:
        """Nothing is kept."""

    def record_evaluation(self, version: WeightVersion, mean_reward: float | None, samples: int, unscored: int = 0) -> None:
        """Nothing is kept."""

    def commit_checkpoint(
        self, version: WeightVersion, folder: str, prompt_cursor: int, counters: Mapping[str, object]
    ) -> Future[None]:
        """Nothing is kept."""
        done = Future[None]()
        done.set_result(None)
        return done

    def tick(self) -> None:
        """Nothing is due."""

    def close(self) -> None:
        """Nothing is open."""
