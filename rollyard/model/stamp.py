"""The generation stamp of weights that are changed in place under the engine that decodes with them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from rollyard.errors import StaleWeights


class WeightStamp:
    """Counts the changes made to a set of parameters. A forward pass first checks the generation it was loaded for.

    A change that fails half way leaves the weights torn: every check raises until `restored` says they are whole again.
    """

    __slots__ = ("_generation", "_torn", "_writing")

    def __init__(self) -> None:
        self._generation = 0
        self._writing = False
        self._torn = False

    @property
    def generation(self) -> int:
        """How many changes were completed."""
        return self._generation

    @property
    def whole(self) -> bool:
        """Neither being changed nor torn."""
        return not (self._writing or self._torn)

    @contextmanager
    def writing(self) -> Iterator[None]:
        """Parameters change inside this block. Raises StaleWeights if they already are changing, or are torn."""
        if not self.whole:
            raise StaleWeights(f"weights cannot be changed: {self._state()}")
        self._writing = self._torn = True
        try:
            yield
            self._torn = False
            self._generation += 1
        finally:
            self._writing = False

    def restored(self) -> None:
        """Torn weights were replaced as a whole. This too is a new generation."""
        if self._writing:
            raise StaleWeights("weights cannot be restored: they are being changed")
        self._torn = False
        self._generation += 1

    def check(self, generation: int) -> None:
        """Raise StaleWeights unless the weights are whole and of this generation."""
        if not self.whole or generation != self._generation:
            raise StaleWeights(f"a forward pass expected weights of generation {generation}: {self._state()}")

    def _state(self) -> str:
        if self._writing:
            return "they are being changed"
        return "a change failed half way" if self._torn else f"they are of generation {self._generation}"
