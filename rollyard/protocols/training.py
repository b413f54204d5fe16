"""Who makes the next version of the policy."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from rollyard.types import (
    Group,
    TensorInfo,
    TrainBatch,
    TrainStats,
    WeightVersion,
)

if TYPE_CHECKING:
    from torch import Tensor


class Trainer(Protocol):
    """Learns from a batch and holds the policy's parameters."""

    @property
    def version(self) -> WeightVersion: ...

    async def train(self, shards: Sequence[TrainBatch]) -> TrainStats:
        """The optimizer steps on one batch, which make a version. Raises TrainError; the version is then unchanged.

        Args:
            shards: a part of the batch for each data-parallel rank, in their order; one part for a trainer that is one.
        """
        ...

    async def settle(self) -> WeightVersion:
        """Wait until nothing is under way, also what nobody waits for any more; the version then. Raises TrainError."""
        ...

    async def save(self, folder: Path) -> None:
        """Write the policy in Hugging Face format, and beside it what training needs to go on."""
        ...

    async def become(self, version: WeightVersion) -> None:
        """Go on from the state of `version`, which was copied into that of this trainer. Raises TrainError."""
        ...

    async def close(self) -> None: ...


class Learner(Protocol):
    """Makes the next version of the policy from finished groups: here, or by having it done elsewhere."""

    @property
    def version(self) -> WeightVersion:
        """What it has."""
        ...

    async def learn(self, step: int, groups: Sequence[Group]) -> TrainStats:
        """Version `step + 1` out of version `step`. Raises TrainError; the version is then unchanged."""
        ...

    async def settle(self) -> WeightVersion:
        """Wait until nothing is under way, also what nobody waits for any more; the version then. Raises TrainError."""
        ...

    async def save(self, folder: Path) -> Path:
        """A checkpoint of the version it has: where it is, which is `folder` unless it lies somewhere already."""
        ...


class ValueTrainer(Trainer, Protocol):
    """A trainer with a value head, which GAE needs."""

    async def values(self, shards: Sequence[TrainBatch]) -> tuple[tuple[tuple[float, ...], ...], ...]:
        """What it expects before each trained token: `[shards][samples][trained tokens]`, samples as in `TrainBatch.samples`.

        Nothing is trained. Raises TrainError.
        """
        ...


class ExternalTrainer(Protocol):
    """A trainer of another stack, made by the function that `train.adapter` names. docs/trainers.md has its contract.

    Plain functions: all calls come in turn on one thread, the one that it was made on, in a process of its own.
    """

    def tensors(self) -> Sequence[TensorInfo]:
        """What it publishes: Hugging Face's names, whole shapes, a tied head left out. Always the same."""
        ...

    def each(self) -> Iterator[tuple[str, Tensor]]:
        """Whole tensors as they are now, in the order of `tensors`. One is done with before the next is asked for."""
        ...

    def train(self, batch: TrainBatch) -> TrainStats:
        """One optimizer step. Raises TrainError with the parameters as they were; after any other error they count as torn."""
        ...

    def save(self, folder: Path) -> None:
        """Write into `folder`, which has the model already, what training needs to go on."""
        ...

    def close(self) -> None: ...


class ResumableTrainer(ExternalTrainer, Protocol):
    """One that can go on where it was: what a resumed run needs."""

    def load(self, folder: Path) -> None:
        """Take back what `save` wrote into `folder`. The weights there are those that it was made with."""
        ...


class ProvableTrainer(ExternalTrainer, Protocol):
    """One that can say what its own model says: what a canary needs. A probe needs `logprobs` only."""

    def logprobs(self, prompts: Sequence[Sequence[int]]) -> Tensor:
        """`[prompts, vocab]` float32 on the CPU: of the token after each prompt, by the pass that trains, at temperature 1."""
        ...

    def move(self, tensors: Mapping[str, Tensor]) -> None:
        """Compute with, and publish, these whole tensors in the place of those of their names, until `restore`."""
        ...

    def restore(self) -> None:
        """All parameters as they were before the first `move`, bit for bit. Harmless without one."""
        ...
