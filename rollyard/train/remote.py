"""A trainer in another process, as the run sees it: every call crosses a line."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from rollyard.errors import CheckpointError, ConfigError, EngineLost, RollyardError, TimeLimitExceeded, TrainerLost, TrainError
from rollyard.protocols.processes import Channel
from rollyard.train import wire
from rollyard.types import TrainBatch, TrainStats, WeightVersion
from rollyard.watch.spans import hear

QUICK_S = 60.0  # seconds for what should take none; a busy machine may be slow


class RemoteTrainer:
    """Implements `protocols.Trainer`, and `group.Member`, over a channel whose other end is `host.serve`.

    Every call raises TrainerLost once the other process is gone, and TrainError when it does not answer in time.

    Args:
        name: for messages.
        channel: the line. It belongs to somebody else, who makes it ready and closes it: an engine may be there too.
        version: the version the trainer there has, or will have once it has started.
        start_s: seconds it may take to load.
        step_s: seconds a step, or writing a checkpoint, may take.
    """

    def __init__(self, name: str, channel: Channel, version: WeightVersion, *, start_s: float, step_s: float) -> None:
        self._name, self._channel, self._version = name, channel, version
        self._start_s, self._step_s = start_s, step_s
        self.spans = hear(channel)  # of its device; where an engine is there too, that one hears instead

    @property
    def version(self) -> WeightVersion:
        """As of the last answer."""
        return self._version

    async def start(self) -> None:
        """Wait until the trainer there is ready."""
        self._version = wire.VERSION.validate_json(await self._call("start", b"", self._start_s))

    async def train(self, shards: Sequence[TrainBatch]) -> TrainStats:
        """One optimizer step. Raises what the trainer there raises; the version is then unchanged."""
        answer = await self._call("step", wire.SHARDS.dump_json(tuple(shards)), self._step_s)
        stats, self._version = wire.TRAINED.validate_json(answer)
        return stats

    async def values(self, shards: Sequence[TrainBatch]) -> tuple[tuple[tuple[float, ...], ...], ...]:
        """See `protocols.ValueTrainer`."""
        return wire.VALUES.validate_json(await self._call("values", wire.SHARDS.dump_json(tuple(shards)), self._step_s))

    async def settle(self) -> WeightVersion:
        """Also a step whose caller has given up."""
        self._version = wire.VERSION.validate_json(await self._call("settle", b"", QUICK_S))
        return self._version

    async def save(self, folder: Path) -> None:
        """Written by the other process: the path has to mean the same there. Raises CheckpointError."""
        await self._call("save", str(folder).encode(), self._step_s)

    async def become(self, version: WeightVersion) -> None:
        await self._call("become", wire.VERSION.dump_json(version), QUICK_S)
        self._version = version

    async def open(self, address: str, limit_s: float) -> str:
        asked = wire.Opening(address, limit_s)
        return (await self._call("open", wire.OPENING.dump_json(asked), QUICK_S)).decode()

    async def join(self, place: str, rank: int, size: int, limit_s: float) -> None:
        asked = wire.Joining(place, rank, size, limit_s)
        await self._call("join", wire.JOINING.dump_json(asked), limit_s + QUICK_S)

    async def close(self) -> None:
        """The trainer ends with its process."""

    async def _call(self, name: str, content: bytes, limit_s: float) -> bytes:
        try:
            return await self._channel.call(f"train.{name}", content, limit_s=limit_s)
        except (TrainError, CheckpointError, ConfigError):
            raise
        except EngineLost as error:
            raise TrainerLost(f"{self._name} is lost: {error}") from error
        except TimeLimitExceeded as error:
            raise TrainError(f"{self._name}: {error}") from error
        except RollyardError as error:
            raise TrainError(f"{self._name} failed: {error}") from error
