"""For an engine that takes no adapter: what travels is the adapter alone, and is merged here into the weights it is for."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from torch import Tensor

from rollyard.errors import WeightSyncError
from rollyard.model.adapter import merge
from rollyard.model.stamp import WeightStamp
from rollyard.protocols.weights import Receiver
from rollyard.types import Manifest, WeightVersion
from rollyard.weights.flat import replacing
from rollyard.weights.words import named


class Merged:
    """A receiver of whole weights, made anew of the unchanged base for every version: no rounding is ever added to another.

    They are written over those of the version before: an engine stands still when it takes one. When that fails half way,
    the stamp says that they are torn, so that nobody decodes with them, until a version was made whole.

    Args:
        inner: brings the adapter.
        base: the weights under it, which nobody changes.
        scaling: of its effect.
        stamp: of what the engine decodes with.
        here: where `inner` is in place: the trainer's adapter as it is now.
    """

    def __init__(
        self,
        inner: Receiver,
        base: Mapping[str, Tensor],
        scaling: float,
        stamp: WeightStamp,
        here: Callable[[], Mapping[str, Tensor]] | None = None,
    ) -> None:
        self._inner, self._base, self._scaling = inner, base, scaling
        self._stamp, self._here = stamp, here
        self._memory: dict[str, Tensor] = {}

    def prepare(self, manifest: Manifest) -> None:
        """Bring the adapter near. Raises WeightSyncError."""
        self._inner.prepare(manifest)

    def take(self, version: WeightVersion) -> Mapping[str, Tensor]:
        """All weights of the version. Raises WeightSyncError; those of the version before are untouched then, or torn."""
        adapter = self._inner.take(version)
        if adapter is None:
            assert self._here is not None, "only what is in place brings nothing"
            adapter = self._here()
        try:
            with replacing(self._stamp):
                return merge(self._base, adapter, self._scaling, self._memory)
        except RuntimeError as error:  # such as torch's own when memory is full
            raise WeightSyncError(f"the adapter of {named(version)} cannot be merged: {error}") from error

    def close(self) -> None:
        self._memory.clear()
        self._inner.close()
