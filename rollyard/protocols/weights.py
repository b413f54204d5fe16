"""How a version reaches engines, and how that is proved."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from rollyard.events import EngineId
from rollyard.types import (
    Answer,
    Baseline,
    Finding,
    Handed,
    Judged,
    Manifest,
    Probed,
    Sent,
    WeightVersion,
)

if TYPE_CHECKING:
    from torch import Tensor


class Publisher(Protocol):
    """The trainer's side of a weight transport. It knows which engines are served, and which version each one has."""

    async def publish(self, version: WeightVersion, engines: Sequence[EngineId]) -> Manifest:
        """Offer the parameters as they are now: a new copy, also of a version that was offered before.

        Once it returns, what is done on the trainer's device next may change them. Raises WeightSyncError; what was offered
        before is untouched then.
        """
        ...

    async def again(self, engines: Sequence[EngineId]) -> Manifest:
        """The last offer once more, to these engines: what was copied then, whatever became of the parameters since.

        Raises WeightSyncError when that is not there any more.
        """
        ...

    async def deliver(self) -> Sent | None:
        """Return once nothing of the last offer is on its way any more: what travelled, where that is known.

        Raises WeightSyncError when it did not get through.
        """
        ...

    def taken(self, engine: EngineId, version: WeightVersion) -> None:
        """The engine decodes with `version` from now on."""

    def lost(self, engine: EngineId) -> None:
        """The engine is gone, and with it what it had mapped."""

    def close(self) -> None: ...


class Receiver(Protocol):
    """The engine's side of a weight transport, where the engine is. Its calls block."""

    def prepare(self, manifest: Manifest) -> None:
        """Bring the tensors near, beside whatever the engine computes. Raises WeightSyncError."""
        ...

    def take(self, version: WeightVersion) -> Mapping[str, Tensor] | None:
        """The tensors of the version that was prepared; None when the engine's own parameters are that version already.

        They stay as they are until the version after the next is prepared. Raises WeightSyncError.
        """
        ...

    def close(self) -> None: ...


Answers = Sequence[Answer]  # one for each of the probe's prompts, in their order


class Evidence(Protocol):
    """The trainer's side of canary and probe: what its own model says, and what engines' answers are worth beside that.

    Each method is one call on the trainer's device; `check` needs none. Nobody trains between `begin` and `restore`.
    Where a trainer is elsewhere, all raise WeightSyncError when it does not answer in time, TrainerLost when it is gone.
    """

    async def prompts(self) -> tuple[tuple[int, ...], ...]:
        """`[prompts][tokens]`: what engines are asked to write one token after."""
        ...

    async def published(self, version: WeightVersion, engines: Sequence[EngineId]) -> None:
        """The parameters as they are now were published to these engines: keep what they say."""
        ...

    async def check(self, engine: EngineId, answers: Answers) -> Probed:
        """Does the engine decode with the version that was published last, or with the one before?"""
        ...

    async def begin(self, answers: Mapping[EngineId, Answers]) -> Baseline:
        """Keep the parameters as they are, which is what these engines answered with."""
        ...

    async def move(self, attempt: int, names: Sequence[str]) -> None:
        """Move these tensors from where they were at `begin`, farther with each attempt; the others are put back."""
        ...

    async def judge(self, answers: Mapping[EngineId, Answers]) -> Judged:
        """Answers of engines that took the parameters as they were moved last."""
        ...

    async def restore(self) -> None:
        """The parameters as they were at `begin`, bit for bit; also when a move failed half way. Harmless without one."""
        ...

    async def returned(self, answers: Mapping[EngineId, Answers]) -> Mapping[EngineId, Finding]:
        """Answers of engines that took the parameters as they were at `begin` again."""
        ...


class TrainerEvidence(Evidence, Protocol):
    """Evidence that stands beside a model which is trained."""

    async def record(self, version: WeightVersion, folder: Path) -> None:
        """Write what the parameters as they are now are, and say, beside them into `folder`, for who checks it elsewhere.

        Raises CheckpointError.
        """
        ...


class Handoff(Protocol):
    """One side of handing a trainer's whole state to another process, which trains on with it."""

    async def give(self, version: WeightVersion, to: str) -> Manifest:
        """Offer the state as it is now to the side of this name. Raises WeightSyncError."""
        ...

    async def given(self) -> None:
        """Return once nothing of it is on its way any more. Raises WeightSyncError when it did not get through."""
        ...

    async def take(self, manifest: Manifest) -> Handed:
        """Receive and check all of it, then replace what is here. Raises WeightSyncError, with the state as it was."""
        ...
