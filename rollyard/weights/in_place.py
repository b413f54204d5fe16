"""The transport for an engine that has the trainer's own parameters at hand: nothing moves between processes.

What an engine packs or rounds of them is its own copy, made anew at each load.
"""

from __future__ import annotations

from rollyard.errors import WeightSyncError
from rollyard.model.folder import tensors
from rollyard.model.transformer import CausalLM
from rollyard.types import Manifest, TensorInfo, WeightVersion


class InPlace:
    """Publisher and receiver in one. What travels is the right to use the parameters as they are now.

    The generation stamp is the proof: between `publish` and `receive` nobody may have changed a parameter.

    Args:
        model: the parameters that trainer and engine share.
    """

    def __init__(self, model: CausalLM) -> None:
        self._model = model
        self._offered: tuple[Manifest, int] | None = None

    async def publish(self, version: WeightVersion) -> Manifest:
        """Offer the parameters as `version`. Raises WeightSyncError when a change of them failed half way."""
        stamp = self._model.stamp
        if not stamp.whole:
            raise WeightSyncError(f"{_named(version)} cannot be published: a change of the weights failed half way")
        names = tensors(self._model)
        infos = tuple(TensorInfo(name, tuple(value.shape), str(value.dtype)) for name, value in names.items())
        manifest = Manifest(version, infos, bytes_copied=0)
        self._offered = manifest, stamp.generation
        return manifest

    def receive(self, version: WeightVersion) -> Manifest:
        """Take the parameters as `version`.

        Raises:
            WeightSyncError: another version is on offer, the names differ, or the parameters changed since.
        """
        if self._offered is None or self._offered[0].version != version:
            offered = "none" if self._offered is None else _named(self._offered[0].version)
            raise WeightSyncError(f"{_named(version)} was asked for, {offered} is on offer")
        manifest, generation = self._offered
        if self._model.stamp.generation != generation or not self._model.stamp.whole:
            raise WeightSyncError(f"the weights changed since {_named(version)} was published")
        sent, consumed = {info.name for info in manifest.tensors}, set(tensors(self._model))
        if sent != consumed:
            raise WeightSyncError(f"tensors only on one side: {', '.join(sorted(sent ^ consumed))}")
        return manifest


def _named(version: WeightVersion) -> str:
    return f"version {version.step}" + (f" of incarnation {version.incarnation}" if version.incarnation else "")
