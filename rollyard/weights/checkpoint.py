"""Weights through a folder on a disk that both sides see: written whole or not at all, read by whoever wants them.

Slow, and works everywhere: every engine that can read a Hugging Face folder can take weights this way.
"""

from __future__ import annotations

import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from rollyard.errors import ConfigError, WeightSyncError
from rollyard.events import EngineId
from rollyard.model.folder import infos, save_each, weight_files
from rollyard.protocols import Device
from rollyard.types import Activity, Manifest, TensorInfo, WeightVersion
from rollyard.weights.flat import Prepared, check, marked, once_more, taken
from rollyard.weights.layout import compare
from rollyard.weights.source import Source
from rollyard.weights.words import named


class CheckpointPublisher:
    """Writes each version as a folder of its own; the newest stays, and what an engine still has.

    Args:
        source: the model's tensors.
        device: where they are changed; a version is read there, between two steps.
        origin: the folder the model came from, for its configuration and tokenizer.
        folder: where versions are written. It is removed by `close`.
    """

    def __init__(self, source: Source, device: Device, origin: Path, folder: Path) -> None:
        self._source, self._device, self._origin, self._folder = source, device, origin, folder
        self._offers = 0
        self._offered: Manifest | None = None

    async def publish(self, version: WeightVersion, engines: Sequence[EngineId]) -> Manifest:
        """Write the parameters. Raises WeightSyncError when they cannot be written."""
        return await self._device.run(self._device.spans.timed(Activity.SYNC, self._publish, "publish"), version)

    async def again(self, engines: Sequence[EngineId]) -> Manifest:
        """The newest folder. Raises WeightSyncError when nothing was written."""
        return once_more(self._offered)

    async def deliver(self) -> None:
        """What was offered lies on the disk."""

    def taken(self, engine: EngineId, version: WeightVersion) -> None:
        """An engine reads what it takes into its own memory."""

    def lost(self, engine: EngineId) -> None:
        """It leaves nothing behind."""

    def close(self) -> None:
        shutil.rmtree(self._folder, ignore_errors=True)

    def _publish(self, version: WeightVersion) -> Manifest:
        described, found = self._source.infos, list[int]()
        each = marked(self._source.each(version), found)
        self._offers += 1
        target = self._folder / f"offer-{self._offers:06d}"
        try:
            save_each(described, each, target, self._origin)
        except (OSError, SafetensorError) as error:
            raise WeightSyncError(f"{named(version)} cannot be written to {target}: {error}") from error
        for older in self._folder.glob("offer-*"):
            if older != target:
                shutil.rmtree(older, ignore_errors=True)
        size = sum(path.stat().st_size for path in weight_files(target))
        self._offered = Manifest(version, described, size, str(target), tuple(found))
        return self._offered


class CheckpointReceiver:
    """Reads a version into memory.

    Args:
        expected: the engine's own tensors.
        device: where they are wanted.
    """

    def __init__(self, expected: Sequence[TensorInfo], device: torch.device) -> None:
        self._expected, self._device = expected, device
        self._prepared: Prepared | None = None

    def prepare(self, manifest: Manifest) -> None:
        """Read and check. Raises WeightSyncError for a folder that is not what the manifest says."""
        compare(manifest.tensors, self._expected)
        self._prepared = None
        folder = Path(manifest.source)
        try:
            files = [load_file(path, device=str(self._device)) for path in weight_files(folder)]
        except (OSError, SafetensorError, ConfigError) as error:
            raise WeightSyncError(f"{named(manifest.version)} cannot be read from {folder}: {error}") from error
        arrived = {name: tensor for file in files for name, tensor in file.items()}
        compare(infos(arrived), self._expected)
        check(manifest, arrived, manifest.fingerprints)
        self._prepared = manifest.version, arrived

    def take(self, version: WeightVersion) -> Mapping[str, Tensor]:
        """Raises WeightSyncError when another version was prepared."""
        return taken(self._prepared, version)

    def close(self) -> None:
        self._prepared = None
