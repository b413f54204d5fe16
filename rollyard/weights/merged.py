"""For an engine that takes no adapter: what travels is the adapter alone, and is merged here into the weights it is for."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from torch import Tensor

from rollyard.model.adapter import merge
from rollyard.protocols import Receiver
from rollyard.types import Manifest, WeightVersion


class Merged:
    """A receiver of whole weights, made anew of the unchanged base for every version: no rounding is ever added to another.

    They are written over those of the version before: an engine stands still when it takes one.

    Args:
        inner: brings the adapter.
        base: the weights under it, which nobody changes.
        scaling: of its effect.
        here: where `inner` is in place: the trainer's adapter as it is now.
    """

    def __init__(
        self,
        inner: Receiver,
        base: Mapping[str, Tensor],
        scaling: float,
        here: Callable[[], Mapping[str, Tensor]] | None = None,
    ) -> None:
        self._inner, self._base, self._scaling, self._here = inner, base, scaling, here
        self._memory: dict[str, Tensor] = {}

    def prepare(self, manifest: Manifest) -> None:
        """Bring the adapter near. Raises WeightSyncError."""
        self._inner.prepare(manifest)

    def take(self, version: WeightVersion) -> Mapping[str, Tensor]:
        """All weights of the version. Raises WeightSyncError; those of the version before are untouched then."""
        adapter = self._inner.take(version)
        if adapter is None:
            assert self._here is not None, "only what is in place brings nothing"
            adapter = self._here()
        return merge(self._base, adapter, self._scaling, self._memory)

    def close(self) -> None:
        self._memory.clear()
        self._inner.close()
