"""What children run in place of a reward model: no torch, so they are there at once."""

from __future__ import annotations

import os
from collections.abc import Sequence

from rollyard.errors import ConfigError
from rollyard.place.inline import DeviceThread
from rollyard.protocols.processes import Channel
from rollyard.reward.batched import Batched
from rollyard.reward.classifier import Asked, Row
from rollyard.reward.model import serve


class Lengths:
    """Judges a text by its length. One that says "die" ends the process at once."""

    def row(self, asked: Asked) -> Row:
        return Row((1,) * len(asked.completion), (0,) * len(asked.completion))

    def judge(self, rows: Sequence[Row]) -> list[float]:
        return [float(len(row.ids)) for row in rows]


class Mortal(Lengths):
    def row(self, asked: Asked) -> Row:
        if asked.completion == "die":
            os._exit(3)
        return super().row(asked)


async def judging(channel: Channel, order: bytes) -> None:
    device = DeviceThread()
    await serve(Batched(Mortal(), device, 64, 10.0, 60.0), device.spans, channel)


async def unreadable(channel: Channel, order: bytes) -> None:
    raise ConfigError("no such model", where="reward.model.folder", remedy="give one")
