"""Versions that lie in folders, written by a trainer that is out of reach: offered as they are, and proved with its record.

What the trainer says of each version lies beside it. For a canary, which wants weights that are moved, the model is loaded
here for a while: what is proved then is the way from a folder into every tensor of an engine.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import torch

from rollyard.errors import ConfigError, WeightSyncError
from rollyard.events import EngineId
from rollyard.model.architecture import Architecture
from rollyard.model.folder import load
from rollyard.protocols.devices import Device
from rollyard.protocols.weights import Answers
from rollyard.types import Baseline, Finding, Judged, Manifest, Probed, Sent, WeightVersion
from rollyard.weights import probe
from rollyard.weights.canary import least_limit
from rollyard.weights.checkpoint import CheckpointPublisher
from rollyard.weights.evidence import NOISE, Evidence, Tables
from rollyard.weights.flat import once_more
from rollyard.weights.record import manifest_of, table_of
from rollyard.weights.source import OwnSource
from rollyard.weights.words import named


class RecordedWeights:
    """Implements `protocols.Publisher` and `protocols.Evidence`.

    Args:
        where: the folder of a version.
        offers: told of a version before engines may read it.
        shape: of the model.
        dtype: number format of the weights.
        device: where a canary is computed.
        scratch: folder for a canary's weights. It is removed afterwards.
    """

    def __init__(
        self,
        where: Callable[[WeightVersion], Path],
        offers: Callable[[WeightVersion], None],
        shape: Architecture,
        dtype: torch.dtype,
        device: Device,
        scratch: Path,
    ) -> None:
        self._where, self._offers, self._shape, self._dtype = where, offers, shape, dtype
        self._device, self._scratch = device, scratch
        self._tables = Tables(str(dtype))
        self._offered: Manifest | None = None
        self._canary: tuple[Evidence, CheckpointPublisher] | None = None

    # ------------------------------------------------------------------------------------------ as a publisher

    async def publish(self, version: WeightVersion, engines: Sequence[EngineId]) -> Manifest:
        """Name the folder; nothing is copied. Of a canary, whose versions nobody trained, write one."""
        if self._canary is not None and version.incarnation < 0:
            self._offered = await self._canary[1].publish(version, engines)
        else:
            self._offered = await self._device.run(self._found, version)
        return self._offered

    async def again(self, engines: Sequence[EngineId]) -> Manifest:
        """The same folder. Raises WeightSyncError when none was named."""
        return once_more(self._offered)

    async def deliver(self) -> Sent:
        """It lies on the disk."""
        return Sent(0 if self._offered is None else self._offered.bytes_copied)

    def taken(self, engine: EngineId, version: WeightVersion) -> None:
        """An engine reads what it takes into its own memory."""

    def lost(self, engine: EngineId) -> None:
        """It leaves nothing behind."""

    def close(self) -> None:
        """What is left of a canary."""
        if self._canary is not None:
            self._canary[1].close()
            self._canary = None

    def _found(self, version: WeightVersion) -> Manifest:
        self._offers(version)
        found = manifest_of(self._where(version))
        if found.version != version:
            raise WeightSyncError(f"{found.source} holds {named(found.version)}, not {named(version)}")
        return found

    # -------------------------------------------------------------------------------------------- as evidence

    async def prompts(self) -> tuple[tuple[int, ...], ...]:
        return probe.prompts(self._shape.vocab_size)

    async def published(self, version: WeightVersion, engines: Sequence[EngineId]) -> None:
        """Raises WeightSyncError when the trainer's record cannot be read."""
        table = await self._device.run(table_of, self._where(version), self._shape.vocab_size)
        self._tables.published(version, table)

    async def check(self, engine: EngineId, answers: Answers) -> Probed:
        return self._tables.check(engine, answers)

    async def begin(self, answers: Mapping[EngineId, Answers]) -> Baseline:
        """Load what was offered last. Raises WeightSyncError when that is not what its trainer had."""
        self.close()
        assert self._offered is not None, "nothing was published"
        self._canary = await self._device.run(self._load, Path(self._offered.source))
        found = await self._canary[0].begin(answers)
        self._tables.noise |= found.noise
        return found

    async def move(self, attempt: int, names: Sequence[str]) -> None:
        await self._proving.move(attempt, names)

    async def judge(self, answers: Mapping[EngineId, Answers]) -> Judged:
        return await self._proving.judge(answers)

    async def restore(self) -> None:
        if self._canary is not None:
            await self._canary[0].restore()

    async def returned(self, answers: Mapping[EngineId, Answers]) -> Mapping[EngineId, Finding]:
        """Afterwards the model that was loaded for it is gone."""
        found = await self._proving.returned(answers)
        self.close()
        return found

    @property
    def _proving(self) -> Evidence:
        assert self._canary is not None, "no canary was begun"
        return self._canary[0]

    def _load(self, folder: Path) -> tuple[Evidence, CheckpointPublisher]:
        try:
            model = load(folder, self._dtype)
        except (OSError, ConfigError) as error:
            raise WeightSyncError(f"{folder} cannot be loaded for the canary: {error}") from error
        table = table_of(folder, self._shape.vocab_size)
        apart = probe.apart(probe.table(model), table)
        if not apart <= least_limit(NOISE[str(self._dtype)]):
            raise WeightSyncError(f"{folder} is not what its trainer had: with it logprobs are {apart:.2g} nats off")
        return Evidence(model, self._device), CheckpointPublisher(OwnSource.of(model), self._device, folder, self._scratch)
