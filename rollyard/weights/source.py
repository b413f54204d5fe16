"""What a publisher sends: tensors under one generation stamp, such as a model's parameters or all that a trainer needs."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence

import torch
from torch import Tensor

from rollyard.errors import WeightSyncError
from rollyard.model.folder import infos, tensors
from rollyard.model.shards import Whole
from rollyard.model.stamp import WeightStamp
from rollyard.model.transformer import CausalLM
from rollyard.types import TensorInfo, WeightVersion
from rollyard.weights.layout import compare
from rollyard.weights.words import named


class Source(ABC):
    """Tensors that travel together. Names, shapes and formats stay the same.

    Args:
        tensors: their names, shapes and formats, in the order in which they travel.
        stamp: counts their changes.
        where: the device of the memory that they are copied to first; single ones may be on another.
        shared: other ranks have parts of them, and take part while they are read.
    """

    def __init__(self, tensors: Sequence[TensorInfo], stamp: WeightStamp, where: torch.device, shared: bool = False) -> None:
        self.infos, self.stamp, self.where, self.shared = tuple(tensors), stamp, where, shared

    @abstractmethod
    def now(self) -> dict[str, Tensor]:
        """All of them, in the order of `infos`. Raises WeightSyncError when they are not what they were at first."""

    @abstractmethod
    def each(self, version: WeightVersion) -> Iterator[tuple[str, Tensor]]:
        """Whole tensors one after the other, in the order of `infos`, to be published: one is done with before the next comes.

        Raises WeightSyncError, already when called, when they are not what they were or a change of them failed half way.
        """

    def check(self, version: WeightVersion) -> None:
        """Raise WeightSyncError when a change of the tensors failed half way."""
        if not self.stamp.whole:
            raise WeightSyncError(f"{named(version)} cannot be published: a change of the weights failed half way")


class OwnSource(Source):
    """Tensors of this process.

    Args:
        tensors: what they are now, by name; asked for on their device.
        stamp, where: as of any source.
        parts: how they lie on ranks that share them. All ranks ask for each tensor then, and only rank 0 gets any.
    """

    def __init__(
        self, tensors: Callable[[], Mapping[str, Tensor]], stamp: WeightStamp, where: torch.device, parts: Whole | None = None
    ) -> None:
        self._tensors, self._parts = tensors, parts or Whole()
        super().__init__(infos(tensors()), stamp, where, self._parts.sharded)

    @classmethod
    def of(cls, model: CausalLM) -> OwnSource:
        """The parameters, a tied head left out."""
        return cls(lambda: tensors(model), model.stamp, model.head_weight.device, model.parts)

    def now(self) -> dict[str, Tensor]:
        found = self._tensors()
        compare(infos(found), self.infos)
        return {info.name: found[info.name] for info in self.infos}

    def each(self, version: WeightVersion) -> Iterator[tuple[str, Tensor]]:
        self.check(version)
        return self._each(self.now())

    def _each(self, found: Mapping[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
        for name, tensor in found.items():
            whole = self._parts.collected(tensor)
            if whole is not None:
                yield name, whole
                del whole  # before the next one comes
