"""The transport for an engine that has the trainer's own parameters at hand: nothing moves between processes.

What an engine packs or rounds of them is its own copy, made anew at each load.
"""

from __future__ import annotations

from collections.abc import Sequence

from rollyard.errors import WeightSyncError
from rollyard.events import EngineId
from rollyard.model.transformer import CausalLM
from rollyard.types import Manifest, WeightVersion
from rollyard.weights.flat import chosen, model_infos, once_more
from rollyard.weights.layout import compare
from rollyard.weights.source import OwnSource
from rollyard.weights.words import named


class InPlace:
    """Publisher and receiver in one. What travels is the right to use the parameters as they are now.

    The generation stamp is the proof: between `publish` and `take` nobody may have changed a parameter.

    Args:
        model: the parameters that trainer and engine share.
    """

    def __init__(self, model: CausalLM) -> None:
        self._model, self._source = model, OwnSource.of(model)
        self._offered: tuple[Manifest, int] | None = None

    async def publish(self, version: WeightVersion, engines: Sequence[EngineId] = ()) -> Manifest:
        """Offer the parameters as `version`. Raises WeightSyncError when a change of them failed half way."""
        self._source.check(version)
        manifest = Manifest(version, self._source.infos, bytes_copied=0)
        self._offered = manifest, self._model.stamp.generation
        return manifest

    async def again(self, engines: Sequence[EngineId] = ()) -> Manifest:
        """The same offer, whose bytes are the parameters. Raises WeightSyncError when those changed since."""
        manifest = once_more(None if self._offered is None else self._offered[0])
        self._check_unchanged()
        return manifest

    async def deliver(self) -> None:
        """Nothing is on its way."""

    def taken(self, engine: EngineId, version: WeightVersion) -> None:
        """Nothing is mapped."""

    def lost(self, engine: EngineId) -> None:
        """Nothing is mapped."""

    def prepare(self, manifest: Manifest) -> None:
        """Raises WeightSyncError when the names differ."""
        compare(manifest.tensors, model_infos(self._model))

    def take(self, version: WeightVersion) -> None:
        """The engine's own parameters are `version`.

        Raises WeightSyncError when another version is on offer, or the parameters changed since.
        """
        chosen(None if self._offered is None else self._offered[0].version, version)
        self._check_unchanged()

    def close(self) -> None:
        """Nothing to give back."""

    def _check_unchanged(self) -> None:
        assert self._offered is not None
        manifest, generation = self._offered
        if self._model.stamp.generation != generation or not self._model.stamp.whole:
            raise WeightSyncError(f"the weights changed since {named(manifest.version)} was published")
